"""Finding layouts: unknown dimensions that are tied together, split and regrouped as a graph is walked.

Each dimension starts as one :class:`Unknown`. When two dimensions meet (an add, a contraction) they are
:func:`unify`-ed; when one is viewed as several it is :func:`divide`-d; when one is sliced it is
:func:`cut_at`. An unknown that turns out to have structure is *bound* to that structure, so every tensor
that mentions it sees the refinement at once (union-find). :func:`freeze` is the answer to everything that
is not understood: the indices below stay whole, which is never wrong, only less to cut.

What is still unknown and not frozen at the end is an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Unknown:
    """A run of indices whose structure is not known (yet).

    Attributes:
        size: number of indices.
        frozen: why these indices must stay whole, or None.
        bound: the structure this turned out to have, or None.
        uses: how operations use the indices: ``heads``, ``groups``, ``rows``, ``outputs``, ``qk``, ``v``.
    """

    size: int
    frozen: str | None = None
    bound: Dim | None = None
    uses: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """Row-major product of dimensions, outermost first."""

    parts: tuple[Dim, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Concat:
    """Dimensions one after the other."""

    parts: tuple[Dim, ...]


Dim = Unknown | Product | Concat
REGROUPED = "regrouped in a way that is not followed"


def find(dim: Dim) -> Dim:
    """``dim`` with every binding followed and nesting flattened (one level deep)."""
    while isinstance(dim, Unknown) and dim.bound is not None:
        dim = dim.bound
    if isinstance(dim, Unknown):
        return dim
    kind = type(dim)
    parts: list[Dim] = []
    for part in dim.parts:
        part = find(part)
        if isinstance(part, kind):
            parts.extend(part.parts)
        elif not (kind is Product and isinstance(part, Unknown) and part.size == 1):
            parts.append(part)
    if not parts:
        return Unknown(1, "size one") if kind is Product else Unknown(0, "empty")
    return parts[0] if len(parts) == 1 else kind(tuple(parts))


def size_of(dim: Dim) -> int:
    """Number of indices."""
    dim = find(dim)
    if isinstance(dim, Unknown):
        return dim.size
    sizes = [size_of(part) for part in dim.parts]
    return math.prod(sizes) if isinstance(dim, Product) else sum(sizes)


def unknowns(dim: Dim) -> Iterator[Unknown]:
    """The unbound unknowns below ``dim``, in order."""
    dim = find(dim)
    if isinstance(dim, Unknown):
        yield dim
    else:
        for part in dim.parts:
            yield from unknowns(part)


def parts_of(dim: Dim) -> Iterator[Dim]:
    """``dim``, and every product, concatenation and unknown below it."""
    dim = find(dim)
    yield dim
    if not isinstance(dim, Unknown):
        for part in dim.parts:
            yield from parts_of(part)


def freeze(dim: Dim, why: str) -> None:
    """Keep all indices below ``dim`` whole; the first reason given is the one reported."""
    for leaf in unknowns(dim):
        if leaf.frozen is None:
            leaf.frozen = why


def mark(dim: Dim, use: str) -> None:
    """Note how an operation uses the indices below ``dim``."""
    for leaf in unknowns(dim):
        leaf.uses.add(use)


def concat(parts: Sequence[Dim]) -> Dim:
    """The dimensions one after the other, empty ones left out."""
    return find(Concat(tuple(part for part in parts if size_of(part) > 0)))


def product(parts: Sequence[Dim]) -> Dim:
    """Row-major product, outermost first."""
    return find(Product(tuple(parts)))


def _bind(leaf: Unknown, to: Dim) -> None:
    if leaf.frozen is not None:
        freeze(to, leaf.frozen)
    for below in unknowns(to):
        below.uses |= leaf.uses
    leaf.bound = to


def unify(a: Dim, b: Dim) -> None:
    """Demand that ``a`` and ``b`` are cut by the same indices in the same order.

    Structure is refined until both sides agree; where their structures cannot be brought together
    (4×6 against 6×4) both are frozen.
    """
    a, b = find(a), find(b)
    if a is b:
        return
    if size_of(a) != size_of(b):
        freeze(a, f"meets {size_of(b)} indices where it has {size_of(a)}")
        freeze(b, f"meets {size_of(a)} indices where it has {size_of(b)}")
    elif isinstance(a, Unknown):
        if isinstance(b, Unknown) and b.frozen is None and a.frozen is not None:
            a, b = b, a
        if a not in set(unknowns(b)):
            _bind(a, b)
        else:
            freeze(b, "is tied to a part of itself")
    elif isinstance(a, Product) and isinstance(b, Product):
        _unify_products(a, b)
    elif isinstance(a, Concat) and not isinstance(b, Unknown):
        first = size_of(a.parts[0])
        if not can_cut(b, first):
            freeze(a, "regrouped across a boundary of its parts")
            freeze(b, "regrouped across a boundary of its parts")
            return
        left, right = cut_at(b, first)
        unify(a.parts[0], left)
        unify(concat(a.parts[1:]), right)
    else:
        unify(b, a)


def _unify_products(a: Product, b: Product) -> None:
    inner_b = size_of(b.parts[-1])
    if size_of(a.parts[-1]) < inner_b:
        _unify_products(b, a)
    elif can_divide(a, inner_b):
        outer, inner = divide(a, inner_b)
        unify(inner, b.parts[-1])
        unify(outer, product(b.parts[:-1]))
    else:
        freeze(a, "regrouped so that its factors do not line up")
        freeze(b, "regrouped so that its factors do not line up")


def can_divide(dim: Dim, inner: int) -> bool:
    """Whether :func:`divide` can split off ``inner`` innermost indices."""
    dim = find(dim)
    total = size_of(dim)
    if inner in (1, total):
        return True
    if inner == 0 or total % inner:
        return False
    if isinstance(dim, Unknown):
        return True
    if isinstance(dim, Concat):
        return all(size_of(part) % inner == 0 and can_divide(part, inner) for part in dim.parts)
    last = size_of(dim.parts[-1])
    if inner % last == 0:
        return can_divide(product(dim.parts[:-1]), inner // last)
    return last % inner == 0 and can_divide(dim.parts[-1], inner)


def divide(dim: Dim, inner: int) -> tuple[Dim, Dim]:
    """Split ``dim`` into (outer, the ``inner`` innermost indices); check :func:`can_divide` first."""
    dim = find(dim)
    total = size_of(dim)
    if inner == total:
        return Unknown(1, "size one"), dim
    if inner == 1:
        return dim, Unknown(1, "size one")
    if isinstance(dim, Unknown):
        outer_part, inner_part = Unknown(total // inner), Unknown(inner)
        _bind(dim, Product((outer_part, inner_part)))
        return outer_part, inner_part
    if isinstance(dim, Concat):
        halves = [divide(part, inner) for part in dim.parts]
        for _, other in halves[1:]:
            unify(halves[0][1], other)
        return concat([outer for outer, _ in halves]), find(halves[0][1])
    last = size_of(dim.parts[-1])
    if inner % last == 0:
        outer, rest = divide(product(dim.parts[:-1]), inner // last)
        return outer, product((rest, dim.parts[-1]))
    outer, rest = divide(dim.parts[-1], inner)
    return product((*dim.parts[:-1], outer)), rest


def can_cut(dim: Dim, at: int) -> bool:
    """Whether :func:`cut_at` can cut ``dim`` before index ``at``."""
    dim = find(dim)
    if at in (0, size_of(dim)) or isinstance(dim, Unknown):
        return True
    if isinstance(dim, Concat):
        for part in dim.parts:
            if at < size_of(part):
                return can_cut(part, at)
            at -= size_of(part)
        return True
    inner = math.prod(size_of(part) for part in dim.parts[1:])
    return at % inner == 0 and can_cut(dim.parts[0], at // inner)


def cut_at(dim: Dim, at: int) -> tuple[Dim, Dim]:
    """Split ``dim`` into its first ``at`` indices and the rest; check :func:`can_cut` first."""
    dim = find(dim)
    total = size_of(dim)
    if at == 0:
        return Unknown(0, "empty"), dim
    if at == total:
        return dim, Unknown(0, "empty")
    if isinstance(dim, Unknown):
        left, right = Unknown(at), Unknown(total - at)
        _bind(dim, Concat((left, right)))
        return left, right
    if isinstance(dim, Concat):
        before: list[Dim] = []
        for place, part in enumerate(dim.parts):
            if at < size_of(part):
                first, second = cut_at(part, at)
                return concat([*before, first]), concat([second, *dim.parts[place + 1 :]])
            at -= size_of(part)
            before.append(part)
    assert isinstance(dim, Product)
    inner = dim.parts[1:]
    first, second = cut_at(dim.parts[0], at // math.prod(size_of(part) for part in inner))
    return product((first, *inner)), product((second, *inner))
