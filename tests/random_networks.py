"""Random small networks of the supported layers, whose widths are all arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE_BLOCKS = (
    "conv", "residual", "depthwise", "grouped", "squeeze", "dense", "group_norm", "gated", "attention", "shuffle",
    "split", "transposed", "instance_norm", "slopes", "last_norm", "pooled", "padded", "einsum", "scaled",
)  # fmt: skip
WORD_BLOCKS = (
    "linear", "mlp", "attention", "packed", "branches", "gated", "conv", "recurrent", "batch_norm", "rms", "half",
    "twice", "quarter", "mean", "both_ways", "encoder", "multihead", "bilinear", "normalised", "placed", "experts",
)  # fmt: skip


class ImageBlock(nn.Module):
    """One block of a random network of images; ``width`` channels in and out of it."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        if kind == "dense":
            self.a = nn.Conv2d(inputs, width, 1)
        elif kind == "residual":
            self.a, self.b = nn.Conv2d(inputs, width, 3, padding=1), nn.Conv2d(width, inputs, 1, bias=False)
            self.norm = nn.BatchNorm2d(inputs)
        elif kind == "depthwise":
            self.a, self.b = nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs), nn.Conv2d(inputs, width, 1)
        elif kind == "grouped":
            self.a, self.b = nn.Conv2d(inputs, 2 * width, 1), nn.Conv2d(2 * width, width * 2, 1, groups=2)
        elif kind == "squeeze":
            self.a, self.b = nn.Conv2d(inputs, width, 1), nn.Conv2d(width, inputs, 1)
        elif kind == "group_norm":
            self.a, self.groups = nn.Conv2d(inputs, 2 * width, 1), nn.GroupNorm(2, 2 * width)
        elif kind in ("gated", "split"):
            self.a = nn.Conv2d(inputs, 2 * width, 1)
            self.b = nn.Conv2d(width, width, 1)
        elif kind == "attention":
            self.q, self.k, self.v = (nn.Linear(inputs, 2 * width, bias=False) for _ in range(3))
            self.o = nn.Linear(2 * width, inputs)
        elif kind == "shuffle":
            self.a = nn.Conv2d(inputs, 4 * width, 1)
        elif kind == "transposed":
            self.up = nn.ConvTranspose2d(inputs, width, 2, stride=2)
        elif kind == "instance_norm":
            self.a, self.instance = nn.Conv2d(inputs, width, 1), nn.InstanceNorm2d(width, affine=True)
        elif kind == "slopes":
            self.a, self.slopes = nn.Conv2d(inputs, width, 1), nn.PReLU(width)
        elif kind == "last_norm":
            self.a, self.last = nn.Conv2d(inputs, width, 1), nn.LayerNorm(width)
        elif kind in ("pooled", "padded"):
            self.a = nn.Conv2d(inputs, width, 3, padding=1 if kind == "pooled" else 0)
        elif kind == "einsum":
            self.mix = nn.Parameter(torch.randn(width, inputs))
        elif kind == "scaled":
            self.a, self.gamma = nn.Conv2d(inputs, inputs, 1), nn.Parameter(torch.randn(inputs, 1, 1))
        else:
            self.a, self.norm = nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "dense":
                y = torch.cat([x, torch.relu(self.a(x))], 1)
            case "residual":
                y = torch.relu(self.norm(x + self.b(torch.relu(self.a(x)))))
            case "depthwise" | "grouped":
                y = self.b(F.gelu(self.a(x)))
            case "squeeze":
                y = x * torch.sigmoid(self.b(torch.relu(self.a(x.mean((2, 3), keepdim=True)))))
            case "group_norm":
                y = F.silu(self.groups(self.a(x)))
            case "gated":
                y = self.b(F.glu(self.a(x), 1))
            case "split":
                left, right = self.a(x).chunk(2, 1)
                y = torch.cat([self.b(left), right], 1)
            case "attention":
                flat = x.flatten(2).mT
                q, k, v = (p(flat).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
                mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
                y = x + self.o(mixed).mT.reshape(x.shape)
            case "shuffle":
                y = F.pixel_shuffle(self.a(x), 2)[..., ::2, ::2]
            case "transposed":
                y = F.avg_pool2d(torch.relu(self.up(x)), 2)
            case "instance_norm":
                y = F.elu(self.instance(self.a(x)))
            case "slopes":
                y = self.slopes(self.a(x))
            case "last_norm":
                y = F.hardswish(self.last(self.a(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
            case "pooled":
                y = F.interpolate(F.max_pool2d(self.a(x), 2), scale_factor=2.0, mode="nearest")
            case "padded":
                y = F.leaky_relu(self.a(F.pad(x, (1, 1, 1, 1), mode="reflect")))
            case "einsum":
                y = torch.einsum("oc,bchw->bohw", self.mix, x).sigmoid()
            case "scaled":
                y = x + self.gamma * self.a(x)
            case _:
                y = torch.relu(self.norm(self.a(x)))
        return y


class Images(nn.Module):
    """A stem, some blocks, a flattened head."""

    def __init__(self, kinds: Sequence[str], widths: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, widths[0], 1)
        self.blocks = nn.Sequential()
        x = torch.zeros(2, 2, 4, 4)
        channels = widths[0]
        for kind, width in zip(kinds, widths[1:], strict=True):
            self.blocks.append(ImageBlock(kind, channels, width))
            channels = self.blocks.eval()(self.stem(x)).shape[1]
        self.head = nn.Linear(channels * 4, 3)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 2).flatten(1))
        return y


class WordBlock(nn.Module):
    """One block of a random network of words; ``width`` features in it, or in one of its heads."""

    def __init__(self, kind: str, inputs: int, width: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width
        match kind:
            case "mlp":
                self.layer_norm = nn.LayerNorm(inputs)
                self.a, self.b = nn.Linear(inputs, width), nn.Linear(width, inputs)
            case "attention":
                self.q, self.k, self.v = (nn.Linear(inputs, 2 * width) for _ in range(3))
                self.o = nn.Linear(2 * width, inputs)
            case "packed":
                self.qkv, self.o = nn.Linear(inputs, 6 * width), nn.Linear(2 * width, inputs)
            case "branches":
                self.a, self.b = nn.Linear(inputs, width), nn.Linear(inputs, width, bias=False)
            case "gated":
                self.a = nn.Linear(inputs, 2 * width)
            case "conv":
                self.conv = nn.Conv1d(inputs, width, 3, padding=1)
            case "recurrent":
                self.rnn = nn.GRU(inputs, width, batch_first=True)
            case "batch_norm":
                self.norm = nn.BatchNorm1d(inputs)
            case "rms":
                self.scale = nn.Parameter(torch.ones(inputs))
            case "both_ways":
                self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=True)
            case "encoder":
                self.layer = nn.TransformerEncoderLayer(inputs, 2, width, dropout=0.0, batch_first=True)
            case "multihead":
                self.heads = nn.MultiheadAttention(inputs, 2, batch_first=True)
            case "bilinear":
                self.a, self.pairs = nn.Linear(inputs, width), nn.Bilinear(inputs, width, inputs)
            case "normalised":
                self.root_mean = nn.RMSNorm(inputs)
                self.a, self.b = nn.Linear(inputs, width), nn.Linear(width, inputs, bias=False)
            case "experts":
                self.gate = nn.Linear(inputs, 3)
                self.experts = nn.ModuleList(nn.Linear(inputs, width) for _ in range(3))
            case _:
                self.a = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "mlp":
                y: Tensor = x + self.b(F.gelu(self.a(self.layer_norm(x))))
            case "attention":
                q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
                scores = (q @ k.mT * self.width**-0.5).softmax(-1)
                y = x + self.o((scores @ v).transpose(1, 2).flatten(2))
            case "packed":
                q, k, v = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
                y = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            case "branches":
                y = torch.cat([self.a(x), torch.relu(self.b(x))], -1)
            case "gated":
                y = F.glu(self.a(x), -1)
            case "conv":
                y = torch.relu(self.conv(x.mT)).mT
            case "recurrent":
                y = self.rnn(x)[0]
            case "batch_norm":
                y = self.norm(x.mT).mT
            case "rms":
                y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3) * self.scale
            case "half" | "twice" | "quarter":
                y = {"half": 0.5, "twice": 2, "quarter": 0.25}[self.kind] * self.a(x)
            case "both_ways":
                y = self.lstm(x)[0]
            case "encoder":
                y = self.layer(x)
            case "multihead":
                y = x + self.heads(x, x, x, need_weights=False)[0]
            case "bilinear":
                y = self.pairs(x, torch.tanh(self.a(x)))
            case "normalised":
                y = x + self.b(F.softplus(self.a(self.root_mean(x))))
            case "placed":
                rows = self.a(x).flatten(0, 1)
                order = torch.arange(rows.shape[0], device=x.device).flip(0)
                y = torch.zeros_like(rows).index_add(0, order, rows).unflatten(0, x.shape[:2])
            case "experts":
                shares = self.gate(x).softmax(-1)
                y = torch.stack([each(x) for each in self.experts], -1) @ shares.unsqueeze(-1)
                y = y.squeeze(-1)
            case "mean":
                y = torch.tanh(self.a(x)) - x.sum((1, 2), keepdim=True) / x.shape[1]
            case _:
                y = F.silu(self.a(x))
        return y


class Words(nn.Module):
    """An embedding, some blocks, and scores by the embedding's own rows where ``tied``."""

    def __init__(self, kinds: Sequence[str], widths: Sequence[int], tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, widths[0])
        self.root = widths[0] ** 0.5
        self.blocks = nn.Sequential()
        channels = widths[0]
        for kind, width in zip(kinds, widths[1:], strict=True):
            self.blocks.append(WordBlock(kind, channels, width))
            channels = self.blocks.eval()(torch.zeros(2, 3, widths[0])).shape[-1]
        self.back = nn.Linear(channels, widths[0])
        self.head = None if tied else nn.Linear(widths[0], 3)
        self.train()

    def forward(self, words: Tensor) -> Tensor:
        h = self.back(self.blocks(self.embedding(words) * self.root))
        y: Tensor = F.linear(h, self.embedding.weight) if self.head is None else self.head(h)
        return y
