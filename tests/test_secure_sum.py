"""Secure sums: exact whoever drops out wherever, nothing below the threshold, and no upload that says anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from fedrolex import FedrolexError
from fedrolex.privacy.masks import Keys, opened, public, sealed, secret, stream, usable
from fedrolex.privacy.quantised import Quantised, Words
from fedrolex.privacy.recovery import AccusedError
from fedrolex.privacy.secure_sum import KEY, Party, SumPlan, summed

COHORT = (3, 5, 8, 13, 21)
AREAS = [(frozenset(COHORT), 4), (frozenset(COHORT[:4]), 3), (frozenset(COHORT[:3]), 2)]  # as nested windows make them


def plan(share: float = 0.5, least: int = 2, about: Sequence[object] = ("round 0",)) -> SumPlan:
    return SumPlan.of(about, COHORT, AREAS, share=share, least=least)


def values(which: SumPlan, seed: int = 0) -> dict[int, dict[int, Words]]:
    """What every device would send without masks."""
    draw = np.random.default_rng(seed)
    return {
        me: {p: draw.integers(0, 2**24, size, dtype=np.uint32) for p, (held, size) in enumerate(AREAS) if me in held}
        for me in which.cohort
    }


def protocol(
    which: SumPlan, sent: Mapping[int, Mapping[int, Words]], drops: Mapping[int, Collection[int]]
) -> tuple[dict[int, Words], dict[int, dict[int, Words]]]:
    """All four steps; ``drops`` says who is lost at a step. The sums, and what the server saw of each device."""
    parties = {me: Party(me, which) for me in which.cohort}

    def left(step: int) -> list[int]:
        return [me for me in which.cohort if not any(me in drops.get(before, ()) for before in range(step + 1))]

    keys = {me: parties[me].advertise() for me in left(0)}
    shared = {me: parties[me].share(keys) for me in left(1)}
    there = list(shared)
    masked = {}
    for me in left(2):
        parties[me].receive({other: shared[other][me] for other in there if other != me})
        masked[me] = parties[me].masked(sent[me])
    helped = {me: parties[me].unmask(list(masked)) for me in left(3)}
    commitments = {me: parties[me].commitments() for me in there}
    found, liars = summed(which, keys, there, masked, helped, commitments)
    assert not liars
    return found, masked


PATTERNS = [
    {step: gone}
    for step in range(4)
    for count in range(len(COHORT))
    for gone in combinations(COHORT, count)
] + [{0: [3], 1: [5]}, {1: [8], 2: [21]}, {2: [3], 3: [5]}, {0: [3], 3: [21]}, {0: [13], 1: [21], 2: [8]}]  # fmt: skip


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_every_drop_out_at_every_step_gives_the_exact_sum_or_none(share: float) -> None:
    which = plan(share)
    sent = values(which)
    done = aborted = 0
    for drops in PATTERNS:
        gone = {device for each in drops.values() for device in each}
        if len(COHORT) - len(gone) < which.threshold:
            with pytest.raises(FedrolexError, match="must be"):
                protocol(which, sent, drops)
            aborted += 1
            continue
        found, masked = protocol(which, sent, drops)
        done += 1
        for place, (members, _) in enumerate(AREAS):
            survivors = members & set(masked)
            if len(survivors) < which.least:
                assert place not in found
                continue
            total = sum(sent[me][place].astype(np.uint64) for me in survivors) % 2**32
            assert (found[place] == total).all()
    assert min(done, aborted) > 10


def test_what_the_server_sees_of_one_device_is_uniform() -> None:
    """Words of a device's upload, which sends zeros only, are even over their range, and no two uploads agree."""
    big = [(frozenset(COHORT), 40_000)]
    which = SumPlan.of(("round 0",), COHORT, big, share=0.5, least=2)
    zeros = {me: {0: np.zeros(40_000, dtype=np.uint32)} for me in COHORT}
    found, masked = protocol(which, zeros, {})
    assert not found[0].any()
    for seen in masked.values():
        for shift in (24, 0):
            counts = np.bincount((seen[0] >> np.uint32(shift)) & np.uint32(255), minlength=256)
            assert stats.chisquare(counts).pvalue > 1e-4
    one, other = (masked[me][0].astype(np.float64) for me in COHORT[:2])
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.03
    again = protocol(which, zeros, {})[1]
    assert not (again[3][0] == masked[3][0]).mean() > 0.01


def test_a_device_whose_partners_are_all_known_is_still_masked() -> None:
    """A server that says a device has dropped out, though it has its upload, learns its pair masks, not its own."""
    which = plan()
    sent = values(which)
    parties = {me: Party(me, which) for me in COHORT}
    keys = {me: party.advertise() for me, party in parties.items()}
    shared = {me: party.share(keys) for me, party in parties.items()}
    for me, party in parties.items():
        party.receive({other: shared[other][me] for other in COHORT if other != me})
        party.masked(sent[me])
    helped = {me: parties[me].unmask(COHORT[1:]) for me in COHORT[1:]}
    of_victim = {place for shares in helped.values() for device, place in shares if device == COHORT[0]}
    assert of_victim == {KEY}
    with pytest.raises(FedrolexError, match="second unmasking"):
        parties[COHORT[1]].unmask(COHORT)


def test_an_area_with_too_few_survivors_stays_masked() -> None:
    which = plan(least=3)
    found, _ = protocol(which, values(which), {2: [3]})
    assert sorted(found) == [0, 1]  # the third area had three devices, and has two


def test_devices_that_were_told_different_plans_do_not_help_each_other() -> None:
    """A server that gives one victim another plan, so that its part of the model is its alone, gets nothing."""
    honest, other = plan(), plan(about=("round 0", "a plan for the victim"))
    parties = {me: Party(me, other if me == 3 else honest) for me in COHORT}
    keys = {me: party.advertise() for me, party in parties.items()}
    shared = {me: party.share(keys) for me, party in parties.items()}
    for me, party in parties.items():
        with pytest.raises(AccusedError, match="another round, cohort or plan") as refused:
            party.receive({o: shared[o][me] for o in COHORT if o != me})
        assert refused.value.devices == ([o for o in COHORT if o != 3] if me == 3 else [3])


def test_a_device_alone_in_its_part_refuses() -> None:
    alone = SumPlan.of(("round 0",), COHORT, [(frozenset(COHORT[1:]), 2)], share=0.5, least=3)
    with pytest.raises(FedrolexError, match="fewer than 3 devices train what this one trains"):
        Party(COHORT[0], alone).advertise()


def test_a_server_that_invents_devices_or_swaps_keys_is_refused() -> None:
    which = plan()
    parties = {me: Party(me, which) for me in COHORT}
    keys = {me: party.advertise() for me, party in parties.items()}
    for wrong, why in (
        ({**keys, 99: Keys(public(secret()), public(secret()))}, "not there before"),
        ({**keys, 5: keys[8]}, "others' keys"),
        ({**keys, 3: Keys(public(secret()), public(secret()))}, "others' keys"),
        ({me: keys[me] for me in COHORT[:2]}, "2 devices are left, and 3 must be"),
    ):
        with pytest.raises(FedrolexError, match=why):
            parties[3].share(wrong)
    shared = {me: party.share(keys) for me, party in parties.items()}
    own = {other: shared[other][3] for other in COHORT if other != 3}
    parties[3].receive(own)
    parties[3].masked(values(which)[3])
    with pytest.raises(FedrolexError, match="not there before"):
        parties[3].unmask([*COHORT, 99])
    with pytest.raises(FedrolexError, match="1 devices are left"):
        parties[3].unmask([3])
    with pytest.raises(FedrolexError, match="device 8 sent shares of another"):  # what was meant for device 3
        parties[5].receive({o: (own[8] if o == 8 else shared[o][5]) for o in COHORT if o != 5})


@given(st.lists(st.lists(st.floats(-2, 2, width=32), min_size=3, max_size=3), min_size=1, max_size=9))
def test_a_sum_of_rounded_numbers_is_off_by_half_a_step_each(numbers: list[list[float]]) -> None:
    rounded = Quantised(reach=2.0, most=9)
    total = np.zeros(3, dtype=np.uint32)
    for each in numbers:
        total += rounded.encoded(torch.tensor(each, dtype=torch.float64))
    exact = torch.tensor(numbers, dtype=torch.float64).sum(0)
    assert bool(((rounded.decoded(total, len(numbers)) - exact).abs() <= len(numbers) * rounded.step / 2 + 1e-9).all())


@pytest.mark.parametrize("most", [1, 255, 256, 257, 1000, 65_536])
def test_the_largest_sum_that_fits_does_not_run_over(most: int) -> None:
    rounded = Quantised(reach=1.0, most=most)
    assert most * rounded.levels < 2**32
    one = rounded.encoded(torch.ones(1, dtype=torch.float64)).astype(np.uint64) * most
    assert float(rounded.decoded(one.astype(np.uint32), most)) == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.01, -1.01])
def test_a_device_does_not_send_what_the_sum_cannot_hold(bad: float) -> None:
    with pytest.raises(FedrolexError, match="beyond ±1"):
        Quantised(reach=1.0, most=4).encoded(torch.tensor([0.0, bad], dtype=torch.float64))


def test_sealed_texts_and_streams_are_for_one_purpose() -> None:
    key = secret()
    text = sealed(key, b"share", b"round 1")
    assert opened(key, text, b"round 1") == b"share"
    with pytest.raises(FedrolexError, match="nothing is unmasked"):
        opened(key, text, b"round 2")
    assert (stream(key, b"area 0", 5) == stream(key, b"area 0", 5)).all()
    assert not (stream(key, b"area 0", 5) == stream(key, b"area 1", 5)).any()


def shared_all(which: SumPlan) -> tuple[dict[int, Party], dict[int, Keys], dict[int, dict[int, bytes]]]:
    """Every device after the first two steps: parties, keys, sealed shares."""
    parties = {me: Party(me, which) for me in which.cohort}
    keys = {me: party.advertise() for me, party in parties.items()}
    return parties, keys, {me: party.share(keys) for me, party in parties.items()}


LIES_OF_HELPERS: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda share: secret() + secret()[: len(share) - 32],
    "first words": lambda share: share[:4] + bytes([share[4] ^ 1]) + share[5:],
    "another's place": lambda share: (2).to_bytes(4, "little") + share[4:],
    "place 0": lambda share: bytes(4) + share[4:],
    "zeros": lambda share: bytes(len(share)),
}


@pytest.mark.parametrize("lie", LIES_OF_HELPERS)
@pytest.mark.parametrize("liars", [[3], [21], [3, 13]])
def test_helpers_that_give_wrong_shares_are_named_and_the_sum_is_exact(lie: str, liars: list[int]) -> None:
    which = plan(0.5)  # three of five shares are enough
    sent = values(which)
    parties, keys, shared = shared_all(which)
    for me, party in parties.items():
        party.receive({other: shared[other][me] for other in COHORT if other != me})
    masked = {me: parties[me].masked(sent[me]) for me in COHORT if me != 8}  # so that a key is recovered, too
    helped = {me: parties[me].unmask(sorted(masked)) for me in masked}
    for me in liars[: len(helped) - which.threshold]:
        helped[me] = {what: LIES_OF_HELPERS[lie](share) for what, share in helped[me].items()}
    commitments = {me: party.commitments() for me, party in parties.items()}
    found, named = summed(which, keys, COHORT, masked, helped, commitments)
    assert named <= set(liars)
    assert named or liars == [21]  # whose shares nobody needed
    for place, (members, _) in enumerate(AREAS):
        total = sum(sent[me][place].astype(np.uint64) for me in members & set(masked)) % 2**32
        assert (found[place] == total).all()


def test_a_device_whose_shares_give_another_secret_is_accused() -> None:
    """It commits itself to other seeds than it shares: taken off, its masks would leave noise."""
    which = plan(0.5)
    sent = values(which)
    parties, keys, shared = shared_all(which)
    commitments = {me: party.commitments() for me, party in parties.items()}
    for me, party in parties.items():
        party.receive({other: shared[other][me] for other in COHORT if other != me})
    masked = {me: parties[me].masked(sent[me]) for me in COHORT}
    helped = {me: parties[me].unmask(COHORT) for me in COHORT}
    wrong = {**commitments, 5: {place: secret() for place in commitments[5]}}
    with pytest.raises(AccusedError, match="device 5 shared secrets that do not come out"):
        summed(which, keys, COHORT, masked, helped, wrong)


def test_a_device_masks_its_values_once() -> None:
    """Masked again, for one device fewer or from other weights, values would tell what the masks hide."""
    which = plan()
    sent = values(which)[3]
    parties, keys, shared = shared_all(which)
    others = {other: shared[other][3] for other in COHORT if other != 3}
    parties[3].receive(others)
    parties[3].masked(sent)
    parties[3].receive({other: text for other, text in others.items() if other != 21})
    with pytest.raises(FedrolexError, match="second masking"):
        parties[3].masked(sent)
    with pytest.raises(FedrolexError, match="second sharing"):
        parties[3].share(keys)


def test_shares_that_are_none_are_seen_before_anything_is_masked() -> None:
    which = plan()
    parties, _, shared = shared_all(which)
    for text in (b"", b"short", secret() * 9, shared[5][8]):
        with pytest.raises(AccusedError, match="device 5 sent shares") as refused:
            parties[3].receive({o: (text if o == 5 else shared[o][3]) for o in COHORT if o != 3})
        assert refused.value.devices == [5]


@pytest.mark.parametrize("key", [bytes(32), (1).to_bytes(32, "little"), b"\xff" * 31 + b"\x7f"])
def test_points_that_nobody_can_agree_on_are_no_keys(key: bytes) -> None:
    assert usable(key) == (key[0] == 255)  # the last is a point like others, reduced
    assert usable(public(secret()))
