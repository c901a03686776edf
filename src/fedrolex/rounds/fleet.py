"""The fleet: which clients there are, what each can hold, and which are there in a round.

Nothing is stored per client: capacities, availability and cohorts are computed from keyed random streams
when they are asked for, so a round of a fleet of a million costs what a round of a fleet of a thousand does.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import islice
from math import floor, inf

import numpy as np

from fedrolex.core import FedrolexError, deck, random_words, shuffle, uniform
from fedrolex.slicing import Capacity, exact
from fedrolex.slicing.windows import fraction


@dataclass(frozen=True)
class Member:
    """A client that takes part in a round, with what it can hold then, and the part of its work that it manages."""

    client: int
    capacity: Fraction
    part: float = 1.0


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
        stratified: whether a cohort has clients of every level in the shares that they have in the fleet, instead of
            as they come; what is left of a cohort after whole clients of every level is drawn as it comes.
        balanced: whether a cohort has all classes about equally often: twice as many clients are drawn, and one after
            the other joins whose classes are the rarest in the cohort so far.
        classes: that each client holds, for balanced cohorts.
        availability: the chance that a client is there in a round, or a list with one entry a round
            (repeated from the start when it ends) of the clients that are.
        stragglers: the chance that a client manages only a part of its work in a round, evenly between none and all.
        seed: key of all draws.
    """

    clients: int
    cohort: int
    capacities: Sequence[Capacity] = ("1", "1/2", "1/4", "1/8", "1/16")
    shares: Sequence[Capacity] | None = None
    redrawn: bool = False
    stratified: bool = False
    balanced: bool = False
    classes: Sequence[Sequence[int]] = field(default=(), repr=False)
    availability: float | Sequence[Sequence[int]] = 1.0
    stragglers: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1 or not 1 <= self.cohort <= self.clients:
            raise FedrolexError(f"a cohort of {self.cohort} of {self.clients} clients: give 1 ≤ cohort ≤ clients")
        if self.stratified and self.balanced:
            raise FedrolexError("fleet.stratified and fleet.balanced are two ways to draw a cohort: leave one out")
        if not self.capacities:
            raise FedrolexError("fleet.capacities is empty: give at least one, such as 1/2")
        if not 0 <= self.stragglers <= 1:
            raise FedrolexError(f"fleet.stragglers is {self.stragglers}: give a chance between 0 and 1")
        for value in self.capacities:
            exact(value)
        if self.shares is not None:
            if len(self.shares) != len(self.capacities):
                raise FedrolexError(f"{len(self.shares)} shares for {len(self.capacities)} capacities: give one each")
            if any(share < 0 for share in self.level_shares) or sum(self.level_shares) != 1:
                given = ", ".join(map(str, self.shares))
                raise FedrolexError(f"fleet.shares is {given}: give shares that are at least 0 and add up to 1")
        if isinstance(self.availability, int | float):
            if not 0 < self.availability <= 1:
                raise FedrolexError(f"availability {self.availability} is outside (0, 1]")
        elif not self.availability:
            raise FedrolexError("the availability trace is empty: give at least one round")
        else:
            every = (client for there in self.availability for client in there)
            wrong = next((client for client in every if not 0 <= client < self.clients), None)
            if wrong is not None:
                raise FedrolexError(f"the availability trace names client {wrong}: there are 0 to {self.clients - 1}")

    @cached_property
    def levels(self) -> list[Fraction]:
        """The capacities as fractions."""
        return [exact(value) for value in self.capacities]

    @cached_property
    def level_shares(self) -> list[Fraction]:
        """How large a part of the fleet has each level."""
        even = [Fraction(1, len(self.levels))] * len(self.levels)
        return [fraction(share, "fleet.shares: share") for share in self.shares or even]

    def capacity(self, client: int, round: int = 0) -> Fraction:
        """What a client can hold in a round."""
        if not self.redrawn and self.shares is None:
            return self.levels[client % len(self.levels)]
        if self.redrawn:
            draw, scale = int(random_words(1, self.seed, "capacity", round, client)[0]), 2**64
        else:
            draw, scale = int(_ranks(self.clients, self.seed)[client]), self.clients
        total = Fraction(0)
        for level, share in zip(self.levels, self.level_shares, strict=True):
            total += share
            if draw < floor(total * scale + Fraction(1, 2)):
                return level
        return self.levels[-1]

    def able(self, width: Fraction) -> int:
        """How many clients can ever hold this width."""
        if self.redrawn:
            return self.clients if max(self.levels) >= width else 0
        return sum(self.capacity(client) >= width for client in range(self.clients))

    def part(self, client: int, round: int) -> float:
        """How much of its work a client manages in a round."""
        if not self.stragglers:
            return 1.0
        late, part = uniform(random_words(2, self.seed, "straggler", round, client)).tolist()
        return part if late < self.stragglers else 1.0

    def members(self, round: int, able: Fraction | None = None) -> list[Member]:
        """The cohort of a round, in the order of client numbers; with ``able``, of clients that can hold so much."""
        called = (Member(c, self.capacity(c, round), self.part(c, round)) for c in self._called(round))
        there = (member for member in called if able is None or member.capacity >= able)
        if self.stratified:
            chosen = self._stratified(there, able)
        elif self.balanced:
            chosen = self._balanced(there)
        else:
            chosen = list(islice(there, self.cohort))
        return sorted(chosen, key=lambda member: member.client)

    def _stratified(self, there: Iterable[Member], able: Fraction | None) -> list[Member]:
        """Whole clients of every level first."""
        chosen: list[Member] = []
        passed: list[Member] = []
        wanted = self._wanted(able)
        free = self.cohort - sum(wanted.values())
        for member in there:
            if wanted.get(member.capacity):
                wanted[member.capacity] -= 1
            elif free:
                free -= 1
            else:
                passed = [*passed, member][: self.cohort]
                continue
            chosen.append(member)
            if len(chosen) == self.cohort:
                break
        return chosen + passed[: self.cohort - len(chosen)]  # of some levels there were too few

    def _balanced(self, there: Iterable[Member]) -> list[Member]:
        """Of twice a cohort, one after the other whose classes the cohort has least."""
        if not self.classes:
            raise FedrolexError("fleet.balanced: it is not known which classes clients hold")
        waiting, shares = list(islice(there, 2 * self.cohort)), defaultdict[int, float](float)
        chosen: list[Member] = []

        def met(member: Member) -> float:
            own = self.classes[member.client]
            return sum(shares[label] for label in own) / len(own) if own else inf

        while waiting and len(chosen) < self.cohort:
            chosen.append(waiting.pop(waiting.index(min(waiting, key=met))))
            own = self.classes[chosen[-1].client]
            for label in own:
                shares[label] += 1 / len(own)
        return chosen

    def _wanted(self, able: Fraction | None) -> dict[Fraction, int]:
        """How many clients of each level a stratified cohort has at least."""
        shares = dict.fromkeys(self.levels, Fraction(0))
        for level, share in zip(self.levels, self.level_shares, strict=True):
            shares[level] += share if able is None or level >= able else 0
        total = sum(shares.values()) or Fraction(1)
        return {level: floor(self.cohort * share / total) for level, share in shares.items()}

    def sampled(self, round: int, chance: float, key: int) -> list[Member]:
        """Of the clients that are there, each with the same chance, in the order of client numbers.

        A Poisson sample, however many that makes; ``key`` is of the stream it is drawn from.
        """
        most = int(chance * 2**64)
        chosen = (c for c in self._called(round) if int(random_words(1, key, "sampled", round, c)[0]) < most)
        return [Member(client, self.capacity(client, round), self.part(client, round)) for client in sorted(chosen)]

    def _called(self, round: int) -> Iterator[int]:
        """The clients that are there, in random order."""
        if isinstance(self.availability, int | float):
            chance = self.availability
            for client in deck(self.clients, self.seed, "cohort", round):
                word = 0 if chance == 1 else int(random_words(1, self.seed, "availability", round, client)[0])
                if word < int(chance * 2**64):
                    yield client
        else:
            there = sorted(set(self.availability[round % len(self.availability)]))
            for place in deck(len(there), self.seed, "cohort", round):
                yield there[place]


@lru_cache(maxsize=4)
def _ranks(clients: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A random place for every client: levels are dealt out along it, each to exactly its share."""
    return np.argsort(shuffle(clients, seed, "capacity"))
