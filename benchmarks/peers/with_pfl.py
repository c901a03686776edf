"""The work on Apple's pfl: its simulated backend, in one process, or in as many as torchrun starts."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from work import Work, build, data, report, rows_of


class Net(nn.Module):
    """The network with the two methods pfl asks for."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of a training step."""
        return nn.functional.cross_entropy(self.train().net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """Asked for in the first round alone, which warms up."""
        loss = nn.functional.cross_entropy(self.eval().net(x), y, reduction="sum")
        return {"loss": Weighted(float(loss), len(y))}


class Clock(TrainingProcessCallback):  # type: ignore[misc]
    """The time after every round, and how many users it had."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.users: list[int] = []

    def on_train_begin(self, *, model: Any) -> Any:
        """Before the first round."""
        self.times.append(time.perf_counter())
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
        """After a round."""
        self.times.append(time.perf_counter())
        values = aggregate_metrics.to_simple_dict()
        self.users += [int(value) for name, value in values.items() if "number of devices" in name]
        return False, Metrics()


def main() -> None:
    work = Work.told()
    torch.set_num_threads(work.threads // int(os.environ.get("WORLD_SIZE", "1")))
    x, y = data(work)
    rows = [rows_of(work, user) for user in range(work.users)]
    held = {user: (x[part], y[part]) for user, part in enumerate(rows)}
    users = FederatedDataset.from_slices(held, get_user_sampler("minimize_reuse", list(held)))
    net = Net(build(work))
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    rounds, clock = work.warmup + work.rounds, Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=work.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        callbacks=[clock],
    )
    assert clock.users == [work.cohort] * rounds, clock.users
    seconds = [after - before for before, after in pairwise(clock.times)]
    if os.environ.get("RANK", "0") == "0":
        report(work, seconds, sum(clock.users[work.warmup :]), net.net.state_dict(), pfl=version("pfl"))


if __name__ == "__main__":
    main()
