"""A round: who takes part, what clients keep, how their answers are averaged."""

from fedrolex.rounds.average import Average
from fedrolex.rounds.client_states import ClientStates
from fedrolex.rounds.engine import Averaged, Engine, interrupted, out_of_memory, unknown_hooks
from fedrolex.rounds.fleet import Fleet, Member
from fedrolex.rounds.round import Round
from fedrolex.rounds.server import Server, State
from fedrolex.rounds.weight_mean import WeightMean

__all__ = [
    "Average", "Averaged", "ClientStates", "Engine", "Fleet", "Member", "Round", "Server", "State", "WeightMean",
    "interrupted", "out_of_memory", "unknown_hooks",
]  # fmt: skip
