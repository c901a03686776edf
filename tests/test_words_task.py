"""Next words: the transformer, its metric, users as clients."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner
from word_tasks import WORDS, corpus

from fedrolex import (
    Examples,
    FedrolexError,
    NextWord,
    Recipe,
    Rolling,
    prepare,
    trace,
    train,
)
from fedrolex.cli.app import app
from fedrolex.clients.messages import MODEL
from fedrolex.data.users import open_users
from fedrolex.data.vocabulary import Vocabulary
from fedrolex.models import WordTransformer
from fedrolex.tasks.words import token_loss, word_accuracies


@pytest.fixture(scope="module")
def transformer() -> WordTransformer:
    torch.manual_seed(0)
    return WordTransformer(54, layers=2, heads=2, head_dim=4, stream=16, inner=32, dropout=0.0).eval()


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_a_full_width_cut_is_the_server_model_in_every_round(transformer: WordTransformer, rounding: Any) -> None:
    """The published code rolls over all heads and then cuts, so heads mix; ours never do."""
    axes = trace(transformer, transformer.slicing_example())
    words = torch.randint(0, 54, (3, 20))
    for round in range(40):
        cut = axes.cut(transformer, Rolling(rounding=rounding).window(axes, round=round, capacity="1")).eval()
        torch.testing.assert_close(cut(words), transformer(words), rtol=1e-4, atol=1e-5)


def test_queries_and_keys_of_a_head_are_cut_alike(transformer: WordTransformer) -> None:
    axes = trace(transformer, transformer.slicing_example())
    window = Rolling().window(axes, round=3, capacity="1/2")
    cut = axes.take(axes.state(transformer), window)
    rows = [3, 0, 7, 4]  # dimensions 3 and 0 of both heads of four
    stream = window["stream"].indices()
    for part in ("query", "key"):
        whole = transformer.layers[0].get_parameter(f"{part}.weight").detach()
        assert torch.equal(cut[f"layers.0.{part}.weight"], whole[rows][:, stream])


def test_later_words_do_not_change_earlier_scores(transformer: WordTransformer) -> None:
    words = torch.randint(1, 54, (2, 20))
    changed = words.clone()
    changed[:, 11:] = 5
    torch.testing.assert_close(transformer(words)[:, :11], transformer(changed)[:, :11])
    assert float((transformer(words)[:, 11:] - transformer(changed)[:, 11:]).detach().abs().max()) > 1e-3


def test_the_metric_on_a_hand_made_batch() -> None:
    """V = 3: words 1–3, unknown 4, begin 5, end 6."""
    vocabulary = Vocabulary(("a", "b", "c"))
    targets = torch.tensor([[1, 4, 2, 6, 0, 0], [3, 4, 1, 2, 3, 1], [0, 0, 0, 0, 0, 0]])
    guessed = torch.tensor([[1, 4, 3, 6, 0, 0], [3, 1, 1, 2, 1, 1], [0, 0, 0, 0, 0, 0]])
    found = word_accuracies(guessed == targets, targets, vocabulary)
    assert found == {"global_accuracy": (7, 10), "accuracy_no_oov": (6, 8), "accuracy_no_oov_no_eos": (5, 7)}


def test_padding_has_no_loss() -> None:
    scores = torch.randn(2, 4, 7, requires_grad=True)
    targets = torch.tensor([[1, 2, 0, 0], [3, 0, 0, 0]])
    loss = token_loss(scores, targets)
    picked = scores.log_softmax(-1)[[0, 0, 1], [0, 1, 0], [1, 2, 3]]
    torch.testing.assert_close(loss, -picked.mean())
    loss.backward()
    assert scores.grad is not None
    assert float(scores.grad[targets == 0].abs().max()) == 0.0


@pytest.mark.parametrize("cut", ["attn", "attn+ffn", "all"])
def test_words_are_learned_and_only_what_is_sliced_is_cut(tmp_path: Path, cut: str) -> None:
    file = corpus(tmp_path / "users.jsonl")
    made = prepare(Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}", f"task.slice={cut}"]))
    assert made.server.task.clients == 27  # a tenth of the users is held out to test on
    kinds = {axis.name for axis in made.server.main.axes.cut_axes}
    assert ("stream" in kinds, "inner0" in kinds, "qk0" in kinds) == {
        "attn": (False, False, True), "attn+ffn": (False, True, True), "all": (True, True, True)
    }[cut]  # fmt: skip
    first = made.evaluate()
    for _ in range(8):
        made.run_round()
    last = made.evaluate()
    assert last["loss"] < 0.8 * first["loss"]
    assert last["global_accuracy"] > first["global_accuracy"]


@pytest.mark.parametrize("scale", [1, 2])
def test_words_are_trained_to_the_end_and_compared_with_the_same_full_model(scale: int, tmp_path: Path) -> None:
    """Columns, too: positions are a buffer that no file keeps, and belong to the model that is sent."""
    file = corpus(tmp_path / "users.jsonl")
    full = []
    for method in ("fedavg", "fedrolex", "columns"):
        words = [*WORDS, f"task.data={file}", "rounds=1", f"fleet.server_scale={scale}", f"method={method}"]
        settings = [word for word in words if not word.startswith("method.")]
        summary = train(Recipe(device="cpu").with_settings(settings), out=tmp_path / method).summary
        full.append(summary["bytes_of_full_model"])
    assert full[0] == full[1] == full[2] > 0


def test_fewer_clients_than_users_and_users_put_aside(tmp_path: Path) -> None:
    file = corpus(tmp_path / "users.jsonl")
    base = Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}"])
    assert prepare(base.with_settings(["fleet.clients=10"])).server.task.clients == 10
    made = prepare(base.with_settings(["task.validation=0.2"]))
    assert made.server.task.clients == 22
    assert "validation_accuracy" in made.evaluate()
    with pytest.raises(FedrolexError, match=r"fleet\.clients is 40; .* has 27 users to train: give fewer"):
        prepare(base.with_settings(["fleet.clients=40"]))
    with pytest.raises(FedrolexError, match="no user has 25 sentences"):
        prepare(base.with_settings(["task.fewest=25"]))


def test_rows_of_words_are_those_read_or_written(tmp_path: Path) -> None:
    """The embedding is tied: the begin mark is only read, and its row must be averaged all the same."""
    file = corpus(tmp_path / "users.jsonl")
    made = prepare(Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}", "method.rows=true"]))
    before = made.server.state[MODEL]["embedding.weight"].clone()
    made.run_round()
    begin = made.server.task.classes - 2
    assert not torch.equal(made.server.state[MODEL]["embedding.weight"][begin], before[begin])
    assert torch.equal(made.server.state[MODEL]["embedding.weight"][0], before[0])


def test_a_user_who_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = corpus(tmp_path / "users.jsonl")
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[3]]) + "\n\n")
    with pytest.raises(FedrolexError, match="user 'u3' is in the file twice"):
        prepare(Recipe(device="cpu").with_settings([*WORDS, f"task.data={file}"]))


def test_data_that_changed_under_a_run_is_noticed(tmp_path: Path) -> None:
    file = corpus(tmp_path / "users.jsonl")
    settings = [word for setting in [*WORDS, f"task.data={file}", "rounds=2"] for word in ("--set", setting)]
    run = str(tmp_path / "run")
    found = CliRunner().invoke(app, ["train", *settings, "--set", "compare=false", "--out", run])
    assert found.exit_code == 0, found.output
    recipe = tmp_path / "run" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("rounds: 2", "rounds: 3"))
    corpus(file, sentences=23)
    again = CliRunner().invoke(app, ["resume", run])
    assert isinstance(again.exception, FedrolexError)
    assert "has changed since its checkpoint" in str(again.exception)
    corpus(file)
    assert CliRunner().invoke(app, ["resume", run]).exit_code == 0


def test_an_empty_user_is_dropped_from_the_round_and_named(tmp_path: Path) -> None:
    file = corpus(tmp_path / "users.jsonl", users=6)
    file.write_text(file.read_text() + '{"user": "nobody", "sentences": []}\n')
    settings = [*WORDS, f"task.data={file}", "task.fewest=0", "fleet.cohort=6"]
    made = prepare(Recipe(device="cpu").with_settings(settings))
    row = made.run_round()
    assert list(row["dropped"].values()) == ["user nobody has no sentences: leave such users out"]


def two_users(path: Path, text: str) -> NextWord:
    """A task of two users."""
    lines = [{"user": "a", "sentences": [text]}, {"user": "b", "sentences": ["red fish"]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = Vocabulary(("red", "fish"))
    test = Examples(torch.ones(1, 4).long(), torch.ones(1, 4).long())
    return NextWord("own", lambda scale: nn.Identity(), open_users(path), np.array([0, 1]), words, test, length=4)


def test_a_changed_sentence_of_a_client_is_noticed(tmp_path: Path) -> None:
    before = two_users(tmp_path / "a.jsonl", "red red").fingerprint()
    same = two_users(tmp_path / "b.jsonl", "red red").fingerprint()
    after = two_users(tmp_path / "a.jsonl", "red fish").fingerprint()
    assert before == same != after
    old = "1d94e80fdd1407ff"  # all that it was before the file counted; such runs still go on
    assert before.partition("+")[0] == after.partition("+")[0] == old


def test_what_a_task_of_words_is_made_of_has_a_kind(tmp_path: Path) -> None:
    with pytest.raises(FedrolexError, match="users of the task is a NoneType: give Users"):
        replace(two_users(tmp_path / "a.jsonl", "red"), users=None)  # type: ignore[arg-type]
