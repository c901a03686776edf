"""FedBE: the server samples models from a posterior over the clients' and distils their ensemble.

Chen, Chao, "FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning", ICLR 2021. After averaging:
fit a distribution to the clients' models; draw models from it; let them, the clients' and the average label public
examples together; sharpen; teach the average, averaging its weights along the way (SWA).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from fedrolex.clients import MODEL, Tensors, Upload, copied, in_precision
from fedrolex.core import check_numbers, random_words
from fedrolex.methods.distillation import AT_ONCE, Group, Public, check_examples_a_round, pieces, teaching
from fedrolex.methods.needs import Needs
from fedrolex.methods.one_size import OneSize
from fedrolex.methods.settings import Weighted, Weighting
from fedrolex.rounds import Round, State

Posterior = Literal["gaussian", "released", "dirichlet"]


@dataclass(frozen=True, kw_only=True)
class FedBE(OneSize, Weighted):
    """FedAvg by samples, then the ensemble.

    Attributes:
        weighting: of a client in the average: ``samples``, by its number of examples, or ``uniform``.
        posterior: ``gaussian`` over the clients' weights; ``released``, the same over normalised changes, as in the
            authors' code; ``dirichlet`` over the clients' shares in an average.
        samples: models drawn from the posterior.
        concentration: of the Dirichlet distribution.
        spread: by what the released form multiplies standard deviations.
        sharpen: exponent 1 / T of the teachers' mean probabilities.
        examples: public examples a round, drawn anew; null is all of them, as the authors have it.
        epochs, batch, lr, momentum, weight_decay: of teaching, by SGD.
        by_class: the loss is the mean over examples *and* classes, as in the authors' code.
        average_from, average_every: steps from and at which weights are averaged; none in a teaching that is shorter.
    """

    weighting: Weighting = "samples"
    posterior: Posterior = "gaussian"
    samples: int = 10
    concentration: float = 1.0
    spread: float = 0.1
    sharpen: float = 2.0
    examples: int | None = None
    epochs: int = 20
    batch: int = 128
    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-5
    by_class: bool = False
    average_from: int = 500
    average_every: int = 25
    needs = Needs(one_size=True, public=True, uploads=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_examples_a_round(self.examples)
        least = {"samples": 0, "spread": 0, "epochs": 0, "batch": 2, "lr": 0, "momentum": 0, "weight_decay": 0,
                 "average_from": 1, "average_every": 1}  # fmt: skip
        check_numbers("method", self, least=least, positive=("concentration", "sharpen"))

    def take(self, round: Round, upload: Upload) -> None:
        """Average the answer, and keep it as a teacher."""
        super().take(round, upload)
        round.keep(upload, self.weight(upload))

    def finish(self, round: Round) -> State:
        """Average; draw models; label public examples by all of them; teach the average."""
        new = round.average.result()
        if not (round.uploads and self.epochs):
            return new
        server, window = round.server, round.plan.jobs[0].window
        group = Group.of(round, new, MODEL, window)
        with teaching(round, self.examples) as public:
            teachers = [group.average, *self.drawn(group, server.seed, round.number), *group.uploads]
            target = self.together(group.scores(each, public).softmax(1) for each in teachers)
            taught = self.taught(group, target, public)
        whole = copied(new[MODEL])
        server.main.axes.put(whole, taught, window)
        return {**new, MODEL: whole}

    def drawn(self, group: Group, seed: int, round: int) -> Iterator[dict[str, Tensor]]:
        """Models of the posterior: weights are drawn, buffers are the average's."""
        draw = np.random.Generator(np.random.Philox(key=int(random_words(1, seed, "posterior", round)[0])))
        trained = [name for name, p in group.module.named_parameters() if p.requires_grad]
        fitted = {name: self.fitted(name, group) for name in trained} if self.posterior != "dirichlet" else {}
        for _ in range(self.samples):
            sample = dict(group.average)
            if self.posterior == "dirichlet":
                share = draw.dirichlet([self.concentration] * len(group.uploads)) * np.asarray(group.weights)
                sample |= mixed(group.uploads, share / share.sum(), trained)
            else:
                for name, (mean, deviation) in fitted.items():
                    noise = torch.from_numpy(draw.standard_normal(tuple(mean.shape), dtype=np.float32))
                    sample[name] = mean + deviation * noise.to(mean)
            yield sample

    def fitted(self, name: str, group: Group) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of every weight of a tensor."""
        own = torch.stack([upload[name] for upload in group.uploads])
        if self.posterior == "gaussian":
            share = torch.tensor(list(group.weights)).to(own)
            share = (share / share.sum()).view(-1, *[1] * (own.dim() - 1))
            mean = (share * own).sum(0)
            return mean, (share * (own - mean).square()).sum(0).sqrt()
        change = own - group.received[name]
        lengths = torch.linalg.vector_norm(change.flatten(1), dim=1)
        unit = change / lengths.clamp(min=1e-12).view(-1, *[1] * (own.dim() - 1))
        mean, length = unit.mean(0), lengths.mean()
        variance = (unit.square().mean(0) - mean.square()).clamp(min=1e-5)
        return group.received[name] + length * mean, length * self.spread * variance.sqrt()

    def together(self, every: Iterator[Tensor]) -> Tensor:
        """The mean of the teachers' probabilities, sharpened, ``(n, classes)``."""
        total, count = torch.zeros(()), 0
        for probabilities in every:
            total, count = total.to(probabilities) + probabilities, count + 1
        sharp = (total / count).clamp(min=1e-8) ** self.sharpen
        return sharp / sharp.sum(1, keepdim=True)

    def taught(self, group: Group, target: Tensor, public: Public) -> dict[str, Tensor]:
        """The average after learning the target, probabilities ``(n, classes)``."""
        student = group.load(group.average).train()
        lr, momentum, decay = self.lr, self.momentum, self.weight_decay
        optimizer = torch.optim.SGD(student.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
        averaged: dict[str, Tensor] = {}
        seen, steps = 0, self.epochs * len(pieces(public.inputs, self.batch))
        for step, rows in enumerate(public.batches(self.batch, steps, "distil"), 1):
            said = in_precision(student, public.inputs[rows], public.precision).log_softmax(1)
            loss = nn.functional.kl_div(said, target[rows], reduction="batchmean")
            optimizer.zero_grad()
            (loss / target.shape[1] if self.by_class else loss).backward()
            optimizer.step()
            if step >= self.average_from and (step - self.average_from) % self.average_every == 0:
                seen += 1
                for name, p in student.named_parameters():
                    averaged[name] = torch.lerp(averaged.get(name, p.detach()), p.detach(), 1 / seen)
        if averaged:
            group.load(averaged)
            update_bn(pieces(public.inputs, AT_ONCE), student)
        return group.tensors()


def mixed(models: Sequence[Tensors], share: Sequence[float], names: Sequence[str]) -> dict[str, Tensor]:
    """The weighted sum of models."""
    return {name: sum(float(s) * each[name] for s, each in zip(share, models, strict=True)) for name in names}  # type: ignore[misc]
