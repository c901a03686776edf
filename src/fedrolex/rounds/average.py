"""The selective average of a round's answers, section by section of the server's state."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fedrolex.clients import MODEL, Job, RoundPlan, Tensors, Upload
from fedrolex.core import FedrolexError
from fedrolex.rounds.engine import Averaged, Engine
from fedrolex.rounds.finite import not_finite
from fedrolex.rounds.server import State
from fedrolex.slicing import Fold, Window
from fedrolex.slicing.fold import Normaliser
from fedrolex.slicing.rows import Rows
from fedrolex.slicing.sums import ExactFold, Grades

Seen = Callable[[Sequence[Upload]], None]


class Average:
    """What has been averaged of a round so far.

    Answers that stay good until the next round (``engine.together``) are averaged at the end, by the engine itself
    or window by window; other answers are folded in as they come. Answers that the engine has summed are counted, and
    their sums asked for at the end.

    Args:
        plan: what the clients were asked.
        engine: who answers.
        normaliser: what averages divide by, see :class:`~fedrolex.slicing.fold.Fold`.
        label_axis: the axis of the classes, where a class counts for the clients that hold it only.
        exact: fold answers in as they come, into sums that do not depend on their order.

    Attributes:
        seen: called with answers of one window when they are folded in, while their tensors are good.
        new: the result, once it was asked for.
        by_engine: the engine's averages by section, where the engine took them.
    """

    def __init__(
        self,
        plan: RoundPlan,
        engine: Engine,
        *,
        normaliser: Normaliser = "per_position",
        label_axis: str | None = None,
        exact: bool = False,
    ) -> None:
        self.plan, self.engine, self.normaliser, self.label_axis = plan, engine, normaliser, label_axis
        self.exact = exact
        self.seen: Seen | None = None
        self.by_engine: dict[str, Averaged] = {}
        self.new: State = {}
        self._finite: dict[int, Tensor] = {}
        self._folds: dict[str, Fold] = {}
        self._waiting: list[tuple[Upload, float]] = []
        self._given: Tensors = {}
        self._as_given = True
        self._summed = False
        self._open = 0  # answers that the engine has summed, and nobody has counted
        self._elsewhere: dict[str, set[str]] = {}  # tensors of a first section that its jobs have in a later one, too
        for job in plan.jobs:
            later = (name for section in job.sections[1:] for name in plan.tensors[section])
            self._elsewhere.setdefault(job.sections[0], set()).update(later)

    def offer(self, upload: Upload) -> None:
        """Note an answer as the engine gave it: the engine itself can only average tensors that nobody replaced."""
        self._given = upload.tensors
        self._open += upload.summed is not None

    def add(self, upload: Upload, weight: float = 1.0) -> None:
        """Take in an answer with its client's weight; a bad answer raises FedrolexError and changes nothing."""
        self._as_given = self._as_given and upload.tensors is self._given
        if upload.summed is not None:
            self._count_in(upload, weight)
            return
        if self.engine.together and not self.exact:
            self._waiting.append((upload, weight))
            return
        parts = self._by_section(upload.job, upload.tensors)
        for section, part in parts.items():
            self._fold(section, upload.job).check(_who(upload.job), part, upload.job.window, weight)
        for place, (section, part) in enumerate(parts.items()):
            rows = None if place else self._rows(upload)
            self._fold(section, upload.job).add(_who(upload.job), part, upload.job.window, weight, rows)
        if self.seen is not None:
            self.seen([upload])

    def add_to(self, section: str, job: Job, part: Tensors, window: Window, weight: float = 1.0) -> None:
        """Take in tensors of one section that a client sends beside its answer."""
        self._fold(section, job).add(_who(job), part, window, weight)

    def result(self) -> State:
        """The new tensors of every section that an answer went to; an average that is not finite raises."""
        if self._summed and self._open:
            raise FedrolexError("take() is marked as adding, and did not add an answer that is in the sums: unmark it")
        new = self._averaged_by_engine()
        if new is None:
            self._fold_what_waits()
            for section, sums in self.engine.sums().items() if self._summed else ():
                self._folds[section].add_sums(sums)
            new = {section: {**self.plan.tensors[section], **fold.average()} for section, fold in self._folds.items()}
        if not (self.by_engine and all(done.finite for done in self.by_engine.values())):
            broken = next((name for tensors in new.values() if (name := not_finite(tensors)) is not None), None)
            if broken is not None:
                raise FedrolexError(f"round {self.plan.round}: {broken} is no longer finite; lower the learning rate")
        self.new = new
        self._finite = {id(tensor): tensor for tensors in new.values() for tensor in tensors.values()}
        return new

    def add_sums(self, section: str, job: Job, sums: Mapping[str, Grades], window: Window) -> None:
        """Take in what somebody else has added up of a section, a job's first or later one, cut to a window."""
        fold = self._fold(section, job)
        assert isinstance(fold, ExactFold)
        fold.merge(sums, window)

    def sums(self) -> dict[str, ExactFold]:
        """What has been added up so far, by section, where sums are ``exact``."""
        return {section: fold for section, fold in self._folds.items() if isinstance(fold, ExactFold)}

    def drift(self) -> dict[str, float] | None:
        """The drift by capacity as the engine measured it, once the result is there; None where it did not."""
        if self.by_engine:
            return dict(self.by_engine[MODEL].drift) if MODEL in self.by_engine else {}
        return self.engine.drift(self.new.get(MODEL, {})) if self._summed else None

    def vouches_for(self, tensor: Tensor) -> bool:
        """Whether a tensor of the result is known to be finite."""
        return id(tensor) in self._finite

    def _count_in(self, upload: Upload, weight: float) -> None:
        """Count an answer that the engine has summed already; the sums come at the end."""
        if weight != upload.summed:
            raise FedrolexError(f"was added up with weight {upload.summed:g}, not {weight:g}: give it in weight()")
        self._summed = True
        self._open -= 1
        for place, section in enumerate(upload.job.sections):
            fold, rows = self._fold(section, upload.job), None if place else self._rows(upload)
            fold.count_in(_who(upload.job), upload.job.window, weight, rows)

    def _averaged_by_engine(self) -> State | None:
        """By the engine, where it can and the average is the paper's: by position, every answer in one section."""
        if not self._as_given or self.normaliser != "per_position" or self._folds:
            return None
        homes: dict[tuple[str, ...], list[tuple[Upload, float]]] = {}
        for upload, weight in self._waiting:
            homes.setdefault(upload.job.sections, []).append((upload, weight))
        if any(len(sections) > 1 for sections in homes):
            return None
        found: dict[str, Averaged] = {}
        for (section,), waiting in homes.items():
            uploads, weights = [upload for upload, _ in waiting], [weight for _, weight in waiting]
            averaged = self.engine.average(uploads, weights, self.label_axis)
            if averaged is None:
                return None
            found[section] = averaged
        self.by_engine = found
        return {section: {**self.plan.tensors[section], **done.state} for section, done in found.items()} or None

    def _fold_what_waits(self) -> None:
        groups: dict[object, list[tuple[Upload, float]]] = {}
        for upload, weight in self._waiting:
            groups.setdefault((upload.job.source, upload.job.capacity), []).append((upload, weight))
        for group in groups.values():
            uploads, weights = [upload for upload, _ in group], [weight for _, weight in group]
            if self.seen is not None:
                self.seen(uploads)
            job, keys = uploads[0].job, [_who(upload.job) for upload in uploads]
            split = [self._by_section(job, upload.tensors) for upload in uploads]
            for place, section in enumerate(split[0]):
                rows = None if place or self.label_axis is None else [self._rows(each) or {} for each in uploads]
                parts = [each[section] for each in split]
                self._fold(section, job).add_all(keys, parts, job.window, weights, rows)
        self._waiting.clear()

    def _by_section(self, job: Job, tensors: Tensors) -> dict[str, Tensors]:
        """An answer's tensors by the section they go to."""
        if len(job.sections) == 1:
            return {job.sections[0]: tensors}
        home = {name: section for section in job.sections for name in self.plan.tensors[section]}
        return {
            section: {name: tensor for name, tensor in tensors.items() if home[name] == section}
            for section in job.sections
        }

    def _fold(self, section: str, job: Job) -> Fold:
        if section not in self._folds:
            gone = self._elsewhere.get(section, set())
            base = {name: tensor for name, tensor in self.plan.tensors[section].items() if name not in gone}
            kind = ExactFold if self.exact else Fold
            self._folds[section] = kind(self.plan.axes(job), base, normaliser=self.normaliser)
        return self._folds[section]

    def _rows(self, upload: Upload) -> Rows | None:
        return None if self.label_axis is None else {self.label_axis: upload.labels or ()}


def _who(job: Job) -> int | str:
    """Who answers a job, for messages and so that nobody counts twice."""
    return f"{job.client} ({job.name})" if job.name else job.client
