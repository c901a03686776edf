"""Numbers that may have been computed from a width: 1/√d in attention is 0.125 in the graph, and so are many others.

A number that follows the sub-model's width where it should not is a wrong cut, and nothing would show it. So a
number follows only where the code around it says what it is; every other one that fits is kept and reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedrolex.slicing.axis import Kind
from fedrolex.slicing.infer import Dim, Unknown, find, parts_of, product, size_of, unknowns
from fedrolex.slicing.walk import Scalar, Summed

SMALL = 8
"""Below this many indices nearly every plain number is a power of the width."""


@dataclass(frozen=True)
class WidthOrigin:
    """The dimension a number may have been computed from.

    Attributes:
        dim: the dimension.
        power: number = size ** power.
        sure: whether this is beyond coincidence.
    """

    dim: Dim
    power: float
    sure: bool


def width_origin(scalar: Scalar, scalars: Sequence[Scalar], kinds: Mapping[Unknown, Kind]) -> WidthOrigin | None:
    """What a number was computed from: the surest guess, or None where no width fits.

    Args:
        scalar: the number.
        scalars: all numbers of the same graph.
        kinds: kinds of the axes by their unknown; only widths are looked at.
    """
    best: WidthOrigin | None = None
    for dim, summed in _candidates(scalar, kinds):
        power = _power(scalar.value, size_of(dim))
        if power is None or not any(kinds.get(leaf) == "width" for leaf in unknowns(dim)):
            continue
        sure = _beyond_coincidence(scalar, dim, -power if scalar.divides else power, summed, scalars)
        if best is None or sure > best.sure:
            best = WidthOrigin(dim, power, sure)
    return best


def _candidates(scalar: Scalar, kinds: Mapping[Unknown, Kind]) -> Iterator[tuple[Dim, Summed | None]]:
    """The dimensions around a number, those summed over before it, and for attention all heads together."""
    places = [(dim, None) for dim in scalar.around] + [(summed.dim, summed) for summed in scalar.summed]
    heads = [dim for dim in map(find, scalar.around) if isinstance(dim, Unknown) and kinds.get(dim) == "heads"]
    for whole, summed in places:
        for dim in parts_of(whole):
            yield dim, summed
            if _is_query(dim):
                yield from ((product((head, dim)), summed) for head in dict.fromkeys(heads))


def _beyond_coincidence(
    scalar: Scalar, dim: Dim, power: float, summed: Summed | None, scalars: Sequence[Scalar]
) -> bool:
    """Whether the code around a number says that it is about this dimension.

    What says so: queries, keys or their products are made smaller; an embedding is multiplied by √E; a sum over the
    dimension is divided by its size at once; or the number is the irrational square root of a size.

    Args:
        power: of the size that values are multiplied by, whether the code multiplies or divides.
    """
    count = size_of(dim)
    root = count**0.5
    irrational = abs(power) == 0.5 and abs(root - round(root)) > 1e-6
    if power < 0 and _is_query(dim):
        certain = scalar.argument == "scale" or count >= SMALL or irrational
        return certain if power != -0.25 else summed is None and _is_one_of_two(scalar, dim, scalars)
    if count < SMALL:
        return False
    embedded = power == 0.5 and scalar.embedded
    mean = power == -1 and scalar.divides and summed is not None and summed.ago == 0 and not summed.weights
    return irrational or embedded or (mean and len(scalar.summed) == 1)


def _is_query(dim: Dim) -> bool:
    return any("qk" in leaf.uses for leaf in unknowns(dim))


def _is_one_of_two(scalar: Scalar, dim: Dim, scalars: Sequence[Scalar]) -> bool:
    """Whether queries and keys are both multiplied by the number: 1/∜d each makes 1/√d."""
    own = set(unknowns(dim))
    alike = [s for s in scalars if s.value == scalar.value and s.divides == scalar.divides]
    return sum(any(own <= set(unknowns(around)) for around in s.around) for s in alike) >= 2


def _power(value: float, count: int) -> float | None:
    """The power of ``count`` that ``value`` is, if it is one people scale by."""
    if count < 2:
        return None
    close = (p for p in (-0.5, 0.5, -1.0, 1.0, -0.25, 0.25) if abs(value - count**p) <= 1e-6 * count**p)
    return next(close, None)
