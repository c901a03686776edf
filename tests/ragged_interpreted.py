"""Run by test_ragged.py in a process of its own, with Triton's interpreter: kernels on a CPU, slowly."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from fedrolex import Classification, Examples, Recipe, trace
from fedrolex.clients.work import LocalTraining, Slot
from fedrolex.engines import Graph, Loop
from fedrolex.engines.gpu.ragged import exchange, tilings
from fedrolex.engines.gpu.ragged.cohort import Cohort
from fedrolex.models.preresnet import Plan, PreResNet
from fedrolex.rounds.drift import Drift
from fedrolex.runs import prepare
from fedrolex.slicing import Rolling
from fedrolex.slicing.fold import Fold
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels

CPU = torch.device("cpu")
CLASSES = 5


def held(y: Tensor) -> Tensor:
    return torch.zeros(CLASSES, dtype=torch.bool).index_fill_(0, y, True)


WORK = LocalTraining(batch=3, lr=0.05, momentum=0.9, weight_decay=5e-4, clip=1.0, mask="zero")


def steps_are_those_of_plain_torch(work: LocalTraining = WORK, tolerance: float = 1e-3) -> None:
    """Odd widths, a short last batch, a client that is done early, masks, clipping, momentum, weight decay."""
    plan = {"blocks": (1, 1, 1, 1), "size": 8, "classes": CLASSES}
    models = [PreResNet(Plan(width=width, **plan)) for width in (6, 3)]  # type: ignore[arg-type]
    for model in models:
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.5, 0.3)
    sizes = [5, 3]
    cohort = Cohort(models, work, room=5, precision="fp32", device=CPU)
    data = [(torch.randn(n, 3, 8, 8), torch.randint(0, 3, (n,))) for n in sizes]
    for client, ((x, y), model) in enumerate(zip(data, models, strict=True)):
        cohort.x[client, : len(x), ..., :3] = x.permute(0, 2, 3, 1)
        cohort.y[client, : len(y)] = y
        cohort.held[client] = held(y).to(torch.int8)
        for name, tensor in cohort.parameters.tensors(client).items():
            tensor.copy_(model.get_parameter(name).detach())
    cohort.sizes.copy_(torch.tensor(sizes))
    cohort.start(work.lr)
    for _ in range(2):
        cohort.step()
    for client, ((x, y), model) in enumerate(zip(data, models, strict=True)):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        slot, total = Slot(model), 0.0
        work.start(slot)
        for rows in torch.arange(len(x)).split(work.batch):
            total += float(work.step(slot, x[rows], y[rows], nn.functional.cross_entropy, work.lr, held(y)))
        assert abs(float(cohort.totals[client]) - total) < 0.1 * tolerance
        for name, got in cohort.parameters.tensors(client).items():
            wanted = model.get_parameter(name).detach() - before[name]
            if work.optimizer == "adam" and wanted.dim() == 1:
                continue  # biases before a norm have a gradient of nothing but rounding, which Adam makes large
            assert float((got - before[name] - wanted).norm()) <= tolerance * float(wanted.norm()), (client, name)


def whole_sums_are_those_of_plain_torch() -> None:
    """The same where one program has the whole sum of a convolution, as with many pixels."""
    tilings.BUSY = tilings.ENOUGH = 1
    steps_are_those_of_plain_torch()


def adam_remembers_as_in_plain_torch() -> None:
    """The second step depends on both moments and on how many steps there were."""
    steps_are_those_of_plain_torch(LocalTraining(batch=3, optimizer="adam", lr=0.01), tolerance=0.05)


def averages_are_those_of_the_fold() -> None:
    """Rolled windows, an idle place, weights, classes that not everyone holds; and the drift."""
    model = PreResNet(Plan(blocks=(1, 1), width=6, size=8, classes=CLASSES))
    axes = trace(model, model.slicing_example())
    capacities = [Fraction(1), Fraction(1, 2), Fraction(1, 2)]
    windows = [Rolling().window(axes, round=5, capacity=c) for c in capacities]
    parts = [axes.cut(model, window) for window in windows]
    work = LocalTraining(batch=2)
    cohorts = [Cohort(group, work, room=2, precision="fp32", device=CPU) for group in (parts[:1] * 2, parts[1:])]  # type: ignore[arg-type]
    between = exchange.Exchange(axes, cohorts)
    state = {name: tensor.clone() for name, tensor in axes.state(model).items()}
    between.deal(state, [windows[0], None, windows[1], windows[2]])
    places = [(cohorts[0], 0), (cohorts[1], 0), (cohorts[1], 1)]
    for (cohort, client), window in zip(places, windows, strict=True):
        for name, wanted in axes.take(state, window).items():
            assert torch.equal(cohort.parameters.tensors(client)[name], wanted), name
    for cohort in cohorts:
        cohort.parameters.values.add_(torch.randn_like(cohort.parameters.values) * 0.1)
    (label,) = (axis.name for axis in axes.axes.values() if axis.kind == "outputs")
    rows = torch.ones(4, CLASSES, dtype=torch.int8)
    rows[2, 3:] = rows[0, :2] = 0
    new, sums, finite = between.average([2.0, 0.0, 1.0, 3.0], label, rows)
    assert finite
    fold, drift = Fold(axes, state), Drift(axes, state)
    for number, ((cohort, client), place, weight) in enumerate(zip(places, (0, 2, 3), (2.0, 1.0, 3.0), strict=True)):
        sent = cohort.parameters.tensors(client)
        fold.add(number, sent, windows[number], weight, {label: rows[place].nonzero().flatten().tolist()})
        drift.add(number, capacities[number], sent, windows[number])
    for name, wanted in fold.average().items():
        torch.testing.assert_close(new[name], wanted)
    wanted_drift = drift.by_capacity(fold.average())
    for capacity, group in (("1", [0]), ("1/2", [2, 3])):
        along, own, mean = (sum(sums[place][which] for place in group) for which in range(3))
        assert abs(1 - along / (own * mean) ** 0.5 - wanted_drift[capacity]) < 1e-4


def rounds_are_those_of_loop() -> None:
    """Cohorts of different composition, of clients with different numbers of images; inputs are made ahead, once."""
    rows = [range(0, 4), range(4, 7), range(7, 9), range(9, 13)]
    x = torch.randint(0, 256, (13, 3, 8, 8), dtype=torch.uint8)
    y = torch.arange(13) % CLASSES
    data, pixels = Examples(x, y), Pixels.of((0.5,) * 3, (0.25,) * 3, 1, True)
    task = Classification(
        "tiny",
        lambda scale: PreResNet(Plan(blocks=(1, 1), width=4 * scale, size=8, classes=CLASSES)),
        data,
        data,
        Partition.of(rows),
        pixels=pixels,
    )
    settings = ["fleet.cohort=2", "fleet.clients=4", 'fleet.capacities=["1", "1/2"]', "client.batch=2", "client.lr=0.1"]
    settings += ["client.mask=zero", "method.rows=true", "client.clip=1.0"]
    recipe = Recipe(device="cpu").with_settings(settings)
    made: list[int] = []

    class Counted:
        random = True

        def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
            made.append(len(x))
            return pixels(x, draws)

        def to(self, device: torch.device) -> Counted:
            return self

    one, other = prepare(recipe, task), prepare(recipe, replace(task, pixels=Counted()))  # type: ignore[arg-type]
    one.engine, other.engine = Loop(one.model), Graph(other.model)
    for _ in range(3):
        rows_one, rows_other = one.run_round(), other.run_round()
        assert other.engine._at_rest is not None
        assert abs(rows_one["train_loss"] - rows_other["train_loss"]) < 1e-3
        for capacity, drift in rows_one["drift"].items():
            assert abs(drift - rows_other["drift"][capacity]) < 1e-3
        for name, tensor in one.state.items():
            torch.testing.assert_close(other.state[name], tensor, rtol=1e-3, atol=1e-4)
    lanes = other.engine._ragged.lanes  # type: ignore[union-attr]
    assert lanes[0].cohort._share == Fraction(2, sum(len(lane.widths) for lane in lanes)) < 1
    assert made == [2, 7, 5, 8, 6]  # an example, then three rounds, the third one's made ahead, and the fourth's


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
