"""Several runs of one process on one GPU: streams that no two runs hold, and captures while the other runs pause.

PyTorch hands out 32 pooled streams in turn, so that two users may get the same stream. Work that one thread launches
on a stream while another thread captures there ends up in the captured graph, and a copy to the host breaks both.
Warming up and capturing also change settings of the whole process. So there are two rules. Whoever needs a stream takes
it from :data:`STREAMS`. Whoever captures is alone at the :data:`GATE`, which every run passes while it works.
"""

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
        self._passing: set[int] = set()  # threads
        self._alone: int | None = None
        self._asking = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Inside, no other thread is alone."""
        me = threading.get_ident()
        if me in self._passing or me == self._alone:
            yield
            return
        self._step_in(me)
        try:
            yield
        finally:
            self._step_out(me)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, no other thread passes."""
        me = threading.get_ident()
        if me == self._alone:
            yield
            return
        passed = me in self._passing
        self._step_out(me)
        try:
            with self._changed:
                self._asking += 1
                try:
                    self._changed.wait_for(lambda: self._alone is None and not self._passing)
                    self._alone = me
                finally:
                    self._asking -= 1
            yield
        finally:
            with self._changed:
                self._alone = None if self._alone == me else self._alone
                self._changed.notify_all()
            if passed:
                self._step_in(me)

    @property
    def asked(self) -> bool:
        """Whether a thread waits to be alone."""
        return self._asking > 0

    def pause(self) -> None:
        """Let a thread that asks to be alone go first."""
        me = threading.get_ident()
        if self.asked and me in self._passing:
            self._step_out(me)
            self._step_in(me)

    def _step_in(self, thread: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._alone is None and not self._asking)
            self._passing.add(thread)

    def _step_out(self, thread: int) -> None:
        with self._changed:
            self._passing.discard(thread)
            self._changed.notify_all()


class Streams:
    """Who holds how many of the streams that ``pooled`` gives for a device, in turn."""

    def __init__(self, pooled: Callable[[torch.device], Any] = torch.cuda.Stream) -> None:
        self._pooled = pooled
        self._lock = threading.Lock()
        self._known: dict[torch.device, list[Any]] = {}
        self._holders: Counter[int] = Counter()

    def take(self, device: torch.device) -> Any:
        """The first stream that nobody holds, whose libraries' workspaces may be there already.

        Where all streams are held, one of those that the fewest hold.
        """
        with self._lock:
            if device not in self._known:
                found = [self._pooled(device) for _ in range(POOL)]
                self._known[device] = list({stream.cuda_stream: stream for stream in found}.values())
            taken = min(self._known[device], key=lambda stream: self._holders[stream.cuda_stream])
            self._holders[taken.cuda_stream] += 1
        return taken

    def give_back(self, *streams: Any) -> None:
        """The holder is done with streams."""
        with self._lock:
            for stream in streams:
                self._holders[stream.cuda_stream] -= 1


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
