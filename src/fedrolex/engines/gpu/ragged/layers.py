"""Launches of a cohort's layers: convolutions, norms with ReLU, their gradients, and the loss."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients import Precision
from fedrolex.engines.gpu.ragged import convolution_kernels, norm_kernels, step_kernels, tilings
from fedrolex.engines.gpu.ragged.buffers import Parameters, Values, begins, padded
from fedrolex.engines.gpu.ragged.tables import Parts, align, column_tiles, table, tiles, weight_tiles
from fedrolex.engines.gpu.ragged.tilings import Tiling, power
from fedrolex.models import PreResNet
from fedrolex.tasks import Mask

MASKS: dict[Mask, int] = {"none": 0, "zero": 1, "neg_inf": 2}
COLUMNS = 16  # channels that a program adds up

Launch = Callable[[], Any]
BARRIERS = 4096  # bytes
Convolution = tuple[str, Values]
"""The name of a convolution, and the values it is taken of (on the way back: the values it gave)."""


class Layers:
    """Makes launches of kernels, each for one layer of all clients.

    Args:
        model: one client's sub-model, for the sides and strides of filters.
        parameters: of all clients.
        batch: images of a step.
        share: of the places, as many have a client in a round.
        precision: of products.
        counts: images of every client in this batch, int32 ``(clients,)``.

    Attributes:
        compiling: whether launches only compile their kernels.
        split: gradients that are made in parts, by the name of their parameter.
        summed: parameters whose gradients' squares are added up where the gradients are made.
        squares_used: places of sums of squares that every client uses.
        squares: sums of squares of gradients, ``(clients, places)``.
        parts, weight_parts: room for results and gradients that are made in parts.
    """

    def __init__(
        self,
        model: PreResNet,
        parameters: Parameters,
        *,
        batch: int,
        share: Fraction | int,
        precision: Precision,
        counts: Tensor,
    ) -> None:
        self.model, self.parameters, self.batch, self.counts = model, parameters, batch, counts
        self.device, self.clients = counts.device, len(counts)
        self.low = parameters.lowered.dtype
        self.dots = "ieee" if precision == "fp32" else "tf32"
        self.compiling = False
        self.split: dict[str, Parts] = {}
        self.summed: set[str] = set()
        self.squares_used = [0] * self.clients
        self._share = share
        self._epsilon: float = model.norm.eps  # type: ignore[assignment]
        self._parts_size = self._weight_parts_size = 0
        self.parts = torch.zeros(0, device=self.device)

    def allocate(self) -> None:
        """Make room for everything that is made in parts, once all launches are known."""
        self.parts.resize_(self._parts_size).zero_()
        self.weight_parts = torch.zeros(max(1, self._weight_parts_size), device=self.device)
        self.squares = torch.zeros(self.clients, max(self.squares_used), device=self.device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        """Launch a kernel, or only compile it."""
        if self.compiling:
            kernel.warmup(*arguments, grid=grid, **constants)
        else:
            kernel[grid](*arguments, **constants)

    def values(self, side: int, channels: Sequence[int]) -> Values:
        """Room for what a layer gives."""
        chunks = max(tilings.CHUNKS, -(-self.batch * side**2 // tilings.FEWEST))
        return Values(self.batch, side, channels, chunks, self.low, self.device)

    # --- forward ---

    def convolve(
        self, convolutions: Sequence[Convolution], out: Values, residual: Values | None = None
    ) -> list[Launch]:
        """The sum of convolutions of active values, and of the residual; and the moments of the result."""
        shapes = self._shapes(convolutions, out)
        if len(shapes) == 1 and shapes[0].parts == 1:
            out.described = True
            whole = self._product(*convolutions[0], out, shapes[0], None, back=False, residual=residual)
            own = (out.moments, out.statistics)
            describe = self._channelwise(norm_kernels.describe, out, shapes[0].rows, None, *own, epsilon=self._epsilon)
            return [whole, describe]
        launches, parts = self._products(convolutions, shapes, out, back=False)
        columns = [parts.begins, out.begins, out.moments_begin, out.channels, parts.apart]
        tensors = [self.parts, (residual or out).value, out.value, out.moments]
        options = {"PARTS": parts.count, "RESIDUAL": residual is not None}
        return [*launches, self._pixelwise(norm_kernels.finish, out, True, columns, *tensors, **options)]

    def activate(self, norm: str, x: Values) -> Launch:
        """Norm and ReLU."""
        tensors = [x.value, x.moments, self.parameters.values, x.active, x.statistics]
        options = {"READY": x.described, "epsilon": self._epsilon}
        return self._pixelwise(norm_kernels.activate, x, False, self._columns(x, norm), *tensors, **options)

    def judge(self, x: Values, mask: Mask, targets: Tensor, held: Tensor, totals: Tensor) -> list[Launch]:
        """Scores of what the last norm made active, their losses, which are added to ``totals``, and their gradients.

        Targets are int64 ``(clients, batch)``, the classes of each client int8 ``(clients, classes)``.
        """
        *self._pooled_begin, size = begins([self.batch * channels for channels in x.channels])
        self._pooled = torch.zeros(size, device=self.device)
        head = [self.parameters.begins(name) for name in ("head.weight", "head.bias")]
        rows = table(self.device, x.begins, *head, self._pooled_begin, x.channels)
        classes, columns = held.shape[1], min(64, max(16, power(max(x.channels))))
        blocks = tiles(x, 16 * x.side**2, columns)
        pool = partial(
            self.launch, step_kernels.pool, (len(blocks),),
            x.active, self._pooled, rows, blocks, self.counts,
            AREA=x.side**2, ROWS=16, COLS=columns, ALIGN=align(x.channels),
        )  # fmt: skip
        judge = partial(
            self.launch, step_kernels.judge, (self.clients,),
            self.parameters.values, self.parameters.gradients, self._pooled, targets, held,
            totals, rows, self.counts, self.batch, classes,
            MASK=MASKS[mask], ROWS=max(16, power(self.batch)), CLASSES=max(16, power(classes)),
            COLS=columns, ALIGN=align(x.channels), PRECISION=self.dots,
        )  # fmt: skip
        return [pool, judge]

    # --- backward ---

    def back(self, norm: str, convolutions: Sequence[Convolution], x: Values, residual: Values | None) -> list[Launch]:
        """From the gradients of convolutions' results to that of ``x``, through the norm they share."""
        shapes = self._shapes(convolutions, x)
        if len(shapes) == 1 and shapes[0].parts == 1:
            whole = self._product(*convolutions[0], x, shapes[0], None, back=True)
            tensors = [x.sums, x.totals, self.parameters.gradients]
            total = self._channelwise(norm_kernels.total, x, shapes[0].rows, norm, *tensors)
            return [whole, total, self.unnorm(norm, x, residual, ready=True)]
        launches, parts = self._products(convolutions, shapes, x, back=True)
        return [*launches, self.deactivate(x, parts), self.unnorm(norm, x, residual)]

    def deactivate(self, x: Values, parts: Parts | None) -> Launch:
        """Back through ReLU; without ``parts``, from the gradient of the mean over pixels."""
        count, begin, apart = (parts.count, parts.begins, parts.apart) if parts else (1, self._pooled_begin, x.places)
        columns = [begin, x.begins, x.moments_begin, x.places, x.channels, apart]
        pooled = self._pooled if parts is None else self.parts
        tensors = [pooled, x.value, x.active, x.statistics, x.back, x.sums]
        options = {"PARTS": count, "POOLED": parts is None}
        return self._pixelwise(norm_kernels.deactivate, x, True, columns, *tensors, **options)

    def unnorm(self, norm: str, x: Values, residual: Values | None, ready: bool = False) -> Launch:
        """Back through the norm."""
        own, gradient = self.parameters, (residual or x).gradient
        tensors = [x.back, x.value, x.statistics, x.sums, x.totals, own.values, gradient, x.gradient, own.gradients]
        options = {"READY": ready, "RESIDUAL": residual is not None}
        return self._pixelwise(norm_kernels.unnorm, x, False, self._columns(x, norm), *tensors, **options)

    def weigh(self, name: str, x: Values, out: Values) -> Launch:
        """The gradient of a convolution's filter."""
        side, stride = self._filter(name)
        shape = self._fitted(tilings.weights(out.pixels, x.channels, out.channels, side, self._share))
        lengths = [side**2 * i * o for i, o in zip(x.channels, out.channels, strict=True)]
        places = self.parameters.begins(f"{name}.weight")
        if shape.parts > 1:
            parts = self.split[f"{name}.weight"] = Parts(shape.parts, lengths, self._weight_parts_size)
            self._weight_parts_size, places = parts.size, parts.begins
        else:
            self.summed.add(f"{name}.weight")
        rows = table(self.device, x.begins, out.begins, places, x.channels, out.channels, lengths)
        blocks = weight_tiles(x, out, side**2 // shape.taps, shape, self.squares_used)
        span = padded(-(-out.pixels // shape.parts), shape.depth)
        return lambda: self.launch(
            convolution_kernels.weigh, (len(blocks), shape.parts),
            x.active, out.gradient, self.weight_parts if shape.parts > 1 else self.parameters.gradients,
            self.squares, rows, blocks, self.counts, self.squares.shape[1],
            span, HEIGHT=x.side, WIDTH=x.side, OUT_HEIGHT=out.side, OUT_WIDTH=out.side,
            SIDE=side, STRIDE=stride, TAPS=shape.taps, ALIGN=align(x.channels + out.channels),
            WHOLE=shape.parts == 1,
            ROWS=shape.rows, COLS=shape.columns, DEPTH=shape.depth, PRECISION=self.dots,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    # --- products, and what is added up of them ---

    def _products(
        self, convolutions: Sequence[Convolution], shapes: Sequence[Tiling], out: Values, back: bool
    ) -> tuple[list[Launch], Parts]:
        """Convolutions, or with ``back`` the gradients of their inputs, in parts that are still to be added up."""
        parts = Parts(sum(shape.parts for shape in shapes), [out.pixels * channels for channels in out.channels])
        self._parts_size = max(self._parts_size, parts.size)
        firsts = accumulate((shape.parts for shape in shapes), initial=0)
        launches = [
            self._product(name, x, out, shape, (parts.at(first), parts.apart), back=back)
            for (name, x), shape, first in zip(convolutions, shapes, firsts, strict=False)
        ]
        return launches, parts

    def _product(
        self,
        name: str,
        x: Values,
        out: Values,
        shape: Tiling,
        parts: tuple[list[int], list[int]] | None,
        *,
        back: bool,
        residual: Values | None = None,
    ) -> Launch:
        """A convolution whose ``parts`` begin and are apart so far.

        Without ``parts``, the whole, with all that :func:`norm_kernels.finish` or, going back, ``deactivate`` does.
        """
        begin, apart = parts or (out.begins, [0] * self.clients)
        sums = [] if parts else [out.moments_begin, out.places] if back else [out.moments_begin]
        weights = self.parameters.begins(f"{name}.weight")
        rows = table(self.device, x.begins, weights, begin, x.channels, out.channels, apart, *sums)
        blocks = tiles(out, shape.rows, shape.columns)
        images, whole = x.gradient if back else x.active, parts is None
        side, stride = self._filter(name)
        return partial(
            self.launch, convolution_kernels.convolve, (len(blocks), shape.parts),
            images, self.parameters.lowered, (out.back if back else out.value) if whole else self.parts,
            (residual or out).value, out.value, out.active, out.statistics, out.sums if back else out.moments,
            rows, blocks, self.counts, x.side, x.side, out.side, out.side, out.chunks,
            SIDE=side, STRIDE=stride, BACK=back, TAPS=side**2 // shape.parts, WHOLE=whole,
            RESIDUAL=residual is not None, ALIGN=align(x.channels + out.channels),
            ROWS=shape.rows, COLS=shape.columns, DEPTH=shape.depth,
            PRECISION=self.dots, num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    # --- norms, and what is done pixel by pixel ---

    def _columns(self, x: Values, norm: str | None) -> list[list[int]]:
        """Of the table for a norm; for a kernel that reads neither scale nor shift, None."""
        scales = [self.parameters.begins(f"{norm}.{what}") for what in ("weight", "bias")] if norm else [x.begins] * 2
        return [x.begins, x.moments_begin, *scales, x.places, x.channels]

    def _channelwise(
        self, kernel: Any, x: Values, length: int, norm: str | None, *tensors: Tensor, **options: float
    ) -> Launch:
        """What is added up for every channel, of chunks of a length."""
        rows, blocks = table(self.device, *self._columns(x, norm)), column_tiles(x, COLUMNS)
        arguments = (*tensors, rows, blocks, self.counts, x.side**2, length, x.chunks)
        return partial(self.launch, kernel, (len(blocks),), *arguments, CHUNKS=tilings.CHUNKS, COLS=COLUMNS, **options)

    def _pixelwise(
        self, kernel: Any, x: Values, chunked: bool, columns: list[list[int]], *tensors: Tensor, **options: float
    ) -> Launch:
        """What is done in blocks of pixels; or in chunks, some rows at a time, where sums are taken of them."""
        shape = tilings.pixels(x.pixels, x.channels, self._share)
        blocks = tiles(x, shape.chunk if chunked else shape.block, shape.columns)
        length, rows = (shape.chunk // shape.rows, shape.rows) if chunked else (shape.chunk, shape.block)
        options |= {"ROWS": rows, "COLS": shape.columns, "ALIGN": align(x.channels)}
        options |= {} if chunked else {"CHUNKS": tilings.CHUNKS}
        arguments = (*tensors, table(self.device, *columns), blocks, self.counts, x.side**2, length, x.chunks)
        return partial(self.launch, kernel, (len(blocks),), *arguments, **options)

    # --- sizes ---

    def _shapes(self, convolutions: Sequence[Convolution], out: Values) -> list[Tiling]:
        return [
            self._fitted(tilings.product(out.pixels, x.channels, out.channels, self._filter(name)[0], self._share))
            for name, x in convolutions
        ]

    def _fitted(self, shape: Tiling) -> Tiling:
        """Smaller blocks where numbers take more room; where products are float32 throughout, much smaller ones.

        Products in float32 are long in compiling.
        """
        if self.dots != "ieee":
            return tilings.fitted(shape, self.low.itemsize, _room(self.device))
        rows, columns, depth = (min(n, most) for n, most in ((shape.rows, 64), (shape.columns, 64), (shape.depth, 32)))
        return replace(shape, rows=rows, columns=columns, depth=depth, warps=4)

    def _filter(self, name: str) -> tuple[int, int]:
        """Side and stride."""
        convolution: Any = self.model.get_submodule(name)
        return convolution.kernel_size[0], convolution.stride[0]


def _room(device: torch.device) -> int:
    """Bytes of shared memory that a program may have, less what barriers take."""
    if device.type != "cuda":
        return sys.maxsize
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin) - BARRIERS
