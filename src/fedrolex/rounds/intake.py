"""A round's answers: which are taken, and their average."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedrolex.core.errors import FedrolexError
from fedrolex.engines import Averaged, Averaging, Failure, RoundPlan, Upload
from fedrolex.rounds.apart import Folds
from fedrolex.rounds.drift import Drift
from fedrolex.slicing.fold import Rows

if TYPE_CHECKING:
    from fedrolex.runs.training import Training


LATE = "managed only a part of its work (fleet.stragglers)"


class Intake:
    """What has come in of a round.

    Args:
        training: whose round it is.
        plan: what the clients were asked.
        together: uploads stay good until the next round, and are averaged at the end; otherwise each is folded in as
            it comes.

    Attributes:
        losses: of the clients whose updates were taken.
        failures: why the others' were not, by client.
        uploads: those taken, with their weights, where the method asks for them one by one.
        bytes_down, bytes_up: what was sent to clients, and what they sent.
    """

    bytes_down = 0
    bytes_up = 0

    def __init__(self, training: Training, plan: RoundPlan, *, together: bool) -> None:
        self.training, self.plan, self.together = training, plan, together
        self.losses: list[float] = []
        self.failures: dict[str, str] = {}
        self.uploads: list[tuple[Upload, float]] = []
        self._uploads: list[Upload] = []
        if not together:
            self._start_folding()

    def _start_folding(self) -> None:
        own, plan = self.training, self.plan
        self._folds = Folds(own.axes, own.state, own.apart, own.method.normaliser, plan.jobs, self.together)
        self._drift = Drift(own.axes, plan.state)

    def take(self, answers: Iterable[Upload | Failure]) -> None:
        """Take in what is sent, as far as it can be used."""
        for answer in answers:
            why = answer.why if isinstance(answer, Failure) else self._refused(answer)
            if isinstance(answer, Upload) and why is None:
                if self.together:
                    self._uploads.append(answer)
                else:
                    why = self._fold(answer)
            if why is not None:
                self.failures[str(answer.job.client)] = why
                if not self.together:
                    self._folds.skip(answer.job)
            elif isinstance(answer, Upload):
                self.losses.append(answer.loss)
                self._keep(answer)
            del answer  # before the next one is trained, which may need its memory

    def _keep(self, upload: Upload) -> None:
        """What a method wants to know of single answers."""
        if self.training.labelling is not None:
            self.training.labelling.take(upload)
        if self.training.controls is not None:
            self.training.controls.take(upload, self.plan)
        if self.training.method.needs.uploads:
            copied = {name: tensor.clone() for name, tensor in upload.tensors.items()}
            self.uploads.append((replace(upload, tensors=copied), self._weight(upload)))

    def _fold(self, upload: Upload) -> str | None:
        """Fold an upload in; says why it could not be."""
        try:
            self._folds.add(upload.job, upload.tensors, self._weight(upload), self._rows(upload), upload.narrower)
        except FedrolexError as error:
            return str(error)
        self._drift.add(upload.job.client, upload.job.capacity, upload.tensors, upload.job.window)
        return None

    def average(self) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        """The server's new tensors, and the drift by capacity; an average that is not finite ends the run."""
        if not self.losses:
            return dict(self.training.state), {}
        done = self._averaged_in_place() if self.together else None
        if done is None:
            if self.together:
                self._start_folding()
                self._fold_window_by_window()
            new = self._folds.average()
            alone = self.training.method.own_models  # sizes that share no weights do not drift from each other
            done = Averaged(new, {} if alone else self._drift.by_capacity(new))
        broken = None if done.finite else not_finite(done.state)
        if broken is not None:
            raise FedrolexError(f"round {self.plan.round}: {broken} is no longer finite; lower the learning rate")
        return {**self.training.state, **done.state}, done.drift

    def _averaged_in_place(self) -> Averaged | None:
        """By the engine, where it can and the average is the paper's: by position, nothing kept apart."""
        own = self.training
        if not isinstance(own.engine, Averaging) or own.method.normaliser != "per_position" or own.apart.names:
            return None
        return own.engine.average(self._uploads, [self._weight(each) for each in self._uploads], own.label_axis)

    def _fold_window_by_window(self) -> None:
        groups: dict[tuple[object, ...], list[Upload]] = {}
        for upload in self._uploads:
            groups.setdefault((upload.job.window, upload.job.capacity), []).append(upload)
        for group in groups.values():
            jobs, parts = [each.job for each in group], [each.tensors for each in group]
            self._drift.add_all(jobs[0].capacity, parts, jobs[0].window)
            rows = None if self.training.label_axis is None else [self._rows(each) or {} for each in group]
            self._folds.add_all(jobs, parts, [self._weight(each) for each in group], rows)

    def _refused(self, upload: Upload) -> str | None:
        """Why an upload is not taken, or None."""
        broken = None if upload.finite else not_finite(upload.tensors)
        if broken is None:
            return None
        lonely = upload.examples % self.plan.client.batch == 1 and any("running_var" in n for n in self.training.state)
        why = "; its last batch is one example, which batch norm cannot train on" if lonely else ""
        return f"sent a value that is not finite ({broken}){why}"

    def _rows(self, upload: Upload) -> Rows | None:
        axis = self.training.label_axis
        return None if axis is None else {axis: upload.labels or ()}

    def _weight(self, upload: Upload) -> float:
        return float(upload.examples) if self.training.method.weighting == "samples" else 1.0


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """The first tensor with a value that is not finite, or None; the device is asked once if all is well."""
    real = [t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta]
    strided = [t for t in real if t.layout is torch.strided and t.numel()]
    if len(strided) == len(real) and real:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(strided)])
        if bool(norms.isfinite().all()):
            return None
    suspects = (n for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point())
    return next((n for n in suspects if not bool(tensors[n].isfinite().all())), None)
