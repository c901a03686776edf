"""Devices that send the others nonsense, at every step of secure sums: it costs them the round, and not the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import Change, Nodes, simulated
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from test_flower_secure import SIX, STEP, secure_run

from fedrolex.flower.transport import RAW

Lie = Callable[[RecordDict], RecordDict]


def said(part: str, **what: Any) -> Lie:
    """A lie in the words of a reply; a function is given what was there."""

    def lie(content: RecordDict) -> RecordDict:
        old = content.config_records[part]
        new: dict[str, Any] = {key: value(old[key]) if callable(value) else value for key, value in what.items()}
        content[part] = ConfigRecord({**old, **new})
        return content

    return lie


def words(change: Callable[[bytes], bytes]) -> Lie:
    """A lie in the masked values."""

    def lie(content: RecordDict) -> RecordDict:
        old = content.array_records["masked"]
        content["masked"] = ArrayRecord(
            {key: Array(each.dtype, each.shape, each.stype, change(each.data)) for key, each in old.items()}
        )
        return content

    return lie


def noise(data: bytes) -> bytes:
    return np.random.default_rng(0).bytes(len(data))


def all_of(change: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    return lambda texts: [change(text) for text in texts]


def first_of(change: Callable[[bytes], bytes]) -> Callable[[list[bytes]], list[bytes]]:
    return lambda texts: [change(text) if place == 0 else text for place, text in enumerate(texts)]


def beside(name: str, what: ConfigRecord | ArrayRecord | MetricRecord) -> Lie:
    def lie(content: RecordDict) -> RecordDict:
        content[name] = what
        return content

    return lie


BIG = Array("uint8", (2**24,), RAW, bytes(2**24))
LIES: list[tuple[str, Lie, str]] = [  # the step, the lie, and what is said of who told it
    ("keys", said("keys", seal=[bytes(32)]), "keys that are none"),
    ("keys", said("keys", mask=[(1).to_bytes(32, "little")]), "keys that are none"),
    ("keys", said("keys", seal=[b"short"]), "has not 32 bytes"),
    ("keys", said("keys", devices=[0]), "cannot be read"),
    ("keys", said("keys", devices=["1"]), "says keys in a wrong way"),
    ("keys", said("keys", seal=7), "says keys in a wrong way"),
    ("keys", lambda content: RecordDict(), "says keys in a wrong way"),
    ("keys", beside("more", ArrayRecord({"big": BIG})), "the most that is looked at"),
    ("shares", said("shares", texts=all_of(noise)), "sent shares of another round, cohort or plan, or none"),
    ("shares", said("shares", texts=all_of(lambda text: b"")), "sent shares of another"),
    ("shares", said("shares", devices=lambda devices: devices[::-1]), "sent shares of another"),
    ("shares", said("shares", devices=lambda devices: [*devices[1:], 99]), "shares for other devices than there are"),
    ("shares", said("shares", devices=lambda devices: [*devices[1:], devices[1]]), "names a device twice"),
    ("shares", said("shares", texts=lambda texts: ["a"] * len(texts)), "says shares in a wrong way"),
    ("shares", said("commitments", hashes=all_of(noise)), "do not come out of its shares"),
    ("shares", said("commitments", areas=[0]), "commit"),
    ("masked", words(lambda data: data[:-4]), "bytes for an area"),
    ("masked", lambda content: RecordDict({"masked": ArrayRecord()}), "other areas than it holds"),
    ("masked", lambda content: RecordDict({"masked": MetricRecord({"a": 1.0})}), "other areas than it holds"),
    ("masked", beside("accused", ConfigRecord({"devices": [0], "why": "\x1b[2J"})), "device 0  [2J"),
    ("masked", beside("accused", ConfigRecord({"devices": "0"})), "says accused in a wrong way"),
    ("unmask", said("helped", shares=all_of(noise)), "gave wrong shares"),
    ("unmask", said("helped", shares=all_of(lambda share: share[:20])), "other shares than were wanted"),
    ("unmask", said("helped", areas=["x"]), "says helped in a wrong way"),
    ("unmask", lambda content: RecordDict(), "says helped in a wrong way"),
    ("unmask", said("helped", shares=all_of(lambda share: bytes(len(share)))), "gave wrong shares"),
]


def liar(lies: Sequence[tuple[str, Lie, str]]) -> Change:
    """A device that tells one lie a round, whenever it comes to its step."""

    def change(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "query.profile" or reply.has_error():
            return [reply]
        step, lie, _ = lies[int(message.metadata.group_id)]
        if message.metadata.message_type != f"train.{step}":
            return [reply]
        return [Message(lie(deepcopy(reply.content)), reply_to=message)]

    return change


def test_a_lie_at_any_step_costs_the_liar_the_round_and_is_named(tmp_path: Path) -> None:
    """Two devices tell a lie each a round; sums go on with the others, and are the plain average within rounding."""
    told = {"1": LIES[: len(LIES) // 2], "3": LIES[len(LIES) // 2 :]}
    settings = [f"rounds={len(told['1'])}", "evaluate_every=1000", "client.lr=0.001", "task.limit=60"]
    change = {101: liar(told["1"]), 103: liar(told["3"])}
    run = secure_run(tmp_path / "run", *settings, change=change, least=2, timeout=10.0)
    trace = []
    for row in run.rows:
        lies = {client: lies[row["round"]] for client, lies in told.items()}
        odd = " ".join(row["strays"])
        lost = {client for client, (step, _, _) in lies.items() if step != "unmask"}
        for client, (step, _, why) in lies.items():
            named = row["dropped"][client] if client in lost else odd
            assert why in named, (step, why, named)
            assert named.isprintable()
        assert set(row["dropped"]) == lost
        trace.append([client for client in range(6) if str(client) not in lost])
        assert row["clients"] == len(trace[-1])
    wanted = simulated(tmp_path / "same", *SIX, *settings, f"fleet.trace={trace}")
    everyone = simulated(tmp_path / "other", *SIX, *settings)
    for name, tensor in wanted.tensors.items():
        off = [float((other.tensors[name] - tensor).abs().max()) for other in (run, everyone)]
        assert off[0] < max(0.1 * off[1], 10 * STEP), name


def test_shares_spoiled_for_one_device_cost_that_device_the_round_at_most(tmp_path: Path) -> None:
    """Nobody can tell who of the two lies; enough others are left."""
    change = {101: liar([("shares", said("shares", texts=first_of(noise)), "")])}
    run = secure_run(tmp_path / "run", "rounds=1", change=change, least=2)
    assert run.rows[0]["dropped"] == {"0": "device 1 sent shares of another round, cohort or plan, or none"}


def test_masked_noise_makes_the_round_void_and_not_the_model_noise(tmp_path: Path) -> None:
    change = {101: liar([("masked", words(noise), ""), ("", lambda content: content, "")])}
    run = secure_run(tmp_path / "run", change=change, least=2)
    assert [row["void"] for row in run.rows] == [True, False]
    assert "the sums are none of changes within reach" in run.rows[0]["dropped"]["0"]
