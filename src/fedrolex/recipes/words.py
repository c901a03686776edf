"""Next-word prediction, as a recipe says it."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedrolex.core import FedrolexError, check_numbers, check_paths, check_words
from fedrolex.data.get import STACKOVERFLOW_H5, find_source, lacking
from fedrolex.data.users import NoSplitError, Users, open_users
from fedrolex.data.vocabulary import Vocabulary
from fedrolex.methods import Method
from fedrolex.models import WordTransformer
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.recipes.task import TaskRecipe, whole_path
from fedrolex.rounds import Fleet
from fedrolex.tasks import Examples, Mask, NextWord, Task
from fedrolex.tasks.words import choose_users, count_words, read_sentences

TEXTS = {
    "stackexchange": "stackexchange/users.jsonl",
    "blogs": "blogs/blogs.npz",
    "stackoverflow": "stackoverflow/stackoverflow.sqlite",
}
POSITIVE = ("vocabulary", "length", "sentences", "test_sentences", "layers", "heads", "head_dim", "stream", "inner")
Slice = Literal["attn", "attn+ffn", "all"]


@dataclass(frozen=True, kw_only=True)
class WordsRecipe(TaskRecipe):
    """Next-word prediction, users as clients.

    Attributes:
        data: ``stackexchange``, ``blogs``, ``stackoverflow``, or the path of a file (.jsonl, .npz, .h5, .sqlite).
        vocabulary: words known; others are one symbol.
        word_list: file with one word a line, most frequent first; null counts the words of the training users
            (an .npz brings its own list).
        length: words of a sentence.
        sentences: most sentences a client trains on.
        fewest: users with fewer sentences are no clients, where the file says how many each has.
        test_users: part of the users whose sentences are the test set, where the data has no split of its own.
        test_sentences: most sentences to test on.
        validation: part of the users put aside for choosing settings.
        layers, heads, head_dim, stream, inner, dropout: of the Transformer.
        slice: what capacities cut: ``attn`` the head dimensions (the paper's text), ``attn+ffn``
            also the feed-forward parts, ``all`` the stream too (the published code).
    """

    data: str = "stackexchange"
    vocabulary: int = 10_000
    word_list: str | None = None
    length: int = 20
    sentences: int = 128
    fewest: int = 20
    test_users: float = 0.1
    test_sentences: int = 10_000
    validation: float = 0.0
    layers: int = 3
    heads: int = 8
    head_dim: int = 12
    stream: int = 128
    inner: int = 2048
    dropout: float = 0.1
    slice: Slice = "attn+ffn"

    def __post_init__(self) -> None:
        check_words("task", self)
        check_paths("task", self, "data", "word_list")
        check_numbers("task", self, least=dict.fromkeys(POSITIVE, 1))
        if not 0 <= self.dropout < 1:
            raise FedrolexError(f"task.dropout is {self.dropout}: give at least 0, below 1")
        if not (self.test_users > 0 and self.validation >= 0 and self.test_users + self.validation < 1):
            raise FedrolexError("task.test_users and task.validation are parts of the users: together below 1")

    def check(self, fleet: FleetRecipe, method: Method) -> None:
        """Words are no classes to be distilled."""
        method.check_kind(self.data, classes=False, models=False)

    def make_model(self, scale: int = 1) -> nn.Module:
        """The server's model; what capacities cut is ``scale`` times as wide."""
        return self._made(self.vocabulary + 4, scale)

    def _made(self, symbols: int, scale: int) -> nn.Module:
        stream = self.stream * (scale if self.slice == "all" else 1)
        inner = self.inner * (1 if self.slice == "attn" else scale)
        head_dim = self.head_dim * scale
        return WordTransformer(symbols, self.length, self.layers, self.heads, head_dim, stream, inner, self.dropout)

    def frozen_axes(self) -> Sequence[str]:
        """Axes that capacities do not cut."""
        inner = [f"inner{layer}" for layer in range(self.layers)]
        return {"attn": ["stream", *inner], "attn+ffn": ["stream"], "all": []}[self.slice]

    def with_whole_paths(self) -> Self:
        """The data's file and the word list named in full."""
        data = self.data if self.data in TEXTS else whole_path(self.data)
        return replace(self, data=data, word_list=self.word_list and whole_path(self.word_list))

    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        """The task and its fleet: all users are clients, or a random choice of them."""
        clients = fleet.clients
        train, test = self._users(folder)
        order = choose_users(train, self.fewest, seed)
        if test is None:
            count = max(1, round(self.test_users * len(order)))
            test, testers, order = train, order[:count], order[count:]
        else:
            testers = choose_users(test, 1, seed)
        count = max(1, round(self.validation * len(order))) if self.validation else 0
        judges, order = order[:count], order[count:]
        if clients is not None and clients > len(order):
            raise FedrolexError(f"fleet.clients is {clients}; {self.data} has {len(order)} users to train: give fewer")
        chosen = np.sort(order[:clients])
        words = self._words(train, chosen, seed)

        def read(users: Users, who: NDArray[np.int64]) -> Examples:
            return read_sentences(users, who.tolist(), words, self.length, self.sentences, self.test_sentences)

        task = NextWord(
            name=self.data,
            build=lambda scale: self._made(words.size, scale),
            users=train,
            chosen=chosen,
            vocabulary=words,
            test=read(test, testers),
            length=self.length,
            sentences=self.sentences,
            frozen=self.frozen_axes(),
            validation=read(train, judges) if count else None,
        )
        return task, fleet.build(seed, task.clients)

    def _users(self, folder: Path) -> tuple[Users, Users | None]:
        """The training users, and the test users where the data has them apart."""
        if self.data in TEXTS:
            source = find_source(self.data)
            if lacking(source, folder) is not None:
                remedy = f"put {source.about} into {folder / source.folder}, or say where it is"
                raise FedrolexError(f"{self.data} is not in {folder}: {remedy} with --data or FEDROLEX_DATA")
        path = folder / TEXTS[self.data] if self.data in TEXTS else Path(self.data).expanduser()
        if self.data == "stackoverflow" and not path.is_file():
            train, test = (folder / name for name in STACKOVERFLOW_H5)
            return open_users(train), open_users(test, "test")
        users = open_users(path)
        if path.suffix in (".sqlite", ".db"):
            with suppress(NoSplitError):
                return users, open_users(path, "test")
        return users, None

    def _words(self, users: Users, who: NDArray[np.int64], seed: int) -> Vocabulary:
        if self.word_list is not None:
            return Vocabulary.read(Path(self.word_list).expanduser(), self.vocabulary)
        return count_words(users, self.vocabulary, who, seed)
