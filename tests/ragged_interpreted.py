"""Run by test_ragged.py in a process of its own, with Triton's interpreter: kernels on a CPU, slowly."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.clients.messages import MODEL, Job, Network, RoundPlan, Upload
from fedrolex.clients.slot import Slot
from fedrolex.clients.work import LocalTraining
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.ragged import Ragged, tilings
from fedrolex.engines.gpu.ragged.cohort import Cohort
from fedrolex.engines.gpu.ragged.exchange import CohortExchange
from fedrolex.models.preresnet import Plan, PreResNet
from fedrolex.recipes.recipe import Recipe
from fedrolex.rounds.drift import Drift
from fedrolex.runs.prepare import prepare
from fedrolex.slicing import RandomMiswired, Rolling, Scheme, trace
from fedrolex.slicing.fold import Fold
from fedrolex.tasks.classification import Classification
from fedrolex.tasks.partition import Partition
from fedrolex.tasks.pixels import Pixels
from fedrolex.tasks.task import Examples

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
        work.begin(slot.memory, slot.parameters)
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
    check_averages(Rolling())


def averages_of_published_dropout_are_those_of_the_fold() -> None:
    """Every convolution draws channels of its own."""
    check_averages(RandomMiswired())


def check_averages(scheme: Scheme) -> None:
    """Windows, an idle place, weights, classes that not everyone holds; and the drift."""
    model = PreResNet(Plan(blocks=(1, 1), width=6, size=8, classes=CLASSES))
    axes = trace(model, model.slicing_example())
    capacities = [Fraction(1), Fraction(1, 2), Fraction(1, 2)]
    windows = [scheme.window(axes, round=5, capacity=c) for c in capacities]
    parts = [axes.cut(model, window) for window in windows]
    work = LocalTraining(batch=2)
    cohorts = [Cohort(group, work, room=2, precision="fp32", device=CPU) for group in (parts[:1] * 2, parts[1:])]  # type: ignore[arg-type]
    between = CohortExchange(axes, cohorts)
    state = {name: tensor.clone() for name, tensor in axes.state(model).items()}
    between.deal([state], [windows[0], None, windows[1], windows[2]])
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


def tiny_task(sizes: list[int]) -> Classification:
    """Images of eight by eight pixels, shifted and flipped; clients hold ``sizes`` of them."""
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    x = torch.randint(0, 256, (ends[-1], 3, 8, 8), dtype=torch.uint8)
    data = Examples(x, torch.arange(ends[-1]) % CLASSES)
    pixels = Pixels.of((0.5,) * 3, (0.25,) * 3, 1, True)
    return Classification("tiny", lambda scale: tiny(4 * scale), data, data, Partition.of(rows), pixels=pixels)


def tiny(width: int) -> PreResNet:
    return PreResNet(Plan(blocks=(1, 1), width=width, size=8, classes=CLASSES))


def rounds_are_those_of_loop() -> None:
    """Cohorts of different composition, of clients with different numbers of images; inputs are made ahead, once."""
    task = tiny_task([4, 3, 2, 4])
    settings = ["fleet.cohort=2", "fleet.clients=4", 'fleet.capacities=["1", "1/2"]', "client.batch=2", "client.lr=0.1"]
    settings += ["client.mask=zero", "method.rows=true", "client.clip=1.0", "engine=loop", "callbacks=[drift]"]
    recipe = Recipe(device="cpu").with_settings(settings)
    made: list[int] = []

    class Counted:
        random = True

        def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
            made.append(len(x))
            return task.pixels(x, draws)  # type: ignore[misc]

        def to(self, device: torch.device) -> Counted:
            return self

    one, other = prepare(recipe, task), prepare(recipe, replace(task, pixels=Counted()))  # type: ignore[arg-type]
    engine = other.engine = Ragged(device=CPU, rehearsed=True)
    cohorts: list[Any] = []
    for _ in range(3):
        rows_one, rows_other = one.run_round(), other.run_round()
        assert engine.together
        assert abs(rows_one["train_loss"] - rows_other["train_loss"]) < 1e-3
        for capacity, drift in rows_one["drift"].items():
            assert abs(drift - rows_other["drift"][capacity]) < 1e-3
        for name, tensor in one.server.state[MODEL].items():
            torch.testing.assert_close(other.server.state[MODEL][name], tensor, rtol=1e-3, atol=1e-4)
        cohorts = cohorts or engine.places[MODEL].cohorts
    assert engine.places[MODEL].cohorts is cohorts, "places were built again"
    assert cohorts[0].share == Fraction(2, sum(each.clients for each in cohorts)) < 1
    # examples, to trace; the first round, the second one's made ahead; examples, to count what a width computes; the
    # third one's; another width; the fourth's
    assert made == [2, 2, 7, 5, 2, 8, 2, 6]
    later = Ragged(device=CPU, rehearsed=True)  # as in a run that goes on from a checkpoint
    other.engine = later
    other.run_round()
    assert list(later.places[MODEL].need.places.items()) == list(engine.places[MODEL].need.places.items())


def several_networks_and_jobs_of_one_client() -> None:
    """Two networks in a round, one of them in two sections; one client with a job in each, another with two for one."""
    task = tiny_task([4, 3, 2])
    networks, tensors = {}, {}
    for name, width in (("first", 4), ("second", 6)):
        module = tiny(width)
        networks[name] = Network(module, trace(module, module.slicing_example()))
        tensors[name] = {key: tensor.clone() for key, tensor in networks[name].axes.state(module).items()}

    tensors["other"] = {key: tensor + 0.05 * torch.randn_like(tensor) for key, tensor in tensors["first"].items()}

    def job(client: int, network: str, capacity: Fraction, name: str = "", section: str = "") -> Job:
        window = Rolling().window(networks[network].axes, round=1, capacity=capacity)
        return Job(client, capacity, window, network, (section or network,), name)

    half, whole = Fraction(1, 2), Fraction(1)
    jobs = [job(0, "first", half, "a"), job(0, "second", half, "b"), job(1, "first", whole)]
    jobs += [job(2, "first", half, "c"), job(2, "first", whole, "d")]
    jobs += [job(1, "first", half, "e", "other"), job(2, "first", whole, "f", "other")]
    plan = RoundPlan(1, 1, networks, tensors, task, WORK, jobs)
    engine = Ragged(device=CPU, rehearsed=True)
    assert engine.supports(plan) is None
    answers = list(zip(Loop().run(plan), engine.run(plan), strict=True))
    for (wanted, found), asked in zip(answers, jobs, strict=True):
        assert isinstance(wanted, Upload)
        assert isinstance(found, Upload)
        assert (found.job.key, found.steps, found.examples) == (asked.key, wanted.steps, wanted.examples)
        assert abs(found.loss - wanted.loss) < 1e-4
    everyone = [found for _, found in answers if isinstance(found, Upload)]
    assert engine.average(everyone, [1.0] * len(jobs), None) is None
    weights = {job.key: weight for job, weight in zip(jobs, (1.0, 1.0, 2.0, 1.0, 3.0, 2.0, 1.0), strict=True)}
    for section in tensors:
        mine = [found for found in everyone if found.job.sections == (section,)]
        averaged = engine.average(mine, [weights[found.job.key] for found in mine], None)
        assert averaged is not None
        fold = Fold(networks[mine[0].job.network].axes, tensors[section])
        for wanted in Loop().run(plan):
            assert isinstance(wanted, Upload)
            if wanted.job.sections == (section,):
                fold.add(wanted.job.key, wanted.tensors, wanted.job.window, weights[wanted.job.key])
        for name, tensor in fold.average().items():
            torch.testing.assert_close(averaged.state[name], tensor, rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
