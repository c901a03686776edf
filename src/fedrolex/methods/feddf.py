"""FedDF: models of several sizes, fused by distilling the ensemble of all clients into each.

Lin, Kong, Stich, Jaggi, "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020. Clients of
one capacity are averaged; then every average learns, on public examples, the mean of *all* clients' logits, until a few
labelled examples show no more progress. Capacities learn from each other through the ensemble alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedrolex.clients import MODEL, copied, in_precision
from fedrolex.core import check_numbers
from fedrolex.methods.distillation import Group, Public, check_examples_a_round, scores, teaching
from fedrolex.methods.model_per_capacity import ModelPerCapacity
from fedrolex.methods.needs import Needs
from fedrolex.rounds import Round, Server, State


@dataclass(frozen=True, kw_only=True)
class FedDF(ModelPerCapacity):
    """Every capacity has a model of its own; the server's model is that of the largest.

    Attributes:
        examples: public examples a round, drawn anew; null is all of them, as the authors have it.
        steps: most steps for one average; the authors have 10,000.
        batch, lr: of Adam, its rate annealed to 0 along a cosine over ``steps``.
        temperature: divides logits on both sides.
        clip: largest norm of a gradient.
        judge_every: steps between looks at the held-out examples; the best look is kept. The authors have 100.
        patience: steps without progress after which teaching ends; the authors have 1000.
    """

    examples: int | None = None
    steps: int = 500
    batch: int = 64
    lr: float = 1e-3
    temperature: float = 1.0
    clip: float = 5.0
    judge_every: int = 25
    patience: int = 100
    needs = Needs(public=True, validation=True, uploads=True, families=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_examples_a_round(self.examples)
        least = {"steps": 0, "batch": 2, "judge_every": 1, "patience": 1}
        check_numbers("method", self, least=least, positive=("lr", "temperature", "clip"))

    def finish(self, round: Round) -> State:
        """Average the clients of every capacity, then teach every average what all clients say together."""
        new = dict(round.average.result())
        if self.steps and round.uploads:
            task = round.server.classification
            assert task.validation is not None
            held, y = task.inputs(task.validation.x), task.validation.y
            groups = self.groups(round, new)
            with teaching(round, self.examples) as public:
                target = self.target(groups.values(), public)
                taught = {level: self.taught(g, target, public, held, y, str(level)) for level, g in groups.items()}
            new = self.replaced(round, new, taught)
        if parts := self.parts(round.server):
            (section,) = self.sections(round.server, max(parts))
            new[MODEL] = copied({**round.state, **new}[section])
        return new

    def target(self, groups: Iterable[Group], public: Public) -> Tensor:
        """The softmax of the mean of all clients' logits, ``(n, classes)``."""
        logits = torch.stack([group.scores(upload, public) for group in groups for upload in group.uploads]).mean(0)
        return (logits / self.temperature).softmax(1)

    def taught(
        self, group: Group, target: Tensor, public: Public, held: Tensor, y: Tensor, key: str = ""
    ) -> dict[str, Tensor]:
        """The average of one capacity after learning the target, probabilities ``(n, classes)``.

        ``held`` and ``y`` are the held-out examples to judge by; ``key`` is that of the capacity's order of batches.
        """
        student = group.load(group.average).train()
        optimizer = torch.optim.Adam(student.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)

        def accuracy() -> float:
            return float((scores(student, held, public.inputs, public.precision).argmax(1) == y).double().mean())

        best, found, since = accuracy(), group.tensors(), 0
        for step, rows in enumerate(public.batches(self.batch, self.steps, f"distil {key}"), 1):
            said = in_precision(student, public.inputs[rows], public.precision) / self.temperature
            loss = nn.functional.kl_div(said.log_softmax(1), target[rows], reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), self.clip)
            optimizer.step()
            schedule.step()
            if step % self.judge_every == 0 or step == self.steps:
                now = accuracy()
                since += self.judge_every
                if now > best:
                    best, found, since = now, group.tensors(), 0
                if since >= self.patience:
                    break
        return found

    def leading(self, server: Server) -> str:
        """The network of the largest capacity."""
        return self.network(server, max(self.sizes(server)))
