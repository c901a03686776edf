"""Secure sums over Flower: four messages a round, after which the server knows sums, and no device's own change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedrolex.clients import Failure, Job, Network, RoundPlan, Tensors, Upload
from fedrolex.core import FedrolexError
from fedrolex.flower.device import Device
from fedrolex.flower.engine import Devices, by_client, cohort_of
from fedrolex.flower.exchange import exchanged
from fedrolex.flower.messages import Asked, bytes_of
from fedrolex.flower.secure_messages import (
    keep,
    kept,
    keys_record,
    masked_record,
    read_keys,
    read_masked,
    read_shares,
    read_texts,
    shares_record,
    texts_record,
)  # fmt: skip
from fedrolex.flower.transport import packed
from fedrolex.privacy.areas import Areas
from fedrolex.privacy.identity import Identity
from fedrolex.privacy.quantised import Quantised, Words
from fedrolex.privacy.secure_sum import KEY, Party, SumPlan, summed
from fedrolex.rounds.engine import Averaged
from fedrolex.slicing import one_line

Said = TypeVar("Said")
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


# --- a device's side ---


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

    def keys(self, content: RecordDict) -> RecordDict:
        """Step 0."""
        party = Party(self.device.client, self.round(Asked.read(content)).plan)
        keys = self.identity.signed(party.plan.about, party.me, party.advertise())
        keep(party, self.state)
        return RecordDict({"keys": keys_record({party.me: keys})})

    def shares(self, content: RecordDict) -> RecordDict:
        """Step 1."""
        party = self._party(content)
        keys = read_keys(content)
        self.identity.check(party.plan.about, keys)
        texts = party.share(keys)
        keep(party, self.state)
        return RecordDict({"shares": texts_record(texts)})

    def masked(self, content: RecordDict) -> RecordDict:
        """Step 2: train, round, mask."""
        asked = Asked.read(content)
        public = self.round(asked)
        party = kept(public.plan, self.device.client, self.state)
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
        masked = party.masked(read_texts(content), values)
        keep(party, self.state)
        return RecordDict({"masked": masked_record(masked)})

    def unmask(self, content: RecordDict) -> RecordDict:
        """Step 3."""
        party = self._party(content)
        survivors: Any = content.config_records["survivors"]["devices"]
        shares = party.unmask(survivors)
        keep(party, self.state)
        return RecordDict({"helped": shares_record(shares)})

    def _party(self, content: RecordDict) -> Party:
        return kept(self.round(Asked.read(content)).plan, self.device.client, self.state)


# --- the server's side ---


class SecureDevices(Devices):
    """Devices of which the server learns sums; see :class:`~fedrolex.flower.engine.Devices`."""

    label = "flower, secure"
    together = True

    def secured(self, *, least: int, share: float, reach: float) -> "SecureDevices":
        """The same with these settings, see :class:`~fedrolex.flower.settings.Settings`."""
        self.least, self.share, self.reach = least, share, reach
        self._sums: dict[int, tuple[Words, int]] = {}
        return self

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job; answers of devices whose changes are in the sums are empty."""
        self.strays, self.carried, self._sums = [], {}, {}
        self._why: dict[int, str] = {}
        if plan.tell_labels:
            raise FedrolexError("method.rows tells which classes a client holds: leave it out with secure sums")
        self.public = SecureRound.of(
            plan.jobs, plan.networks, plan.tensors, round=plan.round, recipe=self.exchange.recipe, least=self.least,
            share=self.share, reach=self.reach,
        )  # fmt: skip
        try:
            survivors, loss = self._steps(plan)
        except FedrolexError as error:
            survivors, loss = [], 0.0
            self._why = {job.client: self._why.get(job.client, str(error)) for job in plan.jobs}
        for job in plan.jobs:
            if job.client in survivors:
                yield Upload(job, {}, 0, loss, 0, finite=True)  # how many examples and steps is not told
            else:
                yield Failure(job, self._why.get(job.client, "is not there"))

    def average(self, uploads: Sequence[Upload], weights: Sequence[float], label_axis: str | None) -> Averaged:
        """The mean change of every area; positions that too few devices trained keep their bits."""
        if any(weight != 1 for weight in weights):
            raise FedrolexError("secure sums count all devices alike: set method.weighting to uniform")
        (section,) = uploads[0].job.sections
        new = {name: tensor.clone() for name, tensor in self._before[section].items()}
        for place, area in enumerate(self.public.areas.found):
            if area.section == section and place in self._sums:
                total, count = self._sums[place]
                self.public.areas.put(place, self.public.values.decoded(total, count) / count, new)
        return Averaged(new, {})

    def _steps(self, plan: RoundPlan) -> tuple[list[int], float]:
        """The four steps; the devices whose changes are in the sums, and their mean loss."""
        self._before, public = plan.tensors, self.public.plan
        who = [client for client in by_client(plan) if client in self.fleet.nodes]
        asked = {client: self._asked(plan, client) for client in who}
        contents = {client: asked[client].record() for client in who}
        keys = self._step(plan, "keys", contents, lambda client, said: read_keys(said)[client])
        contents = {client: _with(asked[client], keys=keys_record(keys)) for client in keys}
        sealed = self._step(plan, "shares", contents, lambda client, said: _texts(said, set(keys) - {client}))
        alive = [place for place in public.alive(list(sealed)) if place in public.alive(list(keys))]
        contents = {}
        for client in sealed:
            others = {other: texts[client] for other, texts in sealed.items() if other != client}
            contents[client] = _with(self._asked(plan, client, tensors=True), shares=texts_record(others))

        def sizes(client: int) -> dict[int, int]:
            return {place: public.sizes[place] for place in alive if client in public.areas[place]}

        masked = self._step(plan, "masked", contents, lambda client, said: read_masked(said, sizes(client)))
        survivors = ConfigRecord({"devices": sorted(masked)})
        contents = {client: _with(asked[client], survivors=survivors) for client in masked}
        wanted = [(c, p) for p in public.alive(sorted(masked)) if p in alive for c in public.areas[p] & set(masked)]
        wanted += [(client, KEY) for client in sealed if client not in masked]
        helped = self._step(plan, "unmask", contents, lambda _, said: read_shares(said, wanted))
        sums = summed(public, {c: keys[c] for c in sealed}, list(sealed), masked, helped)
        counts = {place: len(public.areas[place] & set(masked)) for place in sums}
        self._sums = {place: (total, counts[place]) for place, total in sums.items()}
        last = len(public.areas) - 1
        loss = (
            float(self.public.loss.decoded(sums[last], counts[last])) / counts[last] if last in sums else float("nan")
        )
        return list(masked), loss

    def _asked(self, plan: RoundPlan, client: int, *, tensors: bool = False) -> Asked:
        """What a device is told: what is public and, to train, its own part."""
        jobs = by_client(plan)[client] if tensors else []
        sent = [{what: packed(each) for what, each in job.sent.items()} for job in jobs]
        parts = [packed(plan.received(job)) for job in jobs]
        names = [job.name for job in jobs]
        return Asked(plan.round, client, cohort_of(plan), names, [-1] * len(jobs), self.exchange.recipe, parts, sent)

    def _step(
        self, plan: RoundPlan, step: str, contents: Mapping[int, RecordDict], read: Callable[[int, RecordDict], Said]
    ) -> dict[int, Said]:
        """What devices say in a step, by client; others are left out, with the reason. Too few raise."""
        node = {client: self.fleet.nodes[client][0] for client in contents}
        messages = {
            node[client]: Message(
                content, node[client], f"train.{step}", group_id=str(plan.round), ttl=self.exchange.timeout
            )
            for client, content in contents.items()
        }
        replies = exchanged(self.grid, messages, self.exchange.timeout, stray=lambda reply: self._stray(plan, reply))
        found: dict[int, Said] = {}
        for client, content in contents.items():
            reply = replies.get(node[client])
            self._count(plan, client, carried(content), 0)
            try:
                if reply is None:
                    raise FedrolexError(f"did not answer within {self.exchange.timeout:g} s")
                if reply.has_error():
                    raise FedrolexError(f"failed: {reply.error.reason or f'Flower error {reply.error.code}'}")
                self._count(plan, client, 0, carried(reply.content))
                found[client] = read(client, reply.content)
            except FedrolexError as error:
                self._why[client] = str(error)
            except Exception as error:  # whatever a device sends, the run goes on
                self._why[client] = f"sent what cannot be read: {one_line(error)}"
        if len(found) < self.public.plan.threshold:
            left = f"{len(found)} devices are left, and {self.public.plan.threshold} must be"
            raise FedrolexError(f"{left}: the round is void")
        return found

    def _count(self, plan: RoundPlan, client: int, down: int, up: int) -> None:
        """Put bytes on the account of a client's first job."""
        jobs = by_client(plan)[client]
        before = self.carried.get(jobs[0].key, (0, 0))
        nothing = {job.key: (0, 0) for job in jobs if job.key not in self.carried}
        self.carried = {**self.carried, **nothing, jobs[0].key: (before[0] + down, before[1] + up)}


def _texts(content: RecordDict, wanted: set[int]) -> dict[int, bytes]:
    found = read_texts(content)
    if set(found) != wanted:
        raise FedrolexError("sent shares for other devices than there are")
    return found


def carried(content: RecordDict) -> int:
    """Bytes of tensors, keys and shares in a message."""
    said = 0
    for record in content.config_records.values():
        for value in record.values():
            said += sum(len(each) for each in value if isinstance(each, bytes)) if isinstance(value, list) else 0
    return said + bytes_of(content)


def _with(asked: Asked, **more: ConfigRecord) -> RecordDict:
    record = asked.record()
    for name, each in more.items():
        record[name] = each
    return record
