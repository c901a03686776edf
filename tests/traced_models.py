"""Small models that tests of tracing share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention in several spellings; ``style`` says which."""

    def __init__(self, stream: int = 12, qk: int = 6, v: int = 4, style: str = "sdpa") -> None:
        super().__init__()
        self.style, self.qk = style, qk
        self.embed = nn.Linear(5, stream)
        self.q, self.k = nn.Linear(stream, 3 * qk), nn.Linear(stream, 3 * qk)
        self.v, self.o = nn.Linear(stream, 3 * v), nn.Linear(3 * v, stream)
        self.norm = nn.LayerNorm(stream)
        self.head = nn.Linear(stream, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (part(x).unflatten(-1, (3, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.style == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v)
        elif self.style == "divide":
            mixed = (q @ k.transpose(-2, -1) / math.sqrt(self.qk)).softmax(-1) @ v
        elif self.style == "multiply":
            mixed = ((q * self.qk**-0.5) @ k.mT).softmax(-1) @ v
        else:
            scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / torch.full([], q.shape[-1] ** 0.5)
            mixed = torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)
        y: Tensor = self.head(self.norm(x + self.o(mixed.transpose(1, 2).flatten(2))).mean(1))
        return y
