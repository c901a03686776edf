"""The paper's next-word model: a small causal Transformer with a tied softmax.

Post-norm encoder layers (Vaswani et al., 2017) with heads narrower than the stream, sinusoidal positions,
and the embedding used again as the output layer.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedrolex.slicing import Hints


def sinusoids(length: int, width: int) -> Tensor:
    """Sine and cosine waves of falling frequency, shape ``(length, width)``."""
    place = torch.arange(length)[:, None]
    rate = 10_000 ** -(torch.arange(width) // 2 * 2 / width)
    return torch.where(torch.arange(width) % 2 == 0, torch.sin(place * rate), torch.cos(place * rate))


class Layer(nn.Module):
    """Causal self-attention and a feed-forward part of width ``inner``, each followed by its norm.

    A head has ``qk`` dimensions of queries and keys, and ``v`` of values.
    """

    def __init__(self, stream: int, heads: int, qk: int, v: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(stream, heads * qk), nn.Linear(stream, heads * qk)
        self.value, self.out = nn.Linear(stream, heads * v), nn.Linear(heads * v, stream)
        self.norm1 = nn.LayerNorm(stream)
        self.up, self.down = nn.Linear(stream, inner), nn.Linear(inner, stream)
        self.norm2 = nn.LayerNorm(stream)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, time, stream)`` to the same shape."""
        parts = (self.query, self.key, self.value)
        query, key, value = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = self.norm1(x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2))))
        y: Tensor = self.norm2(x + self.dropout(self.down(torch.relu(self.up(x)))))
        return y


class WordTransformer(nn.Module):
    """Next-word scores for every position of a sentence.

    Args:
        vocabulary: number of symbols; 10,004 is 10,000 words, padding, unknown, begin and end.
        length: longest sentence.
        layers: number of layers.
        heads: attention heads a layer.
        head_dim: query, key and value dimensions a head (12 in the paper's text, 16 in its code).
        stream: width of the residual stream.
        inner: width of the feed-forward parts.
        dropout: probability.
        sizes: axis name to width, for sub-models: ``vocabulary``, ``stream``, ``inner0``, ``qk0``, …
    """

    def __init__(
        self,
        vocabulary: int = 10_004,
        length: int = 20,
        layers: int = 3,
        heads: int = 8,
        head_dim: int = 12,
        stream: int = 128,
        inner: int = 2048,
        dropout: float = 0.1,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.plan: dict[str, Any] = {
            "vocabulary": vocabulary, "length": length, "layers": layers, "heads": heads, "head_dim": head_dim,
            "stream": stream, "inner": inner, "dropout": dropout,
        }  # fmt: skip
        sizes = sizes or {}
        vocabulary, stream = sizes.get("vocabulary", vocabulary), sizes.get("stream", stream)
        self.stream = stream
        self.embedding = nn.Embedding(vocabulary, stream)
        nn.init.normal_(self.embedding.weight, std=stream**-0.5)
        self.position: Tensor
        self.register_buffer("position", sinusoids(length, stream), persistent=False)
        inside = {"qk": head_dim, "v": head_dim, "inner": inner}
        self.layers = nn.ModuleList()
        for i in range(layers):
            qk, v, wide = (sizes.get(f"{part}{i}", full) for part, full in inside.items())
            self.layers.append(Layer(stream, heads, qk, v, wide, dropout))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(dropout)

    def forward(self, words: Tensor) -> Tensor:
        """Word numbers ``(batch, time)`` to scores ``(batch, time, vocabulary)``."""
        x = self.dropout(self.embedding(words) * math.sqrt(self.stream) + self.position[: words.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.embedding.weight, self.bias)

    def slicing_example(self) -> Tensor:
        """Two sentences."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.plan["vocabulary"], (2, self.plan["length"]), generator=generator)

    def slicing_hints(self) -> Hints:
        """Axes are derived by tracing; here they only get their names and a factory."""
        names = {"embedding.weight:0": "vocabulary", "embedding.weight:1": "stream"}
        for i in range(len(self.layers)):
            names[f"layers.{i}.query.qk"] = f"qk{i}"
            names[f"layers.{i}.value.v"] = f"v{i}"
            names[f"layers.{i}.query.heads"] = f"heads{i}"
            names[f"layers.{i}.up.weight:0"] = f"inner{i}"
        return Hints(name=names, factory=partial(_build, self.plan))


def _build(plan: Mapping[str, Any], sizes: Mapping[str, int]) -> WordTransformer:
    return WordTransformer(**plan, sizes=sizes)
