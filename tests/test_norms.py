"""Norms: static batch norm and its statistics, the scaler, groups, and scales that a capacity keeps apart."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path

import pytest
import torch
from torch import nn

from fedrolex import FedrolexError, Hints, Recipe, Static, trace
from fedrolex.clients import MODEL
from fedrolex.models import PreResNet, preresnet18
from fedrolex.models.norms import Moments, Norm, collect, norm_parameters, static_norms, with_statistics
from fedrolex.runs import Training, prepare
from fedrolex.runs.checkpoint import read
from fedrolex.runs.run import Run
from fedrolex.tasks.measure import Measure

IMAGES = torch.randn(24, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def small(norm: Norm = "static", scaler: bool = False) -> PreResNet:
    torch.manual_seed(0)
    model = preresnet18(width=8, norm=norm, scaler=scaler, size=16)
    with torch.no_grad():
        for name in norm_parameters(model):
            model.get_parameter(name).uniform_(0.5, 1.5)
    return model


def test_evaluated_on_the_batch_it_was_collected_from_a_model_computes_what_it_did_in_training() -> None:
    model = small()
    evaluated = with_statistics(model, collect(model, [IMAGES]))
    torch.testing.assert_close(evaluated(IMAGES), model.train()(IMAGES), rtol=1e-4, atol=1e-5)
    alone = torch.cat([evaluated(image[None]) for image in IMAGES])
    torch.testing.assert_close(alone, evaluated(IMAGES), rtol=1e-4, atol=1e-5)


def test_without_statistics_scores_depend_on_the_batch() -> None:
    model = small().eval()
    assert float((model(IMAGES[:4]) - model(IMAGES)[:4]).abs().max().detach()) > 0.01


def test_collecting_and_evaluating_leave_the_model_as_it_was() -> None:
    model = small().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with_statistics(model, collect(model, IMAGES.split(8)))
    assert not model.training
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any("running" in name for name in before)


def test_pooling_what_clients_send_is_what_one_place_with_all_data_would_have() -> None:
    """A single norm, so that its inputs do not depend on how they are batched."""
    norm = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)).double()
    sizes = [5, 1, 11, 7]
    sent = [collect(norm, part.split(4))["0"] for part in IMAGES.double().split(sizes)]
    pooled = reduce(Moments.pooled, sent)
    flat = IMAGES.transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(pooled.mean, flat.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pooled.variance, flat.var(1, correction=0), rtol=1e-12, atol=1e-12)
    assert pooled.count == flat.shape[1]


def test_statistics_of_another_model_are_refused() -> None:
    with pytest.raises(FedrolexError, match="no statistics for norm"):
        with_statistics(small(), {})


@pytest.mark.parametrize("norm", ["static", "group"])
def test_the_scaler_is_undone_by_norms(norm: Norm) -> None:
    sizes = {f"{axis.name}": max(1, axis.size // 2) for axis in trace(small(norm), IMAGES[:2]).cut_axes}
    plain, scaled = PreResNet(small(norm).plan, sizes), PreResNet(small(norm, scaler=True).plan, sizes)
    scaled.load_state_dict(plain.state_dict())
    assert scaled.scale.rate == 0.5
    torch.testing.assert_close(plain(IMAGES), scaled(IMAGES), rtol=0, atol=1e-3)
    torch.testing.assert_close(plain.eval()(IMAGES), scaled.eval()(IMAGES), rtol=0, atol=0)


def test_without_norms_the_scaler_scales_in_training_alone() -> None:
    sizes = {f"{axis.name}": axis.size // 2 for axis in trace(small("none"), IMAGES[:2]).cut_axes}
    plain, scaled = PreResNet(small("none").plan, sizes), PreResNet(small("none", scaler=True).plan, sizes)
    scaled.load_state_dict(plain.state_dict())
    torch.testing.assert_close(scaled.get_submodule("stages.0.0.scale1")(IMAGES), IMAGES * 2)
    assert isinstance(plain.get_submodule("stages.0.0.norm1"), nn.Identity)
    assert not torch.allclose(plain(IMAGES), scaled(IMAGES), atol=1e-3)
    torch.testing.assert_close(plain.eval()(IMAGES), scaled.eval()(IMAGES), rtol=0, atol=0)


def test_statistics_are_collected_without_the_scaler() -> None:
    """Evaluation does not scale; statistics of scaled inputs would be of another network."""
    sizes = {f"{axis.name}": max(1, axis.size // 4) for axis in trace(small(), IMAGES[:2]).cut_axes}
    torch.manual_seed(0)
    scaled = PreResNet(small(scaler=True).plan, sizes)
    evaluated = with_statistics(scaled, collect(scaled, [IMAGES]))
    torch.testing.assert_close(evaluated(IMAGES), scaled.eval()(IMAGES), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", ["static", "batch", "group", "none"])
def test_every_norm_is_cut_and_the_whole_cut_is_the_model(norm: Norm) -> None:
    model = small(norm)
    axes = trace(model, IMAGES[:2])
    whole = axes.cut(model, Static().window(axes, round=0, capacity="1"))
    torch.testing.assert_close(whole(IMAGES), model.train()(IMAGES))
    half = axes.cut(model, Static().window(axes, round=0, capacity="1/2"))
    assert sum(p.numel() for p in half.parameters()) == axes.parameters("1/2")
    half(IMAGES).sum().backward()


def test_group_norm_keeps_its_groups() -> None:
    axes = trace(small("group"), IMAGES[:2])
    assert {axis.size for axis in axes.axes.values() if axis.kind == "groups"} == {4}
    for width in (4, 6):
        with pytest.raises(FedrolexError, match=f"width {width} with norm 'group': give a multiple of 4 above it"):
            preresnet18(width=width, norm="group")


def test_the_scaler_and_running_statistics_are_refused() -> None:
    """Statistics of scaled inputs would be used for unscaled ones."""
    with pytest.raises(FedrolexError, match="spoil running statistics"):
        preresnet18(norm="batch", scaler=True)


# --- in training ---


def training(*settings: str) -> Training:
    recipe = Recipe(device="cpu", rounds=2).with_settings(
        ["task.model=preresnet18", "task.width=4", "fleet.clients=6", "fleet.cohort=6", "client.batch=32",
         'fleet.capacities=["1", "1/2"]', "task.limit=200", *settings]
    )  # fmt: skip
    return prepare(recipe)


def test_a_result_says_how_norms_were_evaluated() -> None:
    made = training()
    first = made.evaluate()
    assert first["statistics"] == "recalibrated"
    made.measure = replace(made.measure, statistics="test-batch", batch=100)
    second = made.evaluate()
    assert second["statistics"] == "test-batch"
    assert first["loss"] != second["loss"]
    assert training("task.norm=batch").evaluate()["statistics"] == "running"
    assert training("task.norm=group", "task.width=8").evaluate()["statistics"] is None
    assert made.evaluate() == second


def test_sub_models_of_every_capacity_are_measured() -> None:
    made = training("evaluation.submodels=true")
    made.run_round()
    found = made.evaluate()
    assert list(found["submodels"]) == ["1", "1/2"]
    assert found["submodels"]["1"] == found["global_accuracy"]


def test_norms_per_capacity_are_moved_by_that_capacity_alone() -> None:
    made = training("method=heterofl", "method.norms=per_capacity")
    name = "norm.weight"
    start = made.server.state[MODEL][name].clone()
    assert torch.equal(made.server.state["norms@1/2"][name], start)
    made.run_round()
    state = made.server.state
    one, half = state["norms@1"][name], state["norms@1/2"][name]
    assert torch.equal(state[MODEL][name], one)
    assert not torch.equal(one, start)
    assert torch.equal(half[16:], start[16:])
    assert not torch.equal(half[:16], start[:16])
    assert not torch.equal(half[:16], one[:16])
    shared = training("method=heterofl")
    shared.run_round()
    assert torch.equal(shared.server.state[MODEL]["stem.weight"], state[MODEL]["stem.weight"])
    assert not torch.equal(shared.server.state[MODEL][name], one)


def test_with_one_capacity_norms_per_capacity_are_shared_norms() -> None:
    one = 'fleet.capacities=["1/2"]'
    made, shared = training(one, "method.norms=per_capacity"), training(one)
    for each in (made, shared):
        each.run_round()
        each.run_round()
    for name, tensor in shared.server.state[MODEL].items():
        assert torch.equal(tensor, made.server.state[MODEL][name]), name
    assert made.evaluate() == shared.evaluate()


def test_a_run_with_norms_per_capacity_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, broken = training("method.norms=per_capacity"), training("method.norms=per_capacity")
    recipe = Recipe(device="cpu", rounds=4, checkpoint_every=2)
    Run.create(tmp_path / "a", recipe).go(whole)
    Run.create(tmp_path / "b", replace(recipe, rounds=2)).go(broken)
    recipe.write(tmp_path / "b" / "recipe.yaml")
    Run.open(tmp_path / "b").go(training("method.norms=per_capacity"))
    one, two = (read(tmp_path / name / "checkpoint.safetensors")[0] for name in "ab")
    assert "norms@1/2:norm.weight" in one
    assert all(torch.equal(one[name], two[name]) for name in one)
    again = training("method.norms=per_capacity", f"weights={tmp_path / 'a' / 'checkpoint.safetensors'}")
    assert all(torch.equal(tensor, one[name]) for name, tensor in again.tensors().items())
    shared = training(f"weights={tmp_path / 'a' / 'checkpoint.safetensors'}")
    assert torch.equal(shared.server.state[MODEL]["norm.weight"], one["norms@1:norm.weight"])


def test_norms_of_a_width_everyone_trains_are_that_widths() -> None:
    made = training("method=fedavg", "method.width=1/3", "client.batch=40", "method.norms=per_capacity")
    row = made.run_round()
    assert row["dropped"] == {}
    plain = training("method=fedavg", "method.width=1/3", "client.batch=40")
    plain.run_round()
    assert made.evaluate() == plain.evaluate()


def test_a_lonely_last_image_does_not_end_a_run() -> None:
    """501 images in batches of 500 on a 1×1 map: the last batch would be one value a channel."""
    for settings in (["evaluation.calibration=151", "evaluation.batch=150"], ["evaluation.statistics=test-batch"]):
        made = training(*settings, "evaluation.batch=199", "task.limit=200")
        assert "global_accuracy" in made.evaluate()


def test_norms_per_capacity_need_norms() -> None:
    with pytest.raises(FedrolexError, match="this model has no norms"):
        training("method.norms=per_capacity", "task.norm=none")


def test_a_sub_model_that_runs_from_a_traced_graph_is_recalibrated_like_one_of_modules() -> None:
    server = training().server
    task, (model, known) = server.task, (server.main.module, server.main.axes)
    axes = trace(model, task.example(), Hints())
    cut, native = (each.cut(model, Static().window(each, round=0, capacity="1/2")) for each in (axes, known))
    assert len(static_norms(cut)) == len(static_norms(native)) == 17
    seen, wanted = (list(collect(part, task.some_inputs(90, 30)).values()) for part in (cut, native))
    for one, other in zip(seen, wanted, strict=True):
        assert one.count == other.count
        torch.testing.assert_close((one.mean, one.variance), (other.mean, other.variance))
    found, expected = Measure()(task, cut), Measure()(task, native)
    assert found["statistics"] == expected["statistics"] == "recalibrated"
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    evaluated, x = Measure().ready(task, cut), next(iter(task.some_inputs(24, 24)))
    alone = torch.cat([evaluated(image[None]) for image in x])
    torch.testing.assert_close(alone, evaluated(x), rtol=1e-4, atol=1e-5)
    assert Measure(statistics="test-batch")(task, cut)["statistics"] == "test-batch"


def test_a_batch_of_one_on_one_pixel_is_the_clients_failure() -> None:
    """Two of the six clients have 34 examples: their last batch is one value a channel."""
    row = training("client.batch=33").run_round()
    assert sorted(row["dropped"]) == ["0", "1"]
    assert all("more than 1 value per channel" in why for why in row["dropped"].values())
    assert row["clients"] == 4
