"""What a day's use wants of runs: a list, a second measurement, a comparison, more rounds, the best checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from threading import Thread

import pytest
from run_folders import RECIPE, files, same, stopped, whole
from told import told
from typer.testing import CliRunner

from fedrolex import FedrolexError, Recipe, Run, load, train
from fedrolex.cli.app import app
from fedrolex.runs import checkpoint, lock
from fedrolex.runs.standing import standing


def command(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(result.exception, FedrolexError), result.output
    return str(result.exception)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("some") / "runs"
    whole(folder / "a-2")
    whole(folder / "a-10", "method=heterofl", "client.lr=0.05", "evaluation.submodels=true")
    stopped(folder / "b" / "seed-7", "method=scaffold", "seed=7", rounds=3)
    return folder


# --- runs ---


def test_runs_are_listed_with_where_they_stand(runs: Path, tmp_path: Path) -> None:
    (runs / "empty").mkdir(exist_ok=True)
    found = json.loads(command("runs", runs, "--json"))
    assert [Path(each["run"]).relative_to(runs).as_posix() for each in found] == ["a-2", "a-10", "b/seed-7"]
    assert [(each["state"], each["rounds"], each["of"]) for each in found] == [
        ("finished", 4, 4), ("finished", 4, 4), ("stopped", 3, 4),
    ]  # fmt: skip
    assert [each["method"] for each in found] == ["fedrolex", "heterofl", "scaffold"]
    assert {each["task"] for each in found} == {"images/digits"}
    assert [each["evaluated"] for each in found] == [3, 3, 1]
    assert found[2]["measured"]["global_accuracy"] == Run(runs / "b" / "seed-7").rows()[1]["global_accuracy"]
    with lock.locked(runs / "a-2"):
        assert json.loads(command("runs", runs, "--json"))[0]["state"] == "running"
    plain = command("runs", runs)
    assert all(word in plain for word in ("3 of 4", "stopped", "heterofl", "images/digits"))
    assert "there is no folder" in fails("runs", tmp_path / "nowhere")
    assert command("runs", tmp_path) == f"no runs in {tmp_path}\n"


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    stopped(tmp_path / "a", rounds=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recipe.yaml").write_text("ronuds: 3")
    found = json.loads(command("runs", tmp_path, "--json"))
    assert [each["state"] for each in found] == ["stopped", "damaged"]
    assert "unknown key 'ronuds'" in found[1]["why"]
    assert "damaged" in command("runs", tmp_path)


DEEP = "[" * 100_000


@pytest.mark.parametrize("file", ["environment.json", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("text", [DEEP, '{"rounds": ' + "9" * 5000 + "}"])
def test_files_that_json_cannot_hold_are_damaged(file: str, text: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", RECIPE)
    (run.folder / file).write_text(text)
    found = json.loads(command("runs", tmp_path, "--json"))
    assert [each["state"] for each in found] == ["damaged" if file == "environment.json" else "stopped"]
    assert run.rows() == []


def test_a_pipe_in_the_place_of_a_summary_is_not_read(runs: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(runs / "a-2", tmp_path / "run")) / "summary.json"
    text = path.read_text()
    path.unlink()
    os.mkfifo(path)
    writer = Thread(target=path.write_text, args=[text], daemon=True)
    writer.start()
    assert [each["state"] for each in json.loads(command("runs", tmp_path, "--json"))] == ["stopped"]
    assert path.read_text() == text


@pytest.mark.parametrize(
    "wrong",
    [{"bytes_down": 10**400}, {"seconds": float("nan")}, {"global_accuracy": "high"}, {"validation_accuracy": []}],
)
def test_metrics_that_are_no_numbers_are_damaged(wrong: dict[str, object], runs: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(runs / "a-2", tmp_path / "run"))
    rows = run.rows()
    run.metrics.write_text("".join(json.dumps(row | wrong) + "\n" for row in rows))
    assert (run.rows(), len(rows)) == ([], 4)
    assert "stopped" in command("runs", tmp_path)
    assert "run" in command("compare", run.folder, runs / "a-10")
    assert "does not hold rounds 0 to 3 any more" in fails("resume", run.folder)


@pytest.mark.parametrize("said", ["9" * 5000, "²", ""])
def test_a_model_is_of_a_round(said: str, runs: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(runs / "a-2", tmp_path / "run"))
    checkpoint.write(run.checkpoint, checkpoint.read(run.checkpoint)[0], {"round": said})
    assert "does not say its round" in told(lambda: load(run.folder))


def test_a_model_file_is_of_the_models_type_and_finite(runs: Path, tmp_path: Path) -> None:
    run = Run(shutil.copytree(runs / "a-2", tmp_path / "run"))
    path = run.folder / "model.safetensors"
    state, about = checkpoint.read(run.checkpoint)
    del about[path.name]  # older runs do not say what they wrote
    checkpoint.write(run.checkpoint, state, about)
    tensors, about = checkpoint.read(path)
    for wrong in ({n: t.half() for n, t in tensors.items()}, {n: t / 0 for n, t in tensors.items()}):
        checkpoint.write(path, wrong, {"round": about["round"]})
        assert "does not fit the run's model: look at tensor" in told(lambda: load(run.folder))
    assert "load() was given a str" in told(lambda: load(run.folder, task="digits"))  # type: ignore[arg-type]
    assert "load() was given a Run where it takes the path" in told(lambda: load(run))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["[/red]", "[bold]a", ":+1:", "a1²"])
def test_names_of_runs_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    Run.create(tmp_path / name, RECIPE)
    assert name in command("runs", tmp_path)
    assert name in command("compare", tmp_path / name, tmp_path / name)


def test_what_is_no_file_is_no_recipe_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "recipe.yaml")
    assert json.loads(command("runs", tmp_path, "--json")) == []


# --- evaluate ---


@pytest.mark.parametrize("name", ["a-2", "a-10"])
def test_a_model_measured_again_is_as_good_as_was_reported(name: str, runs: Path) -> None:
    before = files(runs / name)
    found = json.loads(command("evaluate", runs / name, "--json"))
    assert found["rounds"] == 4
    assert found["measured"] == found["reported"]
    assert found["measured"]["global_accuracy"] == Run(runs / name).rows()[-1]["global_accuracy"]
    assert ("submodels.1/2" in found["measured"]) == (name == "a-10")
    assert files(runs / name) == before
    plain = command("evaluate", runs / name)
    assert plain.count(f"{found['measured']['global_accuracy']:.2%}") >= 2


def test_clients_states_count_where_the_method_measures_with_them(tmp_path: Path) -> None:
    run = whole(tmp_path / "run", "method=fedgkt", "rounds=2")
    found = json.loads(command("evaluate", run.folder, "--json"))
    assert found["measured"] == found["reported"]


def test_a_round_that_was_not_evaluated_has_nothing_reported(runs: Path) -> None:
    found = json.loads(command("evaluate", runs / "b" / "seed-7", "--json"))
    assert (found["rounds"], found["reported"]) == (3, {})
    assert 0 <= found["measured"]["global_accuracy"] <= 1


def test_a_model_is_measured_otherwise_but_not_another_one(runs: Path) -> None:
    words = ["evaluate", runs / "a-2", "--json", "--set", "evaluation.submodels=true"]
    assert "submodels.1/2" in json.loads(command(*words))["measured"]
    assert "client.lr cannot be changed in" in fails(*words, "--set", "client.lr=1")
    assert "best.safetensors: the best is kept where" in fails(*words, "--best")


# --- the best checkpoint ---


def test_the_best_by_validation_is_kept_and_can_be_measured(tmp_path: Path) -> None:
    settings = ["task.validation=0.2", "rounds=6", "evaluate_every=1", "checkpoint_every=4", "client.lr=0.4"]
    run = whole(tmp_path / "whole", *settings)
    judged = [row["validation_accuracy"] for row in run.rows()]
    first = judged.index(max(judged))
    assert checkpoint.read(run.best)[1]["round"] == str(first + 1)
    found = json.loads(command("evaluate", run.folder, "--best", "--json"))
    assert (found["rounds"], found["measured"]) == (first + 1, found["reported"])
    broken = stopped(tmp_path / "broken", *settings, rounds=3)
    command("resume", broken.folder, "--json")
    assert broken.best.read_bytes() == run.best.read_bytes()


def test_without_validation_examples_nothing_is_chosen_by_test_examples(runs: Path) -> None:
    assert not Run(runs / "a-2").best.exists()


# --- compare ---


def test_runs_side_by_side_with_what_differs(runs: Path) -> None:
    found = json.loads(command("compare", runs / "a-2", runs / "a-10", "--json"))
    assert set(found["settings"]) >= {"method.name", "client.lr", "evaluation.submodels"}
    assert found["settings"]["client.lr"] == [0.1, 0.05]
    assert not {"seed", "rounds", "task.width"} & set(found["settings"])
    rows = [Run(runs / name).rows() for name in ("a-2", "a-10")]
    assert found["metrics"]["global_accuracy"] == [each[-1]["global_accuracy"] for each in rows]
    assert found["metrics"]["bytes"] == [sum(r["bytes_down"] + r["bytes_up"] for r in each) for each in rows]
    one, other = found["metrics"]["global_accuracy"]
    plain = command("compare", runs / "a-2", runs / "a-10")
    assert f"{other:.1%} ({100 * (other - one):+.1f})" in plain
    assert "client.lr" in plain
    assert "give two or more" in fails("compare", runs / "a-2")


# --- more rounds ---


@pytest.mark.parametrize("method", ["fedrolex", "scaffold"])
def test_more_rounds_are_as_if_they_had_been_asked_for_at_first(method: str, tmp_path: Path) -> None:
    run = whole(tmp_path / "run", f"method={method}", "rounds=2")
    (summary,) = json.loads(command("resume", run.folder, "--set", "rounds=4", "--json"))["runs"]
    assert summary["rounds"] == 4
    assert same(run, whole(tmp_path / "whole", f"method={method}"))
    assert run.recipe().rounds == 4


def test_what_runs_are_compared_with_gets_more_rounds_too(tmp_path: Path) -> None:
    words = [w for key in ("task.width=4", "task.limit=100", "callbacks=[]", "rounds=1") for w in ("--set", key)]
    command("train", *words, "--out", tmp_path / "run", "--device", "cpu", "--json")
    command("resume", tmp_path / "run", "--set", "rounds=2", "--json")
    assert [len(Run(path).rows()) for path in sorted(tmp_path.iterdir())] == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    "setting", ["rounds=1", "seed=3", "client.lr=1", "method=heterofl", "method.server_optimizer=adam"]
)
def test_what_would_change_rounds_that_are_done_is_refused(setting: str, runs: Path) -> None:
    before = files(runs / "a-2")
    said = fails("resume", runs / "a-2", "--set", setting)
    assert f"{setting.partition('=')[0]} cannot be changed in {runs / 'a-2'}" in said
    assert files(runs / "a-2") == before
    assert Run(runs / "a-2").recipe() == RECIPE


def test_a_run_that_is_done_was_measured_as_its_recipe_says(runs: Path, tmp_path: Path) -> None:
    """Its last row and its model are of one evaluation; with more rounds, the last is measured as is asked for."""
    folder = Path(shutil.copytree(runs / "a-2", tmp_path / "run"))
    before, other = files(folder), ["--set", "evaluation.submodels=true"]
    assert f"evaluation cannot be changed in {folder}, which has done its" in fails("resume", folder, *other)
    assert files(folder) == before
    Run(folder).recipe().with_settings(other[1:]).write(folder / "recipe.yaml")
    assert "evaluation cannot be changed" in fails("resume", folder)
    (folder / "recipe.yaml").write_bytes(before["recipe.yaml"])
    command("resume", folder, *other, "--set", "rounds=5", "--json")
    assert "submodels" in Run(folder).rows()[-1]


def test_runs_of_the_papers_tables_are_listed(tmp_path: Path) -> None:
    """They lie five folders down."""
    made = tmp_path / "overall" / "tuned" / "cifar10-high" / "fedrolex" / "seed-1"
    Run.create(made, Recipe(device="cpu").with_settings(["rounds=1"]))
    assert str(made) in CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout
    (tmp_path / "again").symlink_to(tmp_path)
    Run.create(tmp_path / ".trash" / "run", Recipe(device="cpu"))
    listed = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert [each["run"] for each in listed] == [str(made)], "once, whatever leads to it"


def test_a_run_that_is_given_more_rounds_is_done_when_these_are_measured(tmp_path: Path) -> None:
    """What was measured after fewer rounds is not what it is worth now."""
    recipe = RECIPE.with_settings(["callbacks=[details]", "rounds=1"])
    train(recipe, out=tmp_path / "run")
    details = tmp_path / "run" / "details.json"
    early = details.read_text()
    train(recipe.with_settings(["rounds=2"]), out=tmp_path / "run", resume=True)
    assert json.loads(details.read_text())["rounds"] == 2
    details.write_text(early)
    assert standing(Run.open(tmp_path / "run"))["state"] == "stopped"
