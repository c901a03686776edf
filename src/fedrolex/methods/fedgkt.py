"""FedGKT: clients train the first layers, the server the rest, and both learn from each other's logits.

He, Annavaram, Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge", NeurIPS 2020. A
client trains a small network of its own: an extractor and a head. It sends, for every example, the extractor's feature
map, its logits and the label. The server trains a large network on the feature maps, and sends its logits for every
example back; in the next round the client learns from those too. Logits belong to examples, never to places in a
batch: the released code mixes them up whenever it shuffles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, kl_div
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.clients import (
    MODEL,
    Job,
    LocalTraining,
    Memory,
    Network,
    Precision,
    Slot,
    Upload,
    Visit,
    copied,
    in_precision,
)
from fedrolex.clients.optimizer import adam
from fedrolex.core import FedrolexError, check_numbers, sample, shuffle
from fedrolex.methods.distillation import scores
from fedrolex.methods.method import Method, adding, size
from fedrolex.methods.needs import Needs
from fedrolex.methods.setup import Setup
from fedrolex.models import collect, static_norms, with_statistics
from fedrolex.rounds import Round, Server, State
from fedrolex.slicing import Hints
from fedrolex.tasks import Classification, Measure

MAPS = 16  # channels of the feature maps that travel
MEASURED = 10  # clients through whose extractors the server's network is measured
EDGE, LOGITS, COUNT = "edge", "server's logits", "@steps"
FIRST, SECOND, STEPS = "adam.first", "adam.second", "adam"


class Edge(nn.Module):
    """A client's network: one convolution whose maps are sent, and a small head that never leaves the client."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(channels, MAPS, 3, padding=1), nn.GroupNorm(1, MAPS)
        self.conv, self.conv_norm = nn.Conv2d(MAPS, MAPS, 3, padding=1), nn.GroupNorm(1, MAPS)
        self.head = nn.Linear(4 * MAPS, classes)

    def features(self, x: Tensor) -> Tensor:
        """Images to maps of the same size, ``(batch, 16, h, w)``."""
        return torch.relu(self.norm(self.stem(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        maps = self.features(x)
        maps = torch.relu(self.conv_norm(self.conv(maps)) + maps)
        found: Tensor = self.head(adaptive_avg_pool2d(maps, 2).flatten(1))
        return found

    def slicing_hints(self) -> Hints:
        """Clients train a whole copy."""
        return Hints(factory=lambda _: Edge(self.stem.in_channels, self.head.out_features))


@dataclass(frozen=True, kw_only=True)
class EdgeTraining(LocalTraining):
    """A client's work: train the edge network on labels and on the server's logits, then send maps and logits.

    What a client keeps is its edge network, its optimiser's memory, and the server's logits for its examples in the
    order in which they are stored.
    """

    method: "FedGKT"

    def before(self, visit: Visit) -> None:
        """Go on with one's own network."""
        if visit.job.kept is not None:
            visit.received = {name: visit.job.kept[name] for name in visit.plan.whole(visit.job)}

    def train(self, visit: Visit, slot: Slot) -> None:
        """Epochs of Adam, which remembers what it did in earlier rounds."""
        plan, job, data, kept = visit.plan, visit.job, visit.examples, visit.job.kept
        memory = Memory.of(slot.parameters)
        memory.begin({})
        if kept is not None:
            for what, own in (("first", memory.first), ("second", memory.second)):
                torch._foreach_copy_(own, [kept[f"{what}.{place}"] for place in range(len(own))])
            memory.count.copy_(kept[COUNT])
        x, losses = plan.task.inputs(data.x), []
        teacher = None if kept is None else kept.get(LOGITS)
        for rows in batches(len(data), self.batch, self.epochs, x.device, plan.seed, plan.round, job.client):
            if visit.go_on is not None:
                visit.go_on(visit.steps)
            said = None if teacher is None else teacher[rows]
            how = self.method.alpha, plan.precision
            losses.append(self.method.step(slot.module, memory, x[rows], data.y[rows], said, *how))
            visit.steps += 1
        visit.loss = float(torch.stack(losses).mean()) if losses else float("nan")
        visit.kept = {f"first.{place}": tensor for place, tensor in enumerate(memory.first)}
        visit.kept |= {f"second.{place}": tensor for place, tensor in enumerate(memory.second)} | {COUNT: memory.count}

    @torch.no_grad()
    def after(self, visit: Visit) -> None:
        """Keep the network; send maps, logits and labels."""
        edge, x = cast(Edge, visit.module(visit.trained).eval()), visit.plan.task.inputs(visit.examples.x)
        maps, logits = (in_precision(part, x, visit.plan.precision) for part in (edge.features, edge))
        visit.sent = {"maps": maps, "logits": logits, "labels": visit.examples.y}
        visit.kept = copied(visit.trained) | (visit.kept or {})


@dataclass(frozen=True, kw_only=True)
class FedGKT(Method):
    """Clients hold the first layers; the server's network is the task's, fed with feature maps.

    Attributes:
        temperature: T of both distillations.
        alpha: weight of what a client learns from the server.
        server_alpha: weight of what the server learns from clients; 0 is what the authors' documented commands do.
        lr, weight_decay: of Adam, on both sides.
        server_epochs, server_batch: of the server; clients have the recipe's.
    """

    temperature: float = 3.0
    alpha: float = 1.0
    server_alpha: float = 1.0
    lr: float = 1e-3
    weight_decay: float = 1e-4
    server_epochs: int = 5
    server_batch: int = 64
    needs = Needs(client_state=True, uploads=True, larger_server=True, at_hand=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = {"alpha": 0, "server_alpha": 0, "weight_decay": 0, "server_epochs": 1, "server_batch": 2}
        check_numbers("method", self, least=least, positive=("temperature", "lr"))

    def check(self, setup: Setup) -> None:
        """Several extractors stand before the server's network: there is no one model to have offsets."""
        super().check(setup)
        _refuse_offsets(setup.measure)

    def networks(self, setup: Setup) -> dict[str, Network]:
        """The server's part, for feature maps, and the edge network."""
        task, image = setup.task, setup.task.example().cpu()
        if not isinstance(task, Classification) or task.build_for is None:
            raise FedrolexError("fedgkt cuts a network for images in two: it needs a bundled task of images")
        build, maps = task.build_for, torch.zeros(2, MAPS, *image.shape[2:])
        return {
            MODEL: setup.network(lambda: build(MAPS, setup.scale), "weights", example=maps, whole=True),
            EDGE: setup.network(lambda: Edge(image.shape[1], task.classes), "edge", example=image, whole=True),
        }

    def network(self, server: Server, capacity: Fraction) -> str:
        """Everyone trains an edge network."""
        return EDGE

    def work(self, setup: Setup) -> LocalTraining:
        """Train with the server's answers."""
        return EdgeTraining(**asdict(setup.client), method=self)

    def begin(self, server: Server) -> State:
        """The memory of the server's optimiser."""
        model = {name: server.state[MODEL][name] for name in server.trainable()}
        steps = torch.zeros((), dtype=torch.float64, device=server.device)
        zeros = [{name: torch.zeros_like(tensor) for name, tensor in model.items()} for _ in range(2)]
        return {FIRST: zeros[0], SECOND: zeros[1], STEPS: {"steps": steps}}

    @adding
    def take(self, round: Round, upload: Upload) -> None:
        """Note what a client sends; its edge network stays with the client."""
        round.notes.setdefault("sent", {})[upload.job.client] = copied(upload.sent)

    def finish(self, round: Round) -> State:
        """Train the server's network on what the cohort sent; every client gets the logits of its examples."""
        server, state, sent = round.server, round.state, round.notes["sent"]
        maps, logits, labels = (torch.cat([each[w] for each in sent.values()]) for w in ("maps", "logits", "labels"))
        module, names = server.loaded(), server.trainable()
        memory = Memory.of([p for p in module.parameters() if p.requires_grad])
        memory.begin({})
        torch._foreach_copy_(memory.first, [state[FIRST][name] for name in names])
        torch._foreach_copy_(memory.second, [state[SECOND][name] for name in names])
        memory.count.copy_(state[STEPS]["steps"])
        key, precision = (server.seed, round.number, "server"), round.plan.precision
        for rows in batches(len(maps), self.server_batch, self.server_epochs, maps.device, *key):
            self.step(module, memory, maps[rows], labels[rows], logits[rows], self.server_alpha, precision)
        answers = scores(module, maps, precision=precision).split([len(each["labels"]) for each in sent.values()])
        for client, answer in zip(sent, answers, strict=True):
            round.remember(client, {LOGITS: answer})
        return {
            MODEL: copied(server.main.axes.state(module)),
            FIRST: dict(zip(names, memory.first, strict=True)),
            SECOND: dict(zip(names, memory.second, strict=True)),
            STEPS: {"steps": memory.count},
        }

    def step(
        self,
        module: nn.Module,
        memory: Memory,
        x: Tensor,
        y: Tensor,
        teacher: Tensor | None,
        alpha: float,
        precision: Precision = "fp32",
    ) -> Tensor:
        """One step of Adam on labels and, by ``alpha``, on a teacher's logits where there are any; returns the loss."""
        module.train()
        parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        said = in_precision(module, x, precision)
        loss = cross_entropy(said, y)
        if teacher is not None and alpha:
            loss = loss + alpha * self.distance(said, teacher)
        gradients = list(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            torch._foreach_add_(gradients, parameters, alpha=self.weight_decay)
            adam(parameters, gradients, memory, torch.tensor(self.lr, device=x.device))
        return loss.detach()

    def distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """T² · KL(teacher ‖ student) at temperature T, mean over examples."""
        t = self.temperature
        return t * t * kl_div((student / t).log_softmax(1), (teacher / t).softmax(1), reduction="batchmean")

    @torch.no_grad()
    def evaluate(self, server: Server, measure: Measure) -> dict[str, Any]:
        """The server's network behind the extractors of a few clients that have taken part, mean over them."""
        _refuse_offsets(measure)
        task, module = server.classification, server.loaded()
        y, found = task.test.y, []
        for client in self.measured_clients(server):
            edge, seen = self.seen(server, client)
            said = scores(module, edge.features(task.inputs(task.test.x)), seen)
            right = (said.argmax(1) == y).double()
            held = torch.isin(y, y if client is None else task.labels(task.client(client)))
            found.append((float(task.loss(said, y)), float(right.mean()), float(right[held].mean())))
        loss, everywhere, at_home = (sum(each) / len(found) for each in zip(*found, strict=True))
        norms = any(isinstance(layer, _BatchNorm) for layer in module.modules())
        used = ("recalibrated" if static_norms(module) else "running") if norms else None
        return {"loss": loss, "global_accuracy": everywhere, "local_accuracy": at_home, "statistics": used}

    @torch.no_grad()
    def measured(self, server: Server, measure: Measure) -> nn.Module:
        """The server's network, for feature maps; static norms have the statistics of all measured clients together."""
        module = server.loaded()
        maps = (self.seen(server, client)[1] for client in self.measured_clients(server))
        return with_statistics(module, collect(module, maps)) if static_norms(module) else module

    def submodel(self, server: Server, capacity: Fraction) -> nn.Module | None:
        """None: edge networks stay with their clients."""
        return None

    def measured_clients(self, server: Server) -> Sequence[int | None]:
        """A few of the clients that have taken part; None is a newcomer, as long as there are none."""
        states = server.clients
        assert states is not None
        known = [client for client in range(server.fleet.clients) if states.has(client)]
        return [known[i] for i in sample(len(known), min(MEASURED, len(known)), 0, "measured").tolist()] or [None]

    def seen(self, server: Server, client: int | None) -> tuple[Edge, Tensor]:
        """A client's edge network, and the feature maps of its first 500 images; a newcomer has anyone's."""
        task, edge = server.classification, self.edge(server, client)
        own = task.train.x if client is None else task.client(client).x
        return edge, edge.features(task.inputs(own[:500]))

    def edge(self, server: Server, client: int | None) -> Edge:
        """A client's edge network in evaluation mode; that of a newcomer for None."""
        own = None if client is None or server.clients is None else server.clients.get(client)
        network, first = server.networks[EDGE], server.state[EDGE]
        tensors = first if own is None else {name: own[name].to(server.device) for name in first}
        network.axes.load(network.module, tensors)
        return cast(Edge, network.module.eval())

    def traffic(self, server: Server, job: Job, upload: Upload | None) -> tuple[int, int]:
        """Maps, logits and labels to the server; as many logits back."""
        return (0, 0) if upload is None else (size({"": upload.sent["logits"]}), size(upload.sent))


def batches(count: int, size: int, epochs: int, device: torch.device, *key: object) -> Iterator[Tensor]:
    """Rows of every batch, epoch after epoch; a last batch of one is left out, which norms may not take."""
    for epoch in range(epochs):
        order = torch.from_numpy(shuffle(count, 0, "gkt", *key, epoch)).to(device)
        yield from (rows for rows in order.split(size) if len(rows) > 1 or 1 in (size, count))


def _refuse_offsets(measure: Measure) -> None:
    if measure.offsets:
        raise FedrolexError("evaluation.offsets is for one model, and fedgkt is measured with several: leave it out")
