"""Every trace proves itself.

*Permutation*: the full-width cut under a random permutation of every axis must compute the same function.
A missing tie, a wrong head split, a wrong stride or a forgotten buffer breaks it; no reference is needed.
*Smaller widths*, down to one index an axis: the cut must run in both modes, keep the shape of the model's
outputs, and give a gradient to every parameter that gets one at full width.

Proofs run with dropout off and on weights that are generic: a zero-initialised head or a norm of ones would
let anything pass. The permutation is compared in float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.complaints import one_line, quiet
from fedrolex.slicing.fidelity import distance, generic
from fedrolex.slicing.inputs import Inputs
from fedrolex.slicing.submodel import GraphBuilder, SubModel
from fedrolex.slicing.windows import WHOLE, Arc, Window, pick, width

TOLERANCE = 1e-6
WIDTHS = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 10**6))


@dataclass(frozen=True)
class Trial:
    """A claim about a model's axes, and what it is tried on.

    Every check returns None where it passes, or one line that says what went wrong.

    Attributes:
        axes: the claim.
        builder: makes modules from the traced graphs, dropout off.
        state: generic weights, in the model's own dtype.
        inputs: the example.
        kept: for each mode, the flat outputs that must keep shape and value.
    """

    axes: Axes
    builder: GraphBuilder
    state: Mapping[str, Tensor]
    inputs: Inputs
    kept: Mapping[bool, Sequence[int]]

    def permutation(self, only: Sequence[str] | None = None) -> str | None:
        """Does the full-width cut under a random permutation compute the same function, in both modes?"""
        window = self._permuted(only)
        for mode in self.kept:
            try:
                straight, permuted = self._straight[mode], self._precise(window, mode)
            except Exception as failure:
                return f"the permuted model does not run: {one_line(failure)}"
            for found, wanted in zip(permuted, straight, strict=True):
                if wanted.numel() and not bool(wanted.isfinite().any()):
                    return "the model gives no finite output on the example, so nothing can be proved"
                error = distance(found, wanted)
                if not error <= TOLERANCE:
                    return f"the permuted model differs by {error:.1e} (rounding is below {TOLERANCE:.0e})"
        return None

    def narrower(self, beta: Fraction, only: Sequence[str] | None = None) -> str | None:
        """Does a smaller cut run, keep its outputs' shapes and train all its parameters?"""
        try:
            shapes, trained = self._whole
            narrow_shapes, narrow_trained = self._trained(self._rolled(beta, only))
        except Exception as failure:
            return f"the smaller model does not run: {one_line(failure)}"
        if narrow_shapes != shapes:
            return "the smaller model changes the shape of an output"
        missing = sorted(trained - narrow_trained)
        return f"{missing[0]} gets no gradient in the smaller model" if missing else None

    @cached_property
    def _straight(self) -> dict[bool, list[Tensor]]:
        """What the full-width cut computes, in both modes."""
        return {mode: self._precise(WHOLE, mode) for mode in self.kept}

    @cached_property
    def _whole(self) -> tuple[list[tuple[int, ...]], set[str]]:
        return self._trained(WHOLE)

    def _precise(self, window: Window, mode: bool) -> list[Tensor]:
        """The kept outputs of a cut in float64."""
        example = generic(dict(zip(self.inputs.names, self.inputs.values, strict=True)))
        values = [v.double() if v.is_floating_point() else v for v in example.values()]
        with torch.no_grad():
            return self._outputs(self._module(window).double(), mode, values)

    def _permuted(self, only: Sequence[str] | None) -> Window:
        """Every axis that is not tied to inputs or outputs, reordered at random."""
        generator = torch.Generator().manual_seed(4242)
        spans = {}
        for name, axis in self.axes.axes.items():
            if axis.kind not in ("rows", "outputs") and (only is None or name in only):
                order = torch.randperm(axis.size, generator=generator).tolist()
                spans[name] = pick(order if order != sorted(order) else order[::-1], axis.size)
        return Window(spans)

    def _rolled(self, beta: Fraction, only: Sequence[str] | None) -> Window:
        """A fraction of every axis, from two thirds of the way in."""
        cut = [a for a in self.axes.cut_axes if only is None or a.name in only]
        return Window({a.name: Arc(2 * a.size // 3, width(a.size, beta), a.size) for a in cut})

    def _module(self, window: Window) -> SubModel:
        module = self.builder(self.axes.widths(window), self.axes.take(self.builder.constants, window))
        self.axes.load(module, self.state, window)
        return module

    def _outputs(self, module: SubModel, mode: bool, values: Sequence[Tensor]) -> list[Tensor]:
        """The kept outputs of one run, always with the same random numbers."""
        module.train(mode)
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(7)
            flat = module.slicing_code[mode].flat(module, [v.clone() for v in values])
        return [flat[place] for place in self.kept[mode]]

    def _trained(self, window: Window) -> tuple[list[tuple[int, ...]], set[str]]:
        """Shapes of the kept outputs in both modes, and the parameters that get a gradient in training."""
        shapes: list[tuple[int, ...]] = []
        trained: set[str] = set()
        for mode in self.kept:
            module = self._module(window)
            with torch.set_grad_enabled(mode):
                outputs = self._outputs(module, mode, self.inputs.values)
                losses = [o.double().square().sum() for o in outputs if o.requires_grad and o.is_floating_point()]
                if losses:
                    torch.stack(losses).sum().backward()
            shapes.extend(tuple(o.shape) for o in outputs)
            trained |= {n for n, p in module.named_parameters() if p.grad is not None}
        return shapes, trained
