"""The fleet: which clients there are, what each can hold, and which are there in a round.

Nothing is stored per client: capacities, availability and cohorts are computed from keyed random streams
when they are asked for, so a fleet of a million costs what a fleet of ten does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np

from fedrolex.errors import FedrolexError
from fedrolex.slicing.windows import exact
from fedrolex.streams import sample, words


@dataclass(frozen=True)
class Member:
    """A client that takes part in a round, with what it can hold then."""

    client: int
    capacity: Fraction


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A population of clients.

    Attributes:
        clients: how many there are; they are numbered from 0.
        cohort: how many take part in a round.
        capacities: the levels.
        shares: how large a part of the fleet has each level; equal parts by default.
        redrawn: whether every client's capacity is drawn anew each round (as in the published runs)
            instead of being its own for ever.
        availability: the chance that a client is there in a round, or a list with one entry a round
            (repeated from the start when it ends) of the clients that are.
        seed: key of all draws.
    """

    clients: int
    cohort: int
    capacities: Sequence[Fraction | str | float] = ("1", "1/2", "1/4", "1/8", "1/16")
    shares: Sequence[Fraction | str | float] | None = None
    redrawn: bool = False
    availability: float | Sequence[Sequence[int]] = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1 or not 1 <= self.cohort <= self.clients:
            raise FedrolexError(f"a cohort of {self.cohort} of {self.clients} clients: give 1 ≤ cohort ≤ clients")
        if not self.capacities:
            raise FedrolexError("a fleet needs at least one capacity")
        for value in self.capacities:
            exact(value)
        if self.shares is not None:
            if len(self.shares) != len(self.capacities):
                raise FedrolexError(f"{len(self.shares)} shares for {len(self.capacities)} capacities: give one each")
            if sum(Fraction(str(share)) for share in self.shares) != 1:
                raise FedrolexError("the shares of the capacities must add up to 1")
        if isinstance(self.availability, int | float) and not 0 < self.availability <= 1:
            raise FedrolexError(f"availability {self.availability} is outside (0, 1]")

    @property
    def levels(self) -> list[Fraction]:
        """The capacities as fractions."""
        return [exact(value) for value in self.capacities]

    def capacity(self, client: int, round: int) -> Fraction:
        """What a client can hold in a round."""
        levels = self.levels
        if not self.redrawn and self.shares is None:
            return levels[client % len(levels)]
        key = (round, client) if self.redrawn else (client,)
        draw = Fraction(int(words(1, self.seed, "capacity", *key)[0]), 2**64)
        shares = [Fraction(str(s)) for s in self.shares] if self.shares else [Fraction(1, len(levels))] * len(levels)
        for level, share in zip(levels, shares, strict=True):
            if draw < share:
                return level
            draw -= share
        return levels[-1]

    def members(self, round: int, able: Fraction | None = None) -> list[Member]:
        """The cohort of a round, in the order of client numbers.

        Args:
            round: counted from 0.
            able: only clients with at least this capacity may take part.
        """
        candidates = self._present(round)
        if able is not None:
            candidates = np.array([c for c in candidates if self.capacity(int(c), round) >= able], dtype=np.int64)
        count = min(self.cohort, len(candidates))
        chosen = candidates[sample(len(candidates), count, self.seed, "cohort", round)] if count else candidates
        return [Member(int(client), self.capacity(int(client), round)) for client in chosen]

    def _present(self, round: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        if isinstance(self.availability, int | float):
            if self.availability == 1:
                return np.arange(self.clients)
            draws = words(self.clients, self.seed, "availability", round)
            return np.flatnonzero(draws < np.uint64(min(self.availability * 2**64, 2**64 - 1)))
        there = sorted(set(self.availability[round % len(self.availability)]))
        if there and not 0 <= there[0] <= there[-1] < self.clients:
            raise FedrolexError(f"the availability trace names client {there[-1]} of {self.clients}")
        return np.array(there, dtype=np.int64)


Mode = Literal["fixed", "redrawn"]
