"""A run goes on only from a state that is its own, whole and finite; else it says so, and touches nothing."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_folders import files, resumed, same, stopped, whole
from safetensors.torch import save_file
from told import told
from torch import Tensor

from fedrolex import Run
from fedrolex.rounds import ClientStates
from fedrolex.runs import checkpoint


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of some methods, stopped after two of four rounds, and one of another seed; and two whole ones."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedrolex", "scaffold", "dsfl"):
        stopped(folder / method, f"method={method}")
    stopped(folder / "scaffold-2", "method=scaffold", "seed=2")
    stopped(folder / "dsfl-2", "method=dsfl", "seed=2")
    whole(folder / "whole-fedrolex")
    whole(folder / "whole-scaffold", "method=scaffold")
    return folder


def copy(runs: Path, name: str, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(runs / name, tmp_path / "run")))


def refused(run: Run) -> str:
    """What a run that cannot go on says; it leaves everything as it is."""
    before = files(run.folder)
    said = told(lambda: resumed(run))
    assert {**files(run.folder), ".lock": b""} == {**before, ".lock": b""}
    return said


# --- what clients keep ---


def flip(path: Path, place: int = -1) -> None:
    """Turn one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def swap(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def newest(run: Run) -> Path:
    return sorted((run.folder / "clients").glob("*/*-1.safetensors"))[0]


DAMAGE: dict[str, Callable[[Run, Path], object]] = {
    "deleted": lambda run, other: shutil.rmtree(run.folder / "clients"),
    "one deleted": lambda run, other: newest(run).unlink(),
    "one flipped": lambda run, other: flip(newest(run)),
    "swapped": lambda run, other: swap(run.folder / "clients", other / "clients"),
    "one renamed": lambda run, other: newest(run).rename(newest(run).with_name("x.safetensors")),
    "round spoiled": lambda run, other: (run.folder / "clients" / "round").write_text("two"),
}


@pytest.mark.parametrize("method", ["scaffold", "dsfl"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_states_of_clients_that_are_not_this_runs_are_refused(
    method: str, damage: str, runs: Path, tmp_path: Path
) -> None:
    run = copy(runs, method, tmp_path)
    DAMAGE[damage](run, runs / f"{method}-2")
    assert "clients does not hold what the clients of this run kept until round 2: put it back" in refused(run)


def test_other_files_beside_the_states_do_no_harm(runs: Path, tmp_path: Path) -> None:
    run = copy(runs, "scaffold", tmp_path)
    save_file({"a": torch.zeros(1)}, run.folder / "clients" / "001" / "mine.safetensors")
    assert same(resumed(run), Run(runs / "whole-scaffold"))


def test_a_full_disk_while_states_are_saved_is_one_line_and_leaves_the_states_before(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.put(5, 0, {"c": torch.zeros(3)})
    before = states.save(1)
    states.put(5, 1, {"c": torch.zeros(100_000)})
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        said = told(lambda: states.save(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith(f"cannot write {tmp_path}")
    ClientStates(tmp_path).restore(1, before)
    assert sorted(files(tmp_path)) == ["005/5-0.safetensors", "round"]


# --- checkpoints ---


@pytest.mark.parametrize("place", [-1, -3000, 200])
def test_a_flipped_bit_is_noticed(place: int, runs: Path, tmp_path: Path) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    flip(run.checkpoint, place)
    assert "is damaged" in refused(run)


def spoiled(run: Run, change: Callable[[Tensor], Tensor]) -> None:
    """Write the checkpoint again with other tensors, checksum included."""
    tensors, about = checkpoint.read(run.checkpoint)
    checkpoint.write(run.checkpoint, {name: change(tensor) for name, tensor in tensors.items()}, about)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Tensor.half, "is torch.float16 in the checkpoint; this run has torch.float32"),
        (Tensor.long, "is torch.int64 in the checkpoint; this run has torch.float32"),
        (lambda tensor: tensor * float("nan"), "is not finite in the checkpoint"),
        (lambda tensor: tensor / 0, "is not finite in the checkpoint"),
    ],
)
def test_tensors_of_another_type_and_those_not_finite_are_refused(
    change: Callable[[Tensor], Tensor], says: str, runs: Path, tmp_path: Path
) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    spoiled(run, change)
    assert says in refused(run)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("recipe", "{", "the recipe in checkpoint"),
        ("recipe", "[]", "the recipe in checkpoint"),
        ("recipe", '{"a":' * 100_000, "the recipe in checkpoint"),
        ("recipe", "[" * 100_000, "the recipe in checkpoint"),
        ("round", str(10**9), "is of round 1000000000, and the run has 4"),
        ("round", "9" * 5000, "and the run has 4"),
        ("round", "²", "is of round ², and the run has 4"),
        ("round", "", "is of round ?, and the run has 4"),
    ],
)
def test_a_checkpoint_that_says_nonsense_about_itself(
    key: str, value: str, says: str, runs: Path, tmp_path: Path
) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    tensors, about = checkpoint.read(run.checkpoint)
    checkpoint.write(run.checkpoint, tensors, {**about, key: value})
    assert says in refused(run)


@pytest.mark.parametrize("about", [[1], {"kind": "fedrolex checkpoint", "format": "2", "round": 2}])
def test_a_checkpoint_of_other_types_is_none(about: object, runs: Path, tmp_path: Path) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    tensors, _ = checkpoint.read(run.checkpoint)
    save_file(tensors, run.checkpoint, {checkpoint.ABOUT: json.dumps(about)})
    assert "is not a checkpoint of a fedrolex run" in refused(run)


@pytest.mark.parametrize("method", ["fedrolex", "scaffold"])
def test_a_checkpoint_without_checksums_as_version_0_1_0_wrote_it_goes_on(
    method: str, runs: Path, tmp_path: Path
) -> None:
    run = copy(runs, method, tmp_path)
    tensors, about = checkpoint.read(run.checkpoint)
    about.pop("clients", None)
    del about["metrics"]
    save_file(tensors, run.checkpoint, {checkpoint.ABOUT: json.dumps(about)})
    assert same(resumed(run), Run(runs / f"whole-{method}"))


def test_a_checkpoint_that_is_gone_is_missed(runs: Path, tmp_path: Path) -> None:
    run = copy(runs, "whole-scaffold", tmp_path)
    run.checkpoint.unlink()
    assert "any more, though 4 rounds are done: put it back, or move metrics.jsonl away" in refused(run)


def test_a_run_without_a_checkpoint_as_yet_says_that_it_begins_again(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    run.checkpoint.unlink()
    assert same(resumed(run), Run(runs / "whole-fedrolex"))
    assert capsys.readouterr().err == f"{run.folder} has no checkpoint yet: it starts again at round 0\n"


def test_metrics_and_a_checkpoint_that_were_not_written_together(runs: Path, tmp_path: Path) -> None:
    """Metrics of another run, or a checkpoint that says another round than it was written in."""
    run = copy(runs, "scaffold", tmp_path)
    text = run.metrics.read_bytes()
    shutil.copy(Run(runs / "scaffold-2").metrics, run.metrics)
    says = "metrics.jsonl holds other metrics than its checkpoint was written with: put it back as it was, or"
    assert says in refused(run)
    run.metrics.write_bytes(text)
    assert same(resumed(run), Run(runs / "whole-scaffold"))
    other = Run(Path(shutil.copytree(runs / "fedrolex", tmp_path / "other")))
    tensors, about = checkpoint.read(other.checkpoint)
    for round in "01":
        checkpoint.write(other.checkpoint, tensors, {**about, "round": round})
        assert says in refused(other)


def test_metrics_that_only_say_their_rounds_are_none(runs: Path, tmp_path: Path) -> None:
    run = copy(runs, "fedrolex", tmp_path)
    run.metrics.write_text('{"round": 0}\n{"round": 1}\n')
    assert "does not hold rounds 0 to 1 any more: put it back as it was, or start a new run with" in refused(run)
