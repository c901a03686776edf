"""A whole cohort at once on one GPU: every client's step is a CUDA graph, replayed on a stream of its own."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedrolex.clients import Failure, Kind, RoundPlan, Slot, Tensors, Visit, why_failed
from fedrolex.engines.gpu.seats import Seated, Seats
from fedrolex.engines.visits import Key, batch_sizes, order_of
from fedrolex.rounds import interrupted, out_of_memory, unknown_hooks


class Lane(Seats):
    """A place for one client, in a slot of its own."""

    def __init__(self, visit: Visit, slot: Slot, stream: Any) -> None:
        super().__init__(visit.plan, visit.examples, 1, slot.precision, stream)
        self.slot, self.rate = slot, slot.parameters[0].detach().new_zeros(())
        self.tensors = visit.network.axes.state(slot.module, visit.job.window)

    def begin(self, visits: Sequence[Visit]) -> None:
        """Get the slot ready for the first step of its one client."""
        self.work.start(self.slot, visits[0])

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """The work's own step in the slot; the loss, shape ``()``."""
        held = self.held[0] if self.work.mask != "none" else None
        return self.work.step(self.slot, x[0], y[0], self.task.loss, self.rate, held)

    def trained(self, place: int) -> Tensors:
        """The tensors of the slot, which is the only place."""
        return self.tensors

    def sizes(self) -> Tensor:
        """The sum of the norms of all real tensors."""
        norms = torch._foreach_norm([tensor for tensor in self.tensors.values() if tensor.is_floating_point()])
        kinds = {norm.dtype for norm in norms}
        sums = [torch.stack([norm for norm in norms if norm.dtype is kind]).double().sum() for kind in kinds]
        return torch.stack(sums).sum()[None]


class Lanes(Seated):
    """Trains clients side by side, each in a captured slot of its own; runs any model and any loss."""

    def supports(self, plan: RoundPlan) -> str | None:
        """All but deadlines, and steps of one's own: a step may depend on what a captured step cannot see."""
        return unknown_hooks(plan.work) if plan.deadline is None else interrupted(plan)

    def _seated(self, plan: RoundPlan, visits: Sequence[Visit], failures: dict[Key, Failure]) -> list[Seats]:
        """Every client in the next free lane of its widths, the widest first: their steps are launched first."""
        seated, taken = [], Counter[Kind]()
        for visit in visits:
            kind = plan.kind(visit.job)
            try:
                lane = self._seats([visit], 1, taken[kind])
                for size in set(batch_sizes(visit, 0)):
                    lane.step(size)
                seated.append(lane)
                taken[kind] += 1
            except Exception as failure:
                if out_of_memory(failure):
                    raise
                failures[visit.job.key] = Failure(visit.job, why_failed(failure))
        return sorted(seated, key=lambda lane: -sum(tensor.numel() for tensor in lane.tensors.values()))

    def _made(self, visits: Sequence[Visit], places: int, stream: Any) -> Seats:
        network, visit = visits[0].network, visits[0]
        module = network.axes.cut(network.module, visit.job.window)
        if visit.examples.y.device.type == "cuda":
            module = module.to(memory_format=torch.channels_last)
        lane = Lane(visit, Slot(module, self.precision), stream)
        lane.begin(visits)  # makes what the steps will read
        return lane

    def _load(self, plan: RoundPlan, seats: Sequence[Seats]) -> None:
        """Clients of one source copy it from the first of them."""
        first: dict[object, dict[str, Tensor]] = {}
        for lane in seats:
            visit, own = lane.visits[0], lane.tensors
            source = visit.received if "received" in vars(visit) else first.setdefault(visit.job.source, own)
            if source is own:
                plan.axes(visit.job).take(plan.whole(visit.job), visit.job.window, out=own)
            else:
                torch._foreach_copy_(list(own.values()), [source[name] for name in own])
            lane.start(plan)

    def _fill(self, plan: RoundPlan, seats: Sequence[Seats], epoch: int) -> None:
        """Inputs are augmented for the whole cohort in one go."""
        xs, draws = [], []
        for lane in seats:
            visit = lane.visits[0]
            data = visit.examples
            order, drawn = order_of(plan, len(data), plan.round, visit.job.client, epoch)
            order = order.to(data.y.device, non_blocking=True)
            xs.append(data.x[order])
            draws += [] if drawn is None else [drawn]
            lane.y[0, : len(order)] = data.y[order]
            lane.counter.zero_()
            lane.queue = [lane.step(size) for size in batch_sizes(visit, epoch)]
        if not xs:
            return
        drawn = torch.cat(draws).to(xs[0].device, non_blocking=True) if draws else None
        inputs = plan.task.inputs(torch.cat(xs), drawn).split([len(x) for x in xs])
        for lane, x in zip(seats, inputs, strict=True):
            lane.x[0, : len(x)] = x

    def _get_ready(self, plan: RoundPlan) -> None:
        """Where the answers belong, and where the next round's parts lie."""
        windows = {(job.network, job.window): None for job in (*plan.jobs, *plan.upcoming())}
        for network, window in windows:
            axes = plan.networks[network].axes
            for name in axes.tensors:
                axes.region(name, window)
                axes.region(name, window, counts=True)
