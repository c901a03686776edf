"""Every trace proves itself.

*Permutation*: the full-width cut under a random permutation of every axis must compute the same function.
A missing tie, a wrong head split, a wrong stride or a forgotten buffer breaks it; no reference is needed.
*Half width*: the smaller module must run in both modes, at another batch size, keep the shape of the model's
outputs, and give a gradient to every parameter that gets one at full width.

Proofs run in float64 with dropout off and on weights that are generic: a zero-initialised head or a norm of
ones would let anything pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.capture import Inputs, quiet
from fedrolex.slicing.submodel import GraphBuilder, SubModel
from fedrolex.slicing.windows import Run, Window, pick, width

TOLERANCE = 1e-6


@dataclass(frozen=True)
class Flaw:
    """Why a proof failed: one line."""

    what: str


def generic(state: Mapping[str, Tensor], running: Sequence[str] = ()) -> dict[str, Tensor]:
    """A copy of ``state`` in which no floating parameter is constant.

    Weights that vary keep their values; constant ones (norms, zero biases, zero heads, layer scales) get
    noise around their value. ``running`` names buffers that hold variances: those stay positive.
    """
    generator = torch.Generator().manual_seed(20220)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value = tensor.detach().clone()
        if value.is_floating_point() and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            noise = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value)
            first = float(value.flatten()[0])
            if name in running:
                value = 0.5 + noise
            elif abs(first) > 0.05:
                value = value * (0.5 + noise)
            else:
                value = (noise - 0.5) * 0.6
        result[name] = value
    return result


@dataclass(frozen=True)
class Trial:
    """What a proof runs on.

    Attributes:
        axes: the claim to prove.
        builder: makes modules from the traced graph, dropout off.
        state: generic weights, in the model's own dtype.
        inputs: the example.
        kept: for each mode, the flat outputs that must keep shape and value.
    """

    axes: Axes
    builder: GraphBuilder
    state: Mapping[str, Tensor]
    inputs: Inputs
    kept: Mapping[bool, Sequence[int]]

    def module(self, window: Window, dtype: torch.dtype | None = None) -> SubModel:
        """The cut of the generic weights."""
        builder, axes = self.builder, self.axes
        state = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in self.state.items()}
        constants = axes.take({n: t for n, t in builder.constants.items() if axes.tensors[n].role == "constant"}, window)
        module = builder(axes.widths(window), constants, dtype=dtype)
        axes.load(module, state, window)
        return module

    def outputs(self, module: SubModel, mode: bool, values: Sequence[Tensor]) -> list[Tensor]:
        """The kept outputs of one run, with fixed random numbers."""
        module.train(mode)
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(7)
            flat = module._functions[mode](module, *(v.clone() for v in values))
        return [flat[place] for place in self.kept[mode]]

    def doubled(self) -> list[Tensor]:
        """The example in float64, constant inputs made generic."""
        values = generic(dict(zip(self.inputs.names, self.inputs.values, strict=True)))
        return [v.double() if v.is_floating_point() else v for v in values.values()]


def permutation(axes: Axes, only: Sequence[str] | None = None) -> Window:
    """A window that reorders every axis that is not tied to inputs or outputs."""
    generator = torch.Generator().manual_seed(4242)
    spans = {}
    for name, axis in axes.axes.items():
        if axis.kind not in ("rows", "outputs") and (only is None or name in only):
            order = torch.randperm(axis.size, generator=generator).tolist()
            spans[name] = pick(order if order != sorted(order) else order[::-1], axis.size)
    return Window(spans)


def half(axes: Axes, beta: Any, only: Sequence[str] | None = None) -> Window:
    """A rolled window of a fraction of every axis, two thirds of the way in."""
    return Window(
        {a.name: Run(2 * a.size // 3, width(a.size, beta), a.size) for a in axes.cut_axes if only is None or a.name in only}
    )


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance ‖a − b‖ / ‖b‖; 0 for equal tensors, NaNs in the same places included."""
    if a.shape != b.shape:
        return float("inf")
    if not a.is_floating_point() and not a.is_complex():
        return 0.0 if bool((a == b).all()) else 1.0
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    scale = float(torch.linalg.vector_norm(b[b.isfinite()].double()))
    error = float(torch.linalg.vector_norm((a - b)[~same].double()))
    return error / scale if scale > 0 else float("inf")


def permutation_flaw(trial: Trial, only: Sequence[str] | None = None) -> Flaw | None:
    """None where the permuted full-width cut computes the same function in both modes."""
    window = permutation(trial.axes, only)
    values = trial.doubled()
    with torch.no_grad():
        for mode in trial.kept:
            try:
                straight = trial.outputs(trial.module(Window({}), torch.float64), mode, values)
                permuted = trial.outputs(trial.module(window, torch.float64), mode, values)
            except Exception as error:
                return Flaw(f"the permuted model does not run: {error}")
            for a, b in zip(permuted, straight, strict=True):
                if not bool(torch.isfinite(b).any()) and b.numel():
                    return Flaw("the model gives no finite output on the example, so nothing can be proved")
                error = distance(a, b)
                if not error <= TOLERANCE:
                    return Flaw(f"a permuted model differs by {error:.1e} (at most {TOLERANCE:.0e} is rounding)")
    return None


def half_flaw(trial: Trial, beta: Any, only: Sequence[str] | None = None) -> Flaw | None:
    """None where the smaller module runs, keeps its outputs' shapes and trains all its parameters."""
    window = half(trial.axes, beta, only)
    try:
        wanted = _gradients(trial, Window({}))
        found = _gradients(trial, window)
    except Exception as error:
        return Flaw(f"the smaller model does not run: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    for mode in trial.kept:
        if [tuple(o.shape) for o in found[mode][0]] != [tuple(o.shape) for o in wanted[mode][0]]:
            return Flaw("the smaller model changes the shape of an output")
    missing = sorted(wanted[True][1] - found[True][1])
    if missing:
        return Flaw(f"{missing[0]} gets no gradient in the smaller model")
    return None


def _gradients(trial: Trial, window: Window) -> dict[bool, tuple[list[Tensor], set[str]]]:
    """Kept outputs and the parameters with a gradient, in each mode."""
    result: dict[bool, tuple[list[Tensor], set[str]]] = {}
    for mode in trial.kept:
        module = trial.module(window)
        with torch.enable_grad():
            outputs = trial.outputs(module, mode, trial.inputs.values)
            losses = [o.double().square().sum() for o in outputs if o.is_floating_point() and o.requires_grad]
            if losses:
                torch.stack(losses).sum().backward()
        result[mode] = (outputs, {n for n, p in module.named_parameters() if p.grad is not None})
    return result


def batch_flaw(trial: Trial) -> Flaw | None:
    """None where the model also runs with one sample more than the example has."""
    if not all(v.dim() for v in trial.inputs.values):
        return Flaw("an input has no batch dimension")
    values = [torch.cat([v, v[:1]]) for v in trial.inputs.values]
    try:
        with torch.no_grad():
            for mode in trial.kept:
                trial.outputs(trial.module(half(trial.axes, trial_beta())), mode, values)
    except Exception as error:
        return Flaw(f"another batch size fails: {str(error).splitlines()[0]}")
    return None


def trial_beta() -> Any:
    """The capacity proofs cut to."""
    from fractions import Fraction

    return Fraction(1, 2)


def culprits(names: Sequence[str], check: Callable[[Sequence[str]], Flaw | None]) -> dict[str, Flaw]:
    """The axes that fail a check on their own, or, where none does alone, the smallest failing tail."""
    alone = {name: flaw for name in names if (flaw := check([name])) is not None}
    return alone
