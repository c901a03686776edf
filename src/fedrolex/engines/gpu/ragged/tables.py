"""Which program of a kernel does which part of a cohort's work: tables that kernels read."""

from collections.abc import Sequence
from itertools import product
from math import gcd

import torch
from torch import Tensor

from fedrolex.engines.gpu.ragged.buffers import ALIGN, Values, begins
from fedrolex.engines.gpu.ragged.tilings import Tiling


def table(device: torch.device, *columns: Sequence[int]) -> Tensor:
    """Columns of up to eight as rows of eight, int64."""
    found = torch.zeros(len(columns[0]), 8, dtype=torch.int64)
    for place, column in enumerate(columns):
        found[:, place] = torch.tensor(column)
    return found.to(device)


def tiles(x: Values, rows: int, columns: int) -> Tensor:
    """Client, block of pixels (``rows`` of them), block of channels for every program, the widest clients first."""
    found = [
        (client, row, column)
        for client in sorted(range(len(x.channels)), key=lambda k: -x.channels[k])
        for row in range(-(-x.pixels // rows))
        for column in range(-(-x.channels[client] // columns))
    ]
    return torch.tensor(found, dtype=torch.int32, device=x.value.device)


def column_tiles(x: Values, columns: int) -> Tensor:
    """Client and block of channels for every program."""
    found = [(client, block) for client, c in enumerate(x.channels) for block in range(-(-c // columns))]
    return torch.tensor(found, dtype=torch.int32, device=x.value.device)


def weight_tiles(x: Values, out: Values, taps: int, shape: Tiling, used: list[int]) -> Tensor:
    """Client, which of the groups of taps, block of input channels, of output channels, place of the sum of squares.

    ``used`` are the places of sums of squares that every client has used so far; a program that has the whole sum of a
    gradient takes the next one.
    """
    found, ins, outs = [], x.channels, out.channels
    for client in sorted(range(len(outs)), key=lambda k: -outs[k]):
        blocks = product(range(taps), range(-(-ins[client] // shape.rows)), range(-(-outs[client] // shape.columns)))
        for block in blocks:
            found.append((client, *block, used[client]))
            used[client] += shape.parts == 1
    return torch.tensor(found, dtype=torch.int32, device=x.value.device)


class Parts:
    """Results in several parts that are still to be added up, client by client.

    Attributes:
        count: how many parts.
        apart: for each client, the distance of one part to the next.
        begins: where its first part begins.
        size: where the last one ends.
    """

    def __init__(self, count: int, apart: Sequence[int], start: int = 0) -> None:
        places = begins([count * distance for distance in apart])
        self.count, self.apart = count, list(apart)
        self.begins = [start + place for place in places[:-1]]
        self.size = start + places[-1]

    def at(self, part: int) -> list[int]:
        """Where a part begins."""
        return [begin + part * apart for begin, apart in zip(self.begins, self.apart, strict=True)]


def align(channels: Sequence[int]) -> int:
    """What all these are a multiple of."""
    return gcd(ALIGN, *channels)
