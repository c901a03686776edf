"""Where a window's elements lie in memory.

A contiguous window needs at most two slices for each leaf of a layout, so a tensor's part is a handful of
strided blocks that are copied or added as they are: no index tensors, no gathers. Index lists
(:class:`~fedrolex.slicing.windows.Pick`) fall back to indexing, dimension by dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.slicing import layout as layouts
from fedrolex.slicing.layout import Cat, Fixed, Layout, Prod, Ref
from fedrolex.slicing.windows import Arc, Pick, Span, Window


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions of one dimension that are evenly spaced, in the full tensor and in its cut.

    Attributes:
        source: first position in the full tensor.
        target: first position in the cut.
        steps: (count, step in the full tensor, step in the cut), outermost first.
    """

    source: int
    target: int
    steps: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class StridedBlock:
    """A block of a tensor: one strided view of the full tensor and one of its cut."""

    sizes: tuple[int, ...]
    source: tuple[tuple[int, ...], int]
    target: tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Region:
    """A window's part of one tensor.

    Attributes:
        full: shape of the whole tensor.
        shape: shape of the part.
        pieces: what makes up every dimension, or None where an index list is needed.
        picks: positions along every dimension, None where it is whole; only used where ``pieces`` is None.
    """

    full: tuple[int, ...]
    shape: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...] | None
    picks: tuple[NDArray[np.int64] | None, ...]
    _blocks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[StridedBlock]] = field(
        default_factory=dict, compare=False
    )
    _indices: dict[torch.device, tuple[Tensor | None, ...]] = field(default_factory=dict, compare=False)

    def take(self, source: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the part out of ``source``."""
        if out is None:
            out = torch.empty(self.shape, dtype=source.dtype, device=source.device)
        if self.pieces is None:
            for dim, index in enumerate(self.index(source.device)):
                source = source if index is None else source.index_select(dim, index)
            return out.copy_(source)
        for block in self.blocks(source.stride(), out.stride()):
            _view(out, block.sizes, block.target).copy_(_view(source, block.sizes, block.source))
        return out

    def put(self, target: Tensor, part: Tensor) -> None:
        """Copy ``part`` back into its place in ``target``."""
        if self.pieces is None:
            target[self.open_index(target.device)] = part.to(target.dtype)
            return
        for block in self.blocks(target.stride(), part.stride()):
            _view(target, block.sizes, block.source).copy_(_view(part, block.sizes, block.target))

    def add(self, target: Tensor, part: Tensor, weight: float) -> None:
        """Add ``weight * part`` into its place in ``target``."""
        if self.pieces is None:
            index = self.open_index(target.device)
            target[index] = torch.add(target[index], part, alpha=weight)
            return
        for block in self.blocks(target.stride(), part.stride()):
            _view(target, block.sizes, block.source).add_(_view(part, block.sizes, block.target), alpha=weight)

    def add_constant(self, target: Tensor, value: float) -> None:
        """Add ``value`` to every position of the part in ``target``."""
        if self.pieces is None:
            index = self.open_index(target.device)
            target[index] = target[index] + value
            return
        for block in self.blocks(target.stride(), (0,) * len(self.shape)):  # a constant has no strides
            _view(target, block.sizes, block.source).add_(value)

    def blocks(self, source: tuple[int, ...], target: tuple[int, ...]) -> list[StridedBlock]:
        """The strided blocks for a full tensor and a cut with these strides."""
        found = self._blocks.get((source, target))
        if found is None:
            assert self.pieces is not None
            found = [_block(pieces, source, target) for pieces in product(*self.pieces)]
            self._blocks[source, target] = found
        return found

    def index(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """Positions along every dimension as index tensors; None where it is whole."""
        if device not in self._indices:
            self._indices[device] = tuple(None if p is None else torch.from_numpy(p).to(device) for p in self.picks)
        return self._indices[device]

    def open_index(self, device: torch.device) -> tuple[Tensor, ...]:
        """Index tensors shaped to address the part at once."""
        rank = len(self.full)
        opened = []
        for dim, (index, n) in enumerate(zip(self.index(device), self.full, strict=True)):
            index = torch.arange(n, device=device) if index is None else index
            opened.append(index.view([-1 if d == dim else 1 for d in range(rank)]))
        return tuple(opened)


def region_of(tensor: str, dims: Sequence[Layout], full: Mapping[str, int], window: Window) -> Region:
    """The region of ``window`` in a tensor with these dimensions."""
    spans = [
        {axis: span for axis in layouts.refs(layout) if (span := window.span(tensor, dim, axis)) is not None}
        for dim, layout in enumerate(dims)
    ]
    whole = layouts.shape(dims, full)
    cut = list(zip(dims, spans, whole, strict=True))
    shape = tuple(layouts.size(layout, _widths(layout, full, held)) if held else n for layout, held, n in cut)
    if any(isinstance(span, Pick) for held in spans for span in held.values()):
        picks = tuple(_positions(layout, full, held) if held else None for layout, held, _ in cut)
        return Region(whole, shape, None, picks)
    pieces = tuple(
        tuple(_pieces(layout, full, held)) if held else (Piece(0, 0, ((n, 1, 1),)),) for layout, held, n in cut
    )
    return Region(whole, shape, pieces, (None,) * len(dims))


def _widths(layout: Layout, full: Mapping[str, int], spans: Mapping[str, Span]) -> dict[str, int]:
    return {axis: spans[axis].width if axis in spans else full[axis] for axis in layouts.refs(layout)}


def _positions(layout: Layout, full: Mapping[str, int], spans: Mapping[str, Span]) -> NDArray[np.int64]:
    return layouts.positions(layout, full, lambda a: spans[a].indices() if a in spans else np.arange(full[a]))


def _pieces(layout: Layout, full: Mapping[str, int], spans: Mapping[str, Span]) -> list[Piece]:
    match layout:
        case Fixed(n):
            return [Piece(0, 0, ((n, 1, 1),))]
        case Ref(axis):
            span = spans.get(axis) or Arc(0, full[axis], full[axis])
            assert isinstance(span, Arc)
            result, done = [], 0
            for start, length in span.pieces():
                result.append(Piece(start, done, ((length, 1, 1),)))
                done += length
            return result
        case Cat(parts):
            result, source, target = [], 0, 0
            widths = _widths(layout, full, spans)
            for part in parts:
                for piece in _pieces(part, full, spans):
                    result.append(Piece(piece.source + source, piece.target + target, piece.steps))
                source += layouts.size(part, full)
                target += layouts.size(part, widths)
            return result
        case Prod(parts):
            widths = _widths(layout, full, spans)
            result = [Piece(0, 0, ())]
            for part in parts:
                big, small = layouts.size(part, full), layouts.size(part, widths)
                inner = _pieces(part, full, spans)
                outer = [(o, [(n, s * big, t * small) for n, s, t in o.steps]) for o in result]
                result = [
                    Piece(o.source * big + i.source, o.target * small + i.target, _merged([*steps, *i.steps]))
                    for o, steps in outer
                    for i in inner
                ]
            return result


def _merged(steps: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Neighbouring steps that walk memory as one become one."""
    merged: list[tuple[int, int, int]] = []
    for n, s, t in steps:
        if merged and merged[-1][1:] == (n * s, n * t):
            merged[-1] = (merged[-1][0] * n, s, t)
        else:
            merged.append((n, s, t))
    return tuple(merged)


def _block(pieces: Sequence[Piece], source: Sequence[int], target: Sequence[int]) -> StridedBlock:
    sizes: list[int] = []
    strides: tuple[list[int], list[int]] = ([], [])
    offsets = [0, 0]
    for piece, s, t in zip(pieces, source, target, strict=True):
        offsets[0] += piece.source * s
        offsets[1] += piece.target * t
        for n, step_s, step_t in piece.steps:
            sizes.append(n)
            strides[0].append(step_s * s)
            strides[1].append(step_t * t)
    return StridedBlock(tuple(sizes), (tuple(strides[0]), offsets[0]), (tuple(strides[1]), offsets[1]))


def _view(tensor: Tensor, sizes: tuple[int, ...], where: tuple[tuple[int, ...], int]) -> Tensor:
    return tensor.as_strided(sizes, where[0], tensor.storage_offset() + where[1])
