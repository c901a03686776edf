"""Which sub-model a device of a capacity gets: those that the windows of a scheme give are tried, the best is taken.

A method's sub-model depends on the round it is asked in: rolling windows move on, columns of equal width take turns.
Sub-models are therefore those of several rounds, and they are compared on examples that are no test examples.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.methods import Method
from fedrolex.methods.workload import network_scale
from fedrolex.models import without_statistics
from fedrolex.rounds import Server
from fedrolex.runs import checkpoint
from fedrolex.runs.exports.folder import describe, named_tensors
from fedrolex.runs.hooks import calling
from fedrolex.tasks import Measure, Task
from fedrolex.tasks.metrics import score


@dataclass(frozen=True)
class Candidate:
    """A sub-model that a device may get.

    Attributes:
        round: whose window it has.
        model: as it was trained, in evaluation mode; its static norms have no statistics.
        described: what makes it again, see :func:`~fedrolex.runs.exports.folder.describe`.
    """

    round: int
    model: nn.Module
    described: dict[str, Any] | None


def candidates(method: Method, server: Server, capacity: Fraction, most: int, *, plain: bool) -> Iterator[Candidate]:
    """Different sub-models of a capacity: the last round's, then those of up to ``most`` - 1 rounds before it.

    Rounds are spread evenly over the last turn of the windows, as long as the widest axis. With ``plain``, the windows
    of the server's main network, whatever the method makes of a capacity.
    """
    levels = method.sizes(server)
    if capacity not in levels:
        raise FedrolexError(f"no client trains capacity {capacity}: give one of {', '.join(map(str, levels))}")
    part = capacity * server.scale / network_scale(method, server.scale)  # of the main network
    known = set()
    for round in _rounds(server, most):
        then = copy.copy(server)
        then.round = round + 1
        with calling(method, "submodel"):
            found = Method.submodel(method, then, part) if plain else method.submodel(then, capacity)
            if found is None and [capacity] == list(levels):
                found = method.judged(then)
        if found is None:
            raise FedrolexError(f"{method.name} has no sub-model of capacity {capacity} to give")
        described, model = describe(found, server), copy.deepcopy(found).eval()
        values = {name: tensor.detach().cpu().flatten().sort().values for name, tensor in named_tensors(model).items()}
        key = checkpoint.checksum(values, {})  # the whole model's nodes in another order are the same model
        if key not in known:
            known.add(key)
            yield Candidate(round, model, described)


def _rounds(server: Server, most: int) -> list[int]:
    """The last round, and up to ``most`` - 1 others of the last turn, evenly spread, newest first."""
    last = max(0, server.round - 1)
    turn = min(last + 1, max((axis.size for axis in server.main.axes.cut_axes), default=1))
    count = min(most, turn)
    return [last - place * turn // count for place in range(count)]


def calibrated(task: Task, model: nn.Module, measure: Measure) -> nn.Module:
    """A copy whose batch norms have the statistics of this very model on training examples, where they can have any.

    Where the run is measured with offsets of its classes, the copy has its own.
    """
    return replace(measure, statistics="recalibrated").ready(task, without_statistics(model))


def score_of(task: Task, model: nn.Module, measure: Measure) -> float:
    """How good a model is as it stands: its accuracy, or R². Norms without statistics take those of every batch."""
    found = Measure(statistics="test-batch", batch=measure.batch)(task, model)
    return float(found[score(found)])
