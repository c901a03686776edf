"""Secure sums on a fleet: the plain average within rounding, small uploads, and devices that refuse to be alone."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import SMALL, Change, Done, Nodes, fleet, flower_run, simulated
from flwr.app import ConfigRecord, Message, RecordDict
from torch import Tensor

from fedrolex import FedrolexError, prepare
from fedrolex.flower.certificates import make_key
from fedrolex.flower.secure_messages import keys_record
from fedrolex.flower.settings import Settings
from fedrolex.privacy.areas import Areas
from fedrolex.privacy.masks import Keys, public, secret
from fedrolex.privacy.quantised import Quantised
from fedrolex.recipes import find_recipe

SIX = ["fleet.clients=6", "fleet.cohort=6", 'fleet.capacities=["1", "1/2"]', "rounds=2"]
WHO = {100 + client: ("1", "1/2")[client % 2] for client in range(6)}
STEP = Quantised(8.0, 6).step


def secure_run(folder: Path, *settings: str, change: Mapping[int, Change] | None = None, **config: Any) -> Done:
    config = {"secure": True, "timeout": 2.0, "least": 3, **config}
    own = {node: {"client": node - 100, "capacity": held, "least": config["least"]} for node, held in WHO.items()}
    nodes = fleet(folder, *SIX, *settings, who={}, more=own, change=change, **config)
    return flower_run(folder, *SIX, *settings, nodes=nodes)


def beginning() -> dict[str, Tensor]:
    """The server's tensors before the first round."""
    return prepare(find_recipe("digits").with_settings([*SMALL, *SIX])).tensors()


def near(one: Done, other: Done, rounds: int = 1) -> bool:
    """Whether two runs are equal up to rounding: half a step a round; a later round goes on from what is off."""
    far = {n: float((one.tensors[n].double() - t.double()).abs().max()) for n, t in other.tensors.items()}
    return all(each <= (STEP / 2 + 2e-7) * (1 if rounds == 1 else 1000) for each in far.values())


@pytest.mark.parametrize("method", ["method=fedrolex", "method=heterofl", "method=columns", "task.norm=batch"])
def test_a_secure_round_is_the_plain_average_within_rounding(method: str, tmp_path: Path) -> None:
    run = secure_run(tmp_path / "run", method, "rounds=1")
    wanted = simulated(tmp_path / "same", *SIX, method, "rounds=1")
    assert near(run, wanted)
    assert run.rows[0]["clients"] == 6
    assert run.rows[0]["train_loss"] == pytest.approx(wanted.rows[0]["train_loss"], abs=0.01)


def test_rounds_go_on_from_secure_sums(tmp_path: Path) -> None:
    run = secure_run(tmp_path / "run")
    assert near(run, simulated(tmp_path / "same", *SIX), rounds=2)


def at(step: str, *, round: str = "0") -> Change:
    """A device that is lost at a step."""

    def lost(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [] if (message.metadata.message_type, message.metadata.group_id) == (f"train.{step}", round) else [reply]

    return lost


@pytest.mark.parametrize("step", ["keys", "shares", "masked", "unmask"])
def test_a_device_lost_at_any_step_costs_its_own_part_at_most(step: str, tmp_path: Path) -> None:
    run = secure_run(tmp_path / "run", "rounds=1", change={101: at(step)}, timeout=0.5, least=2)
    there = "[0, 1, 2, 3, 4, 5]" if step == "unmask" else "[0, 2, 3, 4, 5]"
    wanted = simulated(tmp_path / "same", *SIX, "rounds=1", f"fleet.trace=[{there}]")
    assert near(run, wanted)
    assert run.rows[0]["dropped"] == ({} if step == "unmask" else {"1": "did not answer within 0.5 s"})


def test_too_few_devices_make_a_round_void(tmp_path: Path) -> None:
    lost = {node: at("masked") for node in (100, 101, 102)}
    run = secure_run(tmp_path / "run", change=lost, timeout=0.5)
    assert [row["void"] for row in run.rows] == [True, False]
    assert "3 devices are left, and 4 must be" in run.rows[0]["dropped"]["4"]


def test_positions_that_too_few_devices_hold_are_unchanged(tmp_path: Path) -> None:
    start = beginning()
    lost = {100: at("masked")}  # of three devices with the whole model two are left
    run = secure_run(tmp_path / "run", "rounds=1", change=lost, timeout=0.5, least=3)
    wanted = simulated(tmp_path / "same", *SIX, "rounds=1", "fleet.trace=[[1, 2, 3, 4, 5]]")
    changed = {n: run.tensors[n] != start[n] for n in start}
    for name, tensor in wanted.tensors.items():
        inside = changed[name]
        assert torch.equal(run.tensors[name][~inside], start[name][~inside])
        assert bool(((run.tensors[name] - tensor)[inside].abs() <= STEP / 2 + 2e-7).all())
    assert 0.1 < float(torch.cat([each.flatten() for each in changed.values()]).float().mean()) < 0.5


def test_the_server_sees_masked_words_and_nothing_else(tmp_path: Path) -> None:
    seen: dict[str, set[str]] = {}

    def watch(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if reply.has_content():
            keys = {f"{name}.{key}" for name, record in reply.content.config_records.items() for key in record}
            keys |= {f"{name}.*" for name in reply.content.array_records}
            seen.setdefault(message.metadata.message_type, set()).update(keys)
        return [reply]

    secure_run(tmp_path / "run", "rounds=1", change=dict.fromkeys(WHO, watch))
    assert seen.pop("query.profile") == {"profile.format", "profile.client", "profile.capacity", "profile.recipe"}
    assert seen == {
        "train.keys": {"keys.devices", "keys.seal", "keys.mask", "keys.signature"},
        "train.shares": {"shares.devices", "shares.texts", "commitments.areas", "commitments.hashes"},
        "train.masked": {"masked.*"},
        "train.unmask": {"helped.devices", "helped.areas", "helped.shares"},
    }


def test_a_small_device_uploads_what_it_holds_and_not_the_padded_model(tmp_path: Path) -> None:
    sizes: dict[int, int] = {}

    def count(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train.masked":
            sizes[node] = sum(len(array.data) for array in reply.content.array_records["masked"].values())
        return [reply]

    run = secure_run(tmp_path / "run", "rounds=1", "task.width=32", change=dict.fromkeys(WHO, count))
    padded = 4 * sum(tensor.numel() for tensor in run.tensors.values())
    print(f"upload: {sizes[101]:,} bytes of 1/2, {sizes[100]:,} of 1; padded with zeros {padded:,} each")
    assert sizes[100] == padded + 4  # and the loss
    assert sizes[101] < 0.4 * padded


def lied(step: str, **what: Any) -> Change:
    """A server's message to a device, changed on its way."""

    def lie(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != f"train.{step}":
            return [reply]
        other = deepcopy(message)
        for name, change in what.items():
            other.content[name] = ConfigRecord({**other.content.config_records[name], **change})
        return [nodes.reply(other)]

    return lie


def refusal(tmp_path: Path, change: Change, **config: Any) -> str:
    run = secure_run(tmp_path / "run", change={100: change}, **config)
    dropped: dict[str, str] = run.rows[0]["dropped"]
    return dropped["0"]


def test_a_device_refuses_a_plan_in_which_it_is_alone(tmp_path: Path) -> None:
    """The server says that all others are small, so that most of the model would be the victim's alone."""
    cohort = ["0 1", *(f"{client} 1/2" for client in range(1, 6))]

    def alone(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train.keys":
            return [reply]
        other = deepcopy(message)
        other.content["asked"] = ConfigRecord({**other.content.config_records["asked"], "cohort": cohort})
        first = nodes.reply(other)  # it takes part, in what others hold, too ...
        nodes.log.append(other)
        return [first]

    said = refusal(tmp_path, alone)
    assert "a round, cohort or plan that it did not begin with" in said  # ... and stops where it hears another plan


def test_a_victim_that_is_lied_to_all_along_sends_nothing_that_is_masked(tmp_path: Path) -> None:
    """The same lie at every step: the others' plan is another one, so it cannot open what they share, nor they its."""
    cohort = {"cohort": [f"{client} {'1' if client in (0, 1, 2) else '1/2'}" for client in range(6)]}

    def lie(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        step = message.metadata.message_type.removeprefix("train.")
        if step in ("keys", "shares", "masked", "unmask"):
            nodes.contexts[node].state = before.get(node, RecordDict())  # as if the true message had not come
            (answer,) = lied(step, asked=cohort)(nodes, node, message, reply)
            before[node] = deepcopy(nodes.contexts[node].state)
            assert isinstance(answer, Message)
            assert answer.has_error() or "masked" not in answer.content
            return [answer]
        return [reply]

    before: dict[int, RecordDict] = {}
    run = secure_run(tmp_path / "run", "rounds=1", change={100: lie}, least=2)
    assert "shares of another round, cohort or plan" in run.rows[0]["dropped"]["0"]
    assert near(run, simulated(tmp_path / "same", *SIX, "rounds=1", "fleet.trace=[[1, 2, 3, 4, 5]]"))


def test_a_server_that_asks_for_masked_values_twice_gets_them_once(tmp_path: Path) -> None:
    again: list[Message] = []

    def ask(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train.masked":
            again.append(nodes.reply(deepcopy(message)))
        return [reply]

    run = secure_run(tmp_path / "run", "rounds=1", change={100: ask})
    assert run.rows[0]["dropped"] == {}
    assert ["second masking of one round" in str(reply.error.reason) for reply in again] == [True]


def test_a_device_alone_with_its_capacity_refuses(tmp_path: Path) -> None:
    who = {100: "1", **{100 + client: "1/2" for client in range(1, 6)}}
    nodes = fleet(tmp_path / "run", *SIX, "rounds=1", who=who, secure=True)
    run = flower_run(tmp_path / "run", *SIX, "rounds=1", nodes=nodes)
    start = beginning()
    changed = torch.cat([(run.tensors[n] != t).flatten() for n, t in start.items()]).float().mean()
    assert 0 < float(changed) < 0.5  # what is the large device's alone is unchanged


def test_a_device_does_not_lower_its_own_limits(tmp_path: Path) -> None:
    own = {100: {"client": 0, "capacity": "1", "least": 5}}
    who = {node: capacity for node, capacity in WHO.items() if node != 100}
    nodes = fleet(tmp_path / "run", *SIX, "rounds=1", who=who, more=own, secure=True, least=3)
    run = flower_run(tmp_path / "run", *SIX, "rounds=1", nodes=nodes)
    assert "sums of at least 5 only" in run.rows[0]["dropped"]["0"]


def test_nothing_is_sent_plain_in_a_secure_run(tmp_path: Path) -> None:
    nodes = fleet(tmp_path / "run", *SIX, who=WHO, secure=True)
    reply = nodes.reply(Message(RecordDict(), 100, "train"))
    assert "not masked" in str(reply.error.reason)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("method=feddf", "needs more of a client than sums"),
        ("method=scaffold", "needs more of a client than sums"),
        ("method=dsfl", "needs more of a client than sums"),
    ],
)
def test_methods_that_need_single_uploads_are_refused(settings: str, said: str) -> None:
    with pytest.raises(FedrolexError, match=said):
        Settings(set=settings, secure=True).described()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("method.rows=true", "tells which classes"),
        ("method.weighting=samples", "count all devices alike"),
        ("method.norms=per_capacity;task.norm=static", "one section a job"),
    ],
)
def test_settings_that_would_tell_of_single_devices_are_refused(settings: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(FedrolexError, match=said):
        secure_run(tmp_path / "run", *settings.split(";"), "rounds=1")


def test_two_jobs_of_a_client_in_one_section_are_refused() -> None:
    """They would be one value in the sum, the last one's."""
    training = prepare(find_recipe("digits").with_settings([*SMALL, *SIX]))
    server = training.server
    jobs = training.method.jobs(server, 0)
    again = replace(jobs[0], name="again")
    with pytest.raises(FedrolexError, match="two jobs in section 'model'"):
        Areas.of([*jobs, again], server.networks, server.state, 2)


def test_devices_that_know_each_other_refuse_invented_ones(tmp_path: Path) -> None:
    """The server answers for device 5 itself, with keys of its own: without signatures nobody would notice."""
    folder = tmp_path / "known"
    folder.mkdir()
    for node in WHO:
        make_key(tmp_path / f"{node - 100}")
        (tmp_path / f"{node - 100}.pub").rename(folder / f"{node - 100}.pub")

    def invented(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train.keys":
            return [reply]
        fake = {5: Keys(public(secret()), public(secret()), b"")}
        return [Message(RecordDict({"keys": keys_record(fake)}), reply_to=message)]

    own = {
        node: {
            "client": node - 100,
            "capacity": held,
            "identity": str(tmp_path / f"{node - 100}"),
            "known": str(folder),
        }
        for node, held in WHO.items()
    }
    good = fleet(tmp_path / "run", *SIX, "rounds=1", who={}, more=own, secure=True)
    run = flower_run(tmp_path / "run", *SIX, "rounds=1", nodes=good)
    assert near(run, simulated(tmp_path / "same", *SIX, "rounds=1"))
    change: Mapping[int, Change] = {105: invented}
    bad = fleet(tmp_path / "bad", *SIX, "rounds=1", who={}, more=own, change=change, secure=True, least=3)
    run = flower_run(tmp_path / "bad", *SIX, "rounds=1", nodes=bad)
    assert "is not known, or did not sign its keys" in run.rows[0]["dropped"]["5"]
    assert run.rows[0]["clients"] == 5  # the others begin again, without it
