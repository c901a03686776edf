"""Small files of text with its users, in every layout."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from example_writer import example

from fedrolex.data.vocabulary import Vocabulary

WORDS = ("the", "cat", "sat", ".")
ABC = Vocabulary(WORDS)
TEXT = {"ann": ["the cat sat .", "a dog"], "bob": ["cat cat"], "zoë": ["the end ."]}
NUMBERS = {"ann": [[1, 2, 3, 4], [5, 5]], "bob": [[2, 2]], "zoë": [[1, 5, 4]]}


def write_jsonl(path: Path, users: dict[str, list[str]]) -> Path:
    path.write_text("".join(json.dumps({"user": name, "sentences": s}) + "\n" for name, s in users.items()))
    return path


def write_npz(path: Path, save: Callable[..., None] = np.savez, **changed: Any) -> Path:
    sentences = [numbers for those in NUMBERS.values() for numbers in those]
    arrays: dict[str, Any] = {
        "tokens": np.array([n for numbers in sentences for n in numbers], dtype=np.uint16),
        "sent_ptr": np.cumsum([0, *map(len, sentences)]).astype(np.uint32),
        "user_ptr": np.cumsum([0, *map(len, NUMBERS.values())]).astype(np.uint32),
        "users": np.array(list(NUMBERS)),
        "vocab": np.array(WORDS),
        "vocab_counts": np.arange(len(WORDS), 0, -1),
    }
    save(path, **{name: array for name, array in (arrays | changed).items() if array is not None})
    return path


def write_hdf5(path: Path, users: dict[str, list[str]], fixed: bool = False) -> Path:
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    with h5py.File(path, "w") as file:
        for name, sentences in users.items():
            group = file.create_group(f"examples/{name}")
            strings = np.array([s.encode() for s in sentences], dtype="S32") if fixed else sentences
            group.create_dataset("tokens", data=strings, dtype=None if fixed else h5py.string_dtype())
            group.create_dataset("score", data=np.zeros(len(sentences)))
    return path


def write_sqlite(path: Path, users: dict[str, list[str]], *statements: str) -> Path:
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for name, sentences in users.items():
            rows = [("train", name, example(sentence)) for sentence in sentences]
            base.executemany("INSERT INTO examples VALUES (?, ?, ?)", [*rows, ("test", name, example("sat"))])
            base.execute("INSERT INTO client_metadata VALUES (?, 'train', ?)", (name, len(sentences)))
        base.execute("INSERT INTO client_metadata VALUES ('bob', 'test', 1)")
        for statement in statements:
            base.execute(statement)
    base.close()
    return path


def write(layout: str, folder: Path) -> Path:
    match layout:
        case "jsonl":
            return write_jsonl(folder / "users.jsonl", TEXT)
        case "npz":
            return write_npz(folder / "users.npz")
        case "packed npz":
            return write_npz(folder / "users.npz", np.savez_compressed)
        case "hdf5":
            return write_hdf5(folder / "stackoverflow_train.h5", TEXT)
        case "fixed hdf5":
            return write_hdf5(folder / "users.hdf5", TEXT, fixed=True)
    return write_sqlite(folder / "stackoverflow.sqlite", TEXT)


LAYOUTS = ["jsonl", "npz", "packed npz", "hdf5", "fixed hdf5", "sqlite"]
