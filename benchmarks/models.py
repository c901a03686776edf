"""A GPU's engine on models that nobody here wrote, each brought as a user would bring it, beside ``loop``.

torchvision's resnet18 with a 3×3 stem and timm's vit_tiny with patches of 4×4 on 32×32 images, and a Hugging Face GPT-2
on sequences of 64 tokens. Ten clients, two of each capacity from 1 to 1/16, a round is some tens of steps a client.
Data is random: the time of a step does not depend on it.

    python benchmarks/models.py [--models resnet18 vit gpt2] [--batches 10 32] [--engines loop,graph]
    python benchmarks/models.py --engines loop,graph,lanes,stacked      # which way a rule should take
    python benchmarks/models.py --profile [--engines graph]             # where a round's time goes

The engines take turns, round by round, on the same run; a round is everything but evaluation. A speedup is the median
of the ratios of rounds side by side, with the smallest and the largest. ``--profile`` prints the kernels that take
longest, and the share of a round in which no kernel runs. Ends with one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex import Examples, FedrolexError, Recipe, RoundPlan, Task, Training, prepare
from fedrolex.engines.cpu.loop import Loop
from fedrolex.engines.gpu.graph import Graph
from fedrolex.engines.gpu.lanes import Lanes
from fedrolex.engines.gpu.stacked import Stacked
from fedrolex.rounds.engine import Engine

CLIENTS = 10
CLASSES = 10
SIDE = 32
WORDS = 1000
LENGTH = 64


class StackedAnyway(Stacked):
    """Stacks that are said not to pay, too: here that is to be seen."""

    def supports(self, plan: RoundPlan) -> str | None:
        why = super().supports(plan)
        return None if why is not None and "worth" in why else why


ENGINES: dict[str, Callable[..., Engine]] = {"loop": Loop, "graph": Graph, "lanes": Lanes, "stacked": StackedAnyway}


# --- models, as users bring them ---


def resnet18(_: int) -> nn.Module:
    """Torchvision's, for small images."""
    from torchvision.models import resnet18

    model = resnet18(weights=None, num_classes=CLASSES, width_per_group=64)
    model.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    found: nn.Module = model
    return found


def vit(_: int) -> nn.Module:
    """timm's vit_tiny: 12 layers of width 192, 65 tokens."""
    from timm import create_model

    found: nn.Module = create_model(
        "vit_tiny_patch16_224", pretrained=False, img_size=SIDE, patch_size=4, num_classes=CLASSES
    )
    return found


class GPT2(nn.Module):
    """Hugging Face's GPT-2: scores ``(batch, words, length)`` of the next token, as cross-entropy takes them."""

    def __init__(self, layers: int = 3, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        import transformers

        hugging: Any = transformers
        sizes = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": LENGTH, "vocab_size": WORDS}
        self.model = hugging.GPT2LMHeadModel(
            hugging.GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens).logits
        return scores.transpose(1, 2)


def gpt2(_: int) -> nn.Module:
    """Three layers of width 128, with GPT-2's dropout."""
    return GPT2()


def images(count: int) -> Examples:
    """Random images of ten classes."""
    generator = torch.Generator().manual_seed(0)
    return Examples(torch.randn(count, 3, SIDE, SIDE, generator=generator), torch.arange(count) % CLASSES)


def sentences(count: int) -> Examples:
    """Random tokens, and the token after each."""
    words = torch.randint(0, WORDS, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Examples(words[:, :-1].contiguous(), words[:, 1:].contiguous())


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Examples]]] = {
    "resnet18": (resnet18, images),
    "vit": (vit, images),
    "gpt2": (gpt2, sentences),
}


def run_of(name: str, batch: int, options: argparse.Namespace) -> Training:
    """A run of a model of one's own, in Python."""
    build, data = MODELS[name]
    examples = data(CLIENTS * options.steps * batch)
    task = Task.split(build, examples, data(CLASSES), CLIENTS, name=name)
    recipe = Recipe(
        device=options.device, precision=options.precision, engine="loop", callbacks=["drift"]
    ).with_settings([f"client.batch={batch}", f"fleet.clients={CLIENTS}", f"fleet.cohort={CLIENTS}", "client.lr=0.01"])
    return prepare(recipe, task)


# --- timing ---


def wait() -> None:
    """For the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed_round(made: Training, engine: Engine) -> float:
    """Milliseconds of a round on an engine."""
    made.engine = engine
    wait()
    start = time.perf_counter()
    row = made.run_round()
    wait()
    assert not row["dropped"], row["dropped"]
    return 1000 * (time.perf_counter() - start)


def compared(made: Training, names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of rounds of every engine in turn, and how many times faster than the first."""
    device = made.server.device
    figures: dict[str, Any] = {}
    engines: dict[str, Engine] = {}
    for name in names:
        known: dict[str, Any] = {} if name == "loop" or device.type == "cuda" else {"rehearsed": True}
        engine = ENGINES[name](precision=options.precision, device=device, **known)
        why = engine.supports(made.plan(made.method.jobs(made.server, 0)))
        if why is not None:
            print(f"  {name:8} cannot: {why}", flush=True)
            continue
        engines[name] = engine
        figures[f"{name}_first_round_seconds"] = round(timed_round(made, engine) / 1000, 2)
        timed_round(made, engine)
        if isinstance(engine, Graph):
            figures[f"{name}_way"] = type(engine.way).__name__.lower()
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            spent[name].append(timed_round(made, engine))
    first = spent[next(iter(engines))]
    for name, rounds in spent.items():
        figures[f"{name}_ms"] = round(statistics.median(rounds), 1)
        figures[f"{name}_range_ms"] = [round(min(rounds), 1), round(max(rounds), 1)]
        ratios = [one / other for one, other in zip(first, rounds, strict=True)]
        told = f"  {name:8} {figures[f'{name}_ms']:9.1f} ms a round ({min(rounds):.1f} to {max(rounds):.1f})"
        if rounds is not first:
            figures["speedup" if name == "graph" else f"{name}_speedup"] = round(statistics.median(ratios), 2)
            told += f", {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})"
        print(told, flush=True)
        if options.profile and name != "loop" and device.type == "cuda":
            figures |= {f"{name}_{what}": value for what, value in profiled(made, engines[name], options.top).items()}
    return figures


def profiled(made: Training, engine: Engine, top: int) -> dict[str, Any]:
    """Where the time of one round goes: prints the kernels that take longest; the shares that count."""
    from torch.profiler import ProfilerActivity, profile

    timed_round(made, engine)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        whole = timed_round(made, engine)
    spans, by_name, counts = [], Counter[str](), Counter[str]()
    for event in seen.events() or ():
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] += event.time_range.end - event.time_range.start
            counts[event.name] += 1
    busy, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    total = sum(by_name.values())
    found = {
        "kernels": len(spans),
        "idle_share": round(1 - busy / 1000 / whole, 3),
        "kernels_at_once": round(total / busy, 2) if busy else 0.0,
        "profiled_ms": round(whole, 1),
    }
    print(
        f"    {found['kernels']} kernels in {whole:.1f} ms, {found['kernels_at_once']} at once while any runs; "
        f"none runs in {100 * found['idle_share']:.0f} % of the time"
    )
    for name, spent in by_name.most_common(top):
        print(f"    {100 * spent / total:5.1f} % {counts[name]:6} × {spent / counts[name]:7.1f} µs  {name[:90]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[10, 32])
    parser.add_argument("--engines", default="loop,graph", help="in this order; speedups are over the first")
    parser.add_argument("--steps", type=int, help="of a client in a round; 50, with --profile 10")
    parser.add_argument("--rounds", type=int, default=4, help="timed, of each engine")
    parser.add_argument("--queues", type=int, default=32, help="of the driver to the GPU; its own default is 8")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--top", type=int, default=12, help="kernels that --profile prints")
    options = parser.parse_args()
    options.steps = (10 if options.profile else 50) if options.steps is None else options.steps
    names = options.engines.split(",")
    unknown = next((name for name in names if name not in ENGINES), None)
    if unknown is not None:
        parser.error(f"--engines: there is no {unknown!r}: use some of {','.join(ENGINES)}")
    if min(options.batches) < 2 or options.steps < 1 or options.rounds < 1:
        parser.error("give at least 2 to --batches, and 1 to --steps and --rounds")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.queues)  # read when CUDA starts
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here: use --device cpu, to try this script")
    if options.profile and options.device == "cuda":
        os.environ.setdefault("TEARDOWN_CUPTI", "0")  # steps that are captured later are then seen, too
        with torch.profiler.profile():
            torch.zeros(1, device="cuda")
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(0) if options.device == "cuda" else None,
        "torch": torch.__version__,
        "precision": options.precision,
        "queues": options.queues,
        "clients": CLIENTS,
        "steps": options.steps,
    }
    for model in options.models:
        for batch in options.batches:
            start = time.perf_counter()
            try:
                made = run_of(model, batch, options)
            except (FedrolexError, ImportError) as error:
                print(f"{model}: {error}", file=sys.stderr)
                continue
            ready = time.perf_counter() - start
            print(f"{model}, batch {batch} (traced and ready in {ready:.1f} s)", flush=True)
            figures |= {f"{model}_b{batch}_{what}": value for what, value in compared(made, names, options).items()}
            del made
            if options.device == "cuda":
                torch.cuda.empty_cache()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
