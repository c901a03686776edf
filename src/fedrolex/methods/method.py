"""What makes a method: which nodes, what the client does, how updates are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from fedrolex.clients.work import LocalTraining
from fedrolex.methods.needs import TABLE, Needs
from fedrolex.methods.server_optimizer import ServerOptimizer
from fedrolex.methods.server_round import ServerRound
from fedrolex.slicing.fold import Normaliser
from fedrolex.slicing.schemes import Scheme

if TYPE_CHECKING:
    from fedrolex.methods.dsfl import SoftLabels
    from fedrolex.methods.fedgkt import KnowledgeTransfer
    from fedrolex.methods.fedselect import OwnKeys
    from fedrolex.methods.scaffold import Controls

Server = Callable[[ServerRound], Mapping[Fraction | None, dict[str, Tensor]]]
"""Gives new tensors of the models of each size, and under None of the server's own, where it has one."""

Weighting = Literal["uniform", "samples"]
Norms = Literal["shared", "per_capacity"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """A federated method; one file builds each.

    Attributes:
        name: as in recipes.
        scheme: which nodes a client holds in a round.
        client: what it does with them.
        weighting: a client's weight in the average.
        normaliser: what the average divides by.
        width: everyone trains this width instead of what it can hold.
        able_only: only clients that can hold ``width`` take part.
        norms: whether all capacities share scales and shifts of norms, or each keeps its own.
        rows: a class's part of the output layer is averaged over the clients that hold the class only.
        own_models: every capacity has a model of its own, not a part of one that all share.
        server_model: the server has a model of its own beside those, which no client trains.
        keeps_stragglers: clients that did only a part of their work count; otherwise they are dropped.
        optimizer: of the server; None takes the average as it is.
        controls: SCAFFOLD's control variates.
        labels: DS-FL's: nothing is averaged, clients label public examples.
        keys: Federated Select's: clients ask for rows of the output layer, or of the embedding.
        knowledge: FedGKT's: clients train the first layers only, the server the rest.
        server: what the server does after averaging.
    """

    name: str
    scheme: Scheme
    client: LocalTraining
    weighting: Weighting = "uniform"
    normaliser: Normaliser = "per_position"
    width: Fraction | None = None
    able_only: bool = False
    norms: Norms = "shared"
    rows: bool = False
    own_models: bool = False
    server_model: bool = False
    keeps_stragglers: bool = False
    optimizer: ServerOptimizer | None = None
    controls: Controls | None = None
    labels: SoftLabels | None = None
    knowledge: KnowledgeTransfer | None = None
    keys: OwnKeys | None = None
    server: Server | None = None

    @property
    def needs(self) -> Needs:
        """What it must be given."""
        return TABLE[self.name]
