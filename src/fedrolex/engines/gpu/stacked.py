"""Many small clients on one GPU: clients of the same widths are one captured step, whatever they hold.

A short batch is filled up with examples whose targets the loss ignores, and a client that is done with its epoch stands
still while the others go on. Stacked convolutions are grouped ones, which pay where the launches of kernels are what a
step costs: for small networks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedrolex.clients.messages import Failure, Job, RoundPlan, Upload
from fedrolex.clients.visit import Visit, stream_seed
from fedrolex.engines.gpu.captured import captured
from fedrolex.engines.gpu.waves import Waves
from fedrolex.engines.stacking import Stack, filling
from fedrolex.engines.visits import Key, close_visit, epoch_of, open_visits, read_ahead, starts, steps_of
from fedrolex.rounds.engine import interrupted, unknown_hooks
from fedrolex.tasks.task import Examples, Task

PLACES = 16  # clients in one step, at most
FEWEST = 4  # clients of the same widths from which on stacked convolutions pay
STACKED_PARAMETERS = 2**18  # up to which stacked convolutions pay

Kind = tuple[str, tuple[tuple[str, int], ...]]
"""A network's name, and the width of every axis."""


@dataclass
class CapturedStack:
    """A stack with its data, its stream and its captured step, used again in every round.

    Attributes:
        stack: the clients' tensors.
        x, y: inputs and targets of one epoch in the order of training, ``(places, room, …)``.
        left: the steps that each place takes in the epoch, int64.
        longest: the most steps that a place takes in the epoch.
        rate: learning rate of the round.
        counter: the next batch of the epoch, int64.
        totals: sum of each place's losses of the round.
        stream, draws: what the step runs on, and where its dropout draws from; None on a CPU.
        step: one batch of every place.
        visits: of this round, by place.
        read: other tensors that the captured step reads: those tensors must live as long.
    """

    stack: Stack
    x: Tensor
    y: Tensor
    left: Tensor
    rate: Tensor
    counter: Tensor
    totals: Tensor
    longest: int = 0
    stream: Any = None
    draws: torch.Generator | None = None
    step: Any = None
    visits: Sequence[Visit] = ()
    read: list[Tensor] = field(default_factory=list)

    def on_stream(self) -> AbstractContextManager[Any]:
        """What runs inside runs on the stack's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Stacked(Waves):
    """Trains cohorts of many small clients: networks that treat examples one by one, losses that ignore a target."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._stacks: dict[tuple[Kind, int], list[CapturedStack]] = {}
        self._modules: dict[Kind, nn.Module] = {}
        self._ahead: dict[int, Examples] = {}
        self._ahead_of: Task | None = None

    def supports(self, work: RoundPlan) -> str | None:
        """Work without hooks of its own between steps, where batches can be filled up and stacking pays."""
        if work.deadline is not None:
            return interrupted(work)
        if any(filling(work, network) is None for network in {job.network for job in work.jobs}):
            return "batches cannot be filled up with examples that nothing notices"
        if work.work.optimizer == "adam" and work.work.epochs > 1:
            return "clients that are done early would need an Adam of their own"  # its count of steps is one for all
        return unknown_hooks(work.work) or _does_not_pay(work)

    def _holds(self) -> bool:
        return bool(self._stacks)

    def _clear(self) -> None:
        self._stacks.clear()
        self._modules.clear()

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        known = self._ahead if plan.task is self._ahead_of else {}
        visits, failures = open_visits(plan, jobs, lambda job: self._module(plan, job), known)
        stacks = self._seated(plan, visits)
        self._load(plan, stacks, visits)
        with self._drawing(plan):
            for epoch in range(plan.work.epochs):
                self._fill(plan, stacks, epoch)
                self._train(stacks)
        if len(jobs) == len(plan.jobs):
            self._ahead, self._ahead_of = read_ahead(plan), plan.task
        answers = {**failures, **self._answers(stacks)}
        return [answers[job.key] for job in jobs]

    # --- places ---

    def _module(self, plan: RoundPlan, job: Job) -> nn.Module:
        """The sub-model of a job's widths, for its code."""
        kind = (job.network, plan.widths(job))
        if kind not in self._modules:
            network = plan.networks[job.network]
            self._modules[kind] = network.axes.cut(network.module, job.window)
        return self._modules[kind]

    def _seated(self, plan: RoundPlan, visits: Sequence[Visit]) -> list[CapturedStack]:
        """A place for every visit; clients with about as many examples are side by side."""
        groups: dict[Kind, list[Visit]] = {}
        for visit in sorted(visits, key=lambda visit: -len(visit.examples)):
            groups.setdefault((visit.job.network, plan.widths(visit.job)), []).append(visit)
        seated = []
        for kind, group in groups.items():
            places = min(PLACES, len(group) + len(group) % 2)  # cohorts that differ by one use the same stacks
            parts = [group[start : start + places] for start in range(0, len(group), places)]
            kept = self._stacks.setdefault((kind, places), [])
            for number, part in enumerate(parts):
                if number == len(kept) or len(part[0].examples) > kept[number].y.shape[1]:
                    kept[number : number + 1] = [self._built(plan, part, places)]
                kept[number].visits = part
                seated.append(kept[number])
        return seated

    def _built(self, plan: RoundPlan, visits: Sequence[Visit], places: int) -> CapturedStack:
        """A new stack for as many clients; the first visit's has the most examples."""
        longest, work, device = visits[0].examples, plan.work, visits[0].examples.y.device
        module, axes = self._module(plan, visits[0].job), plan.axes(visits[0].job)
        state = axes.state(module, visits[0].job.window)
        tensors = {name: torch.stack([tensor] * places) for name, tensor in state.items()}
        held = torch.ones(places, plan.task.classes, dtype=torch.bool, device=device)
        stack = Stack.of(module, tensors, held if work.mask != "none" else None, self.precision)
        room = -(-len(longest) // work.batch) * work.batch
        x, y = plan.task.inputs(longest.x[:1]), longest.y[:1]
        made = CapturedStack(
            stack,
            x=x.new_zeros((places, room, *x.shape[1:])),
            y=y.new_zeros((places, room, *y.shape[1:])),
            left=torch.zeros(places, dtype=torch.int64, device=device),
            rate=stack.parameters[0].new_zeros(()),
            counter=torch.zeros((), dtype=torch.int64, device=device),
            totals=torch.zeros(places, device=device),
            stream=self._stream(sum(map(len, self._stacks.values()))),
            draws=torch.Generator(device) if device.type == "cuda" else None,
        )
        stack.begin(work, visits)  # makes what the step will read
        made.step = self._captured(plan, made)
        return made

    def _captured(self, plan: RoundPlan, made: CapturedStack) -> Any:
        """One batch of every place: a graph, or on a CPU the function itself."""
        work, task = plan.work, plan.task
        within = torch.arange(work.batch, device=made.y.device)

        def step() -> None:
            rows = made.counter * work.batch + within
            x, y = made.x.index_select(1, rows), made.y.index_select(1, rows)
            with sdpa_kernel(SDPBackend.MATH):  # the other kernels' gradients do not take stacked clients
                losses = made.stack.step(work, task.loss, x, y, made.rate, made.counter < made.left)
            made.totals.add_(losses)
            made.counter.add_(1)

        made.read.append(within)
        return captured(step, made.counter.zero_, made.stream, self.precision, made.draws)

    # --- a round ---

    def _load(self, plan: RoundPlan, stacks: Sequence[CapturedStack], visits: Sequence[Visit]) -> None:
        """What every client begins with; tensors that several clients receive are cut once."""
        parts = {id(visit): part for visit, part in zip(visits, starts(visits), strict=True)}
        for made in stacks:
            made.stack.load([parts[id(visit)] for visit in made.visits])
            made.stack.begin(plan.work, made.visits)
            made.totals.zero_()
            made.rate.fill_(plan.work.rate(plan.round))
            if made.stack.held is not None:
                for row, visit in zip(made.stack.held, made.visits, strict=False):
                    row.copy_(visit.held(plan.work.mask))
            if made.draws is not None:
                made.draws.manual_seed(stream_seed(plan, made.visits[0].job))

    def _fill(self, plan: RoundPlan, stacks: Sequence[CapturedStack], epoch: int) -> None:
        """The epoch's examples; a client's last batch is filled up with ignored ones, batches after that with any."""
        batch = plan.work.batch
        ignored: dict[str, Any] = {name: filling(plan, name) for name in {job.network for job in plan.jobs}}
        for made in stacks:
            left = [0] * len(made.left)
            for place, visit in enumerate(made.visits):
                count, batches = len(visit.examples), -(-len(visit.examples) // batch)
                made.x[place], made.y[place] = epoch_of(visit, epoch, made.y.shape[1])
                made.y[place, count : batches * batch].fill_(ignored[visit.job.network])
                left[place] = min(batches, max(0, steps_of(visit) - epoch * batches))
            made.left.copy_(torch.tensor(left))
            made.longest = max(left)
            made.counter.zero_()

    def _train(self, stacks: Sequence[CapturedStack]) -> None:
        """All steps of an epoch, step by step through the stacks."""
        streams = {made.stream for made in stacks if made.stream is not None}
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for number in range(max((made.longest for made in stacks), default=0)):
            for made in stacks:
                if number < made.longest:
                    with made.on_stream():
                        made.step()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def _drawing(self, plan: RoundPlan) -> Iterator[None]:
        """Inside, a model on a CPU draws from a stream of the round's own; on a GPU, every stack has its generator."""
        if self.device.type == "cuda":
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream_seed(plan, plan.jobs[0]))
            yield

    def _answers(self, stacks: Sequence[CapturedStack]) -> dict[Key, Upload | Failure]:
        """Of every client; the device is asked once for losses, and for sums that are finite if all values are."""
        if not stacks:
            return {}
        sums = [
            torch.stack([tensor.flatten(1).sum(1).double() for tensor in made.stack.tensors.values()]).sum(0)
            for made in stacks
        ]
        told = torch.cat(
            [torch.stack([made.totals.double(), sum_]) for made, sum_ in zip(stacks, sums, strict=True)], 1
        )
        seats = [(made, place) for made in stacks for place in range(len(made.left))]
        found: dict[Key, Upload | Failure] = {}
        for (made, place), loss, total in zip(seats, *told.tolist(), strict=True):
            if place < len(made.visits):
                visit = made.visits[place]
                visit.steps = steps_of(visit)
                visit.loss = loss / visit.steps
                visit.trained = {name: tensor[place] for name, tensor in made.stack.tensors.items()}
                found[visit.job.key] = close_visit(visit, True if total - total == 0 else None)
        return found


def _does_not_pay(plan: RoundPlan) -> str | None:
    """Why stacking is not worth it: few clients, or convolutions of few or large clients of the same widths."""
    modules = [module for name in {job.network for job in plan.jobs} for module in plan.networks[name].module.modules()]
    if not any(isinstance(module, nn.modules.conv._ConvNd) for module in modules):
        return None if len(plan.jobs) >= PLACES else f"fewer than {PLACES} clients are not worth a stack"
    kinds = Counter((job.network, plan.widths(job)) for job in plan.jobs)
    if min(kinds.values(), default=0) < FEWEST:
        return f"fewer than {FEWEST} clients of the same widths are not worth a stack of convolutions"
    if any(plan.axes(job).parameters(job.window) > STACKED_PARAMETERS for job in plan.jobs):
        return f"convolutions of more than {STACKED_PARAMETERS:,} parameters are not worth a stack"
    return None
