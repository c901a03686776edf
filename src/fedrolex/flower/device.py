"""A device's side of a round: its own jobs, recomputed from what is public, and trained by the loop engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex.clients import Job, RoundPlan, Upload
from fedrolex.core import FedrolexError
from fedrolex.engines.cpu.loop import Loop
from fedrolex.flower.fleet import OneRoundFleet
from fedrolex.flower.messages import NEW, Answer, AnsweredJob, Asked
from fedrolex.flower.tensor_versions import TensorVersions
from fedrolex.flower.transport import Transport, downward, packed, rounded, unpacked, unpacked_freely
from fedrolex.rounds import Fleet
from fedrolex.runs.hooks import jobs_of
from fedrolex.runs.training import Training


@dataclass(frozen=True, eq=False)
class OwnPlan(RoundPlan):
    """A round as one device sees it: it has its own parts of the server's tensors, and no others."""

    parts: Mapping[tuple[int, str], Mapping[str, Tensor]] = field(default_factory=dict)

    def received(self, job: Job) -> dict[str, Tensor]:
        """What came with the job."""
        return {name: tensor.clone() for name, tensor in self.parts[job.key].items()}

    def load(self, module: nn.Module, job: Job) -> None:
        """Copy what came with the job into a module of its widths."""
        own = self.axes(job).state(module, job.window)
        for name, tensor in own.items():
            tensor.copy_(self.parts[job.key][name])


class Device:
    """One device of a fleet.

    Args:
        training: as the recipe describes it; its server's tensors are only looked at for their shapes.
        client: the device's number.
        capacity: the most it holds.
        memory: what it keeps between rounds.
        recipe: a hash of the recipe.
        transport: how values travel.
        checkpoint_every: rounds between the server's checkpoints, to which a killed server goes back.
    """

    def __init__(
        self, training: Training, client: int, capacity: Fraction, memory: TensorVersions, recipe: str, *,
        transport: Transport = "fp32", checkpoint_every: int = 1,
    ) -> None:  # fmt: skip
        self.training, self.client, self.capacity, self.memory = training, client, capacity, memory
        self.recipe, self.transport, self.every = recipe, transport, checkpoint_every
        self.loop = Loop(precision=training.engine.precision, device=training.engine.device)

    def answer(self, asked: Asked) -> Answer:
        """Train the jobs of a round."""
        plan, said = self.plan(asked), []
        for job in plan.jobs:
            (found,) = self.loop.run(replace(plan, jobs=[job]))
            if isinstance(found, Upload):
                said.append(self._said(plan, found))
            else:
                said.append(AnsweredJob(job.name, failed=found.why))
        return Answer(asked.round, self.client, said)

    def jobs(self, asked: Asked) -> list[Job]:
        """All jobs of a round: who trains which window follows from the recipe, the round and the cohort."""
        if asked.recipe != self.recipe:
            raise FedrolexError("the server has another recipe: give all the same app and run-config")
        server = self.training.server
        shared = {each.name: getattr(server.fleet, each.name) for each in fields(Fleet)}
        server.fleet = OneRoundFleet(**shared, told=sorted(asked.cohort, key=lambda member: member.client))
        return jobs_of(self.training.method, server, asked.round)

    def plan(self, asked: Asked) -> OwnPlan:
        """The device's own jobs, with what came for them; raises, in one line, where what came does not fit."""
        mine = [job for job in self.jobs(asked) if job.client == self.client]
        if asked.client != self.client or [job.name for job in mine] != list(asked.jobs):
            raise FedrolexError(f"client {self.client} was asked for what client {asked.client} does in this round")
        training, server = self.training, self.training.server
        parts, jobs = {}, []
        for place, job in enumerate(mine):
            if job.capacity > self.capacity:
                raise FedrolexError(f"was asked to train {job.capacity} of the model: it holds {self.capacity}")
            parts[job.key] = on(server.device, unpacked(asked.tensors[place], self.form(job), downward(self.transport)))
            sent = {what: on(server.device, unpacked_freely(each)) for what, each in asked.sent[place].items()}
            ticket = asked.tickets[place]
            kept = None if ticket == NEW else on(server.device, self.memory.get(f"kept {job.name}", ticket))
            jobs.append(replace(job, sent=sent, kept=kept))
        return OwnPlan(
            asked.round, server.seed, server.networks, server.state, server.view, training.work, jobs,
            training.deadline, training.label_axis is not None, precision=training.engine.precision, parts=parts,
        )  # fmt: skip

    def form(self, job: Job) -> dict[str, Tensor]:
        """Names, shapes and types of a job's tensors, without values."""
        axes, server = self.training.server.networks[job.network].axes, self.training.server
        widths = axes.widths(job.window)
        whole = server.tensors(*job.sections)
        return {
            name: torch.empty(axes.shape(name, widths), dtype=tensor.dtype, device="meta")
            for name, tensor in whole.items()
        }

    def _said(self, plan: OwnPlan, upload: Upload) -> AnsweredJob:
        """An answer as it travels; what the client keeps stays here."""
        job, since = upload.job, plan.round // self.every * self.every
        if upload.kept is not None:
            before = {} if job.kept is None else job.kept
            self.memory.keep(f"kept {job.name}", plan.round, {**before, **upload.kept}, since=since)
        tensors = dict(upload.tensors)
        if self.transport != "fp32":
            tensors = self._shortened(plan, upload, since)
        return AnsweredJob(
            name=job.name, examples=upload.examples, steps=upload.steps, loss=float(upload.loss),
            labels=upload.labels, keeps=upload.kept is not None,
            tensors=packed(tensors, self.transport), sent=packed(upload.sent),
        )  # fmt: skip

    def _shortened(self, plan: OwnPlan, upload: Upload, since: int) -> dict[str, Tensor]:
        """The change of what was received and what rounding left of the last one; what is left now is kept."""
        job, axes = upload.job, plan.axes(upload.job)
        received, name = plan.parts[job.key], f"rest {job.name}"
        change = {n: t - received[n] if t.is_floating_point() else t for n, t in upload.tensors.items()}
        before = [version for version in self.memory.versions(name) if version < plan.round]
        if before:  # it lies where that round's window was
            old = self.memory.get(name, before[-1])
            for each, tensor in change.items():
                if tensor.is_floating_point():
                    tensor += axes.region(each, job.window).take(old[each].to(tensor.device))
        arrives = rounded(change, self.transport)
        rest = {}
        for each, tensor in change.items():
            if tensor.is_floating_point():
                rest[each] = torch.zeros(axes.shape(each), dtype=tensor.dtype) if not before else old[each]
                axes.region(each, job.window).put(rest[each], tensor.cpu() - arrives[each])
        self.memory.keep(name, plan.round, rest, since=since)
        return change


def on(device: torch.device, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
