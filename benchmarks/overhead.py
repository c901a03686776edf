"""What the engine adds to the bare work of a round: CPU time beside a plain PyTorch loop.

The same cohort (two clients of each of five capacities) trains the same sub-models on the same batches, once
through the engine (windows, loading, random streams, checks, fold, drift) and once as a bare loop with
``torch.optim.SGD`` over modules that are already there. Pairs are interleaved; the median ratio counts.

    python benchmarks/overhead.py [--pairs 20] [--epochs 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch
from torch import nn

from fedrolex import ClientRecipe, ImagesRecipe, Recipe, Training, prepare
from fedrolex.core.streams import shuffle


def bare(training: Training, modules: dict[int, nn.Module], round: int) -> None:
    """The client steps of a round and nothing else."""
    work, task, seed = training.work, training.server.task, training.server.seed
    for client, module in modules.items():
        data = task.client(client)
        optimiser = torch.optim.SGD(module.parameters(), lr=work.lr, momentum=work.momentum)
        for epoch in range(work.epochs):
            order = torch.from_numpy(shuffle(len(data), seed, "batches", round, client, epoch))
            for batch in order.split(work.batch):
                optimiser.zero_grad()
                task.loss(module(task.inputs(data.x[batch])), data.y[batch]).backward()
                optimiser.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    client = ClientRecipe(epochs=options.epochs, lr=0.02)
    recipe = replace(Recipe(device="cpu", engine="loop"), client=client, task=ImagesRecipe(width=options.width))
    training = prepare(recipe.with_settings(["fleet.clients=10", "fleet.cohort=10"]))
    training.run_round()
    server = training.server
    jobs = training.method.jobs(server, server.round)
    modules = {job.client: server.main.axes.cut(server.main.module, job.window).train() for job in jobs}
    ratios, ours, theirs = [], [], []
    for _ in range(options.pairs):
        start = time.process_time()
        training.run_round()
        middle = time.process_time()
        bare(training, modules, server.round)
        end = time.process_time()
        ours.append(middle - start)
        theirs.append(end - middle)
        ratios.append(ours[-1] / theirs[-1])
    steps = sum(-(-len(server.task.client(client)) // 16) for client in range(10)) * options.epochs
    print(f"{steps} client steps a round, width {options.width}, torch {torch.__version__}, one thread")
    print(f"engine {statistics.median(ours):.3f} CPU s, bare loop {statistics.median(theirs):.3f} CPU s a round")
    print(f"ratio: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(
        json.dumps(
            {
                "steps": steps,
                "engine_cpu_seconds": statistics.median(ours),
                "engine_cpu_ratio": round(statistics.median(ratios), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
