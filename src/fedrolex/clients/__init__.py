"""A client: what it is asked, what it does with its sub-model, what it answers."""

from fedrolex.clients.dropout import OwnDropout, has_dropout
from fedrolex.clients.messages import (
    MODEL,
    Failure,
    Job,
    Kind,
    Network,
    Origin,
    RoundPlan,
    Summing,
    Tensors,
    Upload,
    copied,
)
from fedrolex.clients.optimizer import Memory, Rate
from fedrolex.clients.slot import Precision, Slot, in_precision, products_in
from fedrolex.clients.visit import Visit, examples_of, random_draws, stream_seed, why_failed
from fedrolex.clients.work import LocalTraining, Loss, elementwise

__all__ = [
    "MODEL", "Failure", "Job", "Kind", "LocalTraining", "Loss", "Memory", "Network", "Origin", "OwnDropout",
    "Precision", "Rate", "RoundPlan", "Slot", "Summing", "Tensors", "Upload", "Visit", "copied", "elementwise",
    "examples_of", "has_dropout", "in_precision", "products_in", "random_draws", "stream_seed", "why_failed",
]  # fmt: skip
