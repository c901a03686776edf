"""Methods whose server trains after a round: what it is given of the clients' models, and where its answers go."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedrolex.core.streams import words
from fedrolex.methods.server_round import Group, ServerRound
from fedrolex.rounds.intake import Intake
from fedrolex.slicing.windows import Window
from fedrolex.tasks import Classification

if TYPE_CHECKING:
    from fedrolex.runs.training import Training


class Teaching:
    """The server's part of a training.

    Args:
        training: whose round it is.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self._scratches: dict[Fraction, nn.Module] = {}

    def groups(self, new: Mapping[str, Tensor], intake: Intake) -> dict[Fraction, Group]:
        """What a method's server may want to know of the clients of every size; ``new`` is the average."""
        run = self.training
        found = {}
        for level in run.sizes:
            window = run.window(run.round, level)
            mine = [(upload, weight) for upload, weight in intake.uploads if upload.job.capacity == level]
            found[level] = Group(
                self._scratch(level, window),
                run.axes.take(run.own_or_shared(run.state, level), window),
                run.axes.take(run.own_or_shared(new, level), window),
                [upload.tensors for upload, _ in mine],
                [weight for _, weight in mine],
            )
        return found

    def server_group(self, new: Mapping[str, Tensor]) -> Group | None:
        """The server's own model, where it has one that no client trains."""
        run = self.training
        return Group(run.model, {}, run.apart.shared(new)) if run.method.server_model else None

    def answered(
        self, groups: Mapping[Fraction, Group], own: Group | None
    ) -> Mapping[Fraction | None, dict[str, Tensor]]:
        """What the method's server makes of a round."""
        run = self.training
        assert run.method.server is not None
        assert isinstance(run.task, Classification)
        task, public, held = run.task, run.task.public, run.task.validation
        assert public is not None
        given = None if held is None else (task.inputs(held.x), held.y)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(words(1, run.seed, "server", run.round)[0] >> 1))
            return run.method.server(ServerRound(run.round, run.seed, groups, task.inputs(public.x), given, own))

    def take_over(self, new: dict[str, Tensor], found: Mapping[Fraction | None, dict[str, Tensor]]) -> None:
        """The server's models take the averages' places in ``new``."""
        run = self.training
        if run.method.server_model and not run.whole:
            new |= found[None]
        for level in run.sizes:
            whole = {name: tensor.clone() for name, tensor in run.own_or_shared(new, level).items()}
            run.axes.put(whole, found[level], run.window(run.round, level))
            copies = run.apart.names
            new |= {f"{name}@{level}" if name in copies else name: tensor for name, tensor in whole.items()}
            if copies and run.apart.leads and level == max(run.apart.capacities):
                new |= {name: tensor.clone() for name, tensor in whole.items()}

    def _scratch(self, level: Fraction, window: Window) -> nn.Module:
        """A model of a capacity to load tensors into."""
        if level not in self._scratches:
            with torch.random.fork_rng(devices=[]):
                self._scratches[level] = self.training.axes.cut(self.training.model, window)
        return self._scratches[level]
