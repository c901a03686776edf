"""The command line: what it prints, and one clear line for each mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fedrolex import Axes, FedrolexError, __version__
from fedrolex.cli.app import app, main
from fedrolex.cli.arguments import read_arguments, read_inputs

MODEL = "fedrolex.models:preresnet18"


def fails(*words: str) -> str:
    """Run a command that must fail with one line; return the line."""
    result = CliRunner().invoke(app, list(words))
    assert isinstance(result.exception, FedrolexError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_version_from_the_shell() -> None:
    done = subprocess.run([sys.executable, "-m", "fedrolex", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"fedrolex {__version__}\n"


def test_a_mistake_from_the_shell_is_one_line_and_exit_status_2() -> None:
    done = subprocess.run([sys.executable, "-m", "fedrolex", "slice", "nothing:here"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: cannot import 'nothing': No module named 'nothing'\n"


@pytest.mark.parametrize(("words", "near"), [(["trian"], "'train'"), (["data", "gt"], "'get'")])
def test_a_mistyped_command_is_answered_with_a_near_one_once(words: list[str], near: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.output.count(f"Did you mean {near}?") == 1


def test_slice_prints_axes_sizes_and_the_proof() -> None:
    result = CliRunner().invoke(app, ["slice", MODEL, "--input", "2x3x32x32"])
    assert result.exit_code == 0, result.output
    for text in (
        "stream3",
        "inner2.1",
        "11,172,170",
        "44,510",
        "0.40%",
        "proved: 12 axes",
        "stem.weight:1: tied to an input",
    ):
        assert text in result.output


def test_slice_json_is_one_document_with_loadable_layouts(tmp_path: Path) -> None:
    picture = tmp_path / "axes.png"
    words = ["slice", MODEL, "--input", "2x3x32x32", "--arg", "classes=100", "--capacity", "1/3", "--rounding", "ceil"]
    result = CliRunner().invoke(app, [*words, "--json", "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["proved"] is True
    assert found["capacities"][0]["capacity"] == "1/3"
    axes = Axes.decode(found["layouts"])
    assert axes.parameters("1/3", "ceil") == found["capacities"][0]["parameters"]
    assert {a["name"]: a["size"] for a in found["axes"]}["head"] == 100
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_slice_builds_configured_models_without_evaluating_anything() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    settings = ["n_embd=32", "n_layer=1", "n_head=4", "vocab_size=50", "n_positions=16"]
    words = [
        "slice",
        "transformers:GPT2LMHeadModel",
        "--arg",
        "config=transformers:GPT2Config",
        "--input",
        "input_ids=2x16:int64:50",
    ]
    result = CliRunner().invoke(app, [*words, *(w for s in settings for w in ("--arg", f"config.{s}")), "--json"])
    assert result.exit_code == 0, result.output
    kinds = {a["kind"] for a in json.loads(result.stdout)["axes"]}
    assert kinds == {"width", "heads", "rows"}


def test_coverage_says_what_lockstep_rolling_misses() -> None:
    words = [
        "coverage",
        "--scheme",
        "rolling",
        "--scheme",
        "spread",
        "--capacity",
        "1/4",
        "--rounds",
        "20",
        "--clients",
        "10",
        "--json",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    rolling, spread = json.loads(result.stdout)["results"]
    assert (rolling["scheme"], rolling["capacity"], rolling["rounds"], rolling["clients"]) == ("rolling", "1/4", 20, 10)
    assert rolling["matrices"] < 0.4 < 0.9 < spread["matrices"]
    table = CliRunner().invoke(app, ["coverage", "--capacity", "1/2", "--rounds", "3"])
    assert "unevenness" in table.output


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--capacity", "0"], "capacity 0 is outside (0, 1]"),
        (["--capacity", "1.5"], "capacity 1.5 is outside (0, 1]"),
        (["--capacity", "half"], "capacity 'half' is not a number"),
        (["--input", "2x3x32x32x"], "is not a shape"),
        (["--input", "2x0"], "a dimension is 0"),
        (["--input", "2x3:floaty"], "'floaty' is not a dtype"),
        (["--input", "2x3:int64:many"], "'many' is not a number"),
        (["--input", "2x8:int64:0"], "'0' is not a number of values: integers are drawn from 0 to HIGH - 1, give 1 to"),
        (
            ["--input", "2x8:int8:129"],
            "'129' is not a number of values: integers are drawn from 0 to HIGH - 1, give 1 to 128",
        ),
        (["--input", "2x8:int64:99999999999999999999"], "is not a number of values"),
        (["--input", "2x8:int64:²"], "'²' is not a number of values"),
        (["--input", "2x8:float32:7"], "'7' is not a number of values: only integers have one"),
        (["--input", "99999999999999999999x2"], "--input '99999999999999999999x2': "),
        (["--input", "9" * 5000], "is not a shape"),
        (["--input", "2x3:qint8"], "--input '2x3:qint8': "),
        (["--input", "a=2x3", "--input", "2x3"], "--input a=2x3 --input 2x3 have a name: give all inputs one, or none"),
        (["--input", "2x3", "--input", "a=2x3"], "--input 2x3 --input a=2x3 have a name: give all inputs one, or none"),
        (["--input", "2x5x32x32"], "the model does not accept the example (x: (2, 5, 32, 32) float32)"),
        (["--rounding", "up"], "--rounding is 'up': use one of floor, ceil"),
        (["--picture", "axes.txt"], "must end in .png"),
        (["--arg", "classes"], "is not NAME=VALUE"),
        (["--arg", "colour=red"], "unexpected keyword argument 'colour'"),
        (["--arg", "classes=[1"], "cannot read"),
        (["--arg", "classes.depth=3"], "needs --arg classes=MODULE:OBJECT"),
    ],
)
def test_slice_with_a_mistake(words: list[str], says: str) -> None:
    assert says in fails("slice", MODEL, *words)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("resnet18", "is not MODULE:FACTORY"),
        ("fedrolex.models:resnet19", "has no 'resnet19'"),
        ("no.such.module:thing", "cannot import 'no.such.module'"),
        ("fedrolex:__version__", "give a function or class that makes a module"),
        ("fedrolex.slicing:exact", "calling it failed"),
        ("builtins:dict", "made a dict, not a torch.nn.Module"),
        ("torch.nn:ReLU", "no parameters"),
    ],
)
def test_slice_of_what_is_not_a_model(factory: str, says: str) -> None:
    assert says in fails("slice", factory)


def test_coverage_does_not_simulate_for_hours() -> None:
    words = ["--input", "2x3x32x32", "--times", "1000", "--indices", "4096", "--trials", "100000"]
    said = fails("coverage", MODEL, *words)
    assert said.endswith("at most 500,000,000 are drawn, give fewer --trials")


def test_a_data_folder_that_is_a_link_to_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    words = ["--data", str(tmp_path / "loop")]
    assert CliRunner().invoke(app, ["data", "list", *words]).exit_code == 0
    assert "cifar10" in fails("train", "--set", "task.data=cifar10", "--out", str(tmp_path / "run"), *words)


MADE = torch.nn.Linear(2, 2)


def test_a_model_that_is_made_takes_no_arguments() -> None:
    said = fails("slice", "test_cli:MADE", "--input", "2x2", "--arg", "out_features=3")
    assert said == "test_cli:MADE is a module that is made already, --arg out_features=3 does nothing: leave it out"


def test_letters_that_a_terminal_has_not_are_written_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "☃").mkdir()
    words = [sys.executable, "-m", "fedrolex", "runs", str(tmp_path / "☃")]
    plain = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(words, capture_output=True, text=True, env=plain)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"no runs in {tmp_path}/\\u2603\n"


def test_coverage_with_a_mistake() -> None:
    assert "--scheme is 'spiral': use one of rolling, static, random, blocks" in fails("coverage", "--scheme", "spiral")
    assert "overlap" in fails("coverage", "--overlap", "2")
    for scheme in ("rolling", "spread"):
        said = fails("coverage", "--scheme", scheme, "--overlap", "1/0")
        assert said == "overlap '1/0' is not a number: give a fraction such as 1/4, or 0.25"
    many = ["coverage", "small:Residual", "--input", "2x3x8x8", "--capacity", "1/2"]
    windows = "for every scheme and capacity, have 1,000,000,000 windows: at most 10,000,000 are counted, give fewer"
    assert f"1,000,000,000 clients in 1 rounds, {windows}" in fails(*many, "--clients", "1000000000", "--rounds", "1")
    assert f"1 clients in 1,000,000,000 rounds, {windows}" in fails(*many, "--rounds", "1000000000")
    assert "1,000,000,000 clients in 8 rounds" in fails(*many, "--clients", "1000000000")
    assert "capacity" in fails("coverage", "--capacity", "0")


def test_a_module_in_the_current_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ndef build(width: int = 8):\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))\n"
        "broken = 1 / 0 if __name__ == 'x' else None\n"
    )
    words = [sys.executable, "-m", "fedrolex", "slice", "mine:build", "--input", "2x4", "--arg", "width=6", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["axes"][0] == {
        "name": "0",
        "size": 6,
        "kind": "width",
        "members": ["0.weight:0", "0.bias:0", "2.weight:1"],
    }
    (tmp_path / "bad.py").write_text("raise RuntimeError('boom')\n")
    done = subprocess.run(
        [sys.executable, "-m", "fedrolex", "slice", "bad:build"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (2, "error: importing 'bad' failed: RuntimeError: boom\n")


def test_values_are_yaml_and_inputs_are_reproducible() -> None:
    assert read_arguments(["a=1", "b=[1, 2]", "c=text", "d=true", "e=null"]) == {
        "a": 1,
        "b": [1, 2],
        "c": "text",
        "d": True,
        "e": None,
    }
    first, second = read_inputs(["2x3:int64:7"]), read_inputs(["2x3:int64:7"])
    assert bool((first[0] == second[0]).all())
    assert int(first[0].max()) < 7
    assert read_inputs([])[0].shape == (2, 3, 224, 224)


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("another")])
def test_a_full_device_is_one_line(
    failure: RuntimeError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise failure

    monkeypatch.setattr("fedrolex.cli.app.app", run)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    if not isinstance(failure, torch.OutOfMemoryError):
        with pytest.raises(RuntimeError, match="another"):
            main()
        return
    with pytest.raises(SystemExit) as told:
        main()
    assert told.value.code == 1
    assert capsys.readouterr().err.startswith("error: the device's memory ran out: use a smaller")
