"""What is exported predicts as the run's sub-model does, here and in other runtimes, and says how good it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from told import told
from torch import Tensor, nn
from typer.testing import CliRunner

from fedrolex import Classification, Examples, Exported, Recipe, Run, Task, export, load, prepare, train
from fedrolex.cli import progress
from fedrolex.cli.app import app
from fedrolex.core import FedrolexError
from fedrolex.runs.exports.candidates import calibrated, candidates
from fedrolex.runs.exports.export import Options
from fedrolex.runs.exports.formats import can_write
from fedrolex.slicing import exact
from fedrolex.tasks import Measure

SMALL = ["fleet.clients=6", "fleet.cohort=4", 'fleet.capacities=["1", "1/2", "1/4"]', "rounds=3", "engine=loop",
         "client.batch=32", "task.limit=120", "task.width=8", "device=cpu", "compare=false"]  # fmt: skip
NORMS = ["task.model=resnet8", "task.norm=static", "task.width=4"]


def trained(folder: Path, *settings: str) -> Run:
    recipe = Recipe().with_settings([*SMALL, *settings])
    run = Run.create(folder, recipe)
    run.go(prepare(recipe))
    return run


def images(run: Run) -> Tensor:
    """The inputs of the run's test examples."""
    task = prepare(run.recipe()).server.task
    assert isinstance(task, Classification)
    return task.inputs(task.test.x)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rolling windows, static norms."""
    return trained(tmp_path_factory.mktemp("run") / "run", *NORMS)


@pytest.fixture(scope="module")
def exported(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(run.folder, "1/4", tmp_path_factory.mktemp("export") / "model", windows=4)


def test_of_one_window_it_is_the_runs_sub_model(run: Run, tmp_path: Path) -> None:
    made = export(run.folder, "1/2", tmp_path / "model", windows=1, formats=())
    x = images(run)
    with torch.no_grad():
        assert torch.equal(made.model(x), load(run.folder, "1/2")(x))
    assert [window["round"] for window in made.report["windows"]] == [2]


def test_the_best_window_on_held_out_examples_is_chosen(exported: Exported) -> None:
    windows = exported.report["windows"]
    assert [window["round"] for window in windows] == [2, 1, 0]
    best = max(windows, key=lambda window: window["after"])
    assert exported.report["round"] == best["round"]
    assert exported.report["chosen_on"] == {"examples": "training", "count": 120}


def test_the_report_is_measured_on_the_test_examples(run: Run, exported: Exported) -> None:
    task = prepare(run.recipe()).server.task
    found = Measure()(task, exported.model)["global_accuracy"]
    assert exported.report["test"]["after"] == found
    assert exported.report["test"]["whole"] == Measure()(task, load(run.folder))["global_accuracy"]
    written = json.loads((exported.folder / "model.json").read_text())
    assert written["report"] == exported.report
    assert written["report"]["parameters"] == sum(p.numel() for p in exported.model.parameters())


def test_loaded_from_its_folder_it_is_the_same_model(run: Run, exported: Exported) -> None:
    x, again = images(run), load(exported.folder)
    with torch.no_grad():
        assert torch.equal(again(x), exported.model(x))
        assert torch.allclose(again(x[:1]), exported.model(x)[:1], atol=1e-5)  # one image alone
    assert type(again) is type(exported.model)
    assert load_file(exported.folder / "model.safetensors").keys() >= dict(again.named_parameters()).keys()


WITHOUT = """
import sys, torch
from safetensors.torch import load_file, save_file
model = torch.export.load(sys.argv[1]).module()
save_file({"y": model(load_file(sys.argv[2])["x"]).detach()}, sys.argv[3])
assert not any(name.startswith("fedrolex") for name in sys.modules)
"""


def test_a_fresh_process_runs_the_pt2_without_this_package(run: Run, exported: Exported, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    x = images(run)
    save_file({"x": x}, tmp_path / "x")
    words = [str(exported.folder / "model.pt2"), str(tmp_path / "x"), str(tmp_path / "y")]
    subprocess.run([sys.executable, "-c", WITHOUT, *words], check=True, timeout=300)
    said = load_file(tmp_path / "y")["y"]
    with torch.no_grad():
        own = exported.model(x)
    assert torch.equal(said.argmax(1), own.argmax(1))
    assert torch.allclose(said, own, atol=1e-5)


def test_onnx_runtime_says_the_same(run: Run, exported: Exported) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed")
    if not can_write("onnx"):
        pytest.skip("onnx and onnxscript are not installed")
    session = runtime.InferenceSession(str(exported.folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [each.shape[0] for each in (*session.get_inputs(), *session.get_outputs())] == ["batch", "batch"]
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["classes"]) == json.loads((exported.folder / "model.json").read_text())["classes"]
    x = images(run)
    for some in (x, x[:1]):
        (said,) = session.run(["output"], {"input": some.numpy()})
        with torch.no_grad():
            own = exported.model(some).numpy()
        np.testing.assert_allclose(said, own, atol=1e-4)
        assert (said.argmax(1) == own.argmax(1)).all()


# --- calibration ---


class Tracked(nn.Module):
    """A norm with running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.stem(x))).mean((2, 3)))
        return scores


def test_running_statistics_are_replaced_by_those_of_the_very_model() -> None:
    x = torch.randn(200, 1, 8, 8)
    task = Task.split(
        lambda scale: Tracked(4 * scale), Examples(x, torch.arange(200) % 10), Examples(x, torch.arange(200) % 10), 4
    )
    model = Tracked(4)
    assert model.norm.running_mean is not None
    model.norm.running_mean += 100
    found = calibrated(task, model, Measure())
    assert isinstance(found, Tracked)
    with torch.no_grad():
        seen = model.stem(x)
    assert found.norm.running_mean is not None
    assert found.norm.running_var is not None
    torch.testing.assert_close(found.norm.running_mean, seen.mean((0, 2, 3)))
    torch.testing.assert_close(found.norm.running_var, seen.var((0, 2, 3), correction=0))
    assert float(model.norm.running_mean.mean()) > 50  # what was given is as it was


def test_held_out_examples_are_never_test_examples() -> None:
    x = torch.arange(300.0)[:, None].repeat(1, 20)
    y = torch.arange(300) % 3
    whole = Examples(x[:200], y[:200]), Examples(x[200:], y[200:])

    def task(**aside: float) -> Task:
        return Task.split(lambda scale: nn.Linear(20, 3), *whole, clients=4, **aside)  # type: ignore[arg-type]

    chosen = task().held_out(50)
    assert isinstance(chosen, Classification)
    assert len(chosen.test) == 50
    assert float(chosen.test.x.max()) < 200
    split = task(validation=0.2)
    aside = split.held_out(50)
    assert isinstance(aside, Classification)
    assert isinstance(split, Classification)
    assert split.validation is not None
    assert torch.equal(aside.test.x, split.validation.x)


# --- methods ---


def test_equal_windows_are_tried_once(tmp_path: Path) -> None:
    made = export(trained(tmp_path / "run", "method=heterofl").folder, "1/4", formats=())
    assert [window["round"] for window in made.report["windows"]] == [2]
    assert made.folder == tmp_path / "run" / "exports" / "1-4"


def test_a_device_gets_its_own_columns_or_one_model_that_learned_from_all(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "method=columns", "method.rows=true", "task.public=0.2")
    row = export(run.folder, "1", tmp_path / "row", windows=1)
    assert len(row.model.columns) == 2  # type: ignore[arg-type]
    x = images(run)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "row")(x), load(run.folder, "1")(x))
    one = export(run.folder, "1/4", tmp_path / "one", windows=1, distil=True, steps=20, one_model=True, formats=())
    assert not hasattr(one.model, "columns")
    assert one.report["test"]["distilled"] is not None
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "one")(x), one.model(x))
    assert "distil, too" in told(lambda: Options(one_model=True))


def test_one_model_in_place_of_columns_is_as_wide_as_the_device_whatever_the_server(tmp_path: Path) -> None:
    """A device that holds half of the task's model, beside a server as wide as the task's model and twice as wide."""
    sizes = []
    for scale in (1, 2):
        own = ["method=columns", "task.public=0.2", f"fleet.server_scale={scale}", 'fleet.capacities=["1/2"]']
        run = trained(tmp_path / str(scale), *own)
        how: dict[str, Any] = {"windows": 1, "distil": True, "steps": 2, "one_model": True, "formats": ()}
        one = export(run.folder, "1/2" if scale == 1 else "1/4", tmp_path / f"one-{scale}", **how)
        sizes.append(one.report["parameters"])
    assert sizes[0] == sizes[1]


def test_a_network_of_its_own_of_a_task_given_in_python_is_exported(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(90, 4, generator=draw), torch.arange(3).repeat(30)
    task = Task.split(
        build=lambda scale: nn.Sequential(nn.Linear(4, 8 * scale), nn.ReLU(), nn.Linear(8 * scale, 3)),
        train=Examples(x[:60], y[:60]),
        test=Examples(x[60:], y[60:]),
        clients=4,
    )
    assert isinstance(task, Classification)
    own = {"1/2": lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))}
    task = replace(task, models=own, public=task.test, validation=task.test)
    few = ["fleet.clients=4", "fleet.cohort=4", 'fleet.capacities=["1", "1/2"]', "rounds=1", "callbacks=[]",
           "method=feddf", "method.steps=1", "device=cpu"]  # fmt: skip
    train(Recipe().with_settings(few), task, out=tmp_path / "run")
    done = export(tmp_path / "run", "1/2", tmp_path / "half", task=task, windows=1, formats=())
    assert torch.equal(load(tmp_path / "half", task=task)(x), done.model(x))
    assert done.report["parameters"] == 4 * 2 + 2 + 2 * 3 + 3


def test_distillation_brings_a_sub_model_nearer_to_the_whole_one(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", *NORMS, "rounds=6", "task.limit=600")
    others = prepare(run.recipe()).server.classification.train.x
    made = [
        export(run.folder, "1/2", tmp_path / str(steps), windows=1, distil=bool(steps), public=others, steps=steps or 1,
               formats=())
        for steps in (0, 300)
    ]  # fmt: skip
    plain, taught = (one.report["test"] for one in made)
    assert plain["distilled"] is None
    assert taught["after"] == plain["after"]
    assert taught["distilled"] > plain["after"]


def test_a_run_of_one_width_gives_its_model(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "method=fedavg", "method.width=1/2")
    made = export(run.folder, "1/2", formats=())
    x = images(run)
    with torch.no_grad():
        assert torch.equal(made.model(x), load(run.folder)(x))
        assert torch.equal(load(made.folder)(x), made.model(x))


def test_the_whole_of_a_traced_model_comes_back(tmp_path: Path) -> None:
    """Its norms are other modules than the model's, which it was rebuilt as."""
    run = trained(tmp_path / "run", *NORMS, "method=heterofl", "rounds=1")
    made = export(run.folder, "1", tmp_path / "whole", windows=1, formats=())
    x = images(run)
    with torch.no_grad():
        assert torch.equal(load(made.folder)(x), made.model(x))


class Own(nn.Module):
    """A model of one's own, cut as its traced graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3), nn.BatchNorm2d(width, track_running_stats=False)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.norm(self.stem(x))).mean((2, 3)))
        return scores


def test_a_task_given_in_python_is_given_again(tmp_path: Path) -> None:
    x, y = torch.randn(90, 1, 6, 6), torch.arange(90) % 3
    task = Task.split(lambda scale: Own(8 * scale), Examples(x[:60], y[:60]), Examples(x[60:], y[60:]), 6)
    few = [setting for setting in SMALL if not setting.startswith("task.")]
    train(Recipe().with_settings(few), task, out=tmp_path / "run")
    made = export(tmp_path / "run", "1/4", tmp_path / "model", task=task, formats=("pt2",))
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "model", task=task)(x), made.model(x))
        program: Any = torch.export.load(tmp_path / "model" / "model.pt2").module()
        assert torch.allclose(program(x), made.model(x), atol=1e-5)
    assert classes(tmp_path / "model") is None
    assert "given in Python: give it" in told(lambda: load(tmp_path / "model"))
    assert "given in Python: give it" in told(lambda: export(tmp_path / "run", "1/4"))


def classes(folder: Path) -> Any:
    """What an export says of its classes."""
    return json.loads((folder / "model.json").read_text()).get("classes")


def test_the_names_of_classes_are_written_in_the_order_of_the_scores(exported: Exported, tmp_path: Path) -> None:
    assert classes(exported.folder) == list("0123456789")
    draw = np.random.default_rng(0)
    for name in ("dog", "ant", "zebra"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(20):
            Image.fromarray(draw.integers(0, 256, (8, 8), dtype=np.uint8)).save(folder / f"{number}.png")
    run = trained(tmp_path / "run", f"task.data={tmp_path / 'photos'}", "task.model=convnet", "rounds=1")
    made = export(run.folder, "1/2", tmp_path / "half", windows=1, formats=())
    assert classes(made.folder) == ["ant", "dog", "zebra"]
    task = prepare(run.recipe()).server.task
    assert isinstance(task, Classification)
    assert "2 class_names, but 3 classes" in told(lambda: replace(task, class_names=("ant", "dog")))


def test_candidates_are_those_of_the_rounds(run: Run) -> None:
    from fedrolex.runs.load import restored

    training = restored(run.folder, None, "cpu").training
    found = list(candidates(training.method, training.server, exact("1/4"), 2, plain=False))
    assert [one.round for one in found] == [2, 1]
    for one in found:
        window = training.server.window(one.round, exact("1/4"))
        cut = training.server.main.axes.cut(training.server.loaded(), window)
        assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), cut.parameters(), strict=True))


# --- mistakes ---


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit": (lambda folder: flip(folder / "model.safetensors"), "is not what model.json says, or damaged"),
    "no tensors": (lambda folder: (folder / "model.safetensors").unlink(), "there is no file"),
    "half a file": (lambda folder: (folder / "model.safetensors").write_bytes(b"12"), "damaged or not a safetensors"),
    "no JSON": (lambda folder: (folder / "model.json").write_text("{"), "damaged"),
    "a list": (lambda folder: (folder / "model.json").write_text("[]"), "not of an exported model"),
    "newer": (lambda folder: change(folder / "model.json", format=2), "update fedrolex"),
    "no recipe": (lambda folder: change(folder / "model.json", recipe=3), "model.json cannot be used"),
    "scale": (lambda folder: change(folder / "model.json", scale=10**9), "scale is 1000000000"),
    "a large input": (
        lambda folder: change(folder / "model.json", input={"shape": [2**20, 2**20], "dtype": "float32"}),
        "an input's shape is [1048576, 1048576]: give at most",
    ),
    "an odd input": (
        lambda folder: change(folder / "model.json", input={"shape": [3, -1], "dtype": "float32"}),
        "an input's shape is [3, -1]",
    ),
    "wide": (
        lambda folder: change(folder / "model.json", module={"network": None, "window": {}}),
        "does not fit the model that model.json describes",
    ),
    "a window": (
        lambda folder: change(folder / "model.json", module={"network": None, "window": {"stream": 7}}),
        "not a window",
    ),
    "a network": (
        lambda folder: change(folder / "model.json", module={"network": "1/3", "window": {}}),
        "model.json cannot be used",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_folder_is_one_line(what: str, exported: Exported, tmp_path: Path) -> None:
    for name in ("model.json", "model.safetensors"):
        (tmp_path / name).write_bytes((exported.folder / name).read_bytes())
    damage, said = DAMAGE[what]
    damage(tmp_path)
    assert said in told(lambda: load(tmp_path))


def test_other_mistakes_are_one_line(run: Run, exported: Exported, tmp_path: Path) -> None:
    assert "is not a run" in told(lambda: export(tmp_path, "1/4"))
    assert "no client trains capacity 1/8: give one of 1, 1/2, 1/4" in told(lambda: export(run.folder, "1/8"))
    assert "is not a number" in told(lambda: export(run.folder, "a quarter"))
    assert "exists already" in told(lambda: export(run.folder, "1/4", exported.folder))
    assert "windows is 0" in told(lambda: export(run.folder, "1/4", windows=0))
    assert "did you mean 'onnx'" in told(lambda: export(run.folder, "1/4", formats=["onx"]))
    assert "no public examples" in told(lambda: export(run.folder, "1/4", tmp_path / "x", distil=True))
    assert "without a capacity" in told(lambda: load(exported.folder, "1/4"))


# --- the command line ---


def test_the_command_prints_tables_or_json(run: Run, tmp_path: Path) -> None:
    few = ["export", str(run.folder), "--windows", "2", "--format", "pt2"]
    done = CliRunner().invoke(app, [*few, "--capacity", "1/4", "--capacity", "1/2", "--out", str(tmp_path / "a")])
    assert done.exit_code == 0, done.output
    assert "before calibration" in done.output
    assert (tmp_path / "a" / "1-2" / "model.pt2").is_file()
    done = CliRunner().invoke(app, [*few, "--capacity", "1/4", "--out", str(tmp_path / "b"), "--json"])
    (one,) = json.loads(done.stdout)["exports"]
    assert one["capacity"] == "1/4"
    assert len(one["windows"]) == 2
    assert Path(one["folder"]) == tmp_path / "b"


def test_the_command_exports_every_capacity_that_has_a_model_and_begins_nothing_it_cannot_end(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "method=columns", 'method.columns=["1/2", "1/2"]', "rounds=1")
    few = ["export", str(run.folder), "--windows", "1", "--format", "pt2"]
    done = CliRunner().invoke(app, [*few, "--json"])
    assert [one["capacity"] for one in json.loads(done.stdout)["exports"]] == ["1", "1/2"]
    twice = CliRunner().invoke(app, [*few, "--capacity", "1/2", "--capacity", "0.5", "--out", str(tmp_path / "half")])
    assert twice.exit_code == 0, "one capacity, given twice"
    assert (tmp_path / "half" / "model.json").is_file()
    (tmp_path / "both" / "1-2").mkdir(parents=True)
    (tmp_path / "both" / "1-2" / "mine").touch()
    refused = CliRunner().invoke(app, [*few, "--out", str(tmp_path / "both")])
    assert isinstance(refused.exception, FedrolexError)
    assert [path.name for path in (tmp_path / "both").iterdir()] == ["1-2"]


def test_the_command_says_what_it_does_in_a_pipe(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1)
    words = ["export", str(run.folder), "--capacity", "1/4", "--windows", "2", "--format", "pt2"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "quarter")])
    assert done.exit_code == 0, done.output
    steps = ["reading", "capacity 1/4: window 1", "capacity 1/4: window 2", "measuring", "capacity 1/4: writing"]
    assert [line for line, step in zip(done.stderr.splitlines(), steps, strict=True) if not line.startswith(step)] == []
