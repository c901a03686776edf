"""One training step of a whole cohort of PreResNets of different widths, a few kernel launches a layer.

The kernels work through the clients' parts of common buffers whatever the widths. Products are taken in
bfloat16, TensorFloat-32 or float32 and added up in float32; parameters, gradients and the optimiser's memory are
float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import product
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from triton import AsyncCompileMode

from fedrolex.clients.work import LocalTraining, Precision
from fedrolex.engines.gpu.ragged import convolution_kernels, norm_kernels, step_kernels, tilings
from fedrolex.engines.gpu.ragged.buffers import ALIGN, Parameters, Values, begins, padded
from fedrolex.engines.gpu.ragged.tilings import Tiling, power
from fedrolex.models.preresnet import PreResNet

SIZE = 4096  # parameters a program of the optimiser
MASKS = {"none": 0, "zero": 1, "neg_inf": 2}

Launch = Callable[[], Any]


def takes(model: nn.Module, loss: object) -> bool:
    """Whether cohorts of a model can be trained by these kernels."""
    return (
        isinstance(model, PreResNet)
        and model.plan.norm == "static"
        and not model.plan.scaler
        and model.plan.size % 2 ** (len(model.plan.blocks) - 1) == 0
        and loss is nn.functional.cross_entropy
        and all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())
    )


class Cohort:
    """Clients that train together, each with its own number of images.

    Args:
        models: each client's sub-model, for its shapes.
        work: what clients do.
        room: images a client may have.
        share: of these places, as many have a client in a round.
        precision: of products.
        device: where the kernels run.

    Attributes:
        parameters: of all clients.
        x, y: inputs ``(clients, room, height, width, channels)`` and targets ``(clients, room)`` of an epoch.
        sizes: images of each client, int32.
        held: the classes of each client, int8 ``(clients, classes)``, for the loss's mask.
        rate: learning rate.
        counter: the next batch.
        totals: sum of each client's losses.
    """

    def __init__(
        self,
        models: Sequence[PreResNet],
        work: LocalTraining,
        *,
        room: int,
        share: Fraction | int = 1,
        precision: Precision,
        device: torch.device,
    ) -> None:
        plan, clients = models[0].plan, len(models)
        self.model, self.work, self.device, self.clients = models[0], work, device, clients
        self._share = share
        self.dots = "ieee" if precision == "fp32" else "tf32"
        self.low = torch.bfloat16 if precision == "bf16" else torch.float32
        self.parameters = Parameters(models, self.low, 2 if work.optimizer == "adam" else 1, device)
        shape = (plan.size, plan.size, padded(plan.channels))
        self.x = torch.zeros(clients, padded(room, work.batch), *shape, dtype=self.low, device=device)
        self.y = torch.zeros(clients, padded(room, work.batch), dtype=torch.int64, device=device)
        self.sizes = torch.zeros(clients, dtype=torch.int32, device=device)
        self.held = torch.ones(clients, plan.classes, dtype=torch.int8, device=device)
        self.rate = torch.zeros((), device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.totals = torch.zeros(clients, device=device)
        self._done = torch.zeros(clients, dtype=torch.int32, device=device)
        self._counts = torch.zeros(clients, dtype=torch.int32, device=device)
        self._targets = torch.zeros(clients, work.batch, dtype=torch.int64, device=device)
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._compiling = False
        self._epsilon: float = models[0].norm.eps  # type: ignore[assignment]
        self._parts_size = self._weight_parts_size = 0
        self._split: dict[str, Parts] = {}
        self._squares_used = [0] * clients
        self._summed: set[str] = set()
        self._images = self._values(plan.size, [shape[-1]] * clients)
        self._forward, self._backward = self._program()
        self._optimise = self._optimiser()
        self._parts = torch.zeros(self._parts_size, device=device)
        self._weight_parts = torch.zeros(max(1, self._weight_parts_size), device=device)

    # --- training ---

    def compile(self) -> None:
        """Compile all kernels, several at a time, without running any."""
        self._compiling = True
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
                for launch in (*self._forward, *(each for _, each in self._backward), *self._optimise):
                    launch()
        finally:
            self._compiling = False

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **constants: object) -> None:
        if self._compiling:
            kernel.warmup(*arguments, grid=grid, **constants)
        else:
            kernel[grid](*arguments, **constants)

    def start(self, rate: float) -> None:
        """A new round: parameters have been loaded, the optimiser remembers nothing."""
        self.parameters.clear()
        self.rate.fill_(rate)
        self.totals.zero_()
        self._done.zero_()

    def step(self) -> None:
        """The next batch of every client that has one."""
        for launch in self._forward:
            launch()
        for beside, launch in self._backward:
            if beside and self._beside is not None:
                self._beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._beside):
                    launch()
            else:
                launch()
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        for launch in self._optimise:
            launch()
        self.counter.add_(1)

    # --- the program: launches of the way forward, and of the way back with whether they can run beside the others ---

    def _program(self) -> tuple[list[Launch], list[tuple[bool, Launch]]]:
        forward: list[Launch] = []
        backward: list[list[tuple[bool, Launch]]] = []
        images = self._images
        x = self._values(images.side, self.parameters.outs("stem.weight"))
        forward += [self._fetch, *self._convolve([("stem", images)], x)]
        backward.append([(True, self._weigh("stem", images, x))])
        for path, stride, project in _blocks(self.model):
            inner = self._values(x.side // stride, self.parameters.outs(f"{path}.conv1.weight"))
            y = self._values(inner.side, self.parameters.outs(f"{path}.conv2.weight"))
            forward.append(self._activate(f"{path}.norm1", x))
            forward += self._convolve([(f"{path}.conv1", x)], inner)
            forward.append(self._activate(f"{path}.norm2", inner))
            shortcut = [(f"{path}.shortcut", x)] if project else []
            forward += self._convolve([(f"{path}.conv2", inner), *shortcut], y, None if project else x)
            back = [(True, self._weigh(f"{path}.conv2", inner, y))]
            back += self._back(f"{path}.norm2", [(f"{path}.conv2", y)], inner, None)
            back.append((True, self._weigh(f"{path}.conv1", x, inner)))
            if project:
                back.append((True, self._weigh(f"{path}.shortcut", x, y)))
            shortcut = [(f"{path}.shortcut", y)] if project else []
            back += self._back(f"{path}.norm1", [(f"{path}.conv1", inner), *shortcut], x, None if project else y)
            backward.append(back)
            x = y
        forward += [self._activate("norm", x), *self._judge(x)]
        backward.append([(False, self._deactivate(x, None)), (False, self._unnorm("norm", x, None))])
        return forward, [launch for part in reversed(backward) for launch in part]

    def _fetch(self) -> None:
        """The next batch."""
        batch, image = self.work.batch, self.x[0, 0].numel()
        self._launch(
            step_kernels.fetch, (self.clients, -(-batch * image // 2048)),
            self.x, self.y, self.sizes, self.counter, self._images.active, self._targets, self._counts, self._done,
            batch, self.y.shape[1], image, SIZE=2048, BATCH=power(batch),
        )  # fmt: skip

    def _values(self, side: int, channels: Sequence[int]) -> Values:
        chunks = max(tilings.CHUNKS, -(-self.work.batch * side**2 // tilings.FEWEST))
        return Values.of(self.work.batch, side, channels, chunks, self.low, self.device)

    def _convolve(
        self, convolutions: Sequence[tuple[str, Values]], out: Values, residual: Values | None = None
    ) -> list[Launch]:
        """The sum of convolutions of active values, and of the residual; and the moments of the result."""
        shapes = self._shapes(convolutions, out)
        if len(shapes) == 1 and shapes[0].parts == 1:
            out.described = True
            return [self._whole(*convolutions[0], out, shapes[0], residual), self._describe(out, shapes[0].rows)]
        launches, parts = self._products(convolutions, shapes, out, back=False)
        table = self._table(parts.begins, out.begins, out.moments_begin, out.channels, parts.apart)
        shape = tilings.pixels(self.work.batch * out.side**2, out.channels, self._share)
        tiles = self._tiles(out, shape.chunk, shape.columns)

        def finish() -> None:
            self._launch(
                norm_kernels.finish, (len(tiles),),
                self._parts, (residual or out).value, out.value, out.moments, table, tiles, self._counts,
                out.side**2, shape.chunk // shape.rows, out.chunks,
                PARTS=parts.count, RESIDUAL=residual is not None, ROWS=shape.rows, COLS=shape.columns,
                ALIGN=_align(out.channels),
            )  # fmt: skip

        return [*launches, finish]

    def _back(
        self, norm: str, convolutions: Sequence[tuple[str, Values]], x: Values, residual: Values | None
    ) -> list[tuple[bool, Launch]]:
        """From the gradients of convolutions' results to that of ``x``, through the norm they share."""
        shapes = self._shapes(convolutions, x)
        if len(shapes) == 1 and shapes[0].parts == 1:
            launches = [self._whole_back(*convolutions[0], x, shapes[0]), self._total(norm, x, shapes[0].rows)]
            return [(False, launch) for launch in (*launches, self._unnorm(norm, x, residual, ready=True))]
        launches, parts = self._products(convolutions, shapes, x, back=True)
        launches += [self._deactivate(x, parts), self._unnorm(norm, x, residual)]
        return [(False, launch) for launch in launches]

    def _shapes(self, convolutions: Sequence[tuple[str, Values]], out: Values) -> list[Tiling]:
        pixels = self.work.batch * out.side**2
        return [
            self._fitted(tilings.product(pixels, x.channels, out.channels, self._side(name), self._share))
            for name, x in convolutions
        ]

    def _fitted(self, shape: Tiling) -> Tiling:
        """Smaller blocks where products are float32 throughout: they are long in compiling, and take more room."""
        if self.dots != "ieee":
            return shape
        rows, columns, depth = (min(n, most) for n, most in ((shape.rows, 64), (shape.columns, 64), (shape.depth, 32)))
        return replace(shape, rows=rows, columns=columns, depth=depth, warps=4)

    def _products(
        self, convolutions: Sequence[tuple[str, Values]], shapes: Sequence[Tiling], out: Values, back: bool
    ) -> tuple[list[Launch], Parts]:
        """Convolutions, or with ``back`` the gradients of their inputs, in parts that are still to be added up."""
        pixels = self.work.batch * out.side**2
        parts = Parts(sum(shape.parts for shape in shapes), [pixels * channels for channels in out.channels])
        self._parts_size = max(self._parts_size, parts.size)
        launches: list[Launch] = []
        done = 0
        for (name, x), shape in zip(convolutions, shapes, strict=True):
            where = (parts.at(done), x.channels, out.channels, parts.apart)
            launches.append(self._product(name, x, out, shape, where, back=back))
            done += shape.parts
        return launches, parts

    def _whole(self, name: str, x: Values, out: Values, shape: Tiling, residual: Values | None) -> Launch:
        """A convolution with all that :func:`norm_kernels.finish` does."""
        where = (out.begins, x.channels, out.channels, [0] * self.clients, out.moments_begin)
        return self._product(name, x, out, shape, where, back=False, whole=True, residual=residual)

    def _whole_back(self, name: str, y: Values, x: Values, shape: Tiling) -> Launch:
        """The way back through a convolution with all that :func:`norm_kernels.deactivate` does."""
        where = (x.begins, y.channels, x.channels, [0] * self.clients, x.moments_begin, x.places)
        return self._product(name, y, x, shape, where, back=True, whole=True)

    def _product(
        self,
        name: str,
        x: Values,
        out: Values,
        shape: Tiling,
        where: tuple[list[int], ...],
        *,
        back: bool,
        whole: bool = False,
        residual: Values | None = None,
    ) -> Launch:
        table = self._table(x.begins, self.parameters.begins(f"{name}.weight"), *where)
        tiles = self._tiles(out, shape.rows, shape.columns)
        images = x.gradient if back else x.active
        side, stride = self._side(name), self._stride(name)

        def launch() -> None:
            self._launch(
                convolution_kernels.convolve, (len(tiles), shape.parts),
                images, self.parameters.lowered, (out.back if back else out.value) if whole else self._parts,
                (residual or out).value, out.value, out.active, out.statistics, out.sums if back else out.moments,
                table, tiles, self._counts, x.side, x.side, out.side, out.side, out.chunks,
                SIDE=side, STRIDE=stride, BACK=back, TAPS=side**2 // shape.parts, WHOLE=whole,
                RESIDUAL=residual is not None, ALIGN=_align(x.channels + out.channels),
                ROWS=shape.rows, COLS=shape.columns, DEPTH=shape.depth,
                PRECISION=self.dots, num_warps=shape.warps, num_stages=shape.stages,
            )  # fmt: skip

        return launch

    def _describe(self, x: Values, length: int) -> Launch:
        """Statistics of values whose moments were taken of chunks of a length."""
        table = self._table(x.begins, x.moments_begin, x.begins, x.begins, x.places, x.channels)
        tiles, columns = self._columns(x)

        def launch() -> None:
            self._launch(
                norm_kernels.describe, (len(tiles),),
                x.moments, x.statistics, table, tiles, self._counts, x.side**2, length, x.chunks, self._epsilon,
                CHUNKS=tilings.CHUNKS, COLS=columns,
            )  # fmt: skip

        return launch

    def _total(self, norm: str, x: Values, length: int) -> Launch:
        """Sums over all chunks of a length."""
        table = self._table(x.begins, x.moments_begin, *self._scales(norm), x.places, x.channels)
        tiles, columns = self._columns(x)

        def launch() -> None:
            self._launch(
                norm_kernels.total, (len(tiles),),
                x.sums, x.totals, self.parameters.gradients, table, tiles, self._counts, x.side**2, length, x.chunks,
                CHUNKS=tilings.CHUNKS, COLS=columns,
            )  # fmt: skip

        return launch

    def _columns(self, x: Values) -> tuple[Tensor, int]:
        """Client and block of channels for every program, and how many channels that is."""
        columns = 16
        found = [(client, block) for client, c in enumerate(x.channels) for block in range(-(-c // columns))]
        return torch.tensor(found, dtype=torch.int32, device=self.device), columns

    def _weigh(self, name: str, x: Values, out: Values) -> Launch:
        """The gradient of a convolution's filter."""
        side, stride = self._side(name), self._stride(name)
        shape = self._fitted(
            tilings.weights(self.work.batch * out.side**2, x.channels, out.channels, side, self._share)
        )
        lengths = [side**2 * i * o for i, o in zip(x.channels, out.channels, strict=True)]
        places = self.parameters.begins(f"{name}.weight")
        if shape.parts > 1:
            parts = self._split[f"{name}.weight"] = Parts(shape.parts, lengths, self._weight_parts_size)
            self._weight_parts_size, places = parts.size, parts.begins
        table = self._table(x.begins, out.begins, places, x.channels, out.channels, lengths)
        tiles = self._weight_tiles(x.channels, out.channels, side**2 // shape.taps, shape)
        if shape.parts == 1:
            self._summed.add(f"{name}.weight")
        span = padded(-(-self.work.batch * out.side**2 // shape.parts), shape.depth)

        def launch() -> None:
            self._launch(
                convolution_kernels.weigh, (len(tiles), shape.parts),
                x.active, out.gradient, self._weight_parts if shape.parts > 1 else self.parameters.gradients,
                self._squares, table, tiles, self._counts, self._squares.shape[1],
                x.side, x.side, out.side, out.side, span,
                SIDE=side, STRIDE=stride, TAPS=shape.taps, ALIGN=_align(x.channels + out.channels),
                WHOLE=shape.parts == 1,
                ROWS=shape.rows, COLS=shape.columns, DEPTH=shape.depth, PRECISION=self.dots,
                num_warps=shape.warps, num_stages=shape.stages,
            )  # fmt: skip

        return launch

    def _weight_tiles(self, ins: Sequence[int], outs: Sequence[int], taps: int, shape: Tiling) -> Tensor:
        """Client, which taps, block of input channels, of output channels, and place of the sum of squares."""
        found = []
        for client in sorted(range(self.clients), key=lambda k: -outs[k]):
            blocks = product(
                range(taps), range(-(-ins[client] // shape.rows)), range(-(-outs[client] // shape.columns))
            )
            for block in blocks:
                found.append((client, *block, self._squares_used[client]))
                self._squares_used[client] += shape.parts == 1
        return torch.tensor(found, dtype=torch.int32, device=self.device)

    def _activate(self, norm: str, x: Values) -> Launch:
        """Norm and ReLU."""
        table = self._table(x.begins, x.moments_begin, *self._scales(norm), x.places, x.channels)
        shape = tilings.pixels(self.work.batch * x.side**2, x.channels, self._share)
        tiles = self._tiles(x, shape.block, shape.columns)

        def launch() -> None:
            self._launch(
                norm_kernels.activate, (len(tiles),),
                x.value, x.moments, self.parameters.values, x.active, x.statistics, table, tiles, self._counts,
                x.side**2, shape.chunk, x.chunks, self._epsilon,
                READY=x.described, CHUNKS=shape.chunks, ROWS=shape.block, COLS=shape.columns,
                ALIGN=_align(x.channels),
            )  # fmt: skip

        return launch

    def _deactivate(self, x: Values, parts: Parts | None) -> Launch:
        """Back through ReLU; without ``parts``, from the gradient of the mean over pixels."""
        count, begins, apart = (parts.count, parts.begins, parts.apart) if parts else (1, self._pooled_begin, x.places)
        table = self._table(begins, x.begins, x.moments_begin, x.places, x.channels, apart)
        shape = tilings.pixels(self.work.batch * x.side**2, x.channels, self._share)
        tiles = self._tiles(x, shape.chunk, shape.columns)

        def launch() -> None:
            self._launch(
                norm_kernels.deactivate, (len(tiles),),
                self._pooled if parts is None else self._parts, x.value, x.active, x.statistics, x.back, x.sums,
                table, tiles, self._counts, x.side**2, shape.chunk // shape.rows, x.chunks,
                PARTS=count, POOLED=parts is None, ROWS=shape.rows, COLS=shape.columns, ALIGN=_align(x.channels),
            )  # fmt: skip

        return launch

    def _unnorm(self, norm: str, x: Values, residual: Values | None, ready: bool = False) -> Launch:
        """Back through the norm."""
        table = self._table(x.begins, x.moments_begin, *self._scales(norm), x.places, x.channels)
        shape = tilings.pixels(self.work.batch * x.side**2, x.channels, self._share)
        tiles = self._tiles(x, shape.block, shape.columns)

        def launch() -> None:
            self._launch(
                norm_kernels.unnorm, (len(tiles),),
                x.back, x.value, x.statistics, x.sums, x.totals, self.parameters.values, (residual or x).gradient,
                x.gradient, self.parameters.gradients, table, tiles, self._counts, x.side**2, shape.chunk, x.chunks,
                READY=ready, RESIDUAL=residual is not None, CHUNKS=shape.chunks, ROWS=shape.block,
                COLS=shape.columns, ALIGN=_align(x.channels),
            )  # fmt: skip

        return launch

    def _judge(self, x: Values) -> list[Launch]:
        """Scores, losses and their gradients."""
        places = begins([self.work.batch * channels for channels in x.channels])
        self._pooled = torch.zeros(places[-1], device=self.device)
        self._pooled_begin = places[:-1]
        head = [self.parameters.begins(name) for name in ("head.weight", "head.bias")]
        table = self._table(x.begins, *head, places[:-1], x.channels)
        classes, columns = self.model.plan.classes, min(64, max(16, power(max(x.channels))))
        tiles = self._tiles(x, 16 * x.side**2, columns)

        def pool() -> None:
            self._launch(
                step_kernels.pool, (len(tiles),),
                x.active, self._pooled, table, tiles, self._counts,
                AREA=x.side**2, ROWS=16, COLS=columns, ALIGN=_align(x.channels),
            )  # fmt: skip

        def judge() -> None:
            self._launch(
                step_kernels.judge, (self.clients,),
                self.parameters.values, self.parameters.gradients, self._pooled, self._targets, self.held,
                self.totals, table, self._counts, self.work.batch, classes,
                MASK=MASKS[self.work.mask], ROWS=max(16, power(self.work.batch)), CLASSES=max(16, power(classes)),
                COLS=columns, ALIGN=_align(x.channels), PRECISION=self.dots,
            )  # fmt: skip

        return [pool, judge]

    def _optimiser(self) -> list[Launch]:
        """Collect gradients, limit their norm, step."""
        rows, late = [], []
        for client in range(self.clients):
            for name, (begin, length) in self.parameters.spans(client).items():
                parts = self._split.get(name)
                for done in range(0, length, SIZE):
                    place = (parts.begins[client] + done, parts.count, parts.apart[client]) if parts else (0, 0, 0)
                    row = (begin + done, min(SIZE, padded(length, ALIGN) - done), *place, client)
                    rows.append(row)
                    if name not in self._summed:
                        late.append((*row, self._squares_used[client]))
                        self._squares_used[client] += 1
        chunks, unsummed = self._table(*zip(*rows, strict=True)), self._table(*zip(*late, strict=True))
        self._squares = torch.zeros(self.clients, max(self._squares_used), device=self.device)
        slots, factors = self._squares.shape[1], torch.zeros(self.clients, device=self.device)
        work, own = self.work, self.parameters

        def collect() -> None:
            self._launch(
                step_kernels.collect,
                (len(late),),
                self._weight_parts,
                own.gradients,
                self._squares,
                unsummed,
                slots,
                SIZE=SIZE,
            )

        def limit() -> None:
            self._launch(step_kernels.limit, (self.clients,), self._squares, factors, slots, work.clip, SIZE=1024)

        def descend() -> None:
            self._launch(
                step_kernels.descend, (len(rows),),
                own.values, own.gradients, own.memories[0], own.memories[-1], own.lowered, factors, self._done,
                self.rate, chunks, self._counts, work.weight_decay, work.momentum,
                CLIP=work.clip is not None, ADAM=work.optimizer == "adam", MOMENTUM=work.momentum > 0,
                LOW=own.lowered is not own.values, SIZE=SIZE,
            )  # fmt: skip

        return [collect, limit, descend] if work.clip is not None else [collect, descend]

    # --- sizes and tables ---

    def _side(self, name: str) -> int:
        return int(self.model.get_parameter(f"{name}.weight").shape[-1])

    def _stride(self, name: str) -> int:
        convolution: Any = self.model.get_submodule(name)
        return int(convolution.stride[0])

    def _scales(self, norm: str) -> tuple[list[int], list[int]]:
        return self.parameters.begins(f"{norm}.weight"), self.parameters.begins(f"{norm}.bias")

    def _tiles(self, x: Values, rows: int, columns: int) -> Tensor:
        """Client, block of pixels, block of channels for every program, the widest clients first."""
        blocks = -(-self.work.batch * x.side**2 // rows)
        found = [
            (client, row, column)
            for client in sorted(range(self.clients), key=lambda k: -x.channels[k])
            for row in range(blocks)
            for column in range(-(-x.channels[client] // columns))
        ]
        return torch.tensor(found, dtype=torch.int32, device=self.device)

    def _table(self, *columns: Sequence[int]) -> Tensor:
        """Columns of up to eight as rows of eight."""
        table = torch.zeros(len(columns[0]), 8, dtype=torch.int64)
        for place, column in enumerate(columns):
            table[:, place] = torch.tensor(column)
        return table.to(self.device)


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


def _blocks(model: PreResNet) -> Iterator[tuple[str, int, bool]]:
    """Path, stride, and whether the shortcut is a convolution, of every block."""
    for s, stage in enumerate(model.stages):
        blocks: Any = stage
        for b, block in enumerate(blocks):
            yield f"stages.{s}.{b}", block.conv1.stride[0], block.shortcut is not None


def _align(channels: Sequence[int]) -> int:
    """What all these are a multiple of."""
    return gcd(ALIGN, *channels)
