"""A training run: round after round, from the first or from a checkpoint."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.core.errors import FedrolexError
from fedrolex.engines import Engine, Holding, Job, RoundPlan, out_of_memory
from fedrolex.methods import Method
from fedrolex.methods.fedselect import Selected
from fedrolex.rounds.apart import Apart
from fedrolex.rounds.client_states import ClientStates
from fedrolex.rounds.fleet import Fleet
from fedrolex.rounds.intake import LATE, Intake, not_finite
from fedrolex.runs.controls import SUFFIX, ControlBook
from fedrolex.runs.labelling import LabelBook
from fedrolex.runs.teaching import Teaching
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.capture import one_line
from fedrolex.slicing.schemes import Select
from fedrolex.slicing.windows import WHOLE, Window
from fedrolex.tasks import Classification, Task
from fedrolex.tasks.measure import Measure


@dataclass
class Training:
    """Everything a run is made of, and where it stands.

    Attributes:
        task, fleet, method, engine: what is learned, by whom, how, and on what.
        model: the server's model; its tensors are ``state`` after every round.
        axes: of the model.
        seed: of all streams.
        quorum: fewest good updates that make a round count.
        deadline: seconds a client may take.
        measure: how the model is evaluated.
        levels: capacities whose clients train this model; by default all of the fleet's.
        whole: they train all of it, not a part.
        round: the next round.
        state: the server's tensors; those a capacity keeps apart are named ``tensor@capacity``, those a method
            remembers ``tensor@what``.
    """

    task: Task
    fleet: Fleet
    method: Method
    engine: Engine
    model: nn.Module
    axes: Axes
    seed: int = 0
    quorum: int = 1
    deadline: float | None = None
    measure: Measure = field(default_factory=Measure)
    levels: Sequence[Fraction] | None = None
    whole: bool = False
    round: int = 0
    state: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.state:
            self.state = {name: tensor.clone() for name, tensor in self.axes.state(self.model).items()}
        levels = self.sizes
        self.apart = Apart()
        if self.method.own_models and levels and not self.whole:
            self.apart = Apart(list(self.state), levels, leads=not self.method.server_model)
        elif self.method.client.widths:
            self.apart = Apart.statistics(self.model, self.method.client.widths)
        elif self.method.norms == "per_capacity":
            self.apart = Apart.norms(self.model, levels)
        self.state = self._remembered() | self.apart.added(self.state)
        self._first = {name: tensor.clone() for name, tensor in self.state.items()} if self.method.labels else {}
        self.keep_states(ClientStates() if self.method.needs.client_state else None)
        if self.labelling is not None:
            self.state = self.labelling.remembered() | self.state
        self._bytes_at: dict[tuple[int, ...], int] = {}
        self._coming: dict[int, list[Job]] = {}
        self.teaching = Teaching(self)
        self.label_axis = self._find_label_axis() if self.method.rows else None
        self._view: Selected | None = None
        if self.method.keys is not None:
            axis = self._find_label_axis()
            asked = Select(keys=lambda _, client: {axis: self.view.keys(client).tolist()}, base=self.method.scheme)
            self.method = replace(self.method, scheme=asked)

    def kinds(self) -> Sequence[Training]:
        """The trainings of the models that share no weights, this one first."""
        return [self]

    @property
    def sizes(self) -> Sequence[Fraction]:
        """The capacities this model is trained at."""
        if self.method.width is not None:
            return [self.method.width]
        return self.fleet.levels if self.levels is None else self.levels

    def window(self, round: int, capacity: Fraction, client: int = 0) -> Window:
        """Which nodes a client of a capacity trains in a round."""
        if self.whole:
            capacity = Fraction(1)
        return self.method.scheme.window(self.axes, round=round, capacity=capacity, client=client)

    @property
    def view(self) -> Any:
        """The task as clients see it: where they ask for rows, by their keys."""
        if self.method.keys is None:
            return self.task
        if self._view is None or self._view.task is not self.task:
            self._view = Selected(self.task, self.method.keys)
        return self._view

    @property
    def only_loop(self) -> str | None:
        """Why only ``loop`` can run the client work, or None where any engine can."""
        if self.method.knowledge is not None:
            return "clients train with the server's answers"
        if self.deadline is not None:
            return "only it can interrupt a client at its deadline"
        if self.method.client.widths:
            return "every batch has a width of its own"
        if self.method.client.gradient:
            return "clients also tell a gradient"
        return "stragglers do a part of their work" if self.method.keeps_stragglers and self.fleet.stragglers else None

    def _remembered(self) -> dict[str, Tensor]:
        """What a method keeps of every trainable parameter between rounds, as ``tensor@what``."""
        first: dict[str, float] = {} if self.method.optimizer is None else self.method.optimizer.first_values
        if self.method.controls is not None:
            first = {**first, SUFFIX: 0.0}
        return {f"{n}@{what}": torch.full_like(self.state[n], x) for what, x in first.items() for n in self.trainable}

    @cached_property
    def trainable(self) -> list[str]:
        """Names of the parameters that training changes."""
        return [name for name, p in self.model.named_parameters() if p.requires_grad and name in self.state]

    def keep_states(self, states: ClientStates | None) -> None:
        """Where clients keep what they keep between rounds."""
        self.states = states
        self.controls: ControlBook | None = None
        self.labelling: LabelBook | None = None
        if self.method.labels is not None and states is not None:
            public = self.task.public if isinstance(self.task, Classification) else None
            assert public is not None
            inputs, classes = self.task.inputs(public.x), self.task.classes
            twin = copy.deepcopy(self.model)
            self.labelling = LabelBook(
                self.method.labels, self.axes, twin, inputs, classes, self.seed, states, self._first
            )
        if self.method.controls is not None and states is not None:
            able = self.method.width if self.method.able_only else None
            count = self.fleet.clients if able is None else self.fleet.able(able)
            self.controls = ControlBook(self.method.controls, self.axes, self.trainable, count, states)

    def _find_label_axis(self) -> str:
        """The axis of the classes."""
        size = self.task.classes
        found = [a.name for a in self.axes.axes.values() if a.kind in ("outputs", "rows") and a.size == size]
        if len(found) != 1:
            what = "fedselect" if self.method.keys is not None else "method.rows"
            raise FedrolexError(f"{what} needs one axis for the {size} classes; the model has {len(found)}")
        return found[0]

    def run_round(self) -> dict[str, Any]:
        """One round; returns its metrics. A round below the quorum is void, and the window still advances."""
        began = time.perf_counter()
        intakes = [each.gather() for each in self.kinds()]
        losses = [loss for intake in intakes for loss in intake.losses]
        metrics: dict[str, Any] = {
            "round": self.round,
            "clients": len(losses),
            "dropped": {client: why for intake in intakes for client, why in intake.failures.items()},
            "void": len(losses) < self.quorum,
            "train_loss": sum(losses) / len(losses) if losses else None,
            "bytes_down": sum(intake.bytes_down for intake in intakes),
            "bytes_up": sum(intake.bytes_up for intake in intakes),
        }
        new = self.state
        if not metrics["void"]:
            new, metrics["drift"] = self.settle(intakes)
        metrics["seconds"] = time.perf_counter() - began
        self.state, self.round = new, self.round + 1
        return metrics

    def gather(self) -> Intake:
        """Have this round's clients trained, and take in their answers."""
        plan = self._plan()
        sizes = {window: self._bytes(window) for window in {job.window for job in plan.jobs}}
        late = [] if self.method.keeps_stragglers else [job for job in plan.jobs if job.part < 1]
        asked = plan.jobs
        if late:
            plan = replace(plan, jobs=[job for job in plan.jobs if job.part == 1])
        answers = self.engine.run(plan)
        first = next(answers, None)
        together = self.engine.together or self.labelling is not None  # known once the engine has begun
        intake = Intake(self, plan, together=together)
        answers = answers if first is None else chain([first], answers)
        del first  # its tensors' memory may be needed before the last answer is there
        intake.take(answers)
        intake.failures.update({str(job.client): LATE for job in late})
        intake.bytes_down = sum(sizes[job.window] for job in asked)
        intake.bytes_up = sum(sizes[job.window] for job in asked if str(job.client) not in intake.failures)
        return intake

    def settle(self, intakes: Sequence[Intake]) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        """The server's new tensors after a round that counts, and the drift by capacity."""
        (intake,) = intakes
        if self.labelling is not None:
            new = self.labelling.settle(self.round, self.state)
            self._check_finite(new)
            self.labelling.keep(self.round)
            return new, {}
        new, drift = self.averaged(intake)
        if self.method.server is not None:
            given = self.teaching.groups(new, intake), self.teaching.server_group(new)
            self.teaching.take_over(new, self.teaching.answered(*given))
        if self.controls is not None:
            new |= self.controls.settle(new)
        if self.method.optimizer is not None or self.method.server is not None or self.controls is not None:
            self._check_finite(new)
        if self.controls is not None:
            self.controls.keep(self.round)
        return new, drift

    def averaged(self, intake: Intake) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        """The average of what came in, after the server's optimiser, and the drift by capacity."""
        new, drift = intake.average()
        if self.method.optimizer is not None:
            new = self.method.optimizer.step(self.state, new, self.trainable)
        return new, drift

    def _check_finite(self, new: Mapping[str, Tensor]) -> None:
        broken = not_finite(new)
        if broken is not None:
            raise FedrolexError(f"round {self.round}: {broken} is no longer finite after the server's step")

    def own_or_shared(self, state: Mapping[str, Tensor], level: Fraction) -> dict[str, Tensor]:
        """The tensors a capacity's model is cut from."""
        return {**self.apart.shared(state), **self.apart.own(state, level)}

    def _plan(self) -> RoundPlan:
        jobs = self._coming.pop(self.round, None) or self._jobs(self.round)
        self._coming.clear()
        if self.controls is not None:
            jobs = self.controls.equipped(jobs, self.state)
        if self.labelling is not None:
            jobs = self.labelling.equipped(jobs, self.state, self.round)
        if self.apart.names:
            owns = {capacity: self.apart.own(self.state, capacity) for capacity in {job.capacity for job in jobs}}
            jobs = [replace(job, own=owns[job.capacity]) for job in jobs]
        if self.method.client.widths:
            jobs = [replace(job, narrower=self._narrower(job.capacity)) for job in jobs]
        return RoundPlan(
            self.round,
            self.seed,
            self.axes,
            self.apart.shared(self.state),
            self.view,
            self.method.client,
            jobs,
            self.deadline,
            self.method.rows,
            self._upcoming,
        )

    def _narrower(self, capacity: Fraction) -> dict[Fraction, tuple[Window, dict[str, Tensor]]]:
        """The widths below a capacity that its clients also train, with what each keeps apart."""
        found = {}
        for width in sorted(self.method.client.widths):
            if width < capacity:
                window = self.window(self.round, width)
                found[width] = (window, self.apart.own(self.state, width))
        return found

    def _jobs(self, round: int) -> list[Job]:
        """Who takes part in a round, and with which window."""
        members = self.fleet.members(round, self.method.width if self.method.able_only else None)
        known: dict[Window, Window] = {}  # equal windows are one object: looking them up is then quick
        jobs = []
        for member in members:
            capacity = self.method.width or member.capacity
            if capacity not in self.sizes:
                continue
            window = self.window(round, capacity, member.client)
            jobs.append(Job(member.client, capacity, known.setdefault(window, window), part=member.part))
        return jobs

    def _upcoming(self) -> list[Job]:
        """The jobs of the next round, kept until then."""
        return self._coming.setdefault(self.round + 1, self._jobs(self.round + 1))

    def _bytes(self, window: Window) -> int:
        """What a client receives, and sends back: parameters and buffers, and control variates, in their precision."""
        if self.labelling is not None:
            return self.labelling.bytes()
        widths = self.axes.widths(window)
        key = tuple(widths.values())
        if key not in self._bytes_at:
            shared = self.apart.shared(self.state)
            self._bytes_at[key] = sum(prod(self.axes.shape(n, widths)) * t.element_size() for n, t in shared.items())
            if self.controls is not None:
                variates = {name: shared[name] for name in self.trainable}.items()
                self._bytes_at[key] += sum(prod(self.axes.shape(n, widths)) * t.element_size() for n, t in variates)
        return self._bytes_at[key]

    def whole_bytes(self) -> int:
        """What a client of the full model would receive."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.apart.shared(self.state).values())

    def evaluate(self) -> dict[str, Any]:
        """How good the model is now: the whole one, or the width everyone trains."""
        try:
            return self._evaluate()
        except ValueError as error:  # a batch norm that was given a single value a channel
            raise FedrolexError(f"the model could not be evaluated: {one_line(error)}") from error
        except RuntimeError as failure:
            holding = [each.engine for each in self.kinds() if isinstance(each.engine, Holding)]
            released = [engine.release() for engine in holding] if out_of_memory(failure) else []
            if not any(released):
                raise
        return self.evaluate()  # with what the engines gave back

    def _evaluate(self) -> dict[str, Any]:
        found = self.measure(self.task, self._model(self.method.width), self.model)
        if self.measure.submodels and self.method.width is None:
            found["submodels"] = {
                str(level): self.measure(self.task, self._model(level), self.model)["global_accuracy"]
                for level in self.sizes
            }
        return found

    def _model(self, capacity: Fraction | None) -> nn.Module:
        """The server's model, or its sub-model of a capacity, as it stands."""
        largest = capacity or max(self.sizes, default=Fraction(1))
        own = capacity is None and not self.apart.leads
        self.axes.load(self.model, self.apart.shared(self.state) if own else self.own_or_shared(self.state, largest))
        if capacity is None or self.whole:
            return self.model
        return self.axes.cut(self.model, self.window(max(0, self.round - 1), capacity))

    def trained(self) -> tuple[nn.Module, Axes]:
        """The server's model as it stands, with its axes."""
        return self._model(None), self.axes

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with given weights; where they have none for a capacity's own copy, with those of the model."""
        copies = {f"{name}@{capacity}" for name in self.apart.names for capacity in self.apart.capacities}
        for name, tensor in self.state.items():
            if "@" in name and name not in copies:
                continue
            found = tensors.get(name, tensors.get(name.partition("@")[0]))
            if found is None:
                raise FedrolexError(f"there is no tensor {name!r}: the weights do not fit this model")
            self.axes.fits(name.partition("@")[0], found, WHOLE)
            tensor.copy_(found)
        for name, first in self._first.items():
            first.copy_(self.state[name])

    def restore(self, tensors: Mapping[str, Tensor], round: int) -> None:
        """Go on from a checkpoint."""
        missing = sorted(set(self.state) ^ set(tensors))
        if missing:
            raise FedrolexError(f"the checkpoint does not fit this run: tensor {missing[0]!r}")
        self.axes.check_whole({name.partition("@")[0]: t for name, t in tensors.items() if not name.startswith("@")})
        device = next(iter(self.state.values())).device
        self.state = {name: tensors[name].to(device) for name in self.state}
        self.round = round


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FedrolexError("device is cuda, but there is no CUDA device here: use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
