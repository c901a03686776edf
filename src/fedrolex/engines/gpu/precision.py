"""Switches of the libraries underneath: TensorFloat-32, and results that are the same every time."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


def use_tf32(on: bool) -> None:
    """Whether float32 products may run on tensor cores with ten bits of mantissa."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def tried_convolutions(precision: str) -> AbstractContextManager[None]:
    """Inside, every new shape of a convolution is timed with all algorithms, unless results must be the same."""
    fastest = not torch.are_deterministic_algorithms_enabled()
    flags: AbstractContextManager[None] = torch.backends.cudnn.flags(
        enabled=True, benchmark=fastest, deterministic=not fastest, allow_tf32=precision != "fp32"
    )
    return flags


@contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Only algorithms that add up in a fixed order inside: slower, the same bits on the same machine."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if on:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(on)
    torch.backends.cudnn.benchmark = before[1] and not on
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
