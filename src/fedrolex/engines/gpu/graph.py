"""A whole cohort at once on one GPU: every client's step is a CUDA graph, replayed on a stream of its own.

Shapes depend on the widths alone, so a step is captured once for every (widths, place in the cohort) and
serves all rounds: a round loads parameters, fills the data buffers, and replays. The graph counts its own
batches; learning rate and label mask are tensors it reads. Cohorts of PreResNets, and of many small clients, have
better ways (:mod:`.ragged`, :mod:`.batched`) and are passed on to them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedrolex.clients.messages import Averaged, Failure, Job, RoundPlan, Upload, out_of_memory
from fedrolex.clients.optimizer import Memory
from fedrolex.clients.work import Precision, Slot, in_precision
from fedrolex.core.errors import FedrolexError
from fedrolex.core.streams import shuffle, words
from fedrolex.engines.cpu.loop import Loop, random_draws, why_failed
from fedrolex.engines.gpu.batched import Batched
from fedrolex.engines.gpu.captured import CAPTURING, captured
from fedrolex.engines.holdings import holdings
from fedrolex.tasks.task import Examples

try:
    from fedrolex.engines.gpu.ragged import Ragged
except ImportError:  # no Triton on this machine
    Ragged = None  # type: ignore[assignment,misc]


@dataclass
class Lane:
    """A slot with its data, its stream and its captured steps, used again in every round.

    Attributes:
        slot: the sub-model and the optimiser's memory.
        x, y: inputs and targets of one epoch in the order of training, as many rows as there is room.
        counter: the next batch, int64.
        rate: learning rate of the round.
        held: the client's classes, for the loss's mask.
        total: sum of the losses of the round.
        stream: None on a CPU.
        graphs: a captured step by its number of examples.
        read: other tensors the graphs read: they must live as long.
    """

    slot: Slot
    x: Tensor
    y: Tensor
    counter: Tensor
    rate: Tensor
    held: Tensor
    total: Tensor
    stream: Any = None
    graphs: dict[int, Any] = field(default_factory=dict)
    read: list[Tensor] = field(default_factory=list)

    def on_stream(self) -> AbstractContextManager[Any]:
        """What runs inside runs on this lane's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Graph:
    """Trains a cohort side by side; on a CPU, the same steps without graphs and streams.

    Args:
        model: the server's model, to cut sub-models from; its weights are not used.
        precision: of the forward and backward pass.
        compiled: compile steps with ``torch.compile`` before they are captured (of models without buffers).
        most: clients trained at once; larger cohorts run in waves, and once memory was not enough, in smaller ones.
    """

    def __init__(
        self, model: nn.Module, *, precision: Precision = "fp32", compiled: bool = False, most: int = 256
    ) -> None:
        self.model = model
        self.precision = precision
        self.compiled = compiled
        self.most = most
        self.loop = Loop(model, precision=precision)
        self.together = False
        self._ragged = Ragged(model, precision) if Ragged is not None else None
        self._at_rest: Ragged | None = None
        self._batched = Batched(model, precision=precision)
        self._lanes: dict[tuple[object, ...], Lane] = {}
        self._streams: list[Any] = []
        self._allocated = 0
        self._steps: dict[tuple[torch.Size, ...], Callable[..., Tensor]] = {}
        if compiled:
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train the clients, wave by wave; answers come in the order of the jobs."""
        self.together, self._at_rest = False, None
        if not plan.plain:
            yield from self.loop.run(plan)  # captured steps cannot be interrupted, and all do the same
            return
        waiting, fresh = plan.jobs, not self._holds_lanes()
        while waiting:
            wave, rest = waiting[: self.most], waiting[self.most :]
            answers = self._wave_answers(plan, wave, alone=fresh and len(wave) == 1, first=waiting is plan.jobs)
            if answers is None:
                self.release()  # places for cohorts of other rounds go first; if there were none, waves get smaller
                self.most = -(-len(wave) // 2) if fresh else self.most
                fresh = True
                continue
            self.together = len(wave) == len(plan.jobs)
            self._at_rest = self._ragged_for(plan) if self.together else None
            yield from answers
            waiting, fresh = rest, False

    def _wave_answers(
        self, plan: RoundPlan, wave: Sequence[Job], *, alone: bool, first: bool
    ) -> list[Upload | Failure] | None:
        """What the clients of a wave answer, or None if memory was not enough.

        Args:
            plan: of the round.
            wave: the clients.
            alone: it is one client with nothing else on the device, so that a lack of memory is an error.
            first: of the round, so that nothing has been folded yet.
        """
        try:
            ragged = self._ragged_for(plan)
            train = ragged.run if ragged is not None else self._batched.run if self._batched.takes(plan) else self._wave
            answers = list(train(plan, wave))
            if first:
                self._check_room_to_fold(plan)
            return answers
        except RuntimeError as failure:
            if not out_of_memory(failure):
                raise
            if alone:
                what = f"one client of capacity {wave[0].capacity} at a time and the average"
                raise FedrolexError(f"memory is not enough for {what}: use a smaller batch or model") from failure
            return None

    def _check_room_to_fold(self, plan: RoundPlan) -> None:
        """Run out of memory now, where waves can get smaller, if averaging the answers later would.

        Asked again when more is allocated than at the last time there was room.
        """
        device = next(iter(plan.state.values())).device
        if device.type != "cuda" or (allocated := torch.cuda.memory_allocated(device)) <= self._allocated:
            return
        folds = 1 + len({job.capacity for job in plan.jobs})  # the average, and the drift of every capacity
        models = 2 * folds + 3  # sums and counts; one update, its change, and the new state
        apart = sum(plan.axes.parameters(window) for window in {job.window for job in plan.jobs})  # their changes' sums
        size = models * sum(t.nbytes for t in plan.state.values()) + 4 * apart
        torch.empty(size, dtype=torch.uint8, device=device)  # to see whether there is as much
        self._allocated = allocated

    def _ragged_for(self, plan: RoundPlan) -> Ragged | None:
        return self._ragged if self._ragged is not None and self._ragged.takes(plan) else None

    def _holds_lanes(self) -> bool:
        ragged = self._ragged is not None and bool(self._ragged.lanes)
        return ragged or bool(self._lanes or self._batched.lanes)

    def release(self) -> bool:
        """Give back what lanes hold on the device, and say whether there were any; the next round makes new ones."""
        held = self._holds_lanes()
        self._at_rest, self._allocated = None, 0
        self._lanes.clear()
        self._batched = Batched(self.model, precision=self.precision)
        if self._ragged is not None:
            self._ragged = Ragged(self.model, self.precision)
        gc.collect()
        with CAPTURING:
            torch.cuda.empty_cache()
        return held

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """The selective average of this round's uploads, where one kernel can take it."""
        return None if self._at_rest is None else self._at_rest.average(uploads, weights, label_axis)

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> Iterator[Upload | Failure]:
        data, failures = holdings(plan, jobs)
        lanes: list[tuple[Job, Lane]] = []
        taken: dict[tuple[object, ...], int] = {}
        for job in (job for job in jobs if job.client in data):
            try:
                lanes.append((job, self._ready(plan, job, data[job.client], taken)))
            except Exception as failure:
                if out_of_memory(failure):
                    raise
                failures[job.client] = Failure(job, why_failed(failure))
        self._load(plan, lanes)
        self._train(plan, lanes, data)
        losses = torch.stack([lane.total for _, lane in lanes]).tolist() if lanes else []
        trained = {job.client: (lane, loss) for (job, lane), loss in zip(lanes, losses, strict=True)}
        for job in jobs:
            if job.client in failures:
                yield failures[job.client]
                continue
            lane, loss = trained[job.client]
            examples = data[job.client]
            steps = plan.client.epochs * -(-len(examples) // plan.client.batch)
            labels = plan.task.labels(examples).tolist() if plan.tell_labels else None
            tensors = plan.axes.state(lane.slot.module, job.window)
            yield Upload(job, tensors, len(examples), loss / steps, steps, labels)

    # --- before training ---

    def _ready(self, plan: RoundPlan, job: Job, data: Examples, taken: dict[tuple[object, ...], int]) -> Lane:
        """A lane for a job, the next free one of its widths, with steps captured for the batch sizes it needs."""
        widths = tuple(plan.axes.widths(job.window).items())
        place = taken.get(widths, 0)
        lane = self._lane(plan, job, (*widths, place), data)
        batch, rest = plan.client.batch, len(data) % plan.client.batch
        for size in {batch if len(data) >= batch else rest, rest or batch}:
            if size not in lane.graphs:
                lane.graphs[size] = self._capture(plan, job, lane, size)
        taken[widths] = place + 1
        return lane

    def _lane(self, plan: RoundPlan, job: Job, key: tuple[object, ...], data: Examples) -> Lane:
        lane = self._lanes.get(key)
        if lane is not None and len(lane.y) >= len(data):
            return lane
        device = data.y.device
        module = plan.axes.cut(self.model, job.window)
        if device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        slot = Slot(module, self.precision)
        batch = plan.client.batch
        room = -(-len(data) // batch) * batch
        example = plan.task.inputs(data.x[:1])
        lane = Lane(
            slot,
            x=example.new_zeros((room, *example.shape[1:])),
            y=data.y.new_zeros((room, *data.y.shape[1:])),
            counter=torch.zeros((), dtype=torch.int64, device=device),
            rate=slot.parameters[0].detach().new_zeros(()),
            held=torch.ones(plan.task.classes, dtype=torch.bool, device=device),
            total=torch.zeros((), device=device),
            stream=self._stream(key, device),
        )
        self._lanes[key] = lane
        return lane

    def _stream(self, key: tuple[object, ...], device: torch.device) -> Any:
        """The stream of a new lane, which a lane before it may have had: a stream's workspaces stay on the device."""
        if device.type != "cuda":
            return None
        number = list(self._lanes).index(key) if key in self._lanes else len(self._lanes)
        if number == len(self._streams):
            self._streams.append(torch.cuda.Stream(device))
        return self._streams[number]

    def _capture(self, plan: RoundPlan, job: Job, lane: Lane, size: int) -> Any:
        """One step on the next ``size`` examples: a graph, or on a CPU the function itself."""
        work, task = plan.client, plan.task
        within = torch.arange(size, device=lane.y.device)

        work.start(lane.slot, job.correction)  # makes what the step will read
        whole = self._compiled_step(plan, lane) if self.compiled and not list(lane.slot.module.buffers()) else None

        def step() -> None:
            rows = lane.counter * work.batch + within
            x, y = lane.x.index_select(0, rows), lane.y.index_select(0, rows)
            held = lane.held if work.mask != "none" else None
            if whole is None:
                loss = work.step(lane.slot, x, y, task.loss, lane.rate, held)
            else:
                loss = whole(lane.slot.parameters, lane.slot.memory, x, y, lane.rate, held)
            lane.total.add_(loss)
            lane.counter.add_(1)

        lane.read.append(within)
        return captured(step, lane.counter.zero_, lane.stream, self.precision)

    def _compiled_step(self, plan: RoundPlan, lane: Lane) -> Callable[..., Tensor]:
        """The step as one compiled function of its tensors, shared by all lanes of the same widths."""
        module, work, task, precision = lane.slot.module, plan.client, plan.task, self.precision
        shapes = tuple(p.shape for p in lane.slot.parameters)
        if shapes in self._steps:
            return self._steps[shapes]
        names = [name for name, p in module.named_parameters() if p.requires_grad]

        def step(
            parameters: list[Tensor], memory: Memory, x: Tensor, y: Tensor, rate: Tensor, held: Tensor | None
        ) -> Tensor:
            def objective(values: list[Tensor]) -> Tensor:
                known = dict(zip(names, values, strict=True))
                scores = in_precision(lambda x: functional_call(module, known, (x,)), x, precision)
                return work.objective(scores, y, task.loss, held)

            gradients, loss = grad_and_value(objective)([p.detach() for p in parameters])
            with torch.no_grad():
                work.move(parameters, list(gradients), memory, rate)
            value: Tensor = loss.detach()
            return value

        self._steps[shapes] = torch.compile(step, dynamic=False)
        return self._steps[shapes]

    def _load(self, plan: RoundPlan, lanes: Sequence[tuple[Job, Lane]]) -> None:
        """Parameters into every lane: cut once for every window, then copied."""
        first: dict[tuple[object, ...], Lane] = {}
        for job, lane in lanes:
            like = first.setdefault(job.source, lane)
            if like is lane:
                plan.axes.load(lane.slot.module, {**plan.state, **job.own}, job.window)
            else:
                mine = list(plan.axes.state(lane.slot.module, job.window).values())
                torch._foreach_copy_(mine, list(plan.axes.state(like.slot.module, job.window).values()))
            plan.client.start(lane.slot, job.correction)
            lane.total.zero_()
            lane.rate.fill_(plan.client.rate(plan.round))

    # --- training ---

    def _train(self, plan: RoundPlan, lanes: Sequence[tuple[Job, Lane]], data: dict[int, Examples]) -> None:
        work, task = plan.client, plan.task
        if work.mask != "none":
            for job, lane in lanes:
                lane.held.zero_().index_fill_(0, task.labels(data[job.client]), True)
        seed = int(words(1, plan.seed, "cohort", plan.round)[0] >> 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for epoch in range(work.epochs):
                self._fill(plan, lanes, data, epoch)
                for _, lane in lanes:
                    if lane.stream is not None:
                        lane.stream.wait_stream(torch.cuda.current_stream())
                self._replay(work.batch, lanes, data)
                for _, lane in lanes:
                    if lane.stream is not None:
                        torch.cuda.current_stream().wait_stream(lane.stream)

    def _fill(self, plan: RoundPlan, lanes: Sequence[tuple[Job, Lane]], data: dict[int, Examples], epoch: int) -> None:
        """The epoch's inputs into the lanes, augmented for the whole cohort in one go."""
        task, xs, draws = plan.task, [], []
        for job, lane in lanes:
            examples = data[job.client]
            key = (plan.round, job.client, epoch)
            order = torch.from_numpy(shuffle(len(examples), plan.seed, "batches", *key))
            if task.random_inputs:
                draws.append(random_draws(len(examples), plan.seed, *key)[order])
            order = order.to(examples.y.device, non_blocking=True)
            xs.append(examples.x[order])
            lane.y[: len(order)] = examples.y[order]
            lane.counter.zero_()
        if not lanes:
            return
        drawn = torch.cat(draws).to(xs[0].device, non_blocking=True) if draws else None
        inputs = task.inputs(torch.cat(xs), drawn).split([len(x) for x in xs])
        for (_, lane), x in zip(lanes, inputs, strict=True):
            lane.x[: len(x)] = x

    @staticmethod
    def _replay(batch: int, lanes: Sequence[tuple[Job, Lane]], data: dict[int, Examples]) -> None:
        """All steps of an epoch, step by step through the cohort, the widest lanes first."""
        widest = sorted(lanes, key=lambda each: -sum(p.numel() for p in each[1].slot.parameters))
        longest = max((len(data[job.client]) for job, _ in lanes), default=0)
        for begin in range(0, longest, batch):
            for job, lane in widest:
                size = min(batch, len(data[job.client]) - begin)
                if size > 0:
                    with lane.on_stream():
                        lane.graphs[size]()
