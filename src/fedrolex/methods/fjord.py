"""FjORD: ordered dropout, so that every width is a good model, and self-distillation.

Horváth, Laskaridis, Almeida, Leontiadis, Venieris, Lane, "FjORD: Fair and Accurate Federated Learning under
heterogeneous targets with Ordered Dropout", NeurIPS 2021. A client of capacity p_max holds the first ⌈p_max · K⌉ nodes
of every layer. For every batch it draws a width p ≤ p_max and trains the first ⌈p · K⌉ of them; with distillation it
trains p_max, and p learns what p_max says. Positions are averaged over the clients that hold them, by samples. Running
statistics of batch norms are kept apart for every width: shared ones would fit none.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.clients import MODEL, Job, LocalTraining, Loss, Rate, Slot, Tensors, Upload, Visit, copied, in_precision
from fedrolex.core import FedrolexError, check_numbers, random_words
from fedrolex.methods.averaging import Averaging
from fedrolex.methods.method import adding
from fedrolex.methods.settings import Weighting
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Fleet, Round, Server, State
from fedrolex.slicing import Ordered, Region, Scheme, exact
from fedrolex.slicing.regions import region_of
from fedrolex.tasks import masked


@dataclass
class Narrow:
    """A model of the first nodes of another, with parameters of its own that are copies of the wider model's.

    ``parameters`` are the trainable ones in the order of the wider model's; ``places`` says where each lies in those.
    """

    module: nn.Module
    parameters: list[Tensor]
    places: list[Region]

    @torch.no_grad()
    def load(self, wider: Sequence[Tensor]) -> None:
        """Take over the wider model's parameters."""
        for own, place, parameter in zip(self.parameters, self.places, wider, strict=True):
            place.take(parameter, own)

    def add(self, total: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add gradients of the narrow model's parameters to those of the wider model's."""
        for wide, place, gradient in zip(total, self.places, gradients, strict=True):
            place.add(wide, gradient, 1.0)

    def begin(self, statistics: Tensors) -> dict[str, Tensor]:
        """Begin a round with this width's statistics; returns the tensors that training will change."""
        self.module.train()
        own = dict(self.module.named_buffers())
        for name, tensor in statistics.items():
            own[name].copy_(tensor)
        return {name: own[name] for name in statistics}


@dataclass(frozen=True, kw_only=True)
class OrderedDropout(LocalTraining):
    """A client's work: every batch at a width that is drawn for it.

    Attributes:
        widths: that batches are trained at, as parts of the server's model.
        distil, alpha, temperature: see :class:`Fjord`.
    """

    widths: Sequence[Fraction] = ()
    distil: bool = True
    alpha: float = 1.0
    temperature: float = 1.0

    def start(self, slot: Slot, visit: Visit) -> None:
        """Make the slot ready, and the narrower models inside it, whose statistics are sent back, too."""
        super().start(slot, visit)
        plan, job, axes = visit.plan, visit.job, visit.network.axes
        inside: dict[Fraction, Narrow] = slot.scratch.setdefault("inside", {})
        choices: list[Narrow | None] = []
        ordered, held = Ordered(widths=self.widths), axes.widths(job.window)
        for width in narrower(self.widths, job.capacity):
            if width not in inside:
                module = axes.cut(visit.network.module, ordered.window(axes, round=0, capacity=width))
                own, within = dict(module.named_parameters()), ordered.inner(axes, job.capacity, width)
                places = [region_of(name, axes.tensors[name].dims, held, within) for name in slot.names]
                inside[width] = Narrow(module, [own[name] for name in slot.names], places)
            begun = inside[width].begin(job.sent.get(statistics(width), {}))
            visit.sent |= {f"{statistics(width)} {name}": tensor for name, tensor in begun.items()}
            choices.append(inside[width])
        slot.scratch["drawn"] = drawn([*choices, None], plan.seed, plan.round, job.client)

    def step(self, slot: Slot, x: Tensor, y: Tensor, loss: Loss, rate: Rate, held: Tensor | None = None) -> Tensor:
        """One batch at the width drawn for it."""
        narrow = next(slot.scratch["drawn"])
        if narrow is None:  # nothing to learn from itself; what it would learn from labels counts
            often = 2 - self.alpha if self.distil else 1.0
            return super().step(slot, x, y, lambda said, y: often * loss(said, y), rate, held) / often
        return self.narrow_step(narrow, slot, x, y, loss, rate, held)

    def narrow_step(
        self, narrow: Narrow, slot: Slot, x: Tensor, y: Tensor, loss: Loss, rate: Rate, held: Tensor | None
    ) -> Tensor:
        """One batch at a width below that of the slot; returns its loss."""
        gradients = [torch.zeros_like(p) for p in slot.parameters]
        narrow.load(slot.parameters)
        low = in_precision(narrow.module, x, slot.precision)
        if self.distil:
            scores = slot.scores(x)
            value = self.objective(scores, y, loss, held)
            found = torch.autograd.grad(value, slot.parameters, allow_unused=True, materialize_grads=True)
            torch._foreach_add_(gradients, found)
            small = self.alpha * self.learned(low, scores.detach(), held)
            if self.alpha < 1:
                small = small + (1 - self.alpha) * self.objective(low, y, loss, held)
        else:
            value = small = self.objective(low, y, loss, held)
        narrow.add(gradients, torch.autograd.grad(small, narrow.parameters, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            self.move(slot.parameters, gradients, slot.memory, rate)
        return value.detach()

    def learned(self, low: Tensor, scores: Tensor, held: Tensor | None) -> Tensor:
        """How far the drawn width's answers are from the whole sub-model's: T² · KL at temperature T."""
        if held is not None:
            low, scores = (masked(each, held, self.mask) for each in (low, scores))
        t = self.temperature
        said = (low / t).log_softmax(-1)
        return t * t * kl_div(said.flatten(0, -2), (scores / t).softmax(-1).flatten(0, -2), reduction="batchmean")


def drawn(choices: Sequence[Narrow | None], seed: int, round: int, client: int) -> Iterator[Narrow | None]:
    """The model of every step of a client, drawn evenly; None is the whole sub-model."""
    for step in count():
        yield choices[int(random_words(1, seed, "width", round, client, step)[0]) * len(choices) >> 64]


def narrower(widths: Sequence[Fraction], capacity: Fraction) -> list[Fraction]:
    """The widths below a capacity, ascending."""
    return sorted(width for width in widths if width < capacity)


def statistics(width: Fraction) -> str:
    """The section of the server's state with the running statistics of a width."""
    return f"statistics@{width}"


@dataclass(frozen=True, kw_only=True)
class Fjord(Averaging):
    """Nested widths, each a good model.

    Attributes:
        weighting: of a client in the average: ``samples``, by its number of examples, or ``uniform``.
        widths: that batches are trained at, as parts of the task's model; null is the fleet's capacities.
        distil: train a client's widest model at every batch, and let the drawn width learn from it.
        alpha: how much the drawn width learns from the widest model, the rest is learned from labels.
        temperature: of that distillation.
    """

    weighting: Weighting = "samples"
    widths: list[str] | None = None
    distil: bool = True
    alpha: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms != "shared":
            raise FedrolexError("method.norms=per_capacity does not go with fjord: a client trains several widths")
        if not 0 <= self.alpha <= 1:
            raise FedrolexError(f"method.alpha is {self.alpha}: give a number between 0 and 1")
        check_numbers("method", self, least={}, positive=("temperature",))
        for width in self.widths or ():
            exact(width)

    def check(self, setup: Setup) -> None:
        """Widths learn scores of classes from each other."""
        super().check(setup)
        if self.distil and not setup.task.classes:
            raise FedrolexError(f"method.distil compares scores of classes, which {setup.task.name} has not: set false")

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """Every capacity is a width."""
        super().check_fleet(fleet, client, scale)
        known = fleet.levels if self.widths is None else [exact(width) / scale for width in self.widths]
        missing = next((level for level in fleet.levels if level not in known), None)
        if missing is not None:
            raise FedrolexError(f"method.widths has no {missing}, which is a capacity of the fleet: add it")

    def work(self, setup: Setup) -> LocalTraining:
        """Ordered dropout."""
        own: dict[str, Any] = {"distil": self.distil, "alpha": self.alpha, "temperature": self.temperature}
        return OrderedDropout(**asdict(setup.client), widths=self.parts(setup), **own)

    def windows(self, server: Server) -> Scheme:
        """The first nodes, as many as the capacity says, rounded up."""
        return Ordered(widths=self.parts(server))

    def begin(self, server: Server) -> State:
        """Running statistics of every width, where the model keeps any."""
        module, model = server.main.module, server.state[MODEL]
        norms = {path for path, layer in module.named_modules() if isinstance(layer, _BatchNorm)}
        names = [name for name, _ in module.named_buffers() if name.rpartition(".")[0] in norms]
        own = {statistics(width): {n: model[n].clone() for n in names} for width in self.parts(server) if names}
        return {**super().begin(server), **own}

    def sections(self, server: Server, capacity: Fraction) -> tuple[str, ...]:
        """The model, and the statistics of the capacity."""
        return (MODEL, statistics(capacity)) if statistics(capacity) in server.state else (MODEL,)

    def send(self, server: Server, job: Job) -> Mapping[str, Tensors]:
        """The statistics of the narrower widths that the client trains, too."""
        return {
            section: server.main.axes.take(server.state[section], server.window(server.round, width))
            for width in narrower(self.parts(server), job.capacity)
            if (section := statistics(width)) in server.state
        }

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Average every width's statistics over the clients that trained it."""
        asked = upload.job.sent.items()
        upload.check_sent({f"{section} {name}": t for section, own in asked for name, t in own.items()})
        super().take(round, upload)
        for width in narrower(self.parts(round.server), upload.job.capacity):
            section = statistics(width)
            own = {name: upload.sent[f"{section} {name}"] for name in round.state.get(section, {})}
            if own:
                window = round.server.window(round.number, width)
                round.average.add_to(section, upload.job, own, window, self.weight(upload))

    def finish(self, round: Round) -> State:
        """The average; the server's model has the statistics of the largest width."""
        new = super().finish(round)
        largest = {**round.state, **new}.get(statistics(max(self.parts(round.server))), {})
        return {**new, MODEL: {**new[MODEL], **copied(largest)}}

    def parts(self, run: Setup | Server) -> list[Fraction]:
        """The widths as parts of the server's model."""
        return run.fleet.levels if self.widths is None else [exact(width) / run.scale for width in self.widths]
