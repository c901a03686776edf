"""How many threads an operation of PyTorch is spread over.

Threads that share an operation wait for each other at its end, and spin while they wait. On cores that are busy with
something else, every small operation then takes as long as the other program's turn: a hundred times as long as alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL = 2**18  # parameters of a network up to which a second thread gains little


def threads_for(parameters: int) -> int:
    """How many of PyTorch's threads a network of so many parameters is worth: one, or all."""
    return 1 if parameters <= SMALL else torch.get_num_threads()


@contextmanager
def spread_over(threads: int) -> Iterator[None]:
    """Inside, operations of this thread are spread over so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
