"""Devices that fail, lie or are silent: the run finishes, the reply is named and counted, clean clients decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import Arrives, Change, Nodes, fleet, flower_run, simulated
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

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


def crowded(content: RecordDict) -> RecordDict:
    content["sent 0"] = ArrayRecord({f"extra {n}": Array("uint8", (0,), RAW, b"") for n in range(20_000)})
    return content


LIES: dict[str, tuple[Lie, str]] = {
    "wrong shape": (changed(lambda t: first(t, lambda x: x[:1])), "has shape"),
    "another capacity's shape": (changed(lambda t: first(t, lambda x: torch.cat([x, x]))), "has shape"),
    "NaN": (changed(lambda t: first(t, poisoned)), "not finite"),
    "infinite": (changed(lambda t: first(t, lambda x: x * float("inf"))), "not finite"),
    "huge norm": (changed(lambda t: {name: x * 1e4 for name, x in t.items()}), "a change of norm"),
    "integers": (changed(lambda t: first(t, lambda x: x.int())), "holds 'int32'"),
    "doubles": (changed(lambda t: first(t, lambda x: x.double())), "holds 'float64'"),
    "a tensor missing": (without, "is missing"),
    "a tensor too many": (changed(lambda t: {**t, "extra": torch.zeros(1)}), "'extra' is unknown"),
    "not raw": (forged, "takes"),
    "huge payload": (heavy, "are the most that is looked at"),
    "huge payload of words": (said(failed=["x" * 2**23]), "are the most that is looked at"),
    "huge payload of numbers": (said(**{"labels 0": [0] * 2**20}), "are the most that is looked at"),
    "huge payload of nothing": (crowded, "are the most that is looked at"),
    "another client's answer": (said(client=0), "sent the answer of client 0"),
    "an old round": (said(round=-1), "answered round -1"),
    "a round in words": (said(round="0"), "says round in a wrong way"),
    "other jobs": (said(jobs=["more"]), "answered other jobs"),
    "jobs that are no list": (said(jobs=1), "says jobs in a wrong way"),
    "more answers than jobs": (said(examples=[10, 10]), "says examples in a wrong way"),
    "no examples": (said(examples=[0]), "0 examples"),
    "too many examples": (said(examples=[2**62]), "examples: 1 to 1,000,000,000"),
    "too many steps": (said(steps=[10**6]), "1000000 steps"),
    "words for numbers": (said(examples=["many"]), "says examples in a wrong way"),
    "truth for numbers": (said(steps=[True]), "says steps in a wrong way"),
    "no loss": (said(loss=[float("nan")]), "says its loss is nan"),
    "a loss without end": (said(loss=[float("inf")]), "says its loss is inf"),
    "a loss beyond sums": (said(loss=[1e308]), "says its loss is 1e+308"),
    "a loss in words": (said(loss=["low"]), "says loss in a wrong way"),
    "keeps what nobody keeps": (said(keeps=[True]), "clients of this method keep nothing"),
    "words for a terminal": (said(failed=["\x1b[2J\nround 9: all is well"]), " [2J round 9: all is well"),
    "another format": (said(format=2), "is no 'answer' of format 1"),
    "metrics": (lambda content: RecordDict({"answer": MetricRecord({"round": 0})}), "is no 'answer'"),
    "nothing": (lambda content: RecordDict(), "is no 'answer'"),
    "no tensors": (lambda content: RecordDict({"answer": content["answer"]}), "has no 'tensors 0'"),
}


def liar(lies: Sequence[Lie]) -> Change:
    """A device that tells one lie a round."""

    def change(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        return [Message(lies[int(message.metadata.group_id)](deepcopy(reply.content)), reply_to=message)]

    return change


def test_a_bad_reply_costs_its_client_the_round(tmp_path: Path) -> None:
    """Every lie in a round of its own, all of one device: the weights are those of the others."""
    rounds = [f"rounds={len(LIES)}", "evaluate_every=1000"]
    nodes = fleet(tmp_path / "run", *rounds, change={101: liar([lie for lie, _ in LIES.values()])})
    run = flower_run(tmp_path / "run", nodes=nodes)
    for (name, (_, why)), row in zip(LIES.items(), run.rows, strict=True):
        assert list(row["dropped"]) == ["1"], name
        assert why in row["dropped"]["1"], name
        assert row["dropped"]["1"].isprintable(), name
        assert not row["void"]
    wanted = simulated(tmp_path / "same", *rounds, "fleet.trace=[[0, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def beside(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Lie:
    """A lie in what the method sends beside the trained tensors."""

    def lie(content: RecordDict) -> RecordDict:
        content["sent 0"] = packed(change(unpacked_freely(content.array_records["sent 0"])))
        return content

    return lie


BESIDE = [
    (beside(lambda t: {}), "is missing"),
    (beside(lambda t: {**t, "more": torch.zeros(1)}), "is not asked"),
    (beside(lambda t: first(t, lambda x: x[:1])), "is asked"),
    (beside(lambda t: first(t, poisoned)), "not finite"),
    (beside(lambda t: first(t, lambda x: x.int())), "is asked"),
]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        (["method=scaffold"], []),
        (["method=fjord", "task.model=resnet8", "task.norm=batch"], []),
        (["method=dsfl", "method.epochs=1"], [(beside(lambda t: first(t, lambda x: x + 1)), "that are none")]),
    ],
)  # fmt: skip
def test_a_lie_beside_the_tensors_costs_the_client_the_round(
    settings: list[str], more: list[tuple[Lie, str]], tmp_path: Path
) -> None:
    lies = [*BESIDE, *more]
    rounds = [*settings, f"rounds={len(lies)}", "evaluate_every=1000"]
    nodes = fleet(tmp_path / "run", *rounds, change={100: liar([lie for lie, _ in lies])})
    run = flower_run(tmp_path / "run", nodes=nodes)
    for (_, why), row in zip(lies, run.rows, strict=True):
        assert list(row["dropped"]) == ["0"]
        assert why in row["dropped"]["0"]
    wanted = simulated(tmp_path / "same", *rounds, "fleet.trace=[[1, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_what_a_method_of_ones_own_cannot_take_costs_the_client_the_round(tmp_path: Path) -> None:
    """Its ``take`` trusts what clients send, and fails in its own way; the run does not."""
    own = ["method=flower_methods:Trusting", "rounds=2"]
    nodes = fleet(tmp_path / "run", *own, change={101: liar([beside(lambda t: {})] * 2)})
    run = flower_run(tmp_path / "run", nodes=nodes)
    assert [list(row["dropped"]) for row in run.rows] == [["1"], ["1"]]
    assert "cannot take: 'length'" in run.rows[0]["dropped"]["1"]
    wanted = simulated(tmp_path / "same", *own, "fleet.trace=[[0, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def unreadable(reply: Message, change: Callable[[dict[str, bytes]], None]) -> Callable[[], Message]:
    """Flower's objects of a reply, spoiled, as they are put together at the server."""
    objects = {key: each.deflate() for key, each in get_all_nested_objects(reply).items()}
    change(objects)

    def arrives() -> Message:
        found = inflate_object_from_contents(reply.object_id, dict(objects))
        assert isinstance(found, Message)
        return found

    return arrives


def test_bytes_that_are_no_message_cost_their_node_the_round(tmp_path: Path) -> None:
    def no_protobuf(objects: dict[str, bytes]) -> None:
        for key, content in objects.items():
            objects[key] = content[:-7] + b"\xff" * 7

    def missing(objects: dict[str, bytes]) -> None:
        objects.pop(sorted(objects)[0])

    def other_kind(objects: dict[str, bytes]) -> None:
        for key, content in objects.items():
            objects[key] = content.replace(b"RecordDict", b"PickleDict")

    lies = [no_protobuf, missing, other_kind]

    def spoils(nodes: Nodes, node: int, message: Message, reply: Message) -> Sequence[Any]:
        if message.metadata.message_type != "train":
            return [reply]
        return [unreadable(reply, lies[int(message.metadata.group_id)])]

    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", change={101: spoils}))
    assert ["cannot be read" in row["dropped"]["1"] for row in run.rows] == [True] * 3
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_reply_in_another_nodes_name_costs_its_own_node_the_round(tmp_path: Path) -> None:
    """Names in a message's bytes are the sender's to write: it answers as device 0, to what device 0 was asked."""

    def poses(nodes: Nodes, node: int, message: Message, reply: Message) -> Sequence[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        asked = next(m for m in reversed(nodes.log) if m.metadata.dst_node_id == 100)
        return [Message(deepcopy(reply.content), reply_to=asked)]

    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", change={101: poses}), timeout=30.0)
    for row in run.rows:
        assert row["dropped"] == {"1": "failed: sent a reply to something else"}
        assert len(row["strays"]) == 1
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


PROFILES: dict[str, dict[str, Any]] = {
    "a number in words": {"client": "1"},
    "a truth": {"client": True},
    "a number without end": {"client": 2**62},
    "below 0": {"client": -1},
    "a capacity over 0": {"capacity": "1/0"},
    "a capacity without end": {"capacity": "1e999999999"},
    "a long capacity": {"capacity": "9" * 10_000},
    "a real capacity": {"capacity": 0.5},
    "no capacity": {"capacity": "nan"},
    "another recipe": {"recipe": "\x1b[2J"},
}


def test_nodes_that_lie_about_themselves_are_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lies(what: dict[str, Any] | None) -> Change:
        def lie(nodes: Nodes, node: int, message: Message, reply: Message) -> Sequence[Arrives]:
            if what is None:
                return [unreadable(reply, lambda objects: objects.clear())]
            content = RecordDict({"profile": ConfigRecord({**reply.content.config_records["profile"], **what})})
            return [Message(content, reply_to=message)]

        return lie

    def silent(nodes: Nodes, node: int, message: Message, reply: Message) -> Sequence[Arrives]:
        return []

    hostile = dict(enumerate([*PROFILES.values(), None], start=110))
    more = {node: {"client": 1, "capacity": "1/2"} for node in [*hostile, 130]}
    change = {**{node: lies(what) for node, what in hostile.items()}, 130: silent}
    nodes = fleet(tmp_path / "run", who={100: "1", 102: "1/4"}, more=more, change=change, timeout=0.5)
    run = flower_run(tmp_path / "run", nodes=nodes, timeout=0.5, patience=0.1)
    told = capsys.readouterr().err
    assert all(f"node {node} is not taken" in told for node in more)
    assert max(len(line) for line in told.splitlines()) < 400
    asked = [message.metadata.dst_node_id for message in nodes.log if message.metadata.message_type == "query.profile"]
    assert sorted(asked) == sorted(nodes.contexts)  # each once: nobody makes the others wait in every round
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 2]]")
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
        return (
            [Message(Error(3, "out of\nbattery" + "!" * 10_000), reply_to=message)]
            if message.metadata.group_id == "2"
            else [reply]
        )

    nodes = fleet(tmp_path / "run", change={101: silent, 102: failing}, timeout=1.0)
    run = flower_run(tmp_path / "run", nodes=nodes, timeout=1.0)
    assert run.rows[1]["dropped"] == {"1": "did not answer within 1 s"}
    assert run.rows[2]["dropped"]["2"].startswith("failed: out of battery!")
    assert len(run.rows[2]["dropped"]["2"]) < 400
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 1, 2], [0, 2], [0, 1]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_round_below_the_quorum_is_void_and_the_window_moves_on(tmp_path: Path) -> None:
    def silent(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [] if message.metadata.group_id == "1" else [reply]

    def twice(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [reply, reply] if message.metadata.group_id == "1" else [reply]

    change = {100: twice, 101: silent, 102: silent}
    nodes = fleet(tmp_path / "run", "quorum=2", change=change, timeout=0.5)
    run = flower_run(tmp_path / "run", "quorum=2", nodes=nodes, timeout=0.5)
    assert [row["void"] for row in run.rows] == [False, True, False]
    assert [len(row["strays"]) for row in run.rows] == [0, 1, 0]  # counted where nothing else counts, too
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


def test_a_device_that_comes_back_as_another_node_is_taken_once_the_old_one_has_gone(tmp_path: Path) -> None:
    def restarted(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.group_id == "0":  # Flower still takes the old one for there
            nodes.contexts[201] = Context(
                1, 201, {"client": 1, "capacity": "1/2"}, RecordDict(), nodes.contexts[102].run_config
            )
        elif message.metadata.group_id == "1":
            del nodes.contexts[101]
        return [reply]

    nodes = fleet(tmp_path / "run", change={102: restarted})
    run = flower_run(tmp_path / "run", nodes=nodes)
    wanted = simulated(tmp_path / "same")
    assert [row["clients"] for row in run.rows] == [3, 3, 3]
    assert 201 in [m.metadata.dst_node_id for m in nodes.log if m.metadata.group_id == "2"]
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
