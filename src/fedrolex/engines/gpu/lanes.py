"""A whole cohort at once on one GPU: every client's step is a CUDA graph, replayed on a stream of its own.

Shapes depend on the widths alone, so a step is captured once for every (widths, place in the cohort) and serves all
rounds: a round loads parameters, fills the data buffers, and replays. The graph counts its own batches; learning rate
and label mask are tensors that the graph reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.visit import Visit, examples_of, random_draws, stream_seed, why_failed
from fedrolex.clients.work import LocalTraining
from fedrolex.core.streams import shuffle
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.waves import Waves
from fedrolex.rounds.engine import interrupted, out_of_memory, unknown_hooks
from fedrolex.tasks.task import Examples

Key = tuple[str, tuple[tuple[str, int], ...], int]
"""Of a slot: network, widths, and place among the clients of these widths."""


@dataclass
class CapturedSlot:
    """A slot with its data, its stream and its captured steps, used again in every round.

    Attributes:
        slot: the sub-model and the optimiser's memory.
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
        guests, known, taken = [], dict[int, Examples](), Counter[object]()
        answers: dict[tuple[int, str], Upload | Failure] = {}
        for job in jobs:
            try:
                known[job.client] = examples_of(plan, job, known)
                guests.append(self._seated(plan, job, known[job.client], taken))
            except Exception as failure:
                answers[job.key] = _failed(job, failure)
        self._load(plan, guests)
        self._train(plan, guests)
        totals = torch.stack([guest.place.total for guest in guests]).tolist() if guests else []
        for guest, total in zip(guests, totals, strict=True):
            answers[guest.visit.job.key] = self._answer(plan, guest, total)
        return [answers[job.key] for job in jobs]

    def _answer(self, plan: RoundPlan, guest: Guest, total: float) -> Upload | Failure:
        visit = guest.visit
        visit.steps = sum(map(len, guest.sizes))
        visit.loss = total / visit.steps
        visit.trained = plan.axes(visit.job).state(guest.place.slot.module, visit.job.window)
        try:
            plan.work.after(visit)
            return visit.upload()
        except Exception as failure:
            return _failed(visit.job, failure)

    # --- before training ---

    def _seated(self, plan: RoundPlan, job: Job, data: Examples, taken: Counter[object]) -> Guest:
        """A client in the next free slot of its widths, with steps captured for the sizes of its batches."""
        widths = (job.network, plan.widths(job))
        place = self._slot(plan, job, (*widths, taken[widths]), data)
        visit = Visit(plan, job, data, lambda: place.slot.module)
        plan.work.before(visit)
        guest = Guest(visit, place, batch_sizes(plan.work, len(data), job.part))
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
        """Parameters into every slot; where clients start from the same tensors, those are cut once and copied."""
        first: dict[object, CapturedSlot] = {}
        for guest in guests:
            job, place, work = guest.visit.job, guest.place, plan.work
            like = place if "before" in work.changed else first.setdefault(job.source, place)
            if like is place:
                guest.visit.load(place.slot.module)
            else:
                state = plan.axes(job).state
                mine, others = (state(each.slot.module, job.window).values() for each in (place, like))
                torch._foreach_copy_(list(mine), list(others))
            work.start(place.slot, guest.visit)
            place.total.zero_()
            place.rate.fill_(work.rate(plan.round))
            held = guest.visit.held(work.mask)
            if held is not None:
                place.held.copy_(held)
            if place.draws is not None:
                place.draws.manual_seed(stream_seed(plan, job))

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


def batch_sizes(work: LocalTraining, examples: int, part: float = 1.0) -> list[list[int]]:
    """The sizes of a client's batches, epoch by epoch; a straggler's end where its part of the steps ends."""
    full, rest = divmod(examples, work.batch)
    epoch = [work.batch] * full + [rest] * (rest > 0)
    left = [max(0, work.steps(examples, part) - done * len(epoch)) for done in range(work.epochs)]
    return [epoch[:count] for count in left]


def _failed(job: Job, failure: Exception) -> Failure:
    """Why a client is dropped; a lack of memory is no client's failure, and is raised."""
    if out_of_memory(failure):
        raise failure
    return Failure(job, why_failed(failure))
