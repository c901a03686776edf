"""What is given bytes by devices: a server reads any reply, and the run goes on whatever is in it.

The targets are of the kind of fuzz_targets.py; they need fedrolex[flower].
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Sent
from fuzz_targets import Target
from methods_shared import SMALL, answered

from fedrolex import Engine, Failure, FedrolexError, Recipe, RoundPlan, Training, Upload, prepare
from fedrolex.flower.engine import Devices, Terms, by_client
from fedrolex.flower.messages import Answer, AnsweredJob, Profile
from fedrolex.flower.secure_messages import (
    keys_record,
    masked_record,
    read_keys,
    read_masked,
    read_shares,
    read_texts,
    shares_record,
    texts_record,
)
from fedrolex.flower.transport import RAW, packed
from fedrolex.privacy.masks import Keys

METHODS = ("fedrolex", "scaffold", "fjord", "dsfl")


def content_of(data: bytes) -> RecordDict | None:
    """Records as Flower makes them of bytes; None where it makes none."""
    try:
        return recorddict_from_proto(Sent.FromString(data))
    except Exception:  # Flower's own matter: such a message never reaches the server's app
        return None


def bytes_of(content: RecordDict) -> bytes:
    return bytes(recorddict_to_proto(content).SerializeToString())


class Given(Engine):
    """Gives the answer of a device's reply, as the engine of real devices reads it.

    Attributes:
        client: whose reply it is.
        reply: what the device sent.
    """

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.terms = Terms(recipe="", keeps=keeps)
        self.client, self.reply = 0, RecordDict()

    def supports(self, plan: RoundPlan) -> None:
        return None

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        devices = Devices(cast(Any, None), cast(Any, None), self.terms, print)
        message = cast(Message, SimpleNamespace(content=self.reply, has_error=lambda: False))
        found = devices.checked(plan, {self.client: message})
        yield from found.values()
        yield from (Failure(job, "is not there") for job in plan.jobs if job.key not in found)


@cache
def given(method: str) -> Given:
    """The engine of a method's run."""
    return Given(training_of(method).method.needs.client_state)


@cache
def training_of(method: str) -> Training:
    """A run on two clients; its first round is done again and again."""
    settings = [*SMALL, f"method={method}", "fleet.clients=2", "fleet.cohort=2"]
    settings += ["callbacks=[]", "task.limit=60"]
    settings += ["task.public=0.2", "method.examples=8", "method.epochs=1"] if method == "dsfl" else []
    return prepare(Recipe(device="cpu", engine="loop").with_settings(settings))


def read_upload(data: bytes) -> None:
    """The first byte names the method; the others are what Flower reads records from."""
    content = content_of(data[1:])
    if content is not None:
        take(METHODS[data[0] % len(METHODS)] if data else METHODS[0], content)


def take(method: str, content: RecordDict) -> None:
    """A round in which a device replies with this content; raises why the reply is not taken. The run goes on."""
    training = training_of(method)
    server = training.server
    before = server.state, server.round, server.clients, training.engine
    server.clients = None if server.clients is None else type(server.clients)()
    client = min(by_client(training.plan(training.method.jobs(server, 0))))
    training.engine = given(method)
    training.engine.client, training.engine.reply = client, content
    try:
        row = training.run_round()
    except FedrolexError as error:
        raise AssertionError(f"a device stops the run: {error}") from error
    finally:
        server.state, server.round, server.clients, training.engine = before
    why = row["dropped"].get(str(client))
    if why is not None:
        assert "cannot be read" not in why, why
        raise FedrolexError(why)


@cache
def whole_uploads() -> list[bytes]:
    found = []
    for place, method in enumerate(METHODS):
        training = training_of(method)
        before = training.server.round
        upload = answered(training)[0]
        told = AnsweredJob(
            upload.job.name, "", upload.examples, upload.steps, upload.loss, upload.labels, upload.kept is not None,
            packed(upload.tensors), packed(upload.sent),
        )  # fmt: skip
        assert training.server.round == before
        found.append(bytes([place]) + bytes_of(Answer(0, upload.job.client, [told]).record()))
    return found


ODD: list[Any] = [
    0, -1, 1, 2**31, 2**62, 0.5, float("nan"), float("inf"), "", "x", b"", True, False, [], [0], [-1], [2**40], [""],
    ["", ""], [1.5], [float("nan")], [True], [b"x"], [0, 1, 2], [10**9],
]  # fmt: skip
DTYPES = ("float32", "float64", "int64", "int8", "bool", "uint8", "complex64", "object", "")
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2, 2), (-1,), (2**40, 2**40), (0, 2**40), (1,) * 70]


def read_edits(data: bytes) -> None:
    """The first byte names the method; each four bytes after it change something in a whole answer."""
    if not data:
        return
    place = data[0] % len(METHODS)
    content = content_of(whole_uploads()[place][1:])
    assert content is not None
    for at in range(1, min(len(data) - 3, 40), 4):
        what, which, how, value = data[at : at + 4]
        records = [
            content.config_records["answer"],
            content.array_records["tensors 0"],
            content.array_records["sent 0"],
        ]
        record: Any = records[what % 3]
        names = [*record, "other"]
        name = names[which % len(names)]
        if how == 255:
            record.pop(name, None)
        elif what % 3 == 0:
            with suppress(TypeError, ValueError):  # what Flower does not carry
                record[name] = ODD[value % len(ODD)]
        else:
            old = record.get(name, Array("float32", (1,), RAW, bytes(4)))
            record[name] = Array(
                DTYPES[how % len(DTYPES)] if how & 64 else old.dtype,
                SHAPES[value % len(SHAPES)] if how & 32 else old.shape,
                "numpy.ndarray" if how == 254 else old.stype,
                bytes([value] * len(old.data)) if how & 128 else old.data[: -value or None] if how & 1 else old.data,
            )
    take(METHODS[place], content)


def read_profile(data: bytes) -> None:
    content = content_of(data)
    if content is not None:
        Profile.read(content)


def whole_profiles() -> list[bytes]:
    said: dict[str, Any] = {"format": 1, "client": 3, "capacity": "1/4", "recipe": "abc"}
    return [bytes_of(RecordDict({"profile": ConfigRecord(said)}))]


SIZES = {0: 3, 2: 1}
WANTED = [(1, 0), (2, 0)]


def read_secure(data: bytes) -> None:
    """Every step of secure sums reads the message, which is of one step at most."""
    content = content_of(data)
    if content is None:
        return
    for read in (
        lambda: read_keys(content),
        lambda: read_texts(content),
        lambda: read_masked(content, SIZES),
        lambda: read_shares(content, WANTED),
    ):
        Target(lambda _, read=read: read(), list)(b"")  # type: ignore[misc]


def whole_secure() -> list[bytes]:
    keys = {1: Keys(bytes(32), bytes(32), bytes(64)), 2: Keys(bytes(32), bytes(32), b"")}
    words = {place: torch.arange(size).numpy().astype("uint32") for place, size in SIZES.items()}
    parts: dict[str, Any] = {
        "keys": keys_record(keys), "shares": texts_record({1: b"a", 2: b"bc"}), "masked": masked_record(words),
        "helped": shares_record({(1, 0): b"x", (2, 0): b"y"}),
    }  # fmt: skip
    return [bytes_of(RecordDict(parts))]


TARGETS = {
    "upload": Target(read_upload, whole_uploads),
    "edits": Target(read_edits, lambda: [bytes([place]) + 8 * b"\1\0\0\0" for place in range(len(METHODS))]),
    "profile": Target(read_profile, whole_profiles),
    "secure": Target(read_secure, whole_secure),
}
