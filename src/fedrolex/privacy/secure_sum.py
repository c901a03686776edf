"""Secure sums: the server learns the sum over an area's devices, and nothing else of what one of them sent.

Bonawitz and others, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017: double masking
with recovery from drop-outs, in four steps. What is added here is for sub-models: a device has a mask of its own for
every area that it holds (:mod:`fedrolex.privacy.areas`), and helps to take the masks off an area only where enough
devices are left in it. A device decides so by itself, from the public plan.

A step of :class:`Party` is a device's, :func:`summed` is the server's.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedrolex.core import FedrolexError
from fedrolex.privacy.masks import (
    SECRET,
    SHARE,
    Keys,
    agreed,
    committed,
    opened,
    public,
    sealed,
    secret,
    shares,
    stream,
)
from fedrolex.privacy.quantised import Words
from fedrolex.privacy.recovery import AccusedError, Recovery

KEY = -1  # in the place of an area: the share is of a device's mask key
Shares = dict[tuple[int, int], bytes]
"""By (device, area): a share of the device's own mask there or, for KEY, of its mask key."""


@dataclass(frozen=True)
class SumPlan:
    """What is public of a round's sums; a device computes it by itself.

    Attributes:
        about: a hash of the round, the recipe and everyone's windows: whoever is told something else has another one.
        cohort: the devices that were asked.
        areas: the devices that hold each area.
        sizes: how many values each area has.
        threshold: how many devices must stay to the end.
        least: how many devices an area's sum must be of.
    """

    about: bytes
    cohort: tuple[int, ...]
    areas: tuple[frozenset[int], ...]
    sizes: tuple[int, ...]
    threshold: int
    least: int

    @staticmethod
    def of(
        about: Sequence[object], cohort: Sequence[int], areas: Sequence[tuple[frozenset[int], int]], *, share: float,
        least: int,
    ) -> "SumPlan":  # fmt: skip
        """A plan whose threshold is more than a ``share`` of the cohort."""
        who = tuple(sorted(cohort))
        held = tuple(members for members, _ in areas)
        sizes = tuple(size for _, size in areas)
        threshold = min(len(who), int(share * len(who)) + 1)
        said = repr((*about, who, [sorted(each) for each in held], sizes, threshold, least))
        return SumPlan(hashlib.blake2b(said.encode(), digest_size=32).digest(), who, held, sizes, threshold, least)

    def alive(self, who: Sequence[int]) -> list[int]:
        """The areas that enough of these devices hold."""
        return [place for place, members in enumerate(self.areas) if len(members & set(who)) >= self.least]

    def check(self, who: Sequence[int], before: Sequence[int]) -> None:
        """Raise, in one line, unless these are different devices of those before, and as many as must stay."""
        if len(set(who)) != len(who) or not set(who) <= set(before):
            raise FedrolexError("the server names devices that were not there before: nothing is sent")
        if len(who) < self.threshold:
            raise FedrolexError(f"{len(who)} devices are left, and {self.threshold} must be: nothing is sent")


@dataclass
class Party:
    """One device in one round; its fields are secret, and are kept from step to step.

    Attributes:
        me: the device's number.
        plan: what is public.
        seal, mask: its private keys.
        seeds: of its own mask, by area.
        keys: everyone's public keys.
        own: its share of its own secrets.
        sealed: others' shares, as they came.
        sent: whether it has masked its values: once in a round.
        said: whether it has helped to unmask: once in a round.
    """

    me: int
    plan: SumPlan
    seal: bytes = field(default_factory=secret, repr=False)
    mask: bytes = field(default_factory=secret, repr=False)
    seeds: dict[int, bytes] = field(default_factory=dict, repr=False)
    keys: dict[int, Keys] = field(default_factory=dict, repr=False)
    own: bytes = field(default=b"", repr=False)
    sealed: dict[int, bytes] = field(default_factory=dict, repr=False)
    sent: bool = False
    said: bool = False

    def advertise(self) -> Keys:
        """Step 0: public keys of this round."""
        if not any(self.me in members for members in self.plan.areas):
            raise FedrolexError(f"fewer than {self.plan.least} devices train what this one trains: nothing is sent")
        return Keys(public(self.seal), public(self.mask))

    def share(self, keys: Mapping[int, Keys]) -> dict[int, bytes]:
        """Step 1: shares of its secrets for every other device, sealed."""
        if self.keys:
            raise FedrolexError("the server asks for a second sharing of one round: nothing is sent")
        self.plan.check(list(keys), self.plan.cohort)
        everyone = [key for each in keys.values() for key in (each.seal, each.mask)]
        if keys.get(self.me) != Keys(public(self.seal), public(self.mask)) or len(set(everyone)) != len(everyone):
            raise FedrolexError("the server gives devices others' keys: nothing is sent")
        self.keys = dict(keys)
        who = sorted(keys)
        alive = [place for place in self.plan.alive(who) if self.me in self.plan.areas[place]]
        self.seeds = {place: secret() for place in alive}
        secrets = [self.mask, *(self.seeds[place] for place in alive)]
        split = [shares(each, self.plan.threshold, len(who)) for each in secrets]
        texts = {device: b"".join(each[number] for each in split) for number, device in enumerate(who)}
        self.own = texts.pop(self.me)
        return {device: sealed(self._key(device), text, self._about(self.me, device)) for device, text in texts.items()}

    def commitments(self) -> dict[int, bytes]:
        """By which the server will know the seeds of its own masks, by area; they go with the shares."""
        return {place: committed(seed, _area(self.plan, place)) for place, seed in self.seeds.items()}

    def receive(self, others: Mapping[int, bytes]) -> None:
        """Step 2, first: others' shares. Raises AccusedError where some are not for this round, plan and device."""
        self.plan.check(sorted([*others, self.me]), list(self.keys))
        self.sealed = dict(others)
        wrong = [device for device in others if not self._holds_shares_of(device)]
        if wrong:
            raise AccusedError(wrong, "sent shares of another round, cohort or plan, or none")

    def masked(self, values: Mapping[int, Words]) -> dict[int, Words]:
        """Step 2, then: its values by area, masked; of areas that enough devices hold.

        Once in a round: masked again for fewer others, the same values would tell the masks of who is left out.
        """
        if self.sent:
            raise FedrolexError("the server asks for a second masking of one round: nothing is sent")
        there, others, found = sorted([*self.sealed, self.me]), set(self.sealed), {}
        for place in self.plan.alive(there):
            if place not in self.seeds:
                continue
            size = self.plan.sizes[place]
            if values[place].shape != (size,):
                raise FedrolexError(f"area {place} has {values[place].shape} values: {size} are wanted")
            total = values[place] + stream(self.seeds[place], _area(self.plan, place), size)
            for device in self.plan.areas[place] & others:
                pair = stream(self._pair(device), _area(self.plan, place), size)
                total = total + pair if self.me < device else total - pair
            found[place] = total
        self.sent = True
        return found

    def unmask(self, survivors: Sequence[int]) -> Shares:
        """Step 3: shares that take the masks off the areas in which enough devices are left.

        For a device that has sent its values, a share of its own masks; for one that has not, a share of its mask key;
        never both.
        """
        there = sorted([*self.sealed, self.me])
        if self.said:
            raise FedrolexError("the server asks for a second unmasking of one round: nothing is sent")
        self.plan.check(survivors, there)
        self.said = True
        found: Shares = {}
        alive = set(self.plan.alive(survivors))
        for device in there:
            for place, share in self._shares_of(device).items():
                wanted = place in alive if device in survivors else place == KEY
                if wanted:
                    found[device, place] = share
        return found

    def _shares_of(self, device: int) -> dict[int, bytes]:
        """The shares of a device's secrets that this device was given."""
        text = self.own
        if device != self.me:
            text = opened(self._key(device), self.sealed[device], self._about(device, self.me))
        alive = [place for place in self.plan.alive(sorted(self.keys)) if device in self.plan.areas[place]]
        if len(text) != SHARE * (len(alive) + 1):
            raise FedrolexError(f"the shares of device {device} do not fit the plan: nothing is unmasked")
        return {place: text[SHARE * at : SHARE * (at + 1)] for at, place in enumerate([KEY, *alive])}

    def _holds_shares_of(self, device: int) -> bool:
        try:
            return bool(self._shares_of(device))
        except FedrolexError:
            return False

    def _key(self, device: int) -> bytes:
        return agreed(self.seal, self.keys[device].seal, b"seal" + self.plan.about)

    def _pair(self, device: int) -> bytes:
        return agreed(self.mask, self.keys[device].mask, b"mask" + self.plan.about)

    def _about(self, source: int, target: int) -> bytes:
        return self.plan.about + f" {source} {target}".encode()


def summed(
    plan: SumPlan,
    keys: Mapping[int, Keys],
    there: Sequence[int],
    masked: Mapping[int, Mapping[int, Words]],
    helped: Mapping[int, Shares],
    commitments: Mapping[int, Mapping[int, bytes]],
) -> tuple[dict[int, Words], set[int]]:
    """The sum of every area in which enough devices are left, by area, and who gave wrong shares; the server's side.

    Raises AccusedError where a device's masks cannot be taken off, so that there is no sum with it.

    Args:
        plan: what is public.
        keys: of the devices that shared their secrets.
        there: the devices that shared their secrets.
        masked: what the survivors sent, by device and area.
        helped: the shares that devices gave in the last step.
        commitments: to the seeds of devices' own masks, by device and area.
    """
    if len(helped) < plan.threshold:
        raise FedrolexError(f"{len(helped)} devices are left, and {plan.threshold} must be: the round is void")
    gathered: dict[tuple[int, int], dict[int, bytes]] = {}
    for helper, given in helped.items():
        for what, share in given.items():
            gathered.setdefault(what, {})[helper] = share
    kinds: dict[int, set[bool]] = {}
    for device, place in gathered:
        kinds.setdefault(device, set()).add(place == KEY)
    assert all(len(each) == 1 for each in kinds.values())  # never both secrets of one device
    survivors, recovery = set(masked), Recovery(plan.threshold)

    def secret_of(device: int, place: int) -> bytes:
        def fits(text: bytes) -> bool:
            if place == KEY:
                return len(text) == SECRET and public(text) == keys[device].mask
            return committed(text, _area(plan, place)) == commitments[device][place]

        text = recovery.secret(gathered[device, place], fits)
        if text is None:
            raise AccusedError([device], "shared secrets that do not come out of its shares")
        return text

    lost = {device: secret_of(device, KEY) for device in there if device not in survivors}
    found: dict[int, Words] = {}
    for place in sorted(set(plan.alive(sorted(survivors))) & set(plan.alive(list(keys)))):
        size, members = plan.sizes[place], plan.areas[place] & set(there)
        total = np.zeros(size, dtype=np.uint32)
        for device in members & survivors:
            total += masked[device][place] - stream(secret_of(device, place), _area(plan, place), size)
            for gone in members - survivors:
                key = agreed(lost[gone], keys[device].mask, b"mask" + plan.about)
                pair = stream(key, _area(plan, place), size)
                total = total - pair if device < gone else total + pair
        found[place] = total
    return found, recovery.liars


def _area(plan: SumPlan, place: int) -> bytes:
    return plan.about + f" area {place}".encode()
