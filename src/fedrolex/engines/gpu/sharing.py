"""Several runs of one process on one GPU: streams that no two runs hold, and captures while the other runs pause.

PyTorch hands out 32 pooled streams in turn, so that two users may get the same stream. Work that one thread launches
on a stream while another thread captures there ends up in the captured graph, and a copy to the host breaks both.
Warming up and capturing also change settings of the whole process. So there are two rules. Whoever needs a stream takes
it from :data:`STREAMS`. Whoever captures is alone at the :data:`GATE`, which every run passes while it works.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

POOL = 32  # streams that PyTorch hands out in turn


class Gate:
    """Threads pass side by side, or one thread is alone.

    A thread that passes may ask to be alone: the thread steps out, waits until nobody passes, and passes again
    afterwards. No thread waits for another while it passes, so threads cannot wait for each other in a circle. A thread
    that asks to be alone goes before threads that come later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passing = 0
        self._asking = 0
        self._taken = False
        self._mine = threading.local()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, no other thread is alone."""
        outermost = not self._holds()
        if outermost:
            self._step_in()
        try:
            yield
        finally:
            if outermost:
                self._step_out()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other thread passes."""
        if getattr(self._mine, "alone", False):
            yield
            return
        passed = self._holds()
        if passed:
            self._step_out()
        try:
            self._take()
            try:
                yield
            finally:
                self._give_back()
        finally:
            if passed:
                self._step_in()

    @property
    def asked(self) -> bool:
        """Whether a thread waits to be alone."""
        return self._asking > 0

    def pause(self) -> None:
        """Let a thread that asks to be alone go first."""
        if self.asked and getattr(self._mine, "passing", False):
            self._step_out()
            self._step_in()

    def _holds(self) -> bool:
        return getattr(self._mine, "passing", False) or getattr(self._mine, "alone", False)

    def _step_in(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not (self._taken or self._asking))
            self._passing += 1
        self._mine.passing = True

    def _step_out(self) -> None:
        self._mine.passing = False
        with self._changed:
            self._passing -= 1
            self._changed.notify_all()

    def _take(self) -> None:
        with self._changed:
            self._asking += 1
            try:
                self._changed.wait_for(lambda: not (self._taken or self._passing))
                self._taken = True
            finally:
                self._asking -= 1
                self._changed.notify_all()
        self._mine.alone = True

    def _give_back(self) -> None:
        self._mine.alone = False
        with self._changed:
            self._taken = False
            self._changed.notify_all()


class Streams:
    """Who holds how many of the pooled streams.

    Args:
        pooled: gives a device's streams in turn.
    """

    def __init__(self, pooled: Callable[[torch.device], Any] = torch.cuda.Stream) -> None:
        self._pooled = pooled
        self._lock = threading.Lock()
        self._holders: Counter[int] = Counter()

    def take(self, device: torch.device) -> Any:
        """A stream that nobody holds; where all are held, one of those that the fewest hold."""
        with self._lock:
            found = min((self._pooled(device) for _ in range(POOL)), key=self._held)
            self._holders[found.cuda_stream] += 1
        return found

    def give_back(self, *streams: Any) -> None:
        """The holder is done with streams."""
        with self._lock:
            for stream in streams:
                self._holders[stream.cuda_stream] -= 1

    def _held(self, stream: Any) -> int:
        return self._holders[stream.cuda_stream]


GATE = Gate()
STREAMS = Streams()


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Inside, a thread passes the gate and, on a GPU, works on a stream of its own."""
    with GATE.passing():
        if device.type != "cuda":
            yield
            return
        stream = STREAMS.take(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                yield
            stream.synchronize()
        finally:
            STREAMS.give_back(stream)
