"""Devices that fail, lie or are silent: the run finishes, the reply is named and counted, clean clients decide."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import Nodes, fleet, flower_run, simulated
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from fedrolex.flower.messages import Answer
from fedrolex.flower.transport import RAW, packed, unpacked_freely

Lie = Callable[[RecordDict], RecordDict]


def changed(how: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Lie:
    """A lie about the trained tensors."""

    def lie(content: RecordDict) -> RecordDict:
        content["tensors 0"] = packed(how(unpacked_freely(content.array_records["tensors 0"])))
        return content

    return lie


def said(**what: Any) -> Lie:
    """A lie in words."""

    def lie(content: RecordDict) -> RecordDict:
        content["answer"] = ConfigRecord({**content.config_records["answer"], **what})
        return content

    return lie


def first(tensors: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    name = next(iter(tensors))
    return {**tensors, name: change(tensors[name])}


def poisoned(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


def without(content: RecordDict) -> RecordDict:
    name = next(iter(content.array_records["tensors 0"]))
    kept = {key: array for key, array in content.array_records["tensors 0"].items() if key != name}
    content["tensors 0"] = ArrayRecord(kept)
    return content


def forged(content: RecordDict) -> RecordDict:
    """A pickle where numbers should be."""
    name, array = next(iter(content.array_records["tensors 0"].items()))
    content["tensors 0"] = ArrayRecord(
        {**content.array_records["tensors 0"], name: Array(array.dtype, array.shape, "numpy.ndarray", array.data)}
    )
    return content


def heavy(content: RecordDict) -> RecordDict:
    content["sent 0"] = ArrayRecord({"extra": Array("uint8", (2**24,), RAW, bytes(2**24))})
    return content


LIES: dict[str, tuple[Lie, str]] = {
    "wrong shape": (changed(lambda t: first(t, lambda x: x[:1])), "has shape"),
    "another capacity's shape": (changed(lambda t: first(t, lambda x: torch.cat([x, x]))), "has shape"),
    "NaN": (changed(lambda t: first(t, poisoned)), "not finite"),
    "infinite": (changed(lambda t: first(t, lambda x: x * float("inf"))), "not finite"),
    "huge norm": (changed(lambda t: {name: x * 1e4 for name, x in t.items()}), "a change of norm"),
    "integers": (changed(lambda t: first(t, lambda x: x.int())), "holds 'int32'"),
    "a tensor missing": (without, "is missing"),
    "a tensor too many": (changed(lambda t: {**t, "extra": torch.zeros(1)}), "'extra' is unknown"),
    "not raw": (forged, "takes"),
    "huge payload": (heavy, "are the most that is looked at"),
    "another client's answer": (said(client=0), "sent the answer of client 0"),
    "an old round": (said(round=-1), "answered round -1"),
    "other jobs": (said(jobs=["more"]), "answered other jobs"),
    "no examples": (said(examples=[0]), "0 examples"),
    "too many steps": (said(steps=[10**6]), "1000000 steps"),
    "words for numbers": (said(examples=["many"]), "says examples in a wrong way"),
    "nothing": (lambda content: RecordDict(), "is no 'answer'"),
    "no tensors": (lambda content: RecordDict({"answer": content["answer"]}), "has no 'tensors 0'"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_bad_reply_costs_its_client_the_round(name: str, tmp_path: Path) -> None:
    lie, why = LIES[name]

    def lies(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        return [Message(lie(deepcopy(reply.content)), reply_to=message)]

    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", change={101: lies}))
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 2]]")
    for row in run.rows:
        assert list(row["dropped"]) == ["1"]
        assert why in row["dropped"]["1"]
        assert not row["void"]
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_another_nodes_reply_an_old_one_and_a_second_one_change_nothing(tmp_path: Path) -> None:
    seen: dict[int, Message] = {}

    def second(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        other = Message(deepcopy(reply.content), reply_to=message)
        return [reply, other]

    def old(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        """The first round's reply, again, beside the right one."""
        if message.metadata.message_type != "train":
            return [reply]
        found = [seen[node], reply] if node in seen else [reply]
        seen.setdefault(node, reply)
        return found

    def others(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        """A reply to what another node was asked, which it overheard."""
        if message.metadata.message_type != "train":
            return [reply]
        overheard = next(m for m in reversed(nodes.log) if m.metadata.dst_node_id == 101)
        fake = Message(deepcopy(reply.content), reply_to=overheard)
        fake.metadata.__dict__["_src_node_id"] = node
        return [fake, reply]

    nodes = fleet(tmp_path / "run", change={100: second, 101: old, 102: others})
    run, wanted = flower_run(tmp_path / "run", nodes=nodes), simulated(tmp_path / "same")
    assert [len(row["strays"]) for row in run.rows] == [2, 3, 3]
    assert all("device" in stray for row in run.rows for stray in row["strays"])
    assert all(not row["dropped"] for row in run.rows)
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_the_reply_of_an_old_round_instead_of_this_ones_is_refused(tmp_path: Path) -> None:
    seen: dict[int, RecordDict] = {}

    def replayed(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        seen.setdefault(node, deepcopy(reply.content))
        return [Message(deepcopy(seen[node]), reply_to=message)]

    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", change={101: replayed}))
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 1, 2], [0, 2], [0, 2]]")
    assert "answered round 0 in round 2" in run.rows[2]["dropped"]["1"]
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_silent_and_failing_devices_are_left_out(tmp_path: Path) -> None:
    def silent(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.group_id == "1" else [reply]

    def failing(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [Message(Error(3, "out of battery"), reply_to=message)] if message.metadata.group_id == "2" else [reply]

    nodes = fleet(tmp_path / "run", change={101: silent, 102: failing}, timeout=1.0)
    run = flower_run(tmp_path / "run", nodes=nodes, timeout=1.0)
    assert run.rows[1]["dropped"] == {"1": "did not answer within 1 s"}
    assert run.rows[2]["dropped"] == {"2": "failed: out of battery"}
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 1, 2], [0, 2], [0, 1]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_round_below_the_quorum_is_void_and_the_window_moves_on(tmp_path: Path) -> None:
    def silent(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.group_id == "1" else [reply]

    nodes = fleet(tmp_path / "run", "quorum=2", change={101: silent, 102: silent}, timeout=0.5)
    run = flower_run(tmp_path / "run", "quorum=2", nodes=nodes, timeout=0.5)
    assert [row["void"] for row in run.rows] == [False, True, False]
    wanted = simulated(tmp_path / "same", "quorum=2", "fleet.trace=[[0, 1, 2], [0], [0, 1, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_round_closes_once_its_quorum_has_answered(tmp_path: Path) -> None:
    def silent(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.message_type == "train" else [reply]

    nodes = fleet(tmp_path / "run", "quorum=2", change={102: silent}, grace=0.1)
    run = flower_run(tmp_path / "run", "quorum=2", nodes=nodes, grace=0.1)
    assert [(row["clients"], row["void"]) for row in run.rows] == [(2, False)] * 3


def test_a_device_that_goes_and_comes_back_takes_part_again(tmp_path: Path) -> None:
    gone: list[Any] = []

    def leaves(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.group_id == "0":
            gone.append(nodes.contexts.pop(101))
        elif message.metadata.group_id == "1":
            nodes.contexts[101] = gone.pop()
        return [reply]

    nodes = fleet(tmp_path / "run", change={102: leaves})
    run = flower_run(tmp_path / "run", nodes=nodes)
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 1, 2], [0, 2], [0, 1, 2]]")
    assert [row["clients"] for row in run.rows] == [3, 2, 3]
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_device_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    """A server that asks for more than a device holds, or by another recipe, gets an error and no training."""
    nodes = fleet(tmp_path / "run")
    flower_run(tmp_path / "run", nodes=nodes)
    message = next(m for m in nodes.log if m.metadata.message_type == "train" and m.metadata.dst_node_id == 102)
    for what, wrong in (
        ({"cohort": ["2 1"]}, "it holds 1/4"),
        ({"recipe": "0" * 32}, "another recipe"),
        ({"client": 1}, "was asked for what client 1 does"),
        ({"round": 1}, None),
    ):
        asked = deepcopy(message)
        asked.content["asked"] = ConfigRecord({**message.content.config_records["asked"], **what})
        reply = nodes.reply(asked)
        if wrong is None:
            assert Answer.read(reply.content).round == 1
        else:
            assert wrong in str(reply.error.reason)
