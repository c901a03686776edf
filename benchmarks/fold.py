"""Cut and fold one cohort of the paper, beside the textbook way of doing it.

Ten clients, two of each capacity (1, 1/2, 1/4, 1/8, 1/16), PreResNet18: 29.8 M elements go out and come
back. Ours uses strided blocks; the textbook version gathers with a mesh of indices, adds values and ones
with indexed adds, and divides. Both run in turn, in one process; medians over the pairs are printed.

    python benchmarks/fold.py [--pairs 9] [--scheme rolling|random]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedrolex import Axes, Fold, Random, Rolling, Window, trace
from fedrolex.models import preresnet18

CAPACITIES = ["1", "1/2", "1/4", "1/8", "1/16"]


def ours(
    axes: Axes, state: Mapping[str, Tensor], windows: list[Window], slots: list[dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Cut every client's part into its slot, then fold all of them."""
    fold = Fold(axes, state)
    for client, (window, slot) in enumerate(zip(windows, slots, strict=True)):
        axes.take(state, window, out=slot)
        fold.add(client, slot, window)
    return fold.average()


def textbook(axes: Axes, state: Mapping[str, Tensor], windows: list[Window]) -> dict[str, Tensor]:
    """The same with index meshes, as partial training is usually written."""
    sums = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    counts = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for window in windows:
        for name, tensor in state.items():
            indices = [torch.arange(n) for n in tensor.shape]
            for axis, span in window.items():
                for member, dim in axes.axes[axis].members:
                    if member == name:
                        indices[dim] = torch.from_numpy(span.indices())
            mesh = torch.meshgrid(*indices, indexing="ij")
            part = tensor[mesh].clone()
            sums[name][mesh] += part
            counts[name][mesh] += 1
    new = {}
    for name, tensor in state.items():
        covered = counts[name] > 0
        new[name] = tensor.clone()
        new[name][covered] = sums[name][covered] / counts[name][covered]
    return new


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock seconds of one run."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_growth(
    axes: Axes, state: Mapping[str, Tensor], slot: dict[str, Tensor], window: Window, clients: int
) -> float:
    """MiB of memory above what is held before that a cohort of full-size clients needs at its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    fold = Fold(axes, state)
    for client in range(clients):
        axes.take(state, window, out=slot)
        fold.add(client, slot, window)
    fold.average()
    return (peak_memory() - before) / 1024


def peak_memory() -> int:
    """Peak resident memory since the last reset, in KiB (Linux)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--scheme", choices=["rolling", "random"], default="rolling")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = preresnet18()
    axes = trace(model, torch.randn(2, 3, 32, 32))
    state = {name: tensor for name, tensor in axes.state(model).items() if axes.tensors[name].role == "parameter"}
    scheme = Rolling() if options.scheme == "rolling" else Random()
    fleet = [beta for beta in CAPACITIES for _ in range(2)]
    rounds = iter(range(77, 10_000))

    def cohort() -> list[Window]:
        round = next(rounds)
        return [scheme.window(axes, round=round, capacity=beta, client=c) for c, beta in enumerate(fleet)]

    windows = cohort()
    slots = [{n: torch.empty(axes.region(n, w).shape) for n in state} for w in windows]
    elements = sum(tensor.numel() for slot in slots for tensor in slot.values())

    peak_growth(axes, state, slots[0], windows[0], 2)
    first, second = (peak_growth(axes, state, slots[0], windows[0], count) for count in (10, 100))

    a, b = ours(axes, state, windows, slots), textbook(axes, state, windows)
    worst = max(float((a[name] - b[name]).abs().max()) for name in a)
    fast, slow = [], []
    for _ in range(options.pairs):
        fast.append(seconds(lambda: ours(axes, state, cohort(), slots)))
        slow.append(seconds(lambda: textbook(axes, state, cohort())))
    about = f"{torch.get_num_threads()} threads, torch {torch.__version__}, {options.scheme}"
    print(f"{elements / 1e6:.1f} M elements, {about}")
    print(f"ours      median {statistics.median(fast):.3f} s, {min(fast):.3f} to {max(fast):.3f}")
    print(f"textbook  median {statistics.median(slow):.3f} s, {min(slow):.3f} to {max(slow):.3f}")
    print(f"largest difference {worst:.1e}")
    print(f"extra memory at the peak {first:.1f} MiB for 10 clients, {second:.1f} MiB for 100")
    figures = {
        "elements": elements,
        "cut_and_fold_seconds": round(statistics.median(fast), 4),
        "textbook_seconds": round(statistics.median(slow), 4),
        "cut_and_fold_speedup": round(statistics.median(slow) / statistics.median(fast), 2),
        "memory_10_clients_mib": round(first, 1),
        "memory_100_clients_mib": round(second, 1),
        "largest_difference": worst,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
