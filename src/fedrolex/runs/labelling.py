"""DS-FL through a run: clients' own models are kept by number, last round's labels with the server's tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex.engines import Job, Upload
from fedrolex.methods import server_round
from fedrolex.methods.dsfl import SoftLabels
from fedrolex.rounds.client_states import ClientStates, State
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.windows import WHOLE, Window

IDS, SOFT = "@public ids", "@public labels"


@dataclass
class LabelBook:
    """Gives clients their own models after they learned the labels, and makes the next labels.

    Attributes:
        labels: the method's rules.
        axes, model: of the server.
        public: inputs, ``(n, …)``.
        classes: how many.
        seed: of the run.
        states: the clients' models.
        first: the tensors everyone's model is cut from before its first round.
        said: clients' probabilities for this round's examples, each ``(n, classes)``.
    """

    labels: SoftLabels
    axes: Axes
    model: nn.Module
    public: Tensor
    classes: int
    seed: int
    states: ClientStates
    first: Mapping[str, Tensor]
    said: list[Tensor] = field(default_factory=list)
    _modules: dict[tuple[Fraction, Window], nn.Module] = field(default_factory=dict)
    _trained: dict[int, State] = field(default_factory=dict)

    def remembered(self) -> dict[str, Tensor]:
        """What the server keeps beside its model, before the first round: nothing is labelled."""
        count = min(self.labels.examples, len(self.public))
        like = self.public
        return {
            IDS: torch.full((count,), -1, dtype=torch.int64, device=like.device),
            SOFT: torch.zeros(count, self.classes, device=like.device),
        }

    def bytes(self) -> int:
        """What one client receives: ids of two rounds and labels of one; it sends as many labels back."""
        count = min(self.labels.examples, len(self.public))
        return count * (self.classes * 4 + 16)

    def equipped(self, jobs: Sequence[Job], state: Mapping[str, Tensor], round: int) -> list[Job]:
        """The jobs, every one with the client's own model."""
        self.said, self._trained = [], {}
        self._ids = self.labels.chosen(len(self.public), self.seed, round).to(self.public.device)
        found = []
        for job in jobs:
            module = self._module(job)
            own = self.states.get(job.client)
            self.axes.load(module, self.first, job.window)
            if own is not None:
                torch._foreach_copy_(list(self.axes.state(module, job.window).values()), self._on_device(own))
            if int(state[IDS][0]) >= 0:
                self.labels.learn(module, self.public[state[IDS]], state[SOFT], self.seed, round, job.client)
            whole = {name: torch.zeros_like(self.first[name]) for name in self.first}
            self.axes.put(whole, self.axes.state(module, job.window), job.window)
            found.append(replace(job, own=whole))
        return found

    def take(self, upload: Upload) -> None:
        """Keep a client's model, and note what it says about this round's examples."""
        module = self._module(upload.job)
        mine = self.axes.state(module, upload.job.window)
        torch._foreach_copy_(list(mine.values()), [upload.tensors[name] for name in mine])
        self.said.append(server_round.said(module, self.public[self._ids], self.public).softmax(1))
        self._trained[upload.job.client] = {name: tensor.cpu().clone() for name, tensor in mine.items()}

    def settle(self, round: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Make the labels, teach the server's model; its new tensors, with the labels."""
        labels = self.labels.together(self.said)
        self.axes.load(self.model, {name: tensor for name, tensor in state.items() if "@" not in name})
        self.labels.learn(self.model, self.public[self._ids], labels, self.seed, round, "server")
        new = {name: tensor.clone() for name, tensor in self.axes.state(self.model, WHOLE).items()}
        return {**state, **new, IDS: self._ids, SOFT: labels}

    def keep(self, round: int) -> None:
        """The round counts: clients keep their models."""
        for client, own in self._trained.items():
            self.states.put(client, round, own)

    def _module(self, job: Job) -> nn.Module:
        key = (job.capacity, job.window)
        if key not in self._modules:
            with torch.random.fork_rng(devices=[]):
                self._modules[key] = self.axes.cut(self.model, job.window)
        return self._modules[key]

    def _on_device(self, own: State) -> list[Tensor]:
        return [own[name].to(self.public.device) for name in self.first]
