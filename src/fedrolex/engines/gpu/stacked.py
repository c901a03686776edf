"""Many small clients on one GPU: clients of the same widths are one captured step, whatever they hold.

A short batch is filled up with examples whose targets the loss ignores, and a client that is done with its epoch stands
still while the others go on. Stacked convolutions are grouped ones, which pay where the launches of kernels are what a
step costs: for small networks.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedrolex.clients import Failure, Kind, RoundPlan, Tensors, Visit
from fedrolex.engines.gpu.seats import Seated, Seats
from fedrolex.engines.stacking import Stack, filling
from fedrolex.engines.visits import Key, batch_sizes, epoch_of, read_ahead, starts
from fedrolex.rounds import interrupted, unknown_hooks

PLACES = 16  # clients in one step, at most
FEWEST = 4  # clients of the same widths from which on stacked convolutions pay
STACKED_PARAMETERS = 2**18  # up to which stacked convolutions pay


class StackSeats(Seats):
    """Places for clients of the same widths, each a row of one stack.

    Attributes:
        stack: the clients' tensors.
        left: the steps that each place takes in the epoch, int64.
    """

    def __init__(self, visit: Visit, module: nn.Module, places: int, precision: Any, stream: Any) -> None:
        super().__init__(visit.plan, visit.examples, places, precision, stream)
        state = visit.network.axes.state(module, visit.job.window)
        self.tensors = {name: torch.stack([tensor] * places) for name, tensor in state.items()}
        self.stack = Stack(module, self.tensors, self.held if self.work.mask != "none" else None, precision)
        self.rate = self.stack.parameters[0].new_zeros(())
        self.left = torch.zeros(places, dtype=torch.int64, device=self.y.device)

    def begin(self, visits: Sequence[Visit]) -> None:
        """Have the stack forget its optimiser's memory and take the constants of these clients."""
        self.stack.begin(self.work, visits)

    def losses(self, x: Tensor, y: Tensor) -> Tensor:
        """One step of the stack, in which clients that are done stand still; the losses, shape ``(places,)``."""
        with sdpa_kernel(SDPBackend.MATH):  # the other kernels' gradients do not take stacked clients
            return self.stack.step(self.work, self.task.loss, x, y, self.rate, self.counter < self.left)

    def trained(self, place: int) -> Tensors:
        """The tensors of a place: its row of the stack's."""
        return {name: tensor[place] for name, tensor in self.tensors.items()}

    def sizes(self) -> Tensor:
        """The sum of all values of each place."""
        return self.stack.sums()


class Stacked(Seated):
    """Trains cohorts of many small clients: networks that treat examples one by one, losses that ignore a target."""

    def supports(self, plan: RoundPlan) -> str | None:
        """Work without hooks of its own between steps, where batches can be filled up and stacking pays."""
        if plan.deadline is not None:
            return interrupted(plan)
        if any(filling(plan, network) is None for network in {job.network for job in plan.jobs}):
            return "batches cannot be filled up with examples that nothing notices"
        if plan.work.optimizer == "adam" and plan.work.epochs > 1:
            return "clients that are done early would need an Adam of their own"  # its count of steps is one for all
        return unknown_hooks(plan.work) or plan.work.looks_at_wholes or _does_not_pay(plan)

    def _seated(self, plan: RoundPlan, visits: Sequence[Visit], failures: dict[Key, Failure]) -> list[Seats]:
        """Clients with about as many examples are side by side."""
        groups: dict[Kind, list[Visit]] = {}
        for visit in sorted(visits, key=lambda visit: -len(visit.examples)):
            groups.setdefault(plan.kind(visit.job), []).append(visit)
        seated = []
        for group in groups.values():
            places = min(PLACES, len(group) + len(group) % 2)  # cohorts that differ by one use the same stacks
            for number, start in enumerate(range(0, len(group), places)):
                seated.append(self._seats(group[start : start + places], places, number))
        return seated

    def _made(self, visits: Sequence[Visit], places: int, stream: Any) -> Seats:
        plan, job = visits[0].plan, visits[0].job
        made = StackSeats(visits[0], self._module(plan, job), places, self.precision, stream)
        made.begin(visits)  # makes what the step will read
        made.step(plan.work.batch)
        return made

    def _load(self, plan: RoundPlan, seats: Sequence[Seats]) -> None:
        """Tensors that several clients receive are cut once."""
        parts = iter(starts([visit for each in seats for visit in each.visits]))
        for each in seats:
            assert isinstance(each, StackSeats)
            each.stack.load([next(parts) for _ in each.visits])
            each.start(plan)

    def _fill(self, plan: RoundPlan, seats: Sequence[Seats], epoch: int) -> None:
        """A client's last batch is filled up with ignored examples, batches after that with any."""
        batch = plan.work.batch
        ignored: dict[str, Any] = {name: filling(plan, name) for name in {job.network for job in plan.jobs}}
        for each in seats:
            assert isinstance(each, StackSeats)
            left = [0] * len(each.left)
            for place, visit in enumerate(each.visits):
                count = len(visit.examples)
                each.x[place], each.y[place] = epoch_of(visit, epoch, each.y.shape[1])
                each.y[place, count : -(-count // batch) * batch].fill_(ignored[visit.job.network])
                left[place] = len(batch_sizes(visit, epoch))
            each.left.copy_(torch.tensor(left))
            each.counter.zero_()
            each.queue = [each.step(batch)] * max(left)

    def _get_ready(self, plan: RoundPlan) -> None:
        self._ahead = read_ahead(plan)


def _does_not_pay(plan: RoundPlan) -> str | None:
    """Why stacking is not worth it: few clients, or convolutions of few or large clients of the same widths."""
    modules = [module for name in {job.network for job in plan.jobs} for module in plan.networks[name].module.modules()]
    if not any(isinstance(module, nn.modules.conv._ConvNd) for module in modules):
        return None if len(plan.jobs) >= PLACES else f"fewer than {PLACES} clients are not worth a stack"
    kinds = Counter(plan.kind(job) for job in plan.jobs)
    if min(kinds.values(), default=0) < FEWEST:
        return f"fewer than {FEWEST} clients of the same widths are not worth a stack of convolutions"
    if any(plan.axes(job).parameters(job.window) > STACKED_PARAMETERS for job in plan.jobs):
        return f"convolutions of more than {STACKED_PARAMETERS:,} parameters are not worth a stack"
    return None
