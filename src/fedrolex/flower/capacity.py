"""How much of a model a device can hold: its memory, and a few steps on the clock."""

import os
import time
from collections.abc import Mapping
from fractions import Fraction
from math import inf
from typing import Any

import torch

from fedrolex.clients import MODEL, Slot
from fedrolex.core import FedrolexError
from fedrolex.runs.training import Training
from fedrolex.slicing import Static

COPIES = 5  # of the weights while a client trains: themselves, gradients, two of an optimiser, what was received
STEPS = 3


def measured(training: Training, node: Mapping[str, Any]) -> Fraction:
    """The largest capacity of the recipe that fits a device.

    Args:
        training: of the recipe.
        node: the node's config: ``memory``, MiB that training may take (by default half of what is free), and
            ``seconds``, the most that a step may take (by default no limit).
    """
    room = int(float(node["memory"]) * 2**20) if "memory" in node else free_memory(training.engine.device) // 2
    seconds = float(node.get("seconds", inf))
    levels = sorted(training.server.fleet.levels, reverse=True)
    fitting = [level for level in levels if needed(training, level) <= room]
    if not fitting:
        least = f"{needed(training, levels[-1]) / 2**20:.1f} MiB"
        raise FedrolexError(f"the device cannot hold {levels[-1]}, the least of the recipe: that takes {least}")
    if seconds == inf:
        return fitting[0]
    for level in fitting:
        if step_seconds(training, level) <= seconds:
            return level
    raise FedrolexError(f"a step of {levels[-1]}, the least of the recipe, takes the device longer than {seconds:g} s")


def needed(training: Training, capacity: Fraction) -> int:
    """Bytes that training a sub-model takes: its weights several times, and what a batch leaves for the way back."""
    axes = training.server.main.axes
    window = Static().window(axes, round=0, capacity=capacity, client=0)
    weights = 4 * axes.parameters(window)
    module = axes.cut(training.server.main.module, window)
    saved = 0

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    example = training.server.task.example().to(training.server.device)
    with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
        module(example)
    return COPIES * weights + saved * training.work.batch // max(1, len(example))


def step_seconds(training: Training, capacity: Fraction) -> float:
    """Seconds that one step of a sub-model takes on this device, the quickest of a few."""
    server, work = training.server, training.work
    axes, network = server.main.axes, server.networks[MODEL]
    window = Static().window(axes, round=0, capacity=capacity, client=0)
    slot = Slot(axes.cut(network.module, window), training.engine.precision)
    example = server.task.example().to(server.device)
    x = example.repeat(-(-work.batch // len(example)), *[1] * (example.dim() - 1))[: work.batch]
    best = inf
    for _ in range(STEPS):
        began = time.perf_counter()
        torch.autograd.grad(slot.scores(x).float().square().mean(), slot.parameters, allow_unused=True)
        best = min(best, time.perf_counter() - began)
    return best


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
