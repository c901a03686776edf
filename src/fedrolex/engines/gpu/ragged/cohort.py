"""One training step of a whole cohort of PreResNets of different widths, a few kernel launches a layer.

The kernels work through the clients' parts of common buffers whatever the widths. Products are taken in
bfloat16, TensorFloat-32 or float32 and added up in float32; parameters, gradients and the optimiser's memory are
float32.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from triton import AsyncCompileMode

from fedrolex.clients import LocalTraining, Precision
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.ragged import step_kernels
from fedrolex.engines.gpu.ragged.buffers import ALIGN, Parameters, padded
from fedrolex.engines.gpu.ragged.layers import Launch, Layers
from fedrolex.engines.gpu.ragged.tables import table
from fedrolex.engines.gpu.ragged.tilings import power
from fedrolex.models import PreResNet

FETCHED = 2048  # numbers that a program copies
UPDATED = 4096  # parameters that a program updates


class Cohort:
    """Clients that train together, each with its own number of images.

    Args:
        models: each client's sub-model, for its shapes.
        work: what clients do.
        room: images a client may have.
        share: of these places, as many have a client in a round.
        precision: of products.
        device: where the kernels run.
        beside: a stream for the launches that can run beside the others; None without a GPU.

    Attributes:
        parameters: of all clients.
        x, y: inputs ``(clients, room, height, width, channels)`` and targets ``(clients, room)`` of an epoch.
        sizes: images of each client, int32.
        held: the classes of each client, int8 ``(clients, classes)``, for the loss's mask.
        rate: learning rate.
        counter: the next batch.
        totals: sum of each client's losses.
        stream: what captured steps run on.
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
        beside: Any = None,
    ) -> None:
        plan, clients = models[0].plan, len(models)
        self.work, self.device, self.clients, self.share = work, device, clients, share
        low = torch.bfloat16 if precision == "bf16" else torch.float32
        self.parameters = Parameters(models, low, 2 if work.optimizer == "adam" else 1, device)
        shape = (plan.size, plan.size, padded(plan.channels))
        self.x = torch.zeros(clients, padded(room, work.batch), *shape, dtype=low, device=device)
        self.y = torch.zeros(clients, padded(room, work.batch), dtype=torch.int64, device=device)
        self.sizes, self._done, counts = (torch.zeros(clients, dtype=torch.int32, device=device) for _ in range(3))
        self.held = torch.ones(clients, plan.classes, dtype=torch.int8, device=device)
        self.rate = torch.zeros((), device=device)
        self.counter = torch.zeros((), dtype=torch.int64, device=device)
        self.totals = torch.zeros(clients, device=device)
        self._targets = torch.zeros(clients, work.batch, dtype=torch.int64, device=device)
        self._beside = beside
        self._layers = Layers(
            models[0], self.parameters, batch=work.batch, share=share, precision=precision, counts=counts
        )
        self._images = self._layers.values(plan.size, [shape[-1]] * clients)
        self._forward, self._backward = self._program(models[0])
        self._optimise = self._updates()

    # --- training ---

    def compile(self) -> None:
        """Compile all kernels, several at a time, without running any."""
        self._layers.compiling = True
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
                for launch in (*self._forward, *(each for _, each in self._backward), *self._optimise):
                    launch()
        finally:
            self._layers.compiling = False

    def capture(self, stream: Any) -> None:
        """Steps will be replayed on a stream; without a GPU, None, they are plain. Nobody has images yet."""
        if stream is not None:
            self.compile()
        self.stream, self._captured = stream, captured(self.step, self.counter.zero_, stream)

    def replay(self, steps: int) -> None:
        """As many steps, on the cohort's own stream."""
        with torch.cuda.stream(self.stream):
            for _ in range(steps):
                self._captured()

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

    def _program(self, model: PreResNet) -> tuple[list[Launch], list[tuple[bool, Launch]]]:
        layers, images, outs = self._layers, self._images, self.parameters.outs
        x = layers.values(images.side, outs("stem.weight"))
        forward: list[Launch] = [self._fetch, *layers.convolve([("stem", images)], x)]
        backward: list[list[tuple[bool, Launch]]] = [[(True, layers.weigh("stem", images, x))]]
        for path, stride, project in _blocks(model):
            inner = layers.values(x.side // stride, outs(f"{path}.conv1.weight"))
            y = layers.values(inner.side, outs(f"{path}.conv2.weight"))
            forward.append(layers.activate(f"{path}.norm1", x))
            forward += layers.convolve([(f"{path}.conv1", x)], inner)
            forward.append(layers.activate(f"{path}.norm2", inner))
            shortcut = [(f"{path}.shortcut", x)] if project else []
            forward += layers.convolve([(f"{path}.conv2", inner), *shortcut], y, None if project else x)
            back = [(True, layers.weigh(f"{path}.conv2", inner, y))]
            back += _in_line(layers.back(f"{path}.norm2", [(f"{path}.conv2", y)], inner, None))
            back.append((True, layers.weigh(f"{path}.conv1", x, inner)))
            if project:
                back.append((True, layers.weigh(f"{path}.shortcut", x, y)))
            shortcut = [(f"{path}.shortcut", y)] if project else []
            convolutions = [(f"{path}.conv1", inner), *shortcut]
            back += _in_line(layers.back(f"{path}.norm1", convolutions, x, None if project else y))
            backward.append(back)
            x = y
        forward.append(layers.activate("norm", x))
        forward += layers.judge(x, self.work.mask, self._targets, self.held, self.totals)
        backward.append(_in_line([layers.deactivate(x, None), layers.unnorm("norm", x, None)]))
        return forward, [launch for part in reversed(backward) for launch in part]

    def _fetch(self) -> None:
        """The next batch."""
        batch, image = self.work.batch, self.x[0, 0].numel()
        self._layers.launch(
            step_kernels.fetch, (self.clients, -(-batch * image // FETCHED)),
            self.x, self.y, self.sizes, self.counter, self._images.active, self._targets, self._layers.counts,
            self._done, batch, self.y.shape[1], image, SIZE=FETCHED, BATCH=power(batch),
        )  # fmt: skip

    def _updates(self) -> list[Launch]:
        """The optimiser, once the gradients of all layers are known: collect gradients, limit their norms, step."""
        layers, own, work, rows, late = self._layers, self.parameters, self.work, [], []
        for client in range(self.clients):
            for name, (begin, length) in own.spans(client).items():
                parts = layers.split.get(name)
                for first in range(0, length, UPDATED):
                    place = (parts.begins[client] + first, parts.count, parts.apart[client]) if parts else (0, 0, 0)
                    row = (begin + first, min(UPDATED, padded(length, ALIGN) - first), *place, client)
                    rows.append(row)
                    if name not in layers.summed:
                        late.append((*row, layers.squares_used[client]))
                        layers.squares_used[client] += 1
        chunks, unsummed = (table(self.device, *zip(*each, strict=True)) for each in (rows, late))
        factors = torch.zeros(self.clients, device=self.device)
        layers.allocate()  # all that is to be made in parts is known
        squares, slots = layers.squares, layers.squares.shape[1]
        collect = partial(
            layers.launch, step_kernels.collect, (len(late),),
            layers.weight_parts, own.gradients, squares, unsummed, slots, SIZE=UPDATED,
        )  # fmt: skip
        grid = (self.clients,)
        limit = partial(layers.launch, step_kernels.limit, grid, squares, factors, slots, work.clip, SIZE=1024)
        descend = partial(
            layers.launch, step_kernels.descend, (len(rows),),
            own.values, own.gradients, own.memories[0], own.memories[-1], own.lowered, factors, self._done,
            self.rate, chunks, layers.counts, work.weight_decay, work.momentum,
            CLIP=work.clip is not None, ADAM=work.optimizer == "adam", MOMENTUM=work.momentum > 0,
            LOW=own.lowered is not own.values, SIZE=UPDATED,
        )  # fmt: skip
        return [collect, limit, descend] if work.clip is not None else [collect, descend]


def _in_line(launches: Sequence[Launch]) -> list[tuple[bool, Launch]]:
    """Launches that must run one after the other."""
    return [(False, launch) for launch in launches]


def _blocks(model: PreResNet) -> Iterator[tuple[str, int, bool]]:
    """Path, stride, and whether the shortcut is a convolution, of every block."""
    for s, stage in enumerate(model.stages):
        blocks: Any = stage
        for b, block in enumerate(blocks):
            yield f"stages.{s}.{b}", block.conv1.stride[0], block.shortcut is not None
