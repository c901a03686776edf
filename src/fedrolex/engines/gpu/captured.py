"""A step as a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from fedrolex.engines.gpu.precision import tried_convolutions

WARM_UP = 3
CAPTURING = threading.Lock()  # whoever begins to capture waits for the whole device


def captured(
    step: Callable[[], Any], reset: Callable[[], Any], stream: Any, precision: str = "fp32"
) -> Callable[[], Any]:
    """A function that does what ``step`` does, in one launch; without a stream, on a CPU, the step itself.

    It is captured on the stream it will run on: streams have workspaces of their own, and graphs captured on one stream
    and replayed side by side would overwrite each other's. Other threads may go on meanwhile.

    Args:
        step: works on tensors that stay where they are, and reads nothing back.
        reset: called before every trial run, and at last.
        stream: to run on.
        precision: of its convolutions, which are tried with all algorithms where they are not PyTorch's own.
    """
    if stream is None:
        return step
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with tried_convolutions(precision):
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                reset()
                step()
            reset()
        stream.synchronize()
        with CAPTURING, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
    return graph.replay
