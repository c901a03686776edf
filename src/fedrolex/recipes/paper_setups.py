"""The data sets of the paper's tables, and what each kind of reproduction sets on them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

Kind = Literal["printed", "released", "tuned", "tuned-redrawn"]
Words = Mapping[Kind, tuple[str, ...]]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Schedule:
    """The length of a run, and the rounds at which its rate falls."""

    rounds: int
    milestones: tuple[int, ...]


TUNED = Schedule(1000, (800, 950))
"""Of a tuned run."""


@dataclass(frozen=True)
class Setup:
    """A data set spread over clients.

    Attributes:
        recipe: the package's recipe that it starts from.
        lr, batch: as printed.
        parts: as printed, of methods that train parts.
        plain: as printed, where everyone trains the same model.
        words: settings of its own, in every kind.
        kinds: what can be reproduced on it.
        tuned: of tuned runs.
    """

    recipe: str
    lr: float
    batch: int
    parts: Schedule
    plain: Schedule
    words: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = KINDS
    tuned: Schedule = TUNED

    def settings(self, kind: Kind, schedule: Schedule | None) -> list[str]:
        """Settings of a kind on the data set; ``schedule`` is what is printed for a cell of its own."""
        schedule = self.tuned if "tuned" in kind else schedule or self.parts
        rounds = schedule.rounds
        return [
            f"rounds={rounds}", f"client.milestones={list(schedule.milestones)}", f"evaluate_every={rounds // 20}",
            f"checkpoint_every={rounds // 10}", "callbacks=[details]", *self._of_kind(kind), *self.words,
        ]  # fmt: skip

    def knows(self, word: str) -> bool:
        """Whether a setting of a row means anything on the data set."""
        return True

    def _of_kind(self, kind: Kind) -> Iterator[str]:
        if kind == "printed":
            yield from (f"client.lr={self.lr}", f"client.batch={self.batch}", "client.clip=null", "precision=tf32")
        elif kind == "released":
            yield from (
                "client.optimizer=adam", "client.momentum=0.0", "client.lr=0.0002", "client.batch=128",
                "client.decay=0.25", "fleet.redrawn=true", "precision=tf32",
            )  # fmt: skip
        else:
            yield from ("precision=bf16", "mean_over=20", f"fleet.redrawn={str(kind == 'tuned-redrawn').lower()}")


@dataclass(frozen=True)
class Images(Setup):
    """Images, of which a client holds a few labels only.

    Attributes:
        labels: how many.
    """

    labels: int = 2

    def _of_kind(self, kind: Kind) -> Iterator[str]:
        yield from super()._of_kind(kind)
        yield f"task.partition.labels={self.labels}"
        if kind == "printed":
            yield from ("client.mask=none", "task.partition.name=labels")
        elif kind == "released":
            yield from ("evaluation.statistics=test-batch", "evaluation.batch=100")
        else:
            yield "task.padding=mean"


@dataclass(frozen=True)
class Sentences(Setup):
    """Sentences of users: there are no classes to average apart, and rates are those of the recipe."""

    kinds: tuple[Kind, ...] = ("tuned", "tuned-redrawn")
    tuned: Schedule = Schedule(400, (320, 380))

    def knows(self, word: str) -> bool:
        """Rates of rows, and averages by class, are for images."""
        return not word.startswith(("client.lr=", "method.rows="))

    def _of_kind(self, kind: Kind) -> Iterator[str]:
        yield from super()._of_kind(kind)
        if kind == "printed":
            yield from ("client.optimizer=sgd", "client.momentum=0.9", "client.weight_decay=0.0005")


LONG = Schedule(3500, (1000, 1500))
LATER, PLAIN_WORDS = Schedule(1200, (600, 800)), Schedule(1000, (300,))
PAPER_SETUPS = {
    "cifar10-high": Images("cifar10", 2e-4, 10, Schedule(2500, (800, 1500)), Schedule(1250, (500, 1000)), labels=2),
    "cifar10-low": Images("cifar10", 2e-4, 10, Schedule(2000, (800, 1250)), Schedule(1500, (500, 1000)), labels=5),
    "cifar100-high": Images("cifar100", 1e-4, 24, LONG, LONG, labels=20),
    "cifar100-low": Images("cifar100", 1e-4, 24, LONG, LONG, labels=50),
}
"""Images, by name; high and low are the paper's words for how different clients' labels are."""

STACK_OVERFLOW = Sentences("stackoverflow", 2e-4, 24, LATER, PLAIN_WORDS, kinds=("printed", "tuned", "tuned-redrawn"))
STAND_INS = {name: replace(STACK_OVERFLOW, recipe=name, kinds=Sentences.kinds) for name in ("blogs", "stackexchange")}
"""Text that can be had, beside the paper's; results on it are never called Stack Overflow's."""

RARE = ("task.partition.name=labels", "task.partition.rare=[7, 8, 9]", "task.partition.rare_capacity=1/8")
RARE_SETUP = replace(PAPER_SETUPS["cifar10-high"], labels=3, words=RARE)
SETUPS: dict[str, Setup] = {
    **PAPER_SETUPS,
    "stackoverflow": STACK_OVERFLOW,
    **STAND_INS,
    "cifar10-rare": RARE_SETUP,
}
"""The paper's, two stand-ins for its text, and one in which three classes belong to devices of an eighth and below."""
