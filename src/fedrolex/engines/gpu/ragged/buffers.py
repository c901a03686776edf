"""Where a cohort's tensors lie: one client's part after the other in common buffers, channels last and padded."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor, nn

PAD = 4  # channels are a multiple of it, so that programs can read several at once
ALIGN = 16  # every part begins at a multiple of it


def padded(channels: int, to: int = PAD) -> int:
    """The next multiple."""
    return -(-channels // to) * to


def begins(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    return list(accumulate((padded(size, ALIGN) for size in sizes), initial=0))


class Parameters:
    """The parameters of all clients, their gradients, and the optimiser's memory; float32, one dimension each.

    Filters are stored as (line, column, channels in, channels out), everything else as in its module.

    Args:
        models: each client's sub-model, for names and shapes.
        low: the precision of ``lowered``, the copy that products are taken of.
        memories: how many numbers the optimiser keeps for each parameter.
        device: of all.
    """

    def __init__(self, models: Sequence[nn.Module], low: torch.dtype, memories: int, device: torch.device) -> None:
        self._shapes: list[dict[str, torch.Size]] = [{n: p.shape for n, p in m.named_parameters()} for m in models]
        self._stored = [{name: _stored(shape) for name, shape in shapes.items()} for shapes in self._shapes]
        sizes = [prod(shape) for shapes in self._stored for shape in shapes.values()]
        places = iter(begins(sizes))
        self._begins = [{name: next(places) for name in shapes} for shapes in self._stored]
        self.size = begins(sizes)[-1]
        self._views: dict[int, dict[str, Tensor]] = {}
        self._wholes: dict[int, Tensor] = {}
        self.values = torch.zeros(self.size, device=device)
        self.gradients = torch.zeros(self.size, device=device)
        self.memories = [torch.zeros(self.size, device=device) for _ in range(memories)]
        self.lowered = self.values if low is torch.float32 else torch.zeros(self.size, dtype=low, device=device)

    def begins(self, name: str) -> list[int]:
        """Where every client's tensor begins."""
        return [places[name] for places in self._begins]

    def outs(self, name: str) -> list[int]:
        """Every client's output channels of a convolution's filter."""
        return [shapes[name][-1] for shapes in self._stored]

    def spans(self, client: int) -> Mapping[str, tuple[int, int]]:
        """Name to beginning and length of a client's tensors."""
        return {name: (begin, prod(self._stored[client][name])) for name, begin in self._begins[client].items()}

    def matrix(self, client: int, name: str) -> tuple[int, tuple[int, int, int], tuple[int, int]]:
        """Where a tensor begins, its stored taps, lines and columns, and how many of the last two are real."""
        stored, shape = self._stored[client][name], self._shapes[client][name]
        begin = self._begins[client][name]
        if len(shape) == 4:
            return begin, (stored[0] * stored[1], stored[2], stored[3]), (shape[1], shape[0])
        lines, columns = (1, *stored)[-2:]
        return begin, (1, lines, columns), (lines, shape[-1])

    def tensors(self, client: int) -> dict[str, Tensor]:
        """A client's parameters in the shapes of its sub-model; they share memory with the cohort's."""
        if client in self._views:
            return self._views[client]
        found = self._views[client] = {}
        for name, (begin, length) in self.spans(client).items():
            stored = self.values[begin : begin + length].view(self._stored[client][name])
            shape = self._shapes[client][name]
            found[name] = (stored.permute(3, 2, 0, 1) if len(shape) == 4 else stored)[tuple(map(slice, shape))]
        return found

    def whole(self, client: int) -> Tensor:
        """All of a client's parameters, padding included, shape ``(n,)``."""
        if client not in self._wholes:
            last, length = max(self.spans(client).values())
            self._wholes[client] = self.values[min(self._begins[client].values()) : last + length]
        return self._wholes[client]

    def clear(self) -> None:
        """The optimiser remembers nothing, and the low copy is made anew."""
        for memory in self.memories:
            memory.zero_()
        if self.lowered is not self.values:
            self.lowered.copy_(self.values)


def _stored(shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) == 4:
        return (shape[2], shape[3], padded(shape[1]), padded(shape[0]))
    return (*shape[:-1], padded(shape[-1]))


class Values:
    """What a layer gives for a batch of every client, what norm and ReLU make of it, and the gradients.

    Args:
        batch: images of a step.
        side: height and width.
        channels: of each client, padded.
        chunks: most parts that ``moments`` and ``sums`` are taken of.
        low: the precision of images.
        device: of all.

    Attributes:
        pixels: of a batch.
        begins: where a client's part of the next four begins; pixel by pixel, channels last.
        value, active: before and after norm and ReLU.
        back, gradient: the gradient of the norm's output and of ``value``.
        moments, sums: what the norm and its way back add up chunk by chunk, ``(2, chunks, channels)`` a client.
        statistics, totals: mean and 1 / deviation, and the sums over all chunks, ``(2, channels)`` a client.
        places, moments_begin: where a client's part of the last two, and of the two before, begins.
        described: whether ``statistics`` are there before the norm is taken.
    """

    def __init__(
        self, batch: int, side: int, channels: Sequence[int], chunks: int, low: torch.dtype, device: torch.device
    ) -> None:
        self.pixels = batch * side**2
        *self.begins, end = begins([self.pixels * c for c in channels])
        *self.places, size = begins([2 * c for c in channels])
        self.side, self.channels, self.chunks, self.described = side, list(channels), chunks, False
        self.moments_begin = [chunks * place for place in self.places]
        images = (torch.zeros(end, dtype=low, device=device) for _ in range(4))
        self.value, self.active, self.back, self.gradient = images
        self.moments, self.sums = (torch.zeros(chunks * size, device=device) for _ in range(2))
        self.statistics, self.totals = (torch.zeros(size, device=device) for _ in range(2))
