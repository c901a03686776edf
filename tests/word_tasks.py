"""Small text, and runs on it."""

from __future__ import annotations

import json
from pathlib import Path


def corpus(path: Path, users: int = 30, sentences: int = 24) -> Path:
    """Users who repeat a few sentences."""
    lines = []
    for user in range(users):
        said = [f"the quick brown {('fox', 'dog', 'cat')[(user + i) % 3]} jumps over it" for i in range(sentences)]
        lines.append(json.dumps({"user": f"u{user}", "sentences": said}))
    path.write_text("\n".join(lines) + "\n")
    return path


WORDS = [
    "task=words", "task.vocabulary=8", "task.layers=1", "task.heads=2", "task.head_dim=4", "task.stream=16",
    "task.inner=32", "fleet.clients=null", "fleet.cohort=5", "method.rounding=ceil", "client.lr=0.5", "rounds=6",
]  # fmt: skip
