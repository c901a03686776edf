"""Next-word prediction: users as clients, read when they are needed and not kept."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b, file_digest
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrolex.core import FedrolexError, deck, shuffle
from fedrolex.data.users import NoSentencesError, TextUsers, Users
from fedrolex.data.vocabulary import PAD, Vocabulary, encode
from fedrolex.models import evaluating
from fedrolex.tasks.metrics import Metrics, measured, short
from fedrolex.tasks.task import Examples, Task

COUNTED = 10_000  # users whose words are counted for a vocabulary, at most


def token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy a word, padding left out; scores ``(batch, time, words)``, targets ``(batch, time)``."""
    return nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def word_accuracies(right: Tensor, targets: Tensor, vocabulary: Vocabulary) -> dict[str, tuple[int, int]]:
    """Right and all predictions, counted three ways; padding never counts.

    Of ``right``, bool, and ``targets``, int64, both ``(batch, time)``, ``global_accuracy`` counts every word, unknown
    ones and the end of the sentence included (what the paper reports); ``accuracy_no_oov`` leaves unknown words out,
    ``accuracy_no_oov_no_eos`` the end too.
    """
    words = targets != PAD
    known = words & (targets != vocabulary.unknown)
    inner = known & (targets != vocabulary.end)
    kinds = {"global_accuracy": words, "accuracy_no_oov": known, "accuracy_no_oov_no_eos": inner}
    return {name: (int((right & kind).sum()), int(kind.sum())) for name, kind in kinds.items()}


@dataclass(frozen=True)
class NextWord(Task):
    """A task whose clients are the users of a text.

    Attributes:
        name, build, frozen: see :class:`~fedrolex.tasks.task.Task`.
        users: where their sentences are.
        chosen: the users that are clients, int64, shape ``(clients,)``.
        vocabulary: words with numbers.
        test: sentences no client holds, of other users or (Stack Overflow) of a later time.
        length: words of a sentence.
        sentences: most sentences a client trains on.
        validation: sentences of still other users.
    """

    name: str
    build: Callable[[int], nn.Module]
    users: Users
    chosen: NDArray[np.int64]
    vocabulary: Vocabulary
    test: Examples
    length: int = 20
    sentences: int = 128
    frozen: Sequence[str] = ()
    validation: Examples | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    random_inputs = False
    loss = staticmethod(token_loss)
    ignored = PAD

    def __post_init__(self) -> None:
        for what, kind in {"users": Users, "chosen": np.ndarray, "vocabulary": Vocabulary, "test": Examples}.items():
            if not isinstance(getattr(self, what), kind):
                given = type(getattr(self, what)).__name__
                raise FedrolexError(f"{what} of the task is a {given}: give {kind.__name__}")

    @property
    def clients(self) -> int:
        """How many users are clients."""
        return len(self.chosen)

    @property
    def classes(self) -> int:  # type: ignore[override]
        """Numbers a target can be."""
        return self.vocabulary.size

    def client(self, number: int) -> Examples:
        """A user's sentences, read from the file."""
        sentences = self.users.sentences(int(self.chosen[number]), self.vocabulary)[: self.sentences]
        return Examples(*encode(sentences, self.vocabulary, self.length)).to(self.device)

    def inputs(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        """Word numbers, as they are."""
        return x

    def labels(self, examples: Examples) -> Tensor:
        """The words a client reads or writes: rows of the embedding, which is the output layer too."""
        words: Tensor = torch.cat([examples.x.flatten(), examples.y.flatten()]).unique()
        return words[words != PAD]

    def fingerprint(self) -> str:
        """Of the clients' numbers, the words and the test sentences; after a +, of the file of the users."""
        parts = (self.chosen.tobytes(), repr(self.vocabulary.words).encode(), self.test.y.cpu().numpy().tobytes())
        with self.users.path.open("rb") as file:
            text = file_digest(file, partial(blake2b, digest_size=8))
        return f"{blake2b(b''.join(parts), digest_size=8).hexdigest()}+{text.hexdigest()}"

    def example(self) -> Tensor:
        """Two sentences."""
        return self.test.x[:2]

    def some_inputs(self, count: int, batch: int) -> Iterator[Tensor]:
        """Sentences of the first clients."""
        for number in range(self.clients):
            part = self.client(number).x[:count]
            yield from part.split(batch)
            count -= len(part)
            if count <= 0:
                return

    def held_out(self, count: int) -> Self:
        """Measured on the users put aside for choosing or, where there are none, on sentences of the last clients."""
        aside = self.validation
        if aside is None:
            who = [int(user) for user in self.chosen[::-1]]
            aside = read_sentences(self.users, who, self.vocabulary, self.length, self.sentences, count)
        return replace(self, test=aside.to(self.device), validation=None)

    def to(self, device: torch.device) -> Self:
        """Test sentences on another device; clients' go there when they are read."""
        held = None if self.validation is None else self.validation.to(device)
        return replace(self, test=self.test.to(device), validation=held, device=device)

    def facts(self) -> dict[str, Any]:
        """How large the data is."""
        return {"users": self.clients, "test_sentences": len(self.test)}

    def evaluate(
        self, model: nn.Module, *, batch: int = 500, apart: bool = False, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        """Accuracy a word, three ways, and the loss a word; other metrics are means over batches, by their words."""
        with evaluating(model):
            found = self._measure(model, self.test, min(batch, 100), metrics or {})
            if self.validation is not None:
                held = self._measure(model, self.validation, min(batch, 100))
                found["validation_accuracy"] = held["global_accuracy"]
        return found

    def _measure(
        self, model: nn.Module, examples: Examples, batch: int, metrics: Metrics | None = None
    ) -> dict[str, Any]:
        loss, more = 0.0, dict.fromkeys(map(short, metrics or {}), 0.0)
        sums: dict[str, tuple[int, int]] = {}
        for x, y in zip(examples.x.split(batch), examples.y.split(batch), strict=True):
            scores = model(x)
            counts = word_accuracies(scores.argmax(-1) == y, y, self.vocabulary)
            words = counts["global_accuracy"][1]
            loss += float(token_loss(scores, y)) * words
            if metrics and words:
                for name, value in measured(metrics, scores[y != PAD], y[y != PAD], {"loss": loss, **counts}).items():
                    more[name] += value * words
            for name, (right, all_) in counts.items():
                before = sums.get(name, (0, 0))
                sums[name] = (before[0] + right, before[1] + all_)
        found: dict[str, Any] = {name: right / all_ if all_ else float("nan") for name, (right, all_) in sums.items()}
        words = max(1, sums["global_accuracy"][1])
        return {"loss": loss / words, **found, **{name: value / words for name, value in more.items()}}


def read_sentences(
    users: Users, who: Sequence[int], vocabulary: Vocabulary, length: int, most: int, total: int
) -> Examples:
    """Sentences of some users, at most ``most`` of each and ``total`` in all; users without any are passed over."""
    found: list[NDArray[np.int64]] = []
    for user in who:
        with suppress(NoSentencesError):
            found += users.sentences(user, vocabulary)[:most]
        if len(found) >= total:
            break
    if not found:
        raise FedrolexError("the users held out to test on wrote nothing: hold out more (task.test_users)")
    return Examples(*encode(found[:total], vocabulary, length))


def choose_users(users: Users, fewest: int, seed: int) -> NDArray[np.int64]:
    """Users with at least ``fewest`` sentences, in random order; where only reading would tell, all."""
    order = shuffle(len(users), seed, "users")
    names = Counter(map(users.name, range(len(users))))
    if len(names) < len(users):
        twice = names.most_common(1)[0][0]
        raise FedrolexError(f"user {twice!r} is in the file twice: put a user's sentences together")
    if users.examples(0) is not None:
        order = np.array([user for user in order.tolist() if (users.examples(user) or 0) >= fewest], dtype=np.int64)
    if not len(order):
        raise FedrolexError(f"no user has {fewest} sentences: lower task.fewest")
    return order


def count_words(users: Users, size: int, who: NDArray[np.int64], seed: int) -> Vocabulary:
    """The file's most frequent words or, where it has no list of them, those of (at most 10,000 of) ``who``."""
    if not isinstance(users, TextUsers):
        return users.vocabulary(size)
    some = (int(who[place]) for place, _ in zip(deck(len(who), seed, "vocabulary"), range(COUNTED), strict=False))
    return Vocabulary.count((words for user in some for words in users.text(user)), size)
