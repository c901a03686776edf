"""A Hugging Face language model at the server that is larger than what any client can hold.

    python examples/language_model.py          # a tiny GPT-2 and made-up text; nothing is downloaded

The largest client holds half of the server's width (``server_scale=2``), others a quarter and an eighth. Windows roll,
so the whole model is trained although nobody ever has it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import transformers
from torch import Tensor, nn

from fedrolex import ClientRecipe, FleetRecipe, NextWord, Recipe, WordsRecipe, train

WORDS = 40


class GPT2(nn.Module):
    """Word numbers ``(batch, length)`` to scores of the next word, ``(batch, length, words)``."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        hugging: Any = transformers
        sizes = {"vocab_size": words, "n_positions": 16, "n_embd": width, "n_layer": 2, "n_head": 4}
        config = hugging.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
        self.model = hugging.GPT2LMHeadModel(config)

    def forward(self, numbers: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=numbers).logits
        return scores


def write_text(file: Path, users: int = 30) -> Path:
    """A line a user: everyone has a few favourite words."""
    random = Random(1)
    animals, verbs = ["cat", "dog", "bird", "fox", "cow"], ["sees", "likes", "hears", "follows"]
    with file.open("w") as lines:
        for user in range(users):
            own = random.sample(animals, 2)
            said = [f"The {random.choice(own)} {random.choice(verbs)} the {random.choice(animals)}." for _ in range(30)]
            lines.write(json.dumps({"user": f"user{user}", "sentences": said}) + "\n")
    return file


def main(folder: Path, rounds: int = 30, server_scale: int = 2) -> float:
    """Train, and return the share of words that the server's model predicts, of users it never met."""
    text = WordsRecipe(data=str(write_text(folder / "users.jsonl")), vocabulary=WORDS, length=8, slice="all")
    fleet = FleetRecipe(clients=27, cohort=8, capacities=["1", "1/2", "1/4"], server_scale=server_scale)
    task, _ = text.open(fleet, seed=1, folder=folder, mask="none")  # 27 users as clients, 3 to test on, all their words
    assert isinstance(task, NextWord)
    words = task.vocabulary.size
    task = replace(task, build=lambda scale: GPT2(words, 32 * scale))  # scale times as wide as the largest client's
    client = ClientRecipe(optimizer="adam", lr=0.003, batch=8)
    done = train(Recipe(fleet=fleet, client=client, rounds=rounds, evaluate_every=rounds), task)
    held = {level: done.axes.parameters(level) for level in ("1", "1/2", "1/4", "1/8")}
    print("parameters by share of the server's width:", held, "; the largest client has 1/2")
    return float(done.summary["global_accuracy"])


if __name__ == "__main__":
    print(f"{main(Path(mkdtemp())):.1%} of the words of new users")
