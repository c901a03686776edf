"""Who trains how much in a run, counted from its method and fleet alone: neither data nor training is needed."""

from collections import Counter
from collections.abc import Hashable, Mapping
from fractions import Fraction

from fedrolex.methods.columns import Columns
from fedrolex.methods.method import Method
from fedrolex.methods.one_size import OneSize
from fedrolex.rounds import Member, Server

Parts = tuple[Fraction, ...]
Visits = Mapping[tuple[int, Parts], Fraction]
"""How often a client trains parts of these widths of the main network, one beside the other."""

ANYBODY = -1
"""In place of a client whose number is not known."""

HOOKS = ("work", "view", "send", "traffic", "network", "networks", "members", "jobs")


def is_counted(method: Method) -> bool:
    """Whether clients receive and send parts of one network, of widths that are known here, and nothing beside."""
    known = {hook: {getattr(each, hook) for each in (Method, OneSize, Columns)} for hook in HOOKS}
    return all(getattr(type(method), hook) in known[hook] for hook in HOOKS)


def network_scale(method: Method, scale: int) -> int:
    """How many times wider than the task's model the network is that clients train parts of."""
    return 1 if isinstance(method, Columns) else scale


def who_trains(method: Method) -> tuple[Hashable, ...]:
    """The settings that say, beside the fleet and the network, who trains which width."""
    if isinstance(method, OneSize):
        return "one size", method.width, method.able_only
    if isinstance(method, Columns):
        return "columns", *method.columns, method.one_by_one, method.turns
    return ("own capacity",)


def visits(method: Method, server: Server, rounds: int) -> Visits:
    """Those of a run's rounds."""
    found, turns = Counter[tuple[int, Parts]](), isinstance(method, Columns) and method.turns
    alike: dict[Fraction, Parts] = {}  # without turns all clients of a capacity train as much
    for round in range(rounds):
        for member in method.members(server, round):
            if turns or member.capacity not in alike:
                alike[member.capacity] = _trained(method, server, member, round)
            found[member.client, alike[member.capacity]] += 1
    return {key: Fraction(times) for key, times in found.items()}


def expected_visits(method: Method, server: Server, rounds: int) -> Visits | None:
    """Those to be expected of a fleet of unknown size in which no cohort is short; None where columns take turns."""
    fleet, scale = server.fleet, server.scale
    if isinstance(method, Columns) and method.turns:
        return None
    least = Fraction(0)
    if isinstance(method, Columns):
        least = min(method.widths(fleet, scale)) / scale
    elif isinstance(method, OneSize) and method.able_only:
        least = method.capacity(fleet, scale)
    able = {level: share for level, share in zip(fleet.levels, fleet.level_shares, strict=True) if level >= least}
    every = rounds * fleet.cohort / sum(able.values(), Fraction(0))
    found: dict[tuple[int, Parts], Fraction] = {}
    for level, share in able.items():
        width = method.capacity(fleet, scale) if isinstance(method, OneSize) else level
        key = ANYBODY, _trained(method, server, Member(0, width), 0)
        found[key] = found.get(key, Fraction(0)) + every * share
    return found


def _trained(method: Method, server: Server, member: Member, round: int) -> Parts:
    if not isinstance(method, Columns):
        return (member.capacity,)
    widths = method.widths(server.fleet, server.scale)
    return tuple(widths[column] for column in method.trained_by(server, member, round))
