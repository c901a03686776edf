"""Words as numbers, and sentences as the rows a next-word model is trained on.

Numbers are laid out as in the published Stack Overflow runs: 0 pads, words are 1 to V by falling frequency,
V + 1 stands for every other word, V + 2 begins and V + 3 ends a sentence.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrolex.core import FedrolexError

PAD = 0
_TOKEN = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """The words of raw text: lower case, every punctuation mark a word of its own (``don't`` stays whole)."""
    return _TOKEN.findall(text.lower())


def split_tokens(sentence: bytes) -> list[str]:
    """The words of a sentence that was tokenised before: what stands between spaces."""
    return [word for word in sentence.decode(errors="replace").split(" ") if word]


@dataclass(frozen=True)
class Vocabulary:
    """The words a model knows: V different ones, the most frequent first; ``words[0]`` has number 1."""

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.words:
            raise FedrolexError("a vocabulary needs at least one word: none was given")
        if len(self._numbers) != len(self.words):
            twice = next(word for word, count in Counter(self.words).items() if count > 1)
            raise FedrolexError(f"the word {twice!r} is in the vocabulary twice: give each word once")

    @classmethod
    def count(cls, sentences: Iterable[list[str]], size: int) -> Vocabulary:
        """The ``size`` most frequent words of ``sentences`` (all, if there are fewer); ties alphabetically."""
        _check_size(size)
        counts = Counter(word for sentence in sentences for word in sentence)
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]))

    @classmethod
    def read(cls, path: Path, size: int) -> Vocabulary:
        """The first ``size`` words of a file with one word a line, most frequent first.

        A word may be followed by white space and its count, as in TensorFlow Federated's word-count file.
        """
        _check_size(size)
        words: list[str] = []
        last: int | None = None
        try:
            with path.open(encoding="utf-8") as lines:
                for line in islice(lines, size):
                    word, *count = re.split(r"[ \t]+", line.strip(" \t\r\n"))
                    where = f"{path}, line {len(words) + 1}"
                    if not word or len(count) > 1 or not all(re.fullmatch("[0-9]{1,18}", part) for part in count):
                        raise FedrolexError(f"{where}: {line[:40]!r} is not a word, or a word and its count")
                    if count and last is not None and int(count[0]) > last:
                        raise FedrolexError(f"{where}: the counts rise: put the most frequent words first")
                    last = int(count[0]) if count else last
                    words.append(word)
        except (OSError, UnicodeDecodeError) as error:
            raise FedrolexError(f"the vocabulary {path} cannot be read ({error}): give a text file") from None
        if len(words) < size:
            raise FedrolexError(f"{path} has {len(words)} words, {size} are asked for: ask for fewer")
        return cls(tuple(words))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, 1)}

    @property
    def unknown(self) -> int:
        """The number of every word that is not in the vocabulary."""
        return len(self.words) + 1

    @property
    def begin(self) -> int:
        """The number that begins a sentence; a model never has to predict it."""
        return len(self.words) + 2

    @property
    def end(self) -> int:
        """The number that ends a sentence."""
        return len(self.words) + 3

    @property
    def size(self) -> int:
        """How many numbers there are in all, V + 4: the rows of an embedding."""
        return len(self.words) + 4

    def numbers(self, words: Sequence[str]) -> NDArray[np.int64]:
        """The number of each word, shape ``(len(words),)``."""
        get, unknown = self._numbers.get, self.unknown
        return np.array([get(word, unknown) for word in words], dtype=np.int64)


def encode(sentences: Sequence[NDArray[np.int64]], vocabulary: Vocabulary, length: int = 20) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a next-word model, each int64 ``(len(sentences), length)``, from word numbers.

    A sentence keeps its first ``length`` words; begin comes before it, end after it if it has fewer than
    ``length`` words, and zeros fill it up. The targets are the inputs moved by one place.
    """
    if length < 1:
        raise FedrolexError(f"sentences of {length} words: give a length of at least 1")
    try:
        rows = np.full((len(sentences), length + 1), PAD, dtype=np.int64)
    except (MemoryError, OverflowError, ValueError):
        many = f"{len(sentences):,} sentences of {length:,} words"
        raise FedrolexError(f"{many} do not fit into memory: give a shorter length (task.length)") from None
    if sentences:
        kept = [sentence[:length] for sentence in sentences]
        lengths = np.array([len(words) for words in kept])
        rows[:, 0] = vocabulary.begin
        rows[:, 1:][np.arange(length) < lengths[:, None]] = np.concatenate(kept)
        short = np.flatnonzero(lengths < length)
        rows[short, lengths[short] + 1] = vocabulary.end
    return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())


def _check_size(size: int) -> None:
    if size < 1:
        raise FedrolexError(f"a vocabulary of {size} words: give at least 1")
