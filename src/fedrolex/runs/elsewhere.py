"""A run as another process makes it: from its recipe, as the process that drives it did."""

from dataclasses import replace
from typing import Literal

import torch

from fedrolex.clients import Origin, RoundPlan
from fedrolex.recipes import Recipe
from fedrolex.runs.prepare import prepare


def planned(origin: Origin, device: torch.device) -> RoundPlan:
    """A plan with the networks, the task and the work of a run, and without tensors and jobs.

    Data are opened where they lie for this process; nothing of a population is read before a client is asked.
    """
    recipe = origin.recipe if isinstance(origin.recipe, Recipe) else Recipe.decode(origin.recipe)
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    recipe = replace(recipe, engine="loop", device=kind, weights=None, callbacks=[])
    plan = prepare(recipe, origin.task).plan([])
    return plan if origin.view is None else replace(plan, task=origin.view)
