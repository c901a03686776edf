"""What a sub-model costs: parameters, bytes, multiplications, and the paper's own way of counting.

The paper's table follows HeteroFL's model summary: convolutions and linear layers cost their
multiply-accumulates, norms two operations for each input element, and a module's cost is added once for each
of its parameter tensors. So a linear layer with a bias counts double, a norm with scale and shift four
operations an element, a convolution without a bias once, and one with a bias twice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from fractions import Fraction
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fedrolex.core import FedrolexError
from fedrolex.core.operations import macs_of
from fedrolex.slicing import Axes, Capacity, Rounding, Static, exact
from fedrolex.slicing.inputs import Inputs

BYTES = 4  # of a parameter
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
COUNTED = (_ConvNd, nn.Linear, *NORMS)


@dataclass(frozen=True)
class Cost:
    """What one sub-model costs.

    Attributes:
        capacity: part of every width.
        parameters: how many.
        bytes: of the parameters, at four each: what a client downloads, and uploads, in a round.
        macs: multiply-accumulates of one example's forward pass in convolutions and matrix products.
        paper_flops: the paper's FLOPs of one example; None if its rule says nothing about some of the parameters
            (embeddings, attention) or the sub-model has no layers to count, only a traced program.
    """

    capacity: Fraction
    parameters: int
    bytes: int
    macs: int
    paper_flops: int | None


@dataclass(frozen=True)
class MeanCost:
    """The mean :class:`Cost` of a fleet's clients."""

    parameters: float
    bytes: float
    macs: float
    paper_flops: float | None


def cost(model: nn.Module, axes: Axes, capacity: Capacity, example: Any, rounding: Rounding = "floor") -> Cost:
    """The cost of ``model``'s sub-model at a capacity.

    Args:
        model: the server's, from which ``axes`` were traced.
        axes: its axes.
        capacity: part of every width.
        example: a batch the model can be called with, as for :func:`fedrolex.trace`; operations are divided by
            its size.
        rounding: of the widths.
    """
    beta = exact(capacity)
    small = axes.cut(model, Static(rounding=rounding).window(axes, round=0, capacity=beta)).eval()
    inputs = Inputs.of(model, example)
    batch = next((len(value) for value in inputs.values if value.dim()), 1)
    with _paper_count(small) as paper:
        macs = macs_of(lambda: inputs.call(small, inputs.values)) // batch
    count = axes.parameters(beta, rounding)
    known = all(isinstance(m, COUNTED) for m in small.modules() if any(True for _ in m.parameters(recurse=False)))
    flops = sum(paper) // batch if known else None
    return Cost(capacity=beta, parameters=count, bytes=count * BYTES, macs=macs, paper_flops=flops)


@contextmanager
def _paper_count(module: nn.Module) -> Iterator[list[int]]:
    """Collect the paper's FLOPs of every layer that runs inside the block."""
    found: list[int] = []

    def add(layer: nn.Module, args: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        tensors = sum(1 for _ in layer.parameters(recurse=False))
        found.append(tensors * _operations(layer, [*args, *named.values()][0], output))

    layers = [layer for layer in module.modules() if isinstance(layer, COUNTED)]
    handles = [layer.register_forward_hook(add, with_kwargs=True) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _operations(layer: nn.Module, x: Tensor, y: Tensor) -> int:
    """Multiply-accumulates of a convolution or linear layer; two for each input element of a norm."""
    if isinstance(layer, _ConvNd):
        per_pixel = layer.in_channels * layer.out_channels // layer.groups * prod(layer.kernel_size)
        pixels, channels = (x, layer.in_channels) if layer.transposed else (y, layer.out_channels)
        return pixels.numel() // channels * per_pixel
    if isinstance(layer, nn.Linear):
        return y.numel() * layer.in_features
    return 2 * x.numel()


def fleet_mean(costs: Sequence[Cost], shares: Sequence[Capacity] | None = None) -> MeanCost:
    """The mean over a fleet.

    Args:
        costs: of each capacity.
        shares: how large a part of the fleet has each; equal parts by default.
    """
    if not costs:
        raise FedrolexError("the mean of no costs: give at least one")
    if shares is None:
        parts = [Fraction(1, len(costs))] * len(costs)
    else:
        try:
            parts = [Fraction(str(share)) for share in shares]
        except (ValueError, ZeroDivisionError):
            raise FedrolexError(f"shares {list(shares)} are not numbers: give e.g. 1/4 or 0.25") from None
    if len(parts) != len(costs) or sum(parts) != 1 or min(parts) < 0:
        raise FedrolexError(f"{len(parts)} shares for {len(costs)} costs: give one each, at least 0, adding up to 1")

    def mean(name: str) -> Any:
        values = [getattr(one, name) for one in costs]
        return None if None in values else float(sum(p * value for p, value in zip(parts, values, strict=True)))

    return MeanCost(**{number.name: mean(number.name) for number in fields(MeanCost)})


def paper_rounding(values: Sequence[int]) -> float:
    """The mean as the paper takes it: of values that were rounded to six significant digits first."""
    if not values:
        raise FedrolexError("the mean of no values: give at least one")
    return float(Fraction(sum(round(value, 6 - len(str(abs(value)))) for value in values), len(values)))
