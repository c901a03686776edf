"""Secure sums over Flower: what is public of a round, and a device's side of its four messages.

After them the server knows sums, and no device's own change; the server's side is in
:mod:`fedrolex.flower.secure_engine`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import RecordDict

from fedrolex.clients import Failure, Job, Network, Tensors
from fedrolex.core import FedrolexError
from fedrolex.flower.device import Device
from fedrolex.flower.messages import Asked
from fedrolex.flower.secure_messages import (
    accused_record,
    commitments_record,
    keep,
    kept,
    keys_record,
    masked_record,
    read_keys,
    read_texts,
    shares_record,
    texts_record,
)  # fmt: skip
from fedrolex.privacy.areas import Areas
from fedrolex.privacy.identity import Identity
from fedrolex.privacy.quantised import Quantised, Words
from fedrolex.privacy.recovery import AccusedError
from fedrolex.privacy.secure_sum import Party, SumPlan

STEPS = ("keys", "shares", "masked", "unmask")
LOSS = 100.0  # the largest loss that is told


@dataclass(frozen=True)
class SecureRound:
    """What is public of a round of secure sums, the same for the server and every device.

    Attributes:
        areas: who trains what together with whom.
        plan: of the sums: one for each area, and the last one of everybody's loss.
        values, loss: how numbers are rounded.
    """

    areas: Areas
    plan: SumPlan
    values: Quantised
    loss: Quantised

    @staticmethod
    def of(
        jobs: Sequence[Job], networks: Mapping[str, Network], state: Mapping[str, Tensors], *, round: int, recipe: str,
        least: int, share: float, reach: float,
    ) -> "SecureRound":  # fmt: skip
        """From the jobs of everyone, which follow from the recipe, the round and the cohort."""
        areas = Areas.of(jobs, networks, state, least)
        cohort = sorted({job.client for job in jobs})
        windows = [
            (job.client, job.name, job.sections, sorted((a, repr(job.window[a])) for a in job.window)) for job in jobs
        ]
        held = [(area.members, area.size) for area in areas.found]
        everyone = (frozenset(cohort), 1)
        plan = SumPlan.of((recipe, round, windows, reach), cohort, [*held, everyone], share=share, least=least)
        most = max(1, len(cohort))
        return SecureRound(areas, plan, Quantised(reach, most), Quantised(LOSS, most))


@dataclass(frozen=True)
class SecureDevice:
    """A device that sends nothing that is not masked.

    Attributes:
        device: what it trains by.
        state: Flower's, in which its secrets lie from step to step.
        least, share, reach: as in :class:`~fedrolex.flower.settings.Settings`.
        identity: by which devices know each other.
    """

    device: Device
    state: RecordDict
    least: int
    share: float
    reach: float
    identity: Identity = field(default_factory=Identity)

    def round(self, asked: Asked) -> SecureRound:
        """What is public of a round, computed here; raises where this device would be alone with what it sends."""
        server, me = self.device.training.server, self.device.client
        jobs = self.device.jobs(asked)
        found = SecureRound.of(
            jobs, server.networks, server.state, round=asked.round, recipe=self.device.recipe, least=self.least,
            share=self.share, reach=self.reach,
        )  # fmt: skip
        if not any(me in area.members for area in found.areas.found):
            raise FedrolexError(f"fewer than {self.least} devices train what device {me} trains: nothing is sent")
        return found

    def answer(self, step: str, content: RecordDict) -> RecordDict:
        """The device's answer in one of the steps: what is asked, or whom it cannot make a sum with."""
        steps = dict(zip(STEPS, (self.keys, self.shares, self.masked, self.unmask), strict=True))
        try:
            return steps[step](content)
        except AccusedError as error:
            return RecordDict({"accused": accused_record(error)})

    def keys(self, content: RecordDict) -> RecordDict:
        """Step 0: begin, with new secrets; the device's public keys of the round."""
        party = Party(self.device.client, self.round(Asked.read(content)).plan)
        keys = self.identity.signed(party.plan.about, party.me, party.advertise())
        keep(party, self.state)
        return RecordDict({"keys": keys_record({party.me: keys})})

    def shares(self, content: RecordDict) -> RecordDict:
        """Step 1: check everyone's keys; shares of the device's secrets, and what commits it to them."""
        party = self._party(content)
        keys = read_keys(content)
        self.identity.check(party.plan.about, keys)
        texts = party.share(keys)
        keep(party, self.state)
        return RecordDict({"shares": texts_record(texts), "commitments": commitments_record(party.commitments())})

    def masked(self, content: RecordDict) -> RecordDict:
        """Step 2: open the others' shares, train, round, mask; the device's masked values."""
        asked = Asked.read(content)
        public = self.round(asked)
        party = kept(public.plan, self.device.client, self.state)
        party.receive(read_texts(content))
        plan, losses = self.device.plan(asked), []
        values: dict[int, Words] = {}
        for job in plan.jobs:
            (found,) = self.device.loop.run(replace(plan, jobs=[job]))
            if isinstance(found, Failure):
                raise FedrolexError(found.why)
            if found.sent or found.kept:
                raise FedrolexError("this method sends or keeps more than its tensors: it cannot be summed securely")
            change = {n: t - plan.parts[job.key][n] for n, t in found.tensors.items() if t.is_floating_point()}
            for place, numbers in public.areas.taken(job, change).items():
                values[place] = public.values.encoded(numbers)
            losses.append(float(found.loss))
        loss = torch.tensor([min(LOSS, sum(losses) / len(losses))], dtype=torch.float64)
        values[len(public.areas.found)] = public.loss.encoded(loss)
        masked = party.masked(values)
        keep(party, self.state)
        return RecordDict({"masked": masked_record(masked)})

    def unmask(self, content: RecordDict) -> RecordDict:
        """Step 3: shares that take the masks off the sums of those whose values have come."""
        party = self._party(content)
        survivors: Any = content.config_records["survivors"]["devices"]
        shares = party.unmask(survivors)
        keep(party, self.state)
        return RecordDict({"helped": shares_record(shares)})

    def _party(self, content: RecordDict) -> Party:
        return kept(self.round(Asked.read(content)).plan, self.device.client, self.state)
