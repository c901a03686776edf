"""Static batch norm: no running statistics while training, population statistics collected afterwards.

HeteroFL's static batch norm normalises every training batch by its own mean and variance and keeps nothing,
so clients of different widths never exchange statistics. To evaluate, one pass over training data records what
every norm sees: count, mean and variance a channel, which pool exactly (:meth:`Moments.pooled`) over batches and over
clients. Any model works whose batch norms have ``track_running_stats=False``, and so do sub-models that run from a
traced graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedrolex.core import FedrolexError
from fedrolex.slicing.submodel import GraphNorm

GROUPS = 4
Norm = Literal["static", "batch", "group", "none"]
NORMS = (_BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.modules.instancenorm._InstanceNorm)


def make_norm(kind: Norm, channels: int) -> nn.Module:
    """A norm of feature maps: ``static`` keeps no running statistics, ``batch`` does, ``group`` has four groups."""
    match kind:
        case "static":
            return nn.BatchNorm2d(channels, track_running_stats=False)
        case "batch":
            return nn.BatchNorm2d(channels)
        case "group":
            if channels % GROUPS:
                raise FedrolexError(f"norm 'group' has {GROUPS} groups: {channels} channels do not divide evenly")
            return nn.GroupNorm(GROUPS, channels)
        case _:
            return nn.Identity()


def make_static(model: nn.Module) -> None:
    """Let all batch norms of a model forget their running statistics, and keep none."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None


@dataclass(frozen=True)
class Moments:
    """What one norm saw: number of values a channel, their mean and (biased) variance, shape ``(channels,)``."""

    count: float
    mean: Tensor
    variance: Tensor

    def pooled(self, other: Moments) -> Moments:
        """The moments of what both saw, taken together; exact."""
        count = self.count + other.count
        share = other.count / count
        apart = other.mean - self.mean
        mean = self.mean + apart * share
        variance = self.variance * (1 - share) + other.variance * share + apart.square() * share * (1 - share)
        return Moments(count, mean, variance)


def static_norms(model: nn.Module) -> dict[str, _BatchNorm | GraphNorm]:
    """The batch norms of a model, or of a traced sub-model, that keep no running statistics, by name."""
    every = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm | GraphNorm)}
    return {name: norm for name, norm in every.items() if norm.running_mean is None}


def norm_parameters(model: nn.Module) -> list[str]:
    """Names of the scales and shifts of all norms of a model."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if isinstance(module, NORMS)
        for name, _ in module.named_parameters(recurse=False)
    ]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode and keeps no gradients; then it is in the mode it was in."""
    before = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(before)


def collect(model: nn.Module, batches: Iterable[Tensor]) -> dict[str, Moments]:
    """Run batches through a model in evaluation mode and record what its static norms see.

    As long as norms have no statistics they use the batch's, as in training: deeper norms see inputs that were
    normalised batch by batch, so batches should be large and mixed. Dropout and scalers are off. Moments of what is
    below float32 are taken in float32.
    """
    seen: dict[str, Moments] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].to(torch.promote_types(inputs[0].dtype, torch.float32))
            variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
            now = Moments(x.numel() / x.shape[1], mean.double(), variance.double())
            seen[name] = seen[name].pooled(now) if name in seen else now

        return hook

    with ExitStack() as stack, evaluating(model):
        for name, module in static_norms(model).items():
            stack.callback(module.register_forward_pre_hook(watch(name)).remove)
        for batch in batches:
            model(batch)
    return seen


def without_statistics(model: nn.Module) -> nn.Module:
    """A copy of a model, in evaluation mode, whose batch norms have no running statistics.

    The norms of a traced graph (:class:`~fedrolex.slicing.submodel.GraphNorm`) keep what they have.
    """
    twin = copy.deepcopy(model).eval()
    make_static(twin)
    return twin


def with_statistics(model: nn.Module, statistics: Mapping[str, Moments]) -> nn.Module:
    """A copy of a model, in evaluation mode, whose static norms use these statistics, by the norm's name."""
    twin = copy.deepcopy(model).eval()
    for name, norm in static_norms(twin).items():
        if name not in statistics:
            raise FedrolexError(f"there are no statistics for norm {name!r}: collect them from this model")
        weight = getattr(norm, "weight", None)
        like = next(model.parameters()) if weight is None else weight
        norm.running_mean, norm.running_var = statistics[name].mean.to(like), statistics[name].variance.to(like)
        if isinstance(norm, _BatchNorm):
            norm.track_running_stats = True
    return twin


class _Watching(TorchFunctionMode):
    """While the mode is entered, notes of every batch norm whether it takes the statistics of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.by_batch: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function as it is, and note what a batch norm takes."""
        kwargs = kwargs or {}
        if "batch_norm" in getattr(func, "__name__", ""):
            self.by_batch.append(bool(kwargs.get("training", args[5] if len(args) > 5 else True)))
        return func(*args, **kwargs)


def by_batch(model: nn.Module, inputs: Tensor) -> list[bool]:
    """Of every batch norm that a model calls in evaluation mode: does it take the statistics of its batch?

    Norms that are called as functions are seen, too. Where there is a True, scores depend on the batch.
    """
    watching = _Watching()
    with evaluating(model), watching:
        model(inputs)
    return watching.by_batch
