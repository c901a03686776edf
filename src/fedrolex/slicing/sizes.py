"""Which sizes of a model's inputs may change?

Export keeps the size of a batch and of a sentence free. Any other size that the code asks for (of an image, of a
sequence of floats) is a constant of the graph, and a graph that is given another one may return something wrong. So
other sizes are tried, and those at which graph and module disagree are refused in sub-models.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedrolex.slicing.fidelity import Beside, same_outputs
from fedrolex.slicing.inputs import Limits, Place

ENOUGH = 2
"""Other sizes that must be right before all are taken to be."""


def pinned(beside: Beside) -> Limits:
    """The dimensions of inputs that must be as the example has them."""
    values = beside.inputs.values
    return {
        (place, dim): (values[place].shape[dim],) * 2
        for places in _together(values)
        if _differs(beside, places)
        for place, dim in places
    }


def _together(values: Sequence[Tensor]) -> list[list[Place]]:
    """Dimensions that are tried together: those of equal size, the batch apart."""
    groups: dict[tuple[bool, int], list[Place]] = {}
    for place, value in enumerate(values):
        for dim, size in enumerate(value.shape):
            groups.setdefault((dim == 0, size), []).append((place, dim))
    return list(groups.values())


def _differs(beside: Beside, places: Sequence[Place]) -> bool:
    """Whether there is a size that the module takes and at which the graph is something else."""
    taken = 0
    for values in _other_sizes(beside, places):
        module = beside.module_on(values)
        if isinstance(module, str):
            continue
        taken += 1
        if not same_outputs(beside.graph_on(values), module):
            return True
        if taken == ENOUGH:
            break
    return False


def _other_sizes(beside: Beside, places: Sequence[Place]) -> Iterator[list[Tensor]]:
    """The example at other sizes: a third smaller, one larger, then others that a model with strides may take."""
    values, limits = beside.inputs.values, beside.captured.limits
    first, dim = places[0]
    size = values[first].shape[dim]
    others = [size + 1] if dim == 0 else [size - size // 3, size + 1, size // 2, size + size // 2]
    for other in dict.fromkeys(others):
        allowed = (limits.get(place, (1, other)) for place in places)
        if size > 1 and other != size and all(low <= other <= high for low, high in allowed):
            yield [_resized(value, [d for p, d in places if p == number], other) for number, value in enumerate(values)]


def _resized(value: Tensor, dims: Sequence[int], size: int) -> Tensor:
    """A tensor cut off, or begun again, along some dimensions."""
    for dim in dims:
        value = value.index_select(dim, torch.arange(size, device=value.device) % value.shape[dim])
    return value
