"""The engine ``auto``: the fastest one that a machine has, by a rule."""

from __future__ import annotations

import torch

from fedrolex.clients.slot import Precision
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop
from fedrolex.rounds.engine import Engine


def choose(*, precision: Precision = "fp32", device: torch.device | None = None) -> Engine:
    """``graph`` on a GPU, ``crew`` on a CPU where PyTorch has more than one thread, else ``loop``."""
    if device is not None and device.type == "cuda":
        from fedrolex.engines.gpu.graph import Graph

        return Graph(precision=precision, device=device)
    if torch.get_num_threads() > 1:
        return Crew(precision=precision, device=device)
    return Loop(precision=precision, device=device)
