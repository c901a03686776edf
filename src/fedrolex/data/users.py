"""Text with its users, read one user at a time.

However a file is laid out, it is asked the same: how many users there are, what they are called and what
the sentences of one of them are, as word numbers. No sentence is kept. A source may be used by several threads,
after a fork, or be sent to another process.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrolex.core import FedrolexError
from fedrolex.data.vocabulary import Vocabulary

SPLITS = ("train", "heldout", "test")


class Users(ABC):
    """A text file with its users, who are numbered from 0; their names are all in memory, or looked up."""

    path: Path
    _names: NDArray[Any]

    def __len__(self) -> int:
        """How many users there are."""
        return len(self._names)

    def name(self, user: int) -> str:
        """What the file calls a user."""
        check_user(user, len(self))
        name = self._names[user]
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def examples(self, user: int) -> int | None:
        """How many sentences a user has, or None where only reading them would tell."""
        return None

    @abstractmethod
    def vocabulary(self, size: int) -> Vocabulary:
        """The ``size`` most frequent words, from the file's own list or by reading all users."""

    @abstractmethod
    def sentences(self, user: int, vocabulary: Vocabulary) -> list[NDArray[np.int64]]:
        """A user's sentences as word numbers, one array a sentence; never none."""


class TextUsers(Users):
    """A file that holds words rather than their numbers."""

    @abstractmethod
    def text(self, user: int) -> list[list[str]]:
        """A user's sentences as words."""

    def vocabulary(self, size: int) -> Vocabulary:
        """The ``size`` most frequent words; reads every user once."""
        return Vocabulary.count((words for user in range(len(self)) for words in self.text(user)), size)

    def sentences(self, user: int, vocabulary: Vocabulary) -> list[NDArray[np.int64]]:
        """A user's sentences as word numbers, one array a sentence."""
        text = self.text(user)
        if not text:
            raise NoSentencesError(self.name(user))
        return [vocabulary.numbers(words) for words in text]


def open_users(path: Path, split: str = "train") -> Users:
    """Open a text file of any layout; its suffix says which.

    Args:
        path: ``.jsonl`` (raw sentences), ``.npz`` (word numbers), ``.h5``/``.hdf5`` (Stack Overflow as older
            TensorFlow Federated and FedML have it) or ``.sqlite``/``.db`` (as TensorFlow Federated has it today).
        split: train, heldout or test. An SQLite file has them all; any other file is one split, train unless
            its name ends in another, as ``stackoverflow_test.h5`` does.
    """
    from fedrolex.data.hdf5 import Hdf5Users
    from fedrolex.data.jsonl import JsonlUsers
    from fedrolex.data.npz import NpzUsers
    from fedrolex.data.sqlite import SqliteUsers

    if not path.is_file():
        raise FedrolexError(f"{path} is {'a folder' if path.is_dir() else 'not there'}: give a file of text users")
    if path.stat().st_size == 0:
        raise FedrolexError(f"{path} is empty: copy or download it again")
    suffix = path.suffix.lower()
    if suffix in (".sqlite", ".db"):
        return SqliteUsers(path, split)
    if suffix not in (".jsonl", ".npz", ".h5", ".hdf5"):
        ending = suffix or "without suffix"
        raise FedrolexError(f"{path}: files {ending} cannot be read: give .jsonl, .npz, .h5 or .sqlite")
    ending = path.stem.rpartition("_")[2]
    held = ending if ending in SPLITS else "train"
    if split != held:
        raise NoSplitError(f"{path} has no split {split!r}: it is {held} and nothing else")
    if suffix == ".jsonl":
        return JsonlUsers(path)
    return NpzUsers(path) if suffix == ".npz" else Hdf5Users(path)


class NoSentencesError(FedrolexError):
    """A user has none."""

    def __init__(self, name: str) -> None:
        super().__init__(f"user {name} has no sentences: leave such users out")


class NoSplitError(FedrolexError):
    """A file has no such split, only others."""


def check_user(user: int, count: int) -> None:
    """Refuse a user's number that is not one of ``count``."""
    if not 0 <= user < count:
        raise FedrolexError(f"user {user} is asked for: there are 0 to {count - 1}")
