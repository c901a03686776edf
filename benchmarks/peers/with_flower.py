"""The work on Flower's simulation: one Ray worker a core, one thread each.

Ray lowers its workers' priority by default, which costs them on a machine that does anything else: not here. Nothing
is sent anywhere: telemetry, usage statistics and the look for updates are off.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from typing import Any

os.environ |= {
    "RAY_worker_niceness": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_HOME": tempfile.mkdtemp(prefix="flwr-"),
}

from flower_client import app
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from work import Work, build, report


def main() -> None:
    atexit.register(shutil.rmtree, os.environ["FLWR_HOME"], ignore_errors=True)
    work = Work.told()
    rounds = work.warmup + work.rounds
    times: list[float] = []
    done: dict[str, Any] = {}

    def serve(grid: Grid, _: Context) -> None:
        strategy = FedAvg(
            fraction_train=work.cohort / work.users,
            min_train_nodes=work.cohort,
            min_available_nodes=work.users,
            fraction_evaluate=0.0,
            train_metrics_aggr_fn=lambda replies, _: MetricRecord({"replies": len(replies)}),
        )
        done["result"] = strategy.start(
            grid,
            ArrayRecord(build(work).state_dict()),
            num_rounds=rounds,
            train_config=ConfigRecord({"work": work.words()}),
            evaluate_fn=lambda *_: times.append(time.perf_counter()),  # called before the first round and after each
        )

    server = ServerApp()
    server.main()(serve)
    cpus: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": work.threads},
    }
    run_simulation(server, app, work.users, backend_config=cpus)
    replies = [int(record["replies"]) for _, record in sorted(done["result"].train_metrics_clientapp.items())]
    assert replies == [work.cohort] * rounds, f"replies of {rounds} rounds: {replies}"  # a failed client is left out
    seconds = [after - before for before, after in pairwise(times)]
    state = done["result"].arrays.to_torch_state_dict()
    report(work, seconds, sum(replies[work.warmup :]), state, flwr=version("flwr"), ray=version("ray"))


if __name__ == "__main__":
    main()
