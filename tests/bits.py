"""Hashes of tensors, and whether this machine computes the bits of another one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy


def digest(tensor: Tensor) -> str:
    """A hash of a tensor's shape, type and bits."""
    tensor = tensor.detach().cpu().contiguous()
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + tensor.numpy().tobytes()).hexdigest()[:16]


def together(tensors: Iterable[Tensor]) -> str:
    """A hash of a set of tensors, whatever their names and their order."""
    return hashlib.sha256("".join(sorted({digest(tensor) for tensor in tensors})).encode()).hexdigest()[:16]


def arithmetic() -> str:
    """A hash of a small network's gradients: machines that agree here compute the same bits."""
    draw = torch.Generator().manual_seed(0)
    x, first, last = (torch.randn(*shape, generator=draw) for shape in ((16, 1, 8, 8), (8, 1, 3, 3), (512, 10)))
    first.requires_grad_(), last.requires_grad_()
    loss = cross_entropy(conv2d(x, first, padding=1).tanh().flatten(1) @ last, torch.arange(16) % 10)
    return together(torch.autograd.grad(loss, (first, last)))


def same_bits(about: Mapping[str, object]) -> bool:
    """Whether this machine computes the bits of the one that hashes are from: the same PyTorch and arithmetic."""
    here = [torch.__version__, torch.backends.cpu.get_cpu_capability(), arithmetic()]
    return here == [about[what] for what in ("torch", "cpu", "arithmetic")]
