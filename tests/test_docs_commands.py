"""Every command of README.md and docs/ is run, smaller, or is named below with the reason why it is not.

A command runs in this process, in a folder that has what pages speak of: runs, text, modules. What is added to it, or
put in the place of something, so that it takes a second, is in ``SMALLER``. A command that is neither run nor named
fails.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from doc_blocks import ROOT, Command, commands, saved_files
from typer.testing import CliRunner

from fedrolex.cli.app import app

NOT_RUN = {
    r"scripts/test": "it is what runs this test",
    r"scripts/(quickstart|docs|fleet .*)": "installs packages; what it then starts is tested",
    r"pip install .*": "installs packages",
    r"fedrolex data get .*": "needs a network; test_get.py runs it against a server of its own",
    r"(flower-superlink|flower-supernode|flwr) .*": "needs a fleet; test_flower_processes.py starts one",
    r"(openssl req|mkdir -p \"\$\{FLWR_HOME|printf '\[superlink)[\s\S]*": "each needs the one before "
    "it; the fleet that test_flower_processes.py starts makes its certificates itself",
    r"ray .*": "needs a cluster; test_ray.py starts one",
    r"RAY_ADDRESS=.*": "needs a cluster; test_ray.py starts one",
    r"(srun|first=|address=|sleep|kubectl).*": "needs Slurm or Kubernetes, which the page says was not tried",
    r"export .*": "sets variables only",
    r"FEDROLEX_DATA=\.\.\. python benchmarks/.*": "takes a quarter of an hour and the peers' packages",
    r"python benchmarks/fuzz\.py .*": "takes minutes and atheris; test_fuzz.py runs its targets",
    r"fedrolex paper results/small\.yaml .*": "trains for two hours; test_reproduction_page.py reads the file",
    r"python3 -m venv \.venv|\. \.venv/bin/activate": "sets up an environment",
}
"""What is not run, as patterns of whole commands, and why."""

IMAGES = [
    "task.data=digits",
    "task.width=4",
    "task.limit=150",
    "fleet.clients=20",
    "fleet.cohort=3",
    "rounds=2",
    "evaluate_every=2",
]
WORDS = ["task.vocabulary=20", "task.stream=8", "task.inner=8", "task.heads=2", "task.head_dim=4", "task.layers=1"]
SHORT = ["compare=false", "engine=loop", "callbacks=[]"]
SMALLER: list[tuple[str, list[str]]] = [
    (r"train (stackexchange|blogs)", [*WORDS, "fleet.cohort=2", "rounds=1", *SHORT]),
    (r"train folder", ["task.size=32", "fleet.clients=5", "fleet.cohort=2", "rounds=1", *SHORT]),
    (r"train .*task\.data=", ["fleet.cohort=3", "rounds=1", *SHORT]),
    (r"train .*method=private", [*IMAGES, "method.quantile=null", *SHORT]),
    (r"train .*method=fedgkt", [*IMAGES, "method.server_epochs=1", *SHORT]),
    (r"train .*method=(feddf|fedet)", [*IMAGES, "method.steps=2", *SHORT]),
    (r"train", [*IMAGES, *SHORT]),
    (r"resume", ["rounds=3"]),
    (r"paper \w+ .*--cell", [*IMAGES[:5], "task.model=convnet", "precision=fp32", "device=cpu", "engine=loop"]),
]
"""Settings that make the first fitting command small."""

MORE = {r"paper (?!.*--list).*--cell": ["--scale", "0.002"], r"export": ["--windows", "1"]}
"""Other options for the same end."""

INSTEAD = {
    "--device cuda": "--device cpu",
    "--engine ray": "",
    "--public cifar100": "--public grey",
    "--scale 0.05": "",
    "--seeds 1,2,3": "--seeds 1",
    "--seeds 1,2,3,4": "--seeds 1,2",
    "2x3x224x224": "2x3x64x64",
}
"""What is put in the place of something else: a GPU, a cluster, a data set that is not here."""

APART = ("clipped:Clipped",)
"""Commands with these words run in a process of their own: what they import registers a name."""

SLOW = (
    "export runs/cifar",
    "export runs/resnet",
    "clipped:Clipped",
    "torchvision",
    "transformers",
    "cifar10 --memory",
    "coverage --scheme",
    "paper costs",
    "--list",
    "--cell",
    "costs cifar10",
)
"""Commands with these words are run with ``-m slow``: networks that cannot be made smaller, exports, a process."""


MODELS = """
from torch import nn


def build(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 3))
"""
"""A module of the reader's, which pages speak of."""


def reason(command: Command) -> str | None:
    """Why a command is not run, or None."""
    return next((why for what, why in NOT_RUN.items() if re.fullmatch(what, command.text)), None)


def smaller(command: Command) -> list[str]:
    """The words after ``fedrolex`` of a command that does the same in a second."""
    text = " ".join(["", *command.words])
    words = command.words[1:]
    for long, short in INSTEAD.items():
        if f" {long} " in f"{text} ":
            first, *rest = long.split(" ")
            place = words.index(first)
            words[place : place + 1 + len(rest)] = short.split()
    said = " ".join(words)
    settings = next((found for what, found in SMALLER if re.match(what, said)), [])
    more = next((found for what, found in MORE.items() if re.match(what, said)), [])
    return [*words, *more, *(word for setting in settings for word in ("--set", setting))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pages speak of."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("docs")
    for name, text in saved_files().items():
        (folder / name).write_text(text)
    (folder / "results").mkdir()
    for orders in (Path(__file__).parent.parent / "results").glob("*.yaml"):
        shutil.copy(orders, folder / "results")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "models.py").write_text(MODELS)
    for number in range(30):
        for kind, mode in (("photos", "RGB"), ("grey", "L")):
            (folder / kind / "abc"[number % 3]).mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (8, 8), number * 8).convert(mode)
            image.save(folder / kind / "abc"[number % 3] / f"{number}.png")
    said = ["a cat sat .", "the dog ran to the cat ."] * 12
    lines = [json.dumps({"user": f"user{number}", "sentences": said}) for number in range(20)]
    (folder / "data" / "stackexchange").mkdir(parents=True)
    (folder / "data" / "stackexchange" / "users.jsonl").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        first = Command("", "fedrolex train --out runs/first")
        assert CliRunner().invoke(app, smaller(first), catch_exceptions=False).exit_code == 0
    return folder


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of that folder, for one command."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDROLEX_DATA", str(tmp_path / "data"))
    monkeypatch.syspath_prepend("")
    yield tmp_path
    for name in [*saved_files(), "mypackage.models", "mypackage"]:
        sys.modules.pop(name.removesuffix(".py"), None)


FOUND = commands()
RUN = [command for command in FOUND if reason(command) is None]


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if any(word in command.text for word in SLOW) else [])
        for command in RUN
    ],
    ids=lambda command: f"{command.page}: {command.text}",
)
def test_a_command_of_the_docs_runs(command: Command, here: Path) -> None:
    program = command.words[0]
    if program != "fedrolex":
        assert program in ("ssh-keygen",), f"{command.text}: run it in this test, or say in NOT_RUN why not"
        subprocess.run(command.words, check=True, capture_output=True)
        return
    words = smaller(command)
    for run in {word for option, word in pairwise(words) if option != "--out" and re.fullmatch(r"runs/[\w-]+", word)}:
        shutil.copytree(here / "runs/first", here / run)  # a run that the page speaks of
    before = set(here.rglob("summary.json"))
    if any(word in command.text for word in APART):
        subprocess.run([sys.executable, "-m", "fedrolex", *words], check=True, capture_output=True)
    else:
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, f"{words}: {done.exception!r}\n{done.output}"
    if words[0] == "train":
        assert set(here.rglob("summary.json")) - before, "a run is left behind"


def test_there_are_commands_and_none_is_excused_for_nothing() -> None:
    assert len(RUN) > 40
    assert {command.page for command in FOUND} >= {"README.md", "docs/tutorial.md", "docs/methods/fedrolex.md"}
    idle = [what for what in NOT_RUN if not any(re.fullmatch(what, command.text) for command in FOUND)]
    assert not idle, "excused, but on no page"


def test_a_new_command_must_be_run_or_excused() -> None:
    for text in ("fedrolex dance", "docker run fedrolex", "flwr", "echo 1"):
        assert reason(Command("README.md", text)) is None
    with pytest.raises(AssertionError, match="say in NOT_RUN why not"):
        test_a_command_of_the_docs_runs(Command("README.md", "docker run fedrolex"), ROOT)
