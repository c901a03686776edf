"""Launches of a cohort's optimiser: collect gradients, limit their norms, step."""

from __future__ import annotations

import torch
from torch import Tensor

from fedrolex.clients.work import LocalTraining
from fedrolex.engines.gpu.ragged import step_kernels
from fedrolex.engines.gpu.ragged.buffers import ALIGN, padded
from fedrolex.engines.gpu.ragged.layers import Launch, Layers
from fedrolex.engines.gpu.ragged.tables import table

SIZE = 4096  # parameters a program


def optimiser(layers: Layers, work: LocalTraining, rate: Tensor, done: Tensor) -> list[Launch]:
    """Launches that follow the gradients of all ``layers``.

    Args:
        layers: of the cohort, all of whose gradients are known.
        work: what clients do.
        rate: learning rate, ``()``.
        done: steps done by every client, with this one, int32 ``(clients,)``.
    """
    own, clients, rows, late = layers.parameters, layers.clients, [], []
    for client in range(clients):
        for name, (begin, length) in own.spans(client).items():
            parts = layers.split.get(name)
            for first in range(0, length, SIZE):
                place = (parts.begins[client] + first, parts.count, parts.apart[client]) if parts else (0, 0, 0)
                row = (begin + first, min(SIZE, padded(length, ALIGN) - first), *place, client)
                rows.append(row)
                if name not in layers.summed:
                    late.append((*row, layers.squares_used[client]))
                    layers.squares_used[client] += 1
    chunks, unsummed = (table(layers.device, *zip(*each, strict=True)) for each in (rows, late))
    factors = torch.zeros(clients, device=layers.device)

    def collect() -> None:
        layers.launch(
            step_kernels.collect, (len(late),),
            layers.weight_parts, own.gradients, layers.squares, unsummed, layers.squares.shape[1], SIZE=SIZE,
        )  # fmt: skip

    def limit() -> None:
        squares = layers.squares
        layers.launch(step_kernels.limit, (clients,), squares, factors, squares.shape[1], work.clip, SIZE=1024)

    def descend() -> None:
        layers.launch(
            step_kernels.descend, (len(rows),),
            own.values, own.gradients, own.memories[0], own.memories[-1], own.lowered, factors, done,
            rate, chunks, layers.counts, work.weight_decay, work.momentum,
            CLIP=work.clip is not None, ADAM=work.optimizer == "adam", MOMENTUM=work.momentum > 0,
            LOW=own.lowered is not own.values, SIZE=SIZE,
        )  # fmt: skip

    return [collect, limit, descend] if work.clip is not None else [collect, descend]
