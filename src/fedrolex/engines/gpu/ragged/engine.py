"""Rounds of ragged cohorts: clients of different widths in one kernel launch a layer."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedrolex.clients import Failure, Job, Network, RoundPlan, Upload
from fedrolex.engines.gpu.ragged.ahead import SPARE, Need, needs
from fedrolex.engines.gpu.ragged.matrices import matrices
from fedrolex.engines.gpu.waves import Waves
from fedrolex.models import PreResNet
from fedrolex.rounds import Averaged, interrupted, unknown_hooks
from fedrolex.tasks import Classification, Task

if TYPE_CHECKING:
    from fedrolex.engines.gpu.ragged.places import Places

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run on a CPU, for tests


class Ragged(Waves):
    """Trains cohorts of PreResNets with kernels of its own; only machines with Triton have them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.places: dict[str, Places] = {}  # of every network that was trained, by its name
        self._needs: dict[str, Need] | None = None  # of networks that have no places yet, once it is known
        self._crowded = False  # memory was not enough once: places are for the clients at hand

    def supports(self, plan: RoundPlan) -> str | None:
        """Plain training of PreResNets with static norms by SGD or Adam, to their end."""
        if find_spec("triton") is None:
            return "ragged kernels need Triton, which is not installed"
        networks = (why_not(plan.networks[name], plan.task) for name in {job.network for job in plan.jobs})
        here = None if self.device.type == "cuda" or INTERPRETED else "ragged kernels need a GPU"
        why = interrupted(plan) or unknown_hooks(plan.work, {"rate"}) or next(filter(None, networks), None)
        return why or _why_not_jobs(plan) or here

    def _holds(self) -> bool:
        return bool(self.places)

    def _clear(self) -> None:
        self.places.clear()
        self._needs = None

    def release(self) -> bool:
        """Give back what is kept on the device, and from now on make room for the clients at hand only."""
        self._crowded = True
        return super().release()

    def _wave(self, plan: RoundPlan, jobs: Sequence[Job]) -> list[Upload | Failure]:
        answers: dict[tuple[int, str], Upload | Failure] = {}
        self._crowded = self._crowded or len(jobs) < len(plan.jobs)
        places = list(self._places_for(plan, jobs))
        for each, mine in places:
            answers |= each.seat(plan, mine, 0 if self._crowded else SPARE)
        for each, _ in places:
            each.start(plan)
        for epoch in range(plan.work.epochs):
            for each, _ in places:
                each.fill(plan, epoch)
            for each, _ in places:
                each.launch(plan)
            for each, _ in places:
                each.join()
        if len(jobs) == len(plan.jobs):
            coming = [job for job in plan.upcoming() if job.part == 1]  # stragglers are not trained here
            for each, mine in places:
                each.get_ready(plan, [job for job in coming if mine and job.network == mine[0].network])
        for each, _ in places:
            answers |= each.answers(plan)
        return [answers[job.key] for job in jobs]

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged | None:
        """By one kernel, where the uploads lie and all are of one network and section."""
        homes = {(upload.job.network, upload.job.sections) for upload in uploads}
        if not self.together or len(homes) != 1:
            return None
        return self.places[uploads[0].job.network].average(uploads, weights, label_axis)

    def _places_for(self, plan: RoundPlan, jobs: Sequence[Job]) -> Iterator[tuple[Places, list[Job]]]:
        """Places of every network, with the jobs that are theirs; those without jobs stay as they are."""
        from fedrolex.engines.gpu.ragged.places import STREAMS_USED, Places

        for name in dict.fromkeys(job.network for job in jobs):
            if name not in self.places:
                first = STREAMS_USED * len(self.places)
                streams = [self._stream(number) for number in range(first, first + STREAMS_USED)]
                need = self._need(plan, name)
                self.places[name] = Places(plan.networks[name], need, self.precision, self.device, streams)
            yield self.places[name], [job for job in jobs if job.network == name]

    def _need(self, plan: RoundPlan, name: str) -> Need:
        """What a network's places are for when they are made."""
        if self._needs is None:
            self._needs = {} if self._crowded else needs(plan)
        return self._needs.pop(name, Need())


def why_not(network: Network, task: Task) -> str | None:
    """Why the kernels cannot train parts of a network; None where they can."""
    model = network.module
    if not isinstance(model, PreResNet):
        return f"ragged kernels are for PreResNets, not for {type(model).__name__}"
    if model.plan.norm != "static" or model.plan.scaler:
        return "ragged kernels are for static norms without a scaler"
    if model.plan.size % 2 ** (len(model.plan.blocks) - 1):
        return f"images of side {model.plan.size} cannot be halved {len(model.plan.blocks) - 1} times"
    if not isinstance(task, Classification) or task.loss is not nn.functional.cross_entropy:
        return "ragged kernels are for images and cross-entropy"
    if not all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters()):
        return "ragged kernels train every parameter, in float32"
    return "its tensors are not plain matrices and filters" if matrices(network.axes) is None else None


def _why_not_jobs(plan: RoundPlan) -> str | None:
    if any(len(job.sections) > 1 for job in plan.jobs):
        return "a client starts from tensors of several sections"
    return None
