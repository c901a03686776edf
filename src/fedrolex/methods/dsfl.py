"""DS-FL: clients exchange what they say about public examples, never their models.

Itahara, Nishio, Koda, Morikura, Yamamoto, "Distillation-Based Semi-Supervised Federated Learning for
Communication-Efficient Collaborative Training with Non-IID Private Data", IEEE TMC 2023. In a round, the server names
some public examples. A client learns last round's labels, trains on its own data, and sends its probabilities for this
round's examples. The server averages the probabilities, lowers their entropy (ERA: a softmax of the mean
*probabilities*, divided by T), and its own model learns the result, which goes out with the next round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor, nn

from fedrolex.clients import MODEL, Job, LocalTraining, Precision, Tensors, Upload, Visit, copied, in_precision
from fedrolex.core import FedrolexError, check_numbers, random_words, sample, shuffle
from fedrolex.methods.distillation import pieces, public_rows, scores
from fedrolex.methods.families import Families
from fedrolex.methods.method import adding, size
from fedrolex.methods.needs import Needs
from fedrolex.methods.setup import Setup
from fedrolex.rounds import Fleet, Round, Server, State
from fedrolex.tasks import Classification

Reduction = Literal["era", "power", "none"]
FIRST, LAST, NOW = "first", "labels", "asked"
DESCRIBED = 2000  # public examples that static norms take their statistics from, at most


@dataclass(frozen=True, kw_only=True)
class LabelExchange(LocalTraining):
    """A client's work: learn last round's labels, train on one's own data, label this round's public examples.

    Attributes:
        method: how labels are learned.
        public: inputs of all public examples, ``(n, …)``.
    """

    method: "DSFL"
    public: Tensor = field(repr=False, compare=False)

    def before(self, visit: Visit) -> None:
        """Go on with one's own model, after it learned last round's labels."""
        if visit.job.kept is not None:
            visit.received = dict(visit.job.kept)
        last = visit.job.sent[LAST]
        if int(last["ids"][0]) >= 0:
            module, key = visit.module(visit.received), (visit.plan.seed, visit.plan.round, visit.job.client)
            known = self.public[last["ids"]]
            self.method.learn(module, known, last["labels"], *key, precision=visit.plan.precision)
            visit.received = copied(visit.network.axes.state(module, visit.job.window))

    def after(self, visit: Visit) -> None:
        """Keep the model, send its probabilities for this round's examples."""
        visit.kept = copied(visit.trained)
        asked, module = self.public[visit.job.sent[NOW]["ids"]], visit.module(visit.trained)
        some = sample(len(self.public), min(len(self.public), DESCRIBED), visit.plan.seed, "described")
        said = scores(module, asked, self.public[torch.from_numpy(some)], visit.plan.precision)
        visit.sent["probabilities"] = said.softmax(1)


@dataclass(frozen=True, kw_only=True)
class DSFL(Families):
    """Every client keeps a model of its own size; the server has the largest, which no client need hold.

    Attributes:
        examples: public examples a round.
        reduce: of the labels' entropy: ``era``, a softmax of mean probabilities divided by ``temperature``, which
            flattens instead where there are many classes and none is likely; ``power``, mean probabilities to the power
            1 / ``temperature``, which never does; ``none``, the plain mean.
        temperature: see ``reduce``.
        epochs, batch, lr: of learning labels, by SGD.
    """

    examples: int = 1000
    reduce: Reduction = "era"
    temperature: float = 0.1
    epochs: int = 5
    batch: int = 50
    lr: float = 0.1
    needs = Needs(public=True, client_state=True, larger_server=True, families=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"examples": 2, "epochs": 0, "batch": 2}
        check_numbers("method", self, least=least, positive=("temperature", "lr"))

    def check_fleet(self, fleet: Fleet, client: LocalTraining, scale: int) -> None:
        """A client's model has one size."""
        super().check_fleet(fleet, client, scale)
        if fleet.redrawn:
            raise FedrolexError(f"{self.name} clients keep their models: capacities cannot be redrawn every round")

    def work(self, setup: Setup) -> LocalTraining:
        """Learn labels, train, label."""
        task = setup.task
        assert isinstance(task, Classification)
        assert task.public is not None
        return LabelExchange(**asdict(setup.client), method=self, public=task.inputs(task.public.x))

    def begin(self, server: Server) -> State:
        """Clients begin with the server's first model; nothing is labelled yet."""
        count, device = len(public_rows(server, 0, self.examples)), server.device
        none = torch.full((count,), -1, dtype=torch.int64, device=device)
        labels = torch.zeros(count, server.task.classes, device=device)
        return {FIRST: copied(server.state[MODEL]), LAST: {"ids": none, "labels": labels}}

    def sections(self, server: Server, capacity: Fraction) -> tuple[str, ...]:
        """The tensors that a client begins with in its first round; they never change."""
        name = self.network(server, capacity)
        return (FIRST if name == MODEL else name,)

    def send(self, server: Server, job: Job) -> Mapping[str, Tensors]:
        """Last round's labels, and the examples to label now."""
        return {LAST: server.state[LAST], NOW: {"ids": public_rows(server, server.round, self.examples)}}

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Note the client's probabilities; its model stays with the client."""
        upload.check_sent({"probabilities": round.state[LAST]["labels"]})
        said = upload.sent["probabilities"]
        if not bool((said >= 0).all()) or float((said.sum(1) - 1).abs().max()) > 1e-2:
            raise FedrolexError("sent probabilities that are none: rows from 0 up, each with the sum 1")
        round.notes.setdefault("said", []).append(said.clone())

    def finish(self, round: Round) -> State:
        """Make the labels, teach the server's model."""
        server, task = round.server, round.server.classification
        assert task.public is not None
        ids, labels = public_rows(server, round.number, self.examples), self.together(round.notes["said"])
        module = server.loaded()
        key, precision = (server.seed, round.number, "server"), round.plan.precision
        self.learn(module, task.inputs(task.public.x[ids]), labels, *key, precision=precision)
        return {MODEL: copied(server.main.axes.state(module)), LAST: {"ids": ids, "labels": labels}}

    def together(self, every: Sequence[Tensor]) -> Tensor:
        """The labels that clients' probabilities ``(n, classes)`` make, with less entropy."""
        mean = torch.stack(list(every)).mean(0)
        if self.reduce == "era":
            return (mean / self.temperature).softmax(1)
        if self.reduce == "power":
            return (mean.clamp(min=1e-30).log() / self.temperature).softmax(1)
        return mean

    def learn(
        self, module: nn.Module, inputs: Tensor, labels: Tensor, *key: object, precision: Precision = "fp32"
    ) -> None:
        """Teach a model labels, in place; ``key`` is that of the order of batches, and of what the model draws."""
        module.train()
        optimizer = torch.optim.SGD(module.parameters(), lr=self.lr)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(random_words(1, 0, "learning", *key)[0] >> 1))
            for epoch in range(self.epochs):
                order = torch.from_numpy(shuffle(len(inputs), 0, "labels", *key, epoch)).to(inputs.device)
                for rows in pieces(order, self.batch):
                    said = in_precision(module, inputs[rows], precision).log_softmax(1)
                    loss = nn.functional.kl_div(said, labels[rows], reduction="batchmean")
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        optimizer.zero_grad()

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """A part of the server's model; networks of their own never leave their clients."""
        if self.network(server, capacity) != MODEL:
            return None
        return server.main.axes.cut(server.loaded(), server.window(max(0, server.round - 1), capacity))

    def traffic(self, server: Server, job: Job, upload: Upload | None) -> tuple[int, int]:
        """Labels and numbers of examples, whatever the model's size."""
        return sum(size(tensors) for tensors in job.sent.values()), 0 if upload is None else size(upload.sent)
