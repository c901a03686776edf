"""What a server and a device say to each other, as Flower's records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedrolex.core import FedrolexError
from fedrolex.flower.transport import size
from fedrolex.rounds import Member
from fedrolex.slicing import exact

FORMAT = 1
NEW = -1  # the ticket of a client that keeps nothing yet
ENTRY = 64  # bytes that an entry of a message takes beside its name and value
MOST_WORDS = 300


@dataclass(frozen=True)
class Asked:
    """What a device is asked in a round.

    Attributes:
        round: counted from 0.
        client: the device's number.
        cohort: who takes part in the round, with capacities, as far as the device must know: itself and, for secure
            sums, all others. With it a device finds windows by itself.
        jobs: names of the device's jobs.
        tickets: for every job, the round in which the device kept what it shall go on with; NEW for nothing.
        recipe: a hash of the recipe, which both sides have.
        tensors: for every job, the device's part of the server's tensors.
        sent: for every job, what else the method sends, by purpose.
    """

    round: int
    client: int
    cohort: Sequence[Member]
    jobs: Sequence[str]
    tickets: Sequence[int]
    recipe: str
    tensors: Sequence[ArrayRecord] = ()
    sent: Sequence[Mapping[str, ArrayRecord]] = ()

    def record(self) -> RecordDict:
        """As it travels."""
        config: dict[str, Any] = {
            "format": FORMAT, "round": self.round, "client": self.client,
            "cohort": [f"{m.client} {m.capacity}" for m in self.cohort],
            "jobs": list(self.jobs), "tickets": list(self.tickets), "recipe": self.recipe,
        }  # fmt: skip
        record = RecordDict({"asked": ConfigRecord(config)})
        for place, tensors in enumerate(self.tensors):
            record[f"tensors {place}"] = tensors
        for place, purposes in enumerate(self.sent):
            for purpose, tensors in purposes.items():
                record[f"sent {place} {purpose}"] = tensors
        return record

    @staticmethod
    def read(record: RecordDict) -> "Asked":
        """From a message's content."""
        keys = {"round": int, "client": int, "cohort": list, "jobs": list, "tickets": list, "recipe": str}
        config = _config(record, "asked", keys)
        count = len(config["jobs"])
        sent: list[dict[str, ArrayRecord]] = [{} for _ in range(count)]
        for key, found in record.array_records.items():
            kind, _, rest = key.partition(" ")
            if kind == "sent":
                place, _, purpose = rest.partition(" ")
                sent[int(place)][purpose] = found
        cohort = []
        for each in config["cohort"]:
            client, _, capacity = each.partition(" ")
            cohort.append(Member(int(client), exact(capacity)))
        tensors = [_arrays(record, f"tensors {place}") for place in range(count)]
        named = ("round", "client", "jobs", "tickets", "recipe")
        return Asked(**{name: config[name] for name in named}, cohort=cohort, tensors=tensors, sent=sent)


@dataclass(frozen=True)
class AnsweredJob:
    """A device's answer to one job.

    Attributes:
        name: of the job.
        failed: why there is no answer, in one line; empty where there is one.
        examples, steps, loss: see :class:`~fedrolex.clients.messages.Upload`.
        labels: the classes that the client holds, where it was asked.
        keeps: whether the device has kept something for its next round, under this round's number.
        tensors: what was trained; changes of the received tensors, where values travel shortened.
        sent: what else the method sends.
    """

    name: str
    failed: str = ""
    examples: int = 0
    steps: int = 0
    loss: float = 0.0
    labels: Sequence[int] | None = None
    keeps: bool = False
    tensors: ArrayRecord = field(default_factory=ArrayRecord)
    sent: ArrayRecord = field(default_factory=ArrayRecord)


@dataclass(frozen=True)
class Answer:
    """A device's answer to all its jobs of a round."""

    round: int
    client: int
    jobs: Sequence[AnsweredJob]

    def record(self) -> RecordDict:
        """As it travels."""
        config: dict[str, Any] = {"format": FORMAT, "round": self.round, "client": self.client}
        config["jobs"] = [job.name for job in self.jobs]
        for key in ("failed", "examples", "steps", "loss", "keeps"):
            config[key] = [getattr(job, key) for job in self.jobs]
        record = RecordDict({"answer": ConfigRecord(config)})
        for place, job in enumerate(self.jobs):
            record[f"tensors {place}"], record[f"sent {place}"] = job.tensors, job.sent
            if job.labels is not None:
                config[f"labels {place}"] = list(job.labels)
                record["answer"] = ConfigRecord(config)
        return record

    @staticmethod
    def read(record: RecordDict) -> "Answer":
        """From a reply's content; raises in one line where that is no answer."""
        lists = {"failed": str, "examples": int, "steps": int, "loss": float, "keeps": bool}
        config = _config(record, "answer", {"round": int, "client": int, "jobs": list, **dict.fromkeys(lists, list)})
        names = config["jobs"]
        for key, kind in {"jobs": str, **lists}.items():
            each = config[key]
            if len(each) != len(names) or not all(type(value) is kind for value in each):
                raise FedrolexError(f"its answer says {key} in a wrong way")
        jobs = []
        for place, name in enumerate(names):
            labels = config.get(f"labels {place}")
            if labels is not None and not (isinstance(labels, list) and all(type(x) is int for x in labels)):
                raise FedrolexError("its answer says labels in a wrong way")
            values = {key: config[key][place] for key in lists}
            records = _arrays(record, f"tensors {place}"), _arrays(record, f"sent {place}")
            jobs.append(AnsweredJob(name=name, **values, labels=labels, tensors=records[0], sent=records[1]))
        return Answer(config["round"], config["client"], jobs)


@dataclass(frozen=True)
class Profile:
    """What a device says of itself: its number, what it can hold, and the recipe it would train by."""

    client: int
    capacity: Fraction
    recipe: str

    def record(self) -> RecordDict:
        """As it travels."""
        said: dict[str, Any] = {"client": self.client, "capacity": str(self.capacity), "recipe": self.recipe}
        return RecordDict({"profile": ConfigRecord({"format": FORMAT, **said})})

    @staticmethod
    def read(record: RecordDict) -> "Profile":
        """From a reply's content; raises in one line."""
        config = _config(record, "profile", {"client": int, "capacity": str, "recipe": str})
        return Profile(config["client"], exact(config["capacity"]), config["recipe"])


def bytes_of(record: RecordDict) -> int:
    """Bytes of all tensors in a message."""
    return sum(size(arrays) for arrays in record.array_records.values())


def weight_of(record: RecordDict) -> int:
    """About how many bytes a message takes, whatever it is made of: tensors, words, numbers and all their names."""
    total = bytes_of(record)
    for part, values in record.items():
        total += ENTRY + len(part)
        for name, value in values.items():
            total += ENTRY + len(name)
            for each in value if isinstance(value, list) else [value]:
                total += len(each) if isinstance(each, str | bytes) else 8
    return total


def one_clear_line(text: str) -> str:
    """Words of a device as one line that can be printed."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:MOST_WORDS])


def failure_of(reply: Message) -> FedrolexError:
    """A reply that is an error, as one."""
    return FedrolexError(f"failed: {one_clear_line(reply.error.reason or f'Flower error {reply.error.code}')}")


def _config(record: RecordDict, name: str, keys: Mapping[str, type]) -> dict[str, Any]:
    found = record.config_records.get(name)
    if found is None or found.get("format") != FORMAT:
        raise FedrolexError(f"the message is no {name!r} of format {FORMAT}: use one version of fedrolex everywhere")
    wrong = next((key for key, kind in keys.items() if type(found.get(key)) is not kind), None)
    if wrong is not None:
        raise FedrolexError(f"the message {name!r} says {wrong} in a wrong way")
    return dict(found)


def _arrays(record: RecordDict, key: str) -> ArrayRecord:
    found = record.array_records.get(key)
    if found is None:
        raise FedrolexError(f"the message has no {key!r}")
    return found
