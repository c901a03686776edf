"""Who is in a round: cohorts that have devices of every size, or all classes, in their shares."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from methods_shared import small
from told import told
from word_tasks import WORDS, corpus

from fedrolex import Recipe, prepare
from fedrolex.rounds import Fleet

PAIRS = [[client % 10, (client + 1 + client // 10 % 9) % 10] for client in range(100)]  # every pair of ten classes


def balanced(**more: object) -> Fleet:
    kept = {"clients": 100, "cohort": 10, "balanced": True, "classes": PAIRS, "seed": 5}
    return Fleet(**{**kept, **more})  # type: ignore[arg-type]


def missing(fleet: Fleet, rounds: int = 200) -> int:
    """Classes that nobody in a cohort holds, over some rounds."""
    held = [{label for member in fleet.members(round) for label in PAIRS[member.client]} for round in range(rounds)]
    return sum(10 - len(each) for each in held)


# --- stratified ---


def test_stratified_cohorts_have_every_size_in_its_share() -> None:
    fleet = Fleet(clients=100, cohort=12, stratified=True, seed=5)
    rounds = [fleet.members(round) for round in range(200)]
    counts = [Counter(member.capacity for member in members) for members in rounds]
    assert all(len(members) == 12 and min(count[level] for level in fleet.levels) >= 2 for members, count in
               zip(rounds, counts, strict=True))  # fmt: skip
    met = Counter(member.client for members in rounds for member in members)
    assert len(met) == 100, "nobody is left out"
    assert max(met.values()) < 3 * min(met.values())
    assert any(count[fleet.levels[0]] > 2 for count in counts), "the rest is drawn as it comes"


def test_stratified_cohorts_of_those_who_can_and_of_those_who_are_there() -> None:
    fleet = Fleet(clients=100, cohort=10, stratified=True)
    able = Counter(member.capacity for member in fleet.members(0, able=Fraction(1, 2)))
    assert able == {Fraction(1): 5, Fraction(1, 2): 5}
    there = Fleet(clients=10, cohort=5, stratified=True, availability=[[0, 5, 1, 6, 2]])  # none of 1/8 and 1/16
    assert [member.client for member in there.members(0)] == [0, 1, 2, 5, 6], "places that nobody takes go to others"
    income = Fleet(clients=200, cohort=20, shares=["0.06", "0.10", "0.11", "0.18", "0.55"], stratified=True)
    for round in range(20):
        found = Counter(member.capacity for member in income.members(round))
        assert [found[level] >= least for level, least in zip(income.levels, (1, 2, 2, 3, 11), strict=True)] == [
            True
        ] * 5
    drawn = Fleet(clients=50, cohort=10, redrawn=True, stratified=True)
    assert set(Counter(member.capacity for member in drawn.members(3)).values()) == {2}


# --- balanced ---


def test_balanced_cohorts_have_all_classes_and_everybody_s_turn() -> None:
    fleet = balanced()
    assert missing(fleet) < missing(balanced(balanced=False)) / 5
    met = Counter(member.client for round in range(400) for member in fleet.members(round))
    assert len(met) == 100, "nobody is left out"
    assert max(met.values()) < 3 * min(met.values())
    assert fleet.members(7) == balanced().members(7) != fleet.members(8)


def test_whose_classes_are_rarest_joins() -> None:
    """Four clients are called for two places; after the first, whoever shares no class with it."""
    fleet = Fleet(clients=4, cohort=2, balanced=True, classes=[[0, 1], [0, 1], [2, 3], [2]], capacities=["1"])
    for round in range(40):
        first, second = (set(fleet.classes[member.client]) for member in fleet.members(round))
        assert not first & second


def test_clients_without_classes_come_last() -> None:
    fleet = Fleet(clients=4, cohort=2, balanced=True, classes=[[], [0], [], [0]], capacities=["1"])
    assert {tuple(member.client for member in fleet.members(round)) for round in range(9)} == {(1, 3)}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3, unique=True), min_size=1, max_size=12),
    st.data(),
    st.integers(0, 9),
)
def test_a_balanced_cohort_is_a_cohort(classes: list[list[int]], data: st.DataObject, round: int) -> None:
    """As many clients as another has, each once, of those who are there and can hold so much."""
    cohort = data.draw(st.integers(1, len(classes)))
    fleet = Fleet(clients=len(classes), cohort=cohort, balanced=True, classes=classes, availability=0.7)
    plain = Fleet(clients=len(classes), cohort=len(classes), availability=0.7)
    for able in (None, Fraction(1, 4)):
        members, there = fleet.members(round, able), plain.members(round, able)
        assert [member.client for member in members] == sorted({member.client for member in members})
        assert {member.client for member in members} <= {member.client for member in there}
        assert len(members) == min(cohort, len(there))
        assert all(able is None or member.capacity >= able for member in members)


def test_a_recipe_has_balanced_cohorts_of_what_its_clients_hold() -> None:
    labels = "task.partition={name: labels, labels: 2}"
    made = small("fleet.balanced=true", "fleet.cohort=3", labels)
    task = made.server.classification
    for client, held in enumerate(made.server.fleet.classes):
        assert held == sorted(set(task.client(client).y.tolist()))
    row = made.run_round()
    assert row["clients"] == 3


def test_balanced_cohorts_are_refused_where_they_mean_nothing(tmp_path: Path) -> None:
    assert told(lambda: Fleet(clients=9, cohort=3, balanced=True).members(0)) == (
        "fleet.balanced: it is not known which classes clients hold"
    )
    both = ["fleet.balanced=true", "fleet.stratified=true"]
    assert "leave one out" in told(lambda: Recipe().with_settings(both))
    users = corpus(tmp_path / "users.jsonl")
    wordy = Recipe(device="cpu", callbacks=[]).with_settings([*WORDS, f"task.data={users}", "fleet.balanced=true"])
    assert "fleet.balanced is for tasks of classes" in told(lambda: prepare(wordy))
