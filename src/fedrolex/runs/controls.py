"""SCAFFOLD's control variates through a run: the server's are part of its tensors, the clients' are kept by number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedrolex.engines import Job, RoundPlan, Upload
from fedrolex.methods.scaffold import Controls
from fedrolex.rounds.client_states import ClientStates, State
from fedrolex.slicing.axes import Axes

SUFFIX = "control"


@dataclass
class ControlBook:
    """Gives clients their corrections, and renews both sides' variates after a round that counts.

    Attributes:
        controls: the method's rules.
        axes: of the server's model.
        names: of the trainable parameters.
        clients: how many can ever take part.
        states: what clients keep.
    """

    controls: Controls
    axes: Axes
    names: Sequence[str]
    clients: int
    states: ClientStates
    _renewed: dict[int, State] = field(default_factory=dict)
    _change: dict[str, Tensor] = field(default_factory=dict)

    def equipped(self, jobs: Sequence[Job], state: Mapping[str, Tensor]) -> list[Job]:
        """The jobs with their corrections c − cᵢ."""
        self._renewed, self._change = {}, {name: torch.zeros_like(state[name]) for name in self.names}
        c = {name: state[f"{name}@{SUFFIX}"] for name in self.names}
        found = []
        for job in jobs:
            correction = self.controls.correction(self.axes.take(c, job.window), self._own(job, state))
            found.append(replace(job, correction=correction))
        return found

    def _own(self, job: Job, state: Mapping[str, Tensor]) -> State | None:
        kept = self.states.get(job.client)
        return None if kept is None else {name: tensor.to(state[name].device) for name, tensor in kept.items()}

    @torch.no_grad()
    def take(self, upload: Upload, plan: RoundPlan) -> None:
        """Note a client's new variate."""
        job = upload.job
        if upload.gradient is not None:
            new = {name: upload.gradient[name].clone() for name in self.names}
        else:
            received = self.axes.take({name: plan.state[name] for name in self.names}, job.window)
            distance = self.controls.distance(plan.client, plan.round, upload.steps)
            new = self.controls.renewed(job.correction, received, upload.tensors, distance)
        before = self._own(job, plan.state)
        for name, tensor in new.items():
            change = tensor if before is None else tensor - before[name]
            self.axes.region(name, job.window).add(self._change[name], change, 1.0)
        self._renewed[job.client] = {name: tensor.cpu() for name, tensor in new.items()}

    def keep(self, round: int) -> None:
        """The round counts: clients keep what they found."""
        for client, own in self._renewed.items():
            self.states.put(client, round, own)

    def settle(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The server's c, moved by the clients' changes over all clients."""
        return {f"{n}@{SUFFIX}": state[f"{n}@{SUFFIX}"] + change / self.clients for n, change in self._change.items()}
