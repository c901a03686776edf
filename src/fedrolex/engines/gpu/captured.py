"""A step as a CUDA graph."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedrolex.core import FedrolexError
from fedrolex.engines.gpu.precision import tried_convolutions
from fedrolex.engines.gpu.sharing import GATE
from fedrolex.rounds import out_of_memory
from fedrolex.slicing import one_line

WARM_UP = 3
Step = Callable[[], Any]


def captured(
    step: Step, reset: Step, stream: Any, precision: str = "fp32", draws: torch.Generator | None = None
) -> Step:
    """A function that does what ``step`` does, in one launch; without a stream, on a CPU, the step itself.

    The step is captured on the stream it will run on: streams have workspaces of their own, and graphs captured on one
    stream and replayed side by side would overwrite each other's. Other runs of the process pause meanwhile.

    Args:
        step: works on tensors that stay where they are, and reads nothing back.
        reset: called before every trial run, and at last.
        stream: to run on; from :data:`~fedrolex.engines.gpu.sharing.STREAMS`.
        precision: of the step's convolutions, which are tried with all algorithms where they are not PyTorch's own.
        draws: the generator that dropout in the step draws from, now and whenever the step runs; PyTorch's by default.
    """
    if stream is None:
        return step
    graph = torch.cuda.CUDAGraph()
    with GATE.alone(), tried_convolutions(precision), _drawing_from(draws):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                reset()
                step()
            reset()
        stream.synchronize()
        try:
            with _nothing_freed(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as failure:
            if out_of_memory(failure):
                raise
            raise FedrolexError(f"a step cannot be captured ({one_line(failure)}): use engine loop") from failure
    return graph.replay


@contextmanager
def _nothing_freed() -> Iterator[None]:
    """Inside, the garbage collector rests: a graph that it freed, of a run before, would end a capture under way."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def _drawing_from(draws: torch.Generator | None) -> Iterator[None]:
    """Inside, what draws from the device's default generator draws from another one.

    A graph that is captured inside draws from that generator for good. Graphs that share a generator also share the
    place on the device where replays leave the generator's state, and must not be replayed at once.
    """
    if draws is None:
        yield
        return
    default = torch.cuda.default_generators[draws.device.index or 0]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(draws)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
