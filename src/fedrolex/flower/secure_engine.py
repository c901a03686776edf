"""The server's side of secure sums: four messages a round, after which it knows sums, and nobody's own change."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from flwr.app import ConfigRecord, Message, RecordDict

from fedrolex.clients import Failure, RoundPlan, Upload
from fedrolex.core import FedrolexError
from fedrolex.flower.checks import ROOM
from fedrolex.flower.engine import Devices, by_client, cohort_of
from fedrolex.flower.exchange import exchanged
from fedrolex.flower.messages import NEW, Asked, bytes_of, failure_of, one_clear_line, weight_of
from fedrolex.flower.secure import SecureRound
from fedrolex.flower.secure_messages import (
    keys_record,
    read_accused,
    read_commitments,
    read_keys,
    read_masked,
    read_shares,
    read_texts,
    texts_record,
)  # fmt: skip
from fedrolex.flower.transport import packed
from fedrolex.privacy.masks import SHARE, Keys, usable
from fedrolex.privacy.quantised import Words
from fedrolex.privacy.recovery import AccusedError
from fedrolex.privacy.secure_sum import KEY, summed
from fedrolex.rounds.engine import Averaged
from fedrolex.slicing import one_line

Said = TypeVar("Said")


class SecureDevices(Devices):
    """Devices of which the server learns sums; see :class:`~fedrolex.flower.engine.Devices`."""

    label = "flower, secure"
    together = True

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """One answer a job; answers of devices whose changes are in the sums are empty.

        Where there is no sum because of one device, the others begin again without it.
        """
        self.strays, self.carried = [], {}
        self._why: dict[int, str] = {}
        if plan.tell_labels:
            raise FedrolexError("method.rows tells which classes a client holds: leave it out with secure sums")
        jobs, survivors, loss = list(plan.jobs), list[int](), 0.0
        while jobs and not survivors:
            try:
                survivors, loss = self._steps(replace(plan, jobs=jobs))
            except AccusedError as error:
                self._why |= dict.fromkeys(error.devices, error.why)
                jobs = [job for job in jobs if job.client not in error.devices]
            except FedrolexError as error:
                self._why = {job.client: self._why.get(job.client, str(error)) for job in plan.jobs}
                break
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
        terms = self.terms
        self.public = SecureRound.of(
            plan.jobs, plan.networks, plan.tensors, round=plan.round, recipe=terms.recipe, least=terms.least,
            share=terms.threshold, reach=terms.reach,
        )  # fmt: skip
        self._before, self._sums, public = plan.tensors, dict[int, tuple[Words, int]](), self.public.plan
        who = [client for client in by_client(plan) if client in self.fleet.nodes]
        asked = {client: self._asked(plan, client) for client in who}
        known: set[bytes] = set()
        contents = {client: asked[client].record() for client in who}
        keys = self._step(plan, "keys", contents, lambda client, said: _own_keys(said, client, known))
        contents = {client: _with(asked[client], keys=keys_record(keys)) for client in keys}
        held = {client: [p for p in public.alive(list(keys)) if client in public.areas[p]] for client in keys}
        shared = self._step(
            plan, "shares", contents,
            lambda client, said: (_texts(said, set(keys) - {client}), read_commitments(said, held[client])),
        )  # fmt: skip
        alive = [place for place in public.alive(list(shared)) if place in public.alive(list(keys))]
        contents = {}
        for client in shared:
            others = {other: texts[client] for other, (texts, _) in shared.items() if other != client}
            contents[client] = _with(self._asked(plan, client, tensors=True), shares=texts_record(others))

        def sizes(client: int) -> dict[int, int]:
            return {place: public.sizes[place] for place in alive if client in public.areas[place]}

        masked = self._step(plan, "masked", contents, lambda client, said: read_masked(said, sizes(client)))
        survivors = ConfigRecord({"devices": sorted(masked)})
        contents = {client: _with(asked[client], survivors=survivors) for client in masked}
        wanted = [(c, p) for p in public.alive(sorted(masked)) if p in alive for c in public.areas[p] & set(masked)]
        wanted += [(client, KEY) for client in shared if client not in masked]
        helped = self._step(plan, "unmask", contents, lambda _, said: read_shares(said, wanted))
        for client in sorted(set(masked) - set(helped)):
            self.note(f"round {plan.round}: device {client} did not help to unmask: {self._why[client]}")
        commitments = {client: said for client, (_, said) in shared.items()}
        sums, liars = summed(public, {c: keys[c] for c in shared}, list(shared), masked, helped, commitments)
        for client in sorted(liars):
            self.note(f"round {plan.round}: device {client} gave wrong shares of others' secrets; they are left out")
        return list(masked), self._decoded(sums, set(masked))

    def _decoded(self, sums: Mapping[int, Words], there: set[int]) -> float:
        """Keep the sums of a round; the mean loss. Raises where sums are none that devices as ours make."""
        areas, last = self.public.plan.areas, len(self.public.plan.areas) - 1
        counts = {place: len(areas[place] & there) for place in sums}
        for place, total in sums.items():
            rounding = self.public.loss if place == last else self.public.values
            if not rounding.possible(total, counts[place]):
                raise FedrolexError(
                    "the sums are none of changes within reach, somebody sent others: the round is void"
                )
        self._sums = {place: (total, counts[place]) for place, total in sums.items()}
        if last not in sums:
            return float("nan")
        return float(self.public.loss.decoded(sums[last], counts[last])) / counts[last]

    def _asked(self, plan: RoundPlan, client: int, *, tensors: bool = False) -> Asked:
        """What a device is told: what is public and, to train, its own part."""
        jobs = by_client(plan)[client] if tensors else []
        sent = [{what: packed(each) for what, each in job.sent.items()} for job in jobs]
        parts = [packed(plan.received(job)) for job in jobs]
        names = [job.name for job in jobs]
        return Asked(plan.round, client, cohort_of(plan), names, [NEW] * len(jobs), self.terms.recipe, parts, sent)

    def _step(
        self, plan: RoundPlan, step: str, contents: Mapping[int, RecordDict], read: Callable[[int, RecordDict], Said]
    ) -> dict[int, Said]:
        """What devices say in a step, by client; others are left out, with the reason. Too few raise."""
        node = {client: self.fleet.nodes[client][0] for client in contents}
        messages = {
            node[client]: Message(
                content, node[client], f"train.{step}", group_id=str(plan.round), ttl=self.terms.timeout
            )
            for client, content in contents.items()
        }
        replies = exchanged(self.grid, messages, self.terms.timeout, stray=lambda reply: self.stray(plan, reply))
        found, accused = dict[int, Said](), dict[int, list[str]]()
        for client, content in contents.items():
            reply = replies.get(node[client])
            self._count(plan, client, _secure_bytes(content), 0)
            try:
                if reply is None:
                    raise FedrolexError(f"did not answer within {self.terms.timeout:g} s")
                if reply.has_error():
                    raise failure_of(reply)
                self._count(plan, client, 0, _secure_bytes(reply.content))
                if weight_of(reply.content) > self._most():
                    raise FedrolexError(f"sent more than {self._most():,} bytes, the most that is looked at")
                if (complaint := read_accused(reply.content)) is not None:
                    for device in set(complaint.devices) & set(contents) - {client}:
                        accused.setdefault(device, []).append(one_clear_line(complaint.why))
                    raise complaint
                found[client] = read(client, reply.content)
            except FedrolexError as error:
                self._why[client] = one_clear_line(str(error))
            except Exception as error:  # whatever a device sends, the run goes on
                self._why[client] = f"sent what cannot be read: {one_line(error)}"
        if len(found) < self.public.plan.threshold:
            if accused:
                worst = max(sorted(accused), key=lambda device: len(accused[device]))
                raise AccusedError([worst], f"{accused[worst][0]}, say {len(accused[worst])} devices")
            left = f"{len(found)} devices are left, and {self.public.plan.threshold} must be"
            raise FedrolexError(f"{left}: the round is void")
        return found

    def _most(self) -> int:
        """The largest message that is looked at: twice all values of a round, and all shares."""
        public = self.public.plan
        return ROOM + 8 * sum(public.sizes) + 2 * len(public.cohort) * (len(public.areas) + 1) * SHARE

    def _count(self, plan: RoundPlan, client: int, down: int, up: int) -> None:
        """Put bytes on the account of a client's first job."""
        jobs = by_client(plan)[client]
        before = self.carried.get(jobs[0].key, (0, 0))
        nothing = {job.key: (0, 0) for job in jobs if job.key not in self.carried}
        self.carried = {**self.carried, **nothing, jobs[0].key: (before[0] + down, before[1] + up)}


def _own_keys(content: RecordDict, client: int, known: set[bytes]) -> Keys:
    """A device's keys, which nobody else has, and others can use."""
    found = read_keys(content)[client]
    if not (usable(found.seal) and usable(found.mask)) or found.seal == found.mask or {found.seal, found.mask} & known:
        raise FedrolexError("sent keys that are none, or another device's")
    known |= {found.seal, found.mask}
    return found


def _texts(content: RecordDict, wanted: set[int]) -> dict[int, bytes]:
    found = read_texts(content)
    if set(found) != wanted:
        raise FedrolexError("sent shares for other devices than there are")
    return found


def _secure_bytes(content: RecordDict) -> int:
    """Bytes of a message of secure sums: of its tensors, keys and shares."""
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
