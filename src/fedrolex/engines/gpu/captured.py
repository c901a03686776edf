"""A step as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedrolex.engines.gpu.precision import tried_convolutions
from fedrolex.engines.gpu.sharing import GATE

WARM_UP = 3


def captured(
    step: Callable[[], Any], reset: Callable[[], Any], stream: Any, precision: str = "fp32"
) -> Callable[[], Any]:
    """A function that does what ``step`` does, in one launch; without a stream, on a CPU, the step itself.

    The step is captured on the stream it will run on: streams have workspaces of their own, and graphs captured on one
    stream and replayed side by side would overwrite each other's. Other runs of the process pause meanwhile.

    Args:
        step: works on tensors that stay where they are, and reads nothing back.
        reset: called before every trial run, and at last.
        stream: to run on; from :data:`~fedrolex.engines.gpu.sharing.STREAMS`.
        precision: of the step's convolutions, which are tried with all algorithms where they are not PyTorch's own.
    """
    if stream is None:
        return step
    graph = torch.cuda.CUDAGraph()
    with GATE.alone(), tried_convolutions(precision):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                reset()
                step()
            reset()
        stream.synchronize()
        with _no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: garbage may be graphs and tensors of other runs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
