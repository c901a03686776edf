"""Who learns, as a recipe says it."""

from dataclasses import dataclass, field
from fractions import Fraction

from fedrolex.core import FedrolexError, check_words
from fedrolex.rounds import Fleet
from fedrolex.slicing import exact

LEVELS = ("1", "1/2", "1/4", "1/8", "1/16")
INCOME = ("0.06", "0.10", "0.11", "0.18", "0.55")
MANY = 2**62


@dataclass(frozen=True, kw_only=True)
class FleetRecipe:
    """Who learns the task.

    Attributes:
        clients: how many; null is as many as the data has users.
        cohort: how many take part in a round.
        capacities: the levels, or the name of a mix: ``uniform`` (1 to 1/16, equal shares), ``income`` (the same
            levels in the shares of household incomes, 6, 10, 11, 18 and 55 %), ``rho:0.3`` (that share has 1, the rest
            1/16), ``gamma:4`` (all have 1/4: a server four times as wide as every client).
        shares: how large a part of the fleet has each level; null is equal parts.
        redrawn: draw every client's capacity anew each round, as in the published runs.
        stratified: draw cohorts that have devices of every size in the shares that these have in the fleet.
        balanced: draw cohorts that have all classes about equally often; clients must say which classes they hold.
        availability: chance that a client is there in a round.
        stragglers: chance that a client manages only a part of its work in a round; methods say whether the
            part counts (fedprox) or not (others).
        trace: instead, the clients that are there, a list a round.
        server_scale: how many times wider the server's model is than the task's.
    """

    clients: int | None = 20
    cohort: int = 10
    capacities: list[str] | str = field(default_factory=lambda: list(LEVELS))
    shares: list[str] | None = None
    redrawn: bool = False
    stratified: bool = False
    balanced: bool = False
    availability: float = 1.0
    stragglers: float = 0.0
    trace: list[list[int]] | None = None
    server_scale: int = 1

    def __post_init__(self) -> None:
        for name in ("clients", "cohort", "server_scale"):
            value = getattr(self, name)
            if not isinstance(value, int) and not (value is None and name == "clients"):
                raise FedrolexError(f"fleet.{name} is {value!r}: give a whole number")
        if not isinstance(self.capacities, str | list | tuple):
            raise FedrolexError(f"fleet.capacities is {self.capacities!r}: give a list, or the name of a mix")
        if isinstance(self.capacities, str):
            if self.shares is not None:
                raise FedrolexError(f"fleet.capacities {self.capacities!r} has its own shares: leave fleet.shares out")
            levels, shares = _mix(self.capacities)
            object.__setattr__(self, "capacities", levels)
            object.__setattr__(self, "shares", shares)
        object.__setattr__(self, "capacities", [str(c) for c in self.capacities])
        if not self.capacities:
            raise FedrolexError("fleet.capacities is empty: give at least one")
        check_words("fleet", self)
        if self.server_scale < 1:
            raise FedrolexError(f"fleet.server_scale is {self.server_scale}: give 1 or more")
        self.build(seed=0, clients=self.expected)  # raises where there is no such fleet

    @property
    def expected(self) -> int:
        """How many clients there are; more than any data has users, where the data will say it."""
        return MANY if self.clients is None else self.clients

    def build(self, seed: int, clients: int | None = None) -> Fleet:
        """The fleet, its capacities as parts of the server's model; ``clients`` where the data says how many."""
        count = self.clients if clients is None else clients
        if count is None:
            raise FedrolexError("fleet.clients is null: say how many, only text data has users of its own")
        return Fleet(
            clients=count,
            cohort=self.cohort,
            capacities=[exact(capacity) / self.server_scale for capacity in self.capacities],
            shares=self.shares,
            redrawn=self.redrawn,
            stratified=self.stratified,
            balanced=self.balanced,
            availability=self.availability if self.trace is None else self.trace,
            stragglers=self.stragglers,
            seed=seed,
        )


def _mix(name: str) -> tuple[list[str], list[str] | None]:
    """Capacities and shares of a mix by name."""
    kind, colon, number = name.partition(":")
    wrong = FedrolexError(f"fleet.capacities is {name!r}: use a list, uniform, income, rho:SHARE or gamma:FACTOR")
    if name == "uniform":
        return list(LEVELS), None
    if name == "income":
        return list(LEVELS), list(INCOME)
    try:
        value = Fraction(number) if len(number) < 12 and "e" not in number else Fraction(-1)
    except (ValueError, ZeroDivisionError):
        raise wrong from None
    if kind == "rho" and colon and 0 <= value <= 1:
        return ["1", "1/16"], [str(value), str(1 - value)]
    if kind == "gamma" and value >= 1:
        return [str(1 / value)], None
    raise wrong
