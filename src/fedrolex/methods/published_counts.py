"""FedRolex with the weights in averages that the published code computes, for comparison only.

The published code keeps a count for every position of every tensor, 1 at first and one more for each client that sent
the position. Norms and the output layer are always averaged with these counts as weights. The table that is read and
the table that is written are one object from a round's second tensor on: a client weighs as much as the count that the
clients before it in the round have left, so 1, 2, 3, … in the first round, whatever the client did; with the rounds the
difference fades. Only weights of other layers know the appendix's schemes: ``uniform`` is uniform; ``size`` is by the
nodes of the layer that a client holds; ``updates`` is by the counts again, the same for all clients but for their
order, and ``hybrid`` by both. The first tensor of the model is read before it is written: there counts change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrolex.clients import MODEL, Upload
from fedrolex.core import FedrolexError, shuffle
from fedrolex.methods.averaging import find_label_axis
from fedrolex.methods.fedrolex import FedRolex
from fedrolex.rounds import Round, Server, State
from fedrolex.slicing.layout import refs

COUNTS = "counts"  # the section of the counts


@dataclass(frozen=True, kw_only=True)
class PublishedCounts(FedRolex):
    """FedRolex in which clients count as in the published code; see the head of this file."""

    rows: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weighting == "samples" or self.norms != "shared" or not self.rows:
            raise FedrolexError("the published averages are by class (method.rows), with shared norms, not by samples")

    def begin(self, server: Server) -> State:
        """A count of 1 for every position."""
        floating = {name: tensor for name, tensor in server.state[MODEL].items() if tensor.is_floating_point()}
        return {**super().begin(server), COUNTS: {name: torch.ones_like(tensor) for name, tensor in floating.items()}}

    def take(self, round: Round, upload: Upload) -> None:
        """Keep the answer: what it weighs depends on those before it."""
        super().take(round, upload)
        round.keep(upload, 1.0)

    @torch.no_grad()
    def finish(self, round: Round) -> State:
        """The published average, clients in a random order, as they were drawn there."""
        new, model, counts = round.average.result(), {}, {}
        labels = find_label_axis(round.server, "method.rows")
        order = shuffle(len(round.uploads), round.server.seed, "order", round.number).tolist()
        for place, (name, before) in enumerate(round.state[COUNTS].items()):
            old, dims = round.state[MODEL][name], round.server.main.axes.tensors[name].dims
            classes = [dim for dim, layout in enumerate(dims) if labels in refs(layout)]
            schemes = old.dim() > 1 and not classes
            by_size = schemes and self.weighting in ("size", "hybrid")
            by_count = not schemes or self.weighting in ("updates", "hybrid")
            answers = [_answer(round, round.uploads[each][0], name, classes, by_size) for each in order]
            model[name], counts[name] = counted(old, before, answers, by_count=by_count, aliased=place > 0)
        new = {**new, MODEL: {**new[MODEL], **model}, COUNTS: counts}
        return self.server_optimizer.moved(round.state, new, round.server.trainable())


def _answer(round: Round, upload: Upload, name: str, classes: Sequence[int], by_size: bool) -> tuple[Tensor, Tensor]:
    """A client's part of a tensor in its place, and the weight of every position: 0 where it has sent none."""
    old = round.state[MODEL][name]
    region = round.server.main.axes.region(name, upload.job.window)
    part, weight = torch.zeros_like(old), torch.zeros_like(old)
    region.put(part, upload.tensors[name].to(old))
    region.put(weight, torch.full(region.shape, float(region.shape[0] if by_size else 1)).to(old))
    for dim in classes:
        absent = [label for label in range(old.shape[dim]) if label not in (upload.labels or ())]
        weight.index_fill_(dim, torch.tensor(absent, dtype=torch.int64, device=old.device), 0)
    return part, weight


def counted(
    old: Tensor, before: Tensor, answers: Sequence[tuple[Tensor, Tensor]], *, by_count: bool, aliased: bool
) -> tuple[Tensor, Tensor]:
    """The average of answers, parts with weights, and the counts after them.

    Args:
        old: what stays where nobody has sent anything.
        before: the counts before the round.
        answers: in their order.
        by_count: whether weights are multiplied by the counts.
        aliased: whether an answer is weighed by the counts as the answers before it have left them.
    """
    sums, total, counts = torch.zeros_like(old), torch.zeros_like(old), before.clone()
    for part, given in answers:
        weight = given * (counts if aliased else before) if by_count else given
        sums, total, counts = sums + weight * part, total + weight, counts + (given > 0)
    return torch.where(total > 0, sums / total.clamp(min=1), old), counts
