"""A whole cohort at once on one GPU: every client's step is a CUDA graph, replayed on a stream of its own.

Shapes depend on the widths alone, so a step is captured once for every (widths, place in the cohort) and serves all
rounds: a round loads parameters, fills the data buffers, and replays. The graph counts its own batches; learning rate
and label mask are tensors that the graph reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit, random_draws, stream_seed, why_failed
from fedrolex.core.streams import shuffle
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.waves import Waves
from fedrolex.engines.visits import close_visit, open_visits, steps_of
from fedrolex.rounds.engine import interrupted, out_of_memory, unknown_hooks
from fedrolex.tasks.task import Examples

Key = tuple[str, tuple[tuple[str, int], ...], int]
"""Of a slot: network, widths, and place among the clients of these widths."""


@dataclass
class CapturedSlot:
    """A slot with its data, its stream and its captured steps, used again in every round.

    Attributes:
        slot: the sub-model and the optimiser's memory.
        tensors: the sub-model's parameters and buffers, by name.
        x, y: inputs and targets of one epoch in the order of training, as many rows as there is room.
        counter: the next batch, int64.
        rate: learning rate of the round.
        held: the client's classes, for the loss's mask.
        total: sum of the losses of the round.
        stream, draws: what the steps run on, and where their dropout draws from; None on a CPU.
        steps: a captured step by its number of examples.
        read: other tensors that the captured steps read: those tensors must live as long.
    """

    slot: Slot
    tensors: dict[str, Tensor]
    x: Tensor
    y: Tensor
    counter: Tensor
    rate: Tensor
    held: Tensor
    total: Tensor
    stream: Any = None
    draws: torch.Generator | None = None
    steps: dict[int, Any] = field(default_factory=dict)
    read: list[Tensor] = field(default_factory=list)

    def on_stream(self) -> AbstractContextManager[Any]:
        """What runs inside runs on the slot's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


@dataclass
class Guest:
    """A client of this round, the slot it is trained in, and the sizes of its batches, epoch by epoch."""

    visit: Visit
    place: CapturedSlot
    sizes: list[list[int]]


class Lanes(Waves):
    """Trains clients side by side, each in a captured slot of its own; runs any model and any loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._slots: dict[Key, CapturedSlot] = {}

    def supports(self, work: RoundPlan) -> str | None:
        """All but deadlines, and steps of one's own: a step may depend on what a captured step cannot see."""
        if work.deadline is not None:
            return interrupted(work)
        return unknown_hooks(work.work)

    def _holds(self) -> bool:
        return bool(self._slots)

    def _clear(self) -> None:
        self._slots.clear()

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        visits, failures = open_visits(plan, jobs, self._spare(plan))
        guests, taken = [], Counter[object]()
        for visit in visits:
            try:
                guests.append(self._seated(visit, taken))
            except Exception as failure:
                if out_of_memory(failure):
                    raise
                failures[visit.job.key] = Failure(visit.job, why_failed(failure))
        self._load(plan, guests)
        self._train(plan, guests)
        if len(jobs) == len(plan.jobs):
            self._get_ready(plan)
        answers = {**failures, **self._answers(guests)}
        return [answers[job.key] for job in jobs]

    def _answers(self, guests: Sequence[Guest]) -> dict[tuple[int, str], Upload | Failure]:
        """Every client's answer; the device is asked once for all losses, and for norms that say what is finite."""
        told = [torch.stack([guest.place.total.double(), _size(guest.place.tensors)]) for guest in guests]
        answers = {}
        for guest, (total, size) in zip(guests, torch.stack(told).tolist() if told else (), strict=True):
            visit = guest.visit
            visit.steps = sum(map(len, guest.sizes))
            visit.loss = total / visit.steps
            visit.trained = guest.place.tensors
            answers[visit.job.key] = close_visit(visit, True if isfinite(size) else None)
        return answers

    # --- before training ---

    def _spare(self, plan: RoundPlan) -> Callable[[Job], nn.Module]:
        """Gives a module of a job's widths for hooks to try things with; one for all clients of these widths."""
        made: dict[object, nn.Module] = {}

        def spare(job: Job) -> nn.Module:
            key, network = (job.network, plan.widths(job)), plan.networks[job.network]
            if key not in made:
                made[key] = network.axes.cut(network.module, job.window)
            return made[key]

        return spare

    def _seated(self, visit: Visit, taken: Counter[object]) -> Guest:
        """A client in the next free slot of its widths, with steps captured for the sizes of its batches."""
        plan, job = visit.plan, visit.job
        widths = (job.network, plan.widths(job))
        place = self._slot(plan, job, (*widths, taken[widths]), visit.examples)
        guest = Guest(visit, place, batch_sizes(visit))
        for size in {size for sizes in guest.sizes for size in sizes}:
            if size not in place.steps:
                place.steps[size] = self._captured(plan, guest, size)
        taken[widths] += 1
        return guest

    def _slot(self, plan: RoundPlan, job: Job, key: Key, data: Examples) -> CapturedSlot:
        """The slot of a key, with room for a client's examples."""
        found = self._slots.get(key)
        if found is not None and len(found.y) >= len(data):
            return found
        number = list(self._slots).index(key) if found is not None else len(self._slots)
        network, device = plan.networks[job.network], data.y.device
        module = network.axes.cut(network.module, job.window)
        if device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        slot = Slot(module, self.precision)
        room = -(-len(data) // plan.work.batch) * plan.work.batch
        example = plan.task.inputs(data.x[:1])
        self._slots[key] = CapturedSlot(
            slot,
            network.axes.state(module, job.window),
            x=example.new_zeros((room, *example.shape[1:])),
            y=data.y.new_zeros((room, *data.y.shape[1:])),
            counter=torch.zeros((), dtype=torch.int64, device=device),
            rate=slot.parameters[0].detach().new_zeros(()),
            held=torch.ones(plan.task.classes, dtype=torch.bool, device=device),
            total=torch.zeros((), device=device),
            stream=self._stream(number),
            draws=torch.Generator(device) if device.type == "cuda" else None,
        )
        return self._slots[key]

    def _captured(self, plan: RoundPlan, guest: Guest, size: int) -> Any:
        """One step on the next ``size`` examples: a graph, or on a CPU the function itself."""
        work, task, place = plan.work, plan.task, guest.place
        within = torch.arange(size, device=place.y.device)
        work.start(place.slot, guest.visit)  # makes what the step will read

        def step() -> None:
            rows = place.counter * work.batch + within
            x, y = place.x.index_select(0, rows), place.y.index_select(0, rows)
            held = place.held if work.mask != "none" else None
            place.total.add_(work.step(place.slot, x, y, task.loss, place.rate, held))
            place.counter.add_(1)

        place.read.append(within)
        return captured(step, place.counter.zero_, place.stream, self.precision, place.draws)

    def _load(self, plan: RoundPlan, guests: Sequence[Guest]) -> None:
        """What every client starts from into its slot; clients of one source copy it from the first of them."""
        first: dict[object, dict[str, Tensor]] = {}
        for guest in guests:
            visit, place, work = guest.visit, guest.place, plan.work
            own = place.tensors
            source = visit.received if "received" in vars(visit) else first.setdefault(visit.job.source, own)
            if source is own:
                plan.axes(visit.job).take(plan.whole(visit.job), visit.job.window, out=own)
            else:
                torch._foreach_copy_(list(own.values()), [source[name] for name in own])
            work.start(place.slot, visit)
            place.total.zero_()
            place.rate.fill_(work.rate(plan.round))
            held = visit.held(work.mask)
            if held is not None:
                place.held.copy_(held)
            if place.draws is not None:
                place.draws.manual_seed(stream_seed(plan, visit.job))

    # --- training ---

    def _train(self, plan: RoundPlan, guests: Sequence[Guest]) -> None:
        """All epochs; the widest clients' steps are launched first."""
        widest = sorted(guests, key=lambda guest: -sum(p.numel() for p in guest.place.slot.parameters))
        streams = {guest.place.stream for guest in guests if guest.place.stream is not None}
        for epoch in range(plan.work.epochs):
            self._fill(plan, guests, epoch)
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
            for number in range(max((len(guest.sizes[epoch]) for guest in guests), default=0)):
                for guest in widest:
                    if number < len(guest.sizes[epoch]):
                        with guest.place.on_stream():
                            guest.place.steps[guest.sizes[epoch][number]]()
            for stream in streams:
                torch.cuda.current_stream().wait_stream(stream)

    @staticmethod
    def _get_ready(plan: RoundPlan) -> None:
        """While the device is at work: where the answers belong, and where the next round's parts lie."""
        windows = {(job.network, job.window): None for job in (*plan.jobs, *plan.upcoming())}
        for network, window in windows:
            axes = plan.networks[network].axes
            for name in axes.tensors:
                axes.region(name, window)
                axes.region(name, window, counts=True)

    def _fill(self, plan: RoundPlan, guests: Sequence[Guest], epoch: int) -> None:
        """The epoch's inputs into the slots, augmented for the whole cohort in one go."""
        task, xs, draws = plan.task, [], []
        for guest in guests:
            data, key = guest.visit.examples, (plan.round, guest.visit.job.client, epoch)
            order = torch.from_numpy(shuffle(len(data), plan.seed, "batches", *key))
            if task.random_inputs:
                draws.append(random_draws(len(data), plan.seed, *key)[order])
            order = order.to(data.y.device, non_blocking=True)
            xs.append(data.x[order])
            guest.place.y[: len(order)] = data.y[order]
            guest.place.counter.zero_()
        if not guests:
            return
        drawn = torch.cat(draws).to(xs[0].device, non_blocking=True) if draws else None
        inputs = task.inputs(torch.cat(xs), drawn).split([len(x) for x in xs])
        for guest, x in zip(guests, inputs, strict=True):
            guest.place.x[: len(x)] = x


def batch_sizes(visit: Visit) -> list[list[int]]:
    """The sizes of a client's batches, epoch by epoch; a straggler's end where its part of the steps ends."""
    work, steps = visit.plan.work, steps_of(visit)
    full, rest = divmod(len(visit.examples), work.batch)
    epoch = [work.batch] * full + [rest] * (rest > 0)
    return [epoch[: max(0, steps - done * len(epoch))] for done in range(work.epochs)]


def _size(tensors: Mapping[str, Tensor]) -> Tensor:
    """The sum of the norms of all real tensors, float64 ``()``: finite if all values are, up to overflow."""
    norms = torch._foreach_norm([tensor for tensor in tensors.values() if tensor.is_floating_point()])
    kinds = {norm.dtype for norm in norms}
    return torch.stack([torch.stack([n for n in norms if n.dtype is kind]).double().sum() for kind in kinds]).sum()
