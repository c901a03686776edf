"""A round on real devices is a round: over Flower's messages every method gives the simulation's bits."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="needs fedrolex[flower]")

from flower_grid import SMALL, Done, Nodes, config, fleet, flower_run, simulated
from flower_methods import Creep
from flwr.app import Context, Message, RecordDict

from fedrolex import Examples, FedrolexError, Run, prepare
from fedrolex.flower import Settings, SubModelStrategy, capacity, own_data, train_on
from fedrolex.flower.messages import Asked, bytes_of
from fedrolex.flower.transport import packed, unpacked_freely
from fedrolex.privacy.accountant import epsilon
from fedrolex.recipes import find_recipe

METHODS: dict[str, list[str]] = {
    "fedrolex": [],
    "spread": ["method.spread=true"],
    "norms": ["method.norms=per_capacity", "task.norm=static"],
    "batch norm": ["task.norm=batch"],
    "rows": ["method.rows=true", "client.mask=zero"],
    "heterofl": ["method=heterofl"],
    "fed_dropout": ["method=fed_dropout"],
    "fjord": ["method=fjord"],
    "fedavg": ["method=fedavg"],
    "fedprox": ["method=fedprox"],
    "scaffold": ["method=scaffold"],
    "columns": ["method=columns"],
    "feddf": ["method=feddf", "method.steps=2", "method.judge_every=2"],
    "fedbe": ["method=fedbe", "method.epochs=1"],
    "fedet": ["method=fedet", "method.steps=2"],
    "dsfl": ["method=dsfl", "method.epochs=1"],
}


@pytest.mark.parametrize("name", METHODS)
def test_devices_give_the_bits_of_a_simulation(name: str, tmp_path: Path) -> None:
    run = flower_run(tmp_path / "run", *METHODS[name])
    wanted = simulated(tmp_path / "same", *METHODS[name])
    assert run.tensors.keys() == wanted.tensors.keys()
    for key, tensor in wanted.tensors.items():
        assert torch.equal(run.tensors[key], tensor), key
    for mine, theirs in zip(run.rows, wanted.rows, strict=True):
        assert not mine["dropped"]
        assert mine["train_loss"] == theirs["train_loss"]
        assert mine["global_accuracy"] == theirs["global_accuracy"]


def test_a_method_of_ones_own_runs_on_devices(tmp_path: Path) -> None:
    own = ["method=plugin.fedrolex_plugin.clipped:Clipped", "method.most=0.3"]
    run, wanted = flower_run(tmp_path / "run", *own), simulated(tmp_path / "same", *own)
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_only_the_sub_model_travels_and_its_bytes_are_counted(tmp_path: Path) -> None:
    nodes = fleet(tmp_path / "run")
    run = flower_run(tmp_path / "run", nodes=nodes)
    asked = [message for message in nodes.log if message.metadata.message_type == "train"]
    sizes = {message.metadata.dst_node_id: bytes_of(message.content) for message in asked}
    assert sizes[100] > 2 * sizes[101] > 4 * sizes[102] > 0
    assert [row["bytes_down"] for row in run.rows] == [sum(sizes.values())] * len(run.rows)
    assert [row["bytes_up"] for row in run.rows] == [sum(sizes.values())] * len(run.rows)
    model = sum(t.numel() * t.element_size() for t in run.tensors.values())
    assert sizes[100] == model


def test_a_device_gets_its_own_columns_only(tmp_path: Path) -> None:
    nodes = fleet(tmp_path / "run", "method=columns")
    run = flower_run(tmp_path / "run", "method=columns", nodes=nodes)
    column = {  # its tensors of each column, as the server has them after the last round
        "0": {name.removeprefix("model:"): t for name, t in run.tensors.items() if name.startswith("model:")},
        "1": {name.removeprefix("column1:"): t for name, t in run.tensors.items() if name.startswith("column1:")},
    }
    asked = [m for m in nodes.log if m.metadata.message_type == "train" and m.metadata.group_id == "2"]
    jobs = {m.metadata.dst_node_id: Asked.read(m.content).jobs for m in asked}
    assert jobs == {100: ["0", "1"], 101: ["0"], 102: ["1"]}
    for message in asked:
        names = [key for key in message.content.array_records if key.startswith("tensors")]
        assert len(names) == len(jobs[message.metadata.dst_node_id])
        for place, name in enumerate(jobs[message.metadata.dst_node_id]):
            assert set(message.content[f"tensors {place}"]) == set(column[name])


def test_a_fleet_that_is_not_all_there_trains_with_those_who_are(tmp_path: Path) -> None:
    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", who={100: "1", 102: "1/4"}))
    wanted = simulated(tmp_path / "same", "fleet.trace=[[0, 2]]")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_capacity_between_two_levels_is_the_lower_one(tmp_path: Path) -> None:
    run = flower_run(tmp_path / "run", nodes=fleet(tmp_path / "run", who={100: "1", 101: "0.7", 102: "1/3"}))
    wanted = simulated(tmp_path / "same")
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"client": 1, "capacity": "1/100"}, "less than every capacity"),
        ({"client": 0, "capacity": "1"}, "there is a client 0 already"),
        ({"client": 7, "capacity": "1"}, "there are 0 to 2"),
        ({"capacity": "1"}, "give it a number"),
        ({"client": 1, "capacity": "fast"}, "fast"),
        ({"client": 1, "memory": 0.001}, "cannot hold 1/4"),
    ],
)
def test_a_node_that_does_not_fit_is_not_taken(
    node: Mapping[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = fleet(tmp_path / "run", who={100: "1"}, more={101: node})
    run = flower_run(tmp_path / "run", nodes=nodes, patience=0.5)
    assert said in capsys.readouterr().err
    assert [row["clients"] for row in run.rows] == [1, 1, 1]


def test_a_measured_capacity_is_the_largest_that_fits(tmp_path: Path) -> None:
    nodes = fleet(
        tmp_path / "run", who={100: "1"}, more={101: {"client": 1, "memory": 4096}, 102: {"client": 2, "memory": 0.2}}
    )
    flower_run(tmp_path / "run", nodes=nodes)
    last = [Asked.read(message.content) for message in nodes.log if message.metadata.group_id == "2"]
    cohort = {member.client: member.capacity for asked in last for member in asked.cohort}
    assert cohort[1] == 1
    assert cohort[2] < 1


def test_a_device_that_is_slow_takes_less_than_it_could_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    training = prepare(find_recipe("digits").with_settings(SMALL))
    assert 0 < capacity.step_seconds(training, Fraction(1, 4)) < 60  # by the clock
    monkeypatch.setattr(capacity, "step_seconds", lambda training, level: 8.0 * level)
    for seconds, wanted in ((9, "1"), (7.9, "1/2"), (2, "1/4")):
        assert capacity.measured(training, {"memory": 4096, "seconds": seconds}) == Fraction(wanted)
    assert capacity.measured(training, {"memory": 0.2, "seconds": 9}) < 1
    with pytest.raises(FedrolexError, match=r"a step of 1/4, .* longer than 1 s"):
        capacity.measured(training, {"memory": 4096, "seconds": 1})


@pytest.mark.parametrize("method", ["fedgkt", "fedselect"])
def test_methods_whose_server_reads_devices_are_refused(method: str) -> None:
    with pytest.raises(FedrolexError, match=f"{method} cannot run on real devices"):
        Settings(set=f"method={method}").described()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"transport": "fp8"}, "fp32, bf16, int8"),
        ({"timeuot": 3}, "did you mean 'timeout'"),
        ({"threshold": 0.4}, "at least a half"),
        ({"least": 1}, "hides nothing"),
        ({"reach": 0.0}, "run-config.reach is 0.0: give a number above 0"),
        ({"timeout": -1}, "run-config.timeout is -1.0: give a number above 0"),
        ({"set": "fleet.redrawn=true"}, "for simulations"),
        ({"set": "fleet.stragglers=0.1"}, "for simulations"),
    ],
)
def test_a_wrong_run_config_is_one_line(config: dict[str, Any], said: str) -> None:
    with pytest.raises(FedrolexError, match=said):
        Settings.read(config).described()


def test_what_rounding_leaves_of_a_change_gets_through_in_later_rounds(tmp_path: Path) -> None:
    """Changes of a quarter of an int8 step, which would be rounded to nothing in every round."""
    step, rounds = 1 / 127, 12
    own = ["method=flower_methods:Creeping", f"rounds={rounds}", "evaluate_every=1000"]
    run = flower_run(tmp_path / "run", *own, nodes=fleet(tmp_path / "run", *own, transport="int8"))
    wanted = simulated(tmp_path / "same", *own)
    assert rounds * Creep.little > 3 * step  # what would be lost
    for name, tensor in wanted.tensors.items():
        assert float((run.tensors[name] - tensor).abs().max()) < step, name


def test_private_averages_on_devices_are_the_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples, noise and the clip that follows the norms, to the bits; here with a system that draws what is known."""
    pytest.importorskip("dp_accounting", reason="needs fedrolex[flower]")
    monkeypatch.setattr("fedrolex.methods.private.secrets.randbits", lambda bits: 2**bits // 3)
    own = ["method=private", "method.noise=0.5", "method.count_noise=1", "method.clip=0.5", "fleet.clients=6",
           "fleet.cohort=3", "task.limit=360", "rounds=4"]  # fmt: skip
    who = {100 + client: ("1", "1/2", "1/4")[client % 3] for client in range(6)}
    run = flower_run(tmp_path / "run", *own, nodes=fleet(tmp_path / "run", *own, who=who))
    said = capsys.readouterr().out
    wanted = simulated(tmp_path / "same", *own, "method.secret=true")
    assert run.tensors.keys() == wanted.tensors.keys()
    assert "clip:norm" in wanted.tensors
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())
    assert [row["clients"] for row in run.rows] == [row["clients"] for row in wanted.rows]
    assert len({row["clients"] for row in run.rows}) > 1  # a Poisson sample's
    spent = epsilon(0.5, 0.5, 4, 6**-1.1)
    assert f"ε = {spent:.3g} at δ = 0.14, for a client added or removed with all its data" in said
    assert "sampling rate 0.5, 4 rounds)" in said  # and no word of a simulation
    monkeypatch.undo()
    other = flower_run(tmp_path / "other", *own, nodes=fleet(tmp_path / "other", *own, who=who))
    assert not torch.equal(run.tensors["clip:norm"], other.tensors["clip:norm"])  # the system's own draws are others


def test_a_private_round_does_not_leave_out_a_client_because_of_others(tmp_path: Path) -> None:
    """Its change is shortened instead: whether a client counts must not follow from the others' norms."""

    def far(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            trained = unpacked_freely(reply.content.array_records["tensors 0"])
            reply.content["tensors 0"] = packed({name: tensor * 1e4 for name, tensor in trained.items()})
        return [reply]

    own = ["method=private", "method.noise=0", "method.quantile=null", "method.clip=0.5"]
    run = flower_run(tmp_path / "run", *own, nodes=fleet(tmp_path / "run", *own, change={101: far}))
    assert [row["dropped"] for row in run.rows] == [{}, {}, {}]
    start = prepare(find_recipe("digits").with_settings([*SMALL, *own])).tensors()
    assert max(float((run.tensors[name] - tensor).abs().max()) for name, tensor in start.items()) < 3 * 0.5


def test_a_strategy_gives_the_bits_of_private_averages_and_leaves_out_what_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedrolex.methods.private.secrets.randbits", lambda bits: 2**bits // 3)

    def twice(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [reply, Message(RecordDict(), reply_to=message)] if message.metadata.message_type == "train" else [reply]

    def wrong(nodes: Nodes, node: int, message: Message, reply: Message) -> list[Message]:
        return [Message(RecordDict(), reply_to=message)] if message.metadata.message_type == "train" else [reply]

    own = ["method=private", "method.noise=0.5", "method.quantile=null"]
    settings = Settings.read(config(tmp_path / "run", *own))
    recipe = settings.described()
    training = prepare(recipe)
    strategy = SubModelStrategy(training, recipe, settings)
    nodes = fleet(tmp_path / "run", *own, change={100: twice, 101: wrong})
    result = strategy.start(nodes, strategy.arrays(), num_rounds=3, timeout=5)
    wanted = simulated(tmp_path / "same", *own, "method.secret=true", "fleet.trace=[[0, 2]]")
    assert all(torch.equal(training.tensors()[key], tensor) for key, tensor in wanted.tensors.items())
    assert [result.train_metrics_clientapp[n]["dropped"] for n in (1, 2, 3)] == [1, 1, 1]
    assert ["device 0" in str(row["strays"]) for row in strategy.rows] == [True] * 3
    assert "for a client added or removed" in training.method.facts(training.server)["privacy"]


@pytest.mark.parametrize(("transport", "least"), [("bf16", 1.9), ("int8", 2.4)])
def test_shortened_values_cost_less_and_hardly_change_the_model(transport: str, least: float, tmp_path: Path) -> None:
    run = flower_run(tmp_path / "run", "rounds=6", nodes=fleet(tmp_path / "run", "rounds=6", transport=transport))
    wanted = simulated(tmp_path / "same", "rounds=6")
    sent = [sum(row["bytes_down"] + row["bytes_up"] for row in each.rows) for each in (wanted, run)]
    assert sent[0] / sent[1] > least
    moved = [simulated(tmp_path / "first", "rounds=1").tensors, wanted.tensors]
    far = sum(float((moved[1][k] - moved[0][k]).square().sum()) for k in wanted.tensors)
    off = sum(float((run.tensors[k] - t).square().sum()) for k, t in wanted.tensors.items())
    assert 0 < off < 0.1 * far


def test_a_killed_server_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    method = ["method=scaffold", "rounds=4", "checkpoint_every=2"]

    def killed(nodes: Nodes, node: int, message: Any, reply: Any) -> list[Any]:
        if message.metadata.group_id == "3":
            raise KeyboardInterrupt
        return [reply]

    own = {101: {"client": 1, "capacity": "1/2", "folder": str(tmp_path / "device")}}
    for node, client in ((100, 0), (102, 2)):
        own[node] = {"client": client, "capacity": "1", "folder": str(tmp_path / "device")}
    with pytest.raises(KeyboardInterrupt):
        flower_run(
            tmp_path / "run", *method, nodes=fleet(tmp_path / "run", *method, who={}, more=own, change={100: killed})
        )
    assert len(Run.open(tmp_path / "run").rows()) == 3
    run = flower_run(tmp_path / "run", *method, nodes=fleet(tmp_path / "run", *method, who={}, more=own))
    wanted = simulated(tmp_path / "same", *method)
    assert all(torch.equal(run.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_device_takes_nothing_that_it_kept_in_a_run_by_another_recipe(tmp_path: Path) -> None:
    """What rounding left of a change is its run's: it does not fit another model's, and lies to another seed's."""

    def run(name: str, device: str, *settings: str) -> Done:
        own = {
            node: {"client": node - 100, "capacity": held, "folder": str(tmp_path / device)}
            for node, held in {100: "1", 101: "1/2", 102: "1/4"}.items()
        }
        nodes = fleet(tmp_path / name, *settings, who={}, more=own, transport="bf16")
        return flower_run(tmp_path / name, *settings, nodes=nodes)

    run("before", "device")
    absent = "fleet.trace=[[0, 1, 2], [0, 2], [0, 1, 2]]"  # client 1 has nothing newer than the run before in round 2
    for name, settings in (("wide", ["task.width=16"]), ("seed", ["seed=5"])):
        again, wanted = (run(f"{name}-{device}", device, *settings, absent) for device in ("device", f"new-{name}"))
        assert [row["dropped"] for row in again.rows] == [{}, {}, {}]
        assert all(torch.equal(again.tensors[key], tensor) for key, tensor in wanted.tensors.items())


def test_a_device_that_lost_what_it_kept_is_left_out(tmp_path: Path) -> None:
    def forgets(nodes: Nodes, node: int, message: Any, reply: Any) -> list[Any]:
        nodes.contexts[node].state.clear()
        return [reply]

    nodes = fleet(tmp_path / "run", "method=scaffold", change={101: forgets})
    run = flower_run(tmp_path / "run", "method=scaffold", nodes=nodes)
    assert not run.rows[0]["dropped"]
    assert "has lost what it kept in round 0" in run.rows[1]["dropped"]["1"]


def test_the_example_with_a_model_of_ones_own_learns(tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "examples" / "flower_own_model" / "own_app.py"
    app: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), app)
    run_config: dict[str, Any] = {"out": str(tmp_path / "run"), "patience": 5.0, "set": "rounds=20; device=cpu"}
    nodes = Nodes(
        app["client"], {100 + n: {"client": n, "capacity": c} for n, c in enumerate(("1", "1/2", "1/4"))}, run_config
    )
    summary = train_on(nodes, Context(1, 0, {}, RecordDict(), run_config), app["recipe"], app["task"])
    assert float(str(summary["global_accuracy"])) > 0.8
    assert summary["dropped"] == 0


def test_flowers_own_loop_drives_a_strategy_to_the_same_bits(tmp_path: Path) -> None:
    settings = Settings.read(config(tmp_path / "run"))
    recipe = settings.described()
    training = prepare(recipe)
    strategy = SubModelStrategy(training, recipe, settings)
    result = strategy.start(fleet(tmp_path / "run"), strategy.arrays(), num_rounds=3, timeout=5)
    wanted = simulated(tmp_path / "same")
    assert all(torch.equal(training.tensors()[key], tensor) for key, tensor in wanted.tensors.items())
    assert result.train_metrics_clientapp[3]["clients"] == 3
    for name, array in result.arrays.items():
        assert torch.equal(torch.from_numpy(array.numpy()), wanted.tensors[f"model:{name}"])
    with pytest.raises(FedrolexError, match="four messages a round"):
        SubModelStrategy(training, recipe, Settings(secure=True))


@pytest.mark.parametrize(("given", "said"), [({"client": 3}, "give 0 to 2"), ({}, "say classes")])
def test_data_of_ones_own_says_what_it_lacks(given: dict[str, Any], said: str) -> None:
    examples = Examples(torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(FedrolexError, match=said):
        own_data(lambda scale: torch.nn.Linear(2, 2), examples, clients=3, **given)
