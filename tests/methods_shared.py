"""Small runs and models that the tests of methods share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedrolex.clients.messages import MODEL, Job, RoundPlan, Upload
from fedrolex.methods.distillation import Group
from fedrolex.recipes.recipe import Recipe
from fedrolex.runs.prepare import prepare
from fedrolex.runs.training import Training
from fedrolex.tasks.task import Task

SMALL = ["task.width=8", "fleet.clients=6", "fleet.cohort=4", "task.limit=180", 'fleet.capacities=["1", "1/2"]',
         "client.batch=16", "callbacks=[drift]"]  # fmt: skip


def small(*settings: str, task: Task | None = None) -> Training:
    """A run of digits on six clients, or of a task of one's own."""
    return prepare(Recipe(device="cpu").with_settings([*SMALL, *settings]), task)


def states(made: Training, rounds: int = 2) -> dict[str, Tensor]:
    """The server's model after some rounds."""
    for _ in range(rounds):
        made.run_round()
    return made.server.state[MODEL]


def copied(made: Training) -> dict[str, dict[str, Tensor]]:
    """The server's state, section by section."""
    return {section: {n: t.clone() for n, t in tensors.items()} for section, tensors in made.server.state.items()}


def asked(made: Training) -> RoundPlan:
    """The client work of the next round."""
    return made.plan(made.method.jobs(made.server, made.server.round))


def answered(made: Training) -> list[Upload]:
    """The clients' answers in the next round, which is not counted."""
    found = []
    for answer in made.engine.run(asked(made)):
        assert isinstance(answer, Upload)
        found.append(replace(answer, tensors={name: tensor.clone() for name, tensor in answer.tensors.items()}))
    return found


def part(made: Training, job: Job) -> dict[str, Tensor]:
    """The tensors that a job's client would receive now."""
    axes = made.server.networks[job.network].axes
    return axes.take(made.server.tensors(*job.sections), job.window)


def only(made: Training, clients: Sequence[int]) -> Training:
    """The same run, in which no other clients are ever there."""
    made.server.fleet = replace(made.server.fleet, availability=[list(clients)])
    return made


def group(*models: Tensor, weights: list[float] | None = None, sent: float = 0.0) -> Group:
    """Clients with linear models ``(classes, inputs)``, which received a constant."""
    module = nn.Linear(models[0].shape[-1], models[0].shape[0], bias=False)
    weights = weights or [1.0] * len(models)
    mean = sum(w * m for w, m in zip(weights, models, strict=True)) / sum(weights)
    uploads = [{"weight": model} for model in models]
    assert isinstance(mean, Tensor)
    return Group(module, {"weight": torch.full_like(mean, sent)}, {"weight": mean}, uploads, weights)


def wordy(tmp_path: Path) -> list[str]:
    """Settings of a run on eight users' few sentences."""
    file = tmp_path / "users.jsonl"
    users = [{"user": f"u{i}", "sentences": [f"a b c w{i}", f"b c d v{i} w{i}"] * 4} for i in range(8)]
    file.write_text("".join(json.dumps(user) + "\n" for user in users))
    return ["task=words", f"task.data={file}", "task.fewest=1", "fleet.clients=null", "fleet.cohort=2",
            "task.layers=1", "task.inner=64"]  # fmt: skip
