"""What keeps runs of one process apart on a GPU: streams that nobody else holds, and a gate that one thread closes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import pytest
import torch

from fedrolex.engines.gpu.sharing import POOL, Gate, Streams, own_stream

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Pooled:
    cuda_stream: int


def pool() -> Callable[[torch.device], Pooled]:
    """Streams in turn, as PyTorch hands them out."""
    handles = cycle(range(POOL))
    return lambda device: Pooled(next(handles))


def test_two_holders_never_get_the_same_stream() -> None:
    take = pool()
    streams = Streams(take)
    held = []
    for turn in range(POOL):
        for _ in range(turn % 5):
            take(DEVICE)  # others take streams, too
        held.append(streams.take(DEVICE))
    assert len(set(held)) == POOL


def test_a_stream_that_is_given_back_is_free_again() -> None:
    streams = Streams(pool())
    held = [streams.take(DEVICE) for _ in range(POOL)]
    streams.give_back(held[7])
    assert streams.take(DEVICE) == held[7]


def test_whoever_comes_later_gets_the_same_streams_again() -> None:
    """Libraries keep workspaces for every stream that they were used on."""
    streams = Streams(pool())
    for _ in range(5):
        held = [streams.take(DEVICE) for _ in range(3)]
        assert [stream.cuda_stream for stream in held] == [0, 1, 2]
        streams.give_back(*held)


def test_where_all_are_held_those_of_the_fewest_are_shared() -> None:
    streams = Streams(pool())
    twice = [streams.take(DEVICE) for _ in range(2 * POOL)]
    assert sorted(stream.cuda_stream for stream in twice) == sorted([*range(POOL)] * 2)


def at_once(work: Callable[[int], None], threads: int) -> None:
    """Run in threads; a thread that hangs fails the test instead of hanging it."""
    with ThreadPoolExecutor(threads) as executor:
        for future in [executor.submit(work, number) for number in range(threads)]:
            future.result(timeout=120)


def test_who_is_alone_is_alone() -> None:
    """Threads that pass all the time, each of which asks to be alone now and then."""
    gate, lock, inside, alone = Gate(), threading.Lock(), set[int](), list[int]()

    def run(number: int) -> None:
        with gate.passing():
            for turn in range(200):
                with lock:
                    inside.add(number)
                with gate.passing():  # again, by the same thread
                    pass
                with lock:
                    inside.remove(number)
                gate.pause()
                if turn % (7 + number) == 0:
                    with gate.alone(), gate.alone():
                        assert not inside
                        alone.append(number)
                        with gate.passing():
                            assert not inside

    at_once(run, 4)
    assert set(alone) == {0, 1, 2, 3}


def test_threads_pass_side_by_side() -> None:
    gate, both = Gate(), threading.Barrier(2)

    def run(number: int) -> None:
        with gate.passing():
            both.wait(timeout=120)  # breaks if the other thread cannot come in

    at_once(run, 2)


def test_a_failure_opens_the_gate() -> None:
    gate = Gate()
    with pytest.raises(ZeroDivisionError), gate.passing(), gate.alone():
        raise ZeroDivisionError

    def run(number: int) -> None:
        with gate.alone():
            pass

    at_once(run, 2)


def test_whoever_waits_to_be_alone_goes_before_those_who_come_later() -> None:
    gate, order = Gate(), list[str]()
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with gate.passing():
            inside.set()
            leave.wait(timeout=120)
            gate.pause()
            order.append("passes again")

    def capture() -> None:
        with gate.alone():
            order.append("alone")

    def late() -> None:
        with gate.passing():
            order.append("late")

    with ThreadPoolExecutor(3) as executor:
        futures = [executor.submit(first)]
        assert inside.wait(timeout=120)
        futures.append(executor.submit(capture))
        while not gate.asked:
            pass
        futures.append(executor.submit(late))
        leave.set()
        for future in futures:
            future.result(timeout=120)
    assert order[0] == "alone"


def test_on_a_cpu_a_thread_only_passes() -> None:
    with own_stream(torch.device("cpu")):
        pass
