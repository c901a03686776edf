"""``trace(model, example)``: the axes of any module, derived from what it computes, and proved.

axes = trace(model, torch.randn(2, 3, 32, 32))
window = Rolling().window(axes, round=0, capacity="1/4")
small = axes.cut(model, window)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fedrolex.errors import FedrolexError
from fedrolex.slicing.axes import Axes, Kind, Note, Role
from fedrolex.slicing.capture import Captured, Inputs, capture, one_line, quiet, register
from fedrolex.slicing.infer import Unknown, freeze
from fedrolex.slicing.layout import show
from fedrolex.slicing.program import Program, evaluation_of, without_dropout
from fedrolex.slicing.proof import HALF, QUARTER, Trial, distance, generic
from fedrolex.slicing.resolve import Resolution, apply_overrides
from fedrolex.slicing.submodel import GraphBuilder
from fedrolex.slicing.walk import Ties, walk

Factory = Callable[[Mapping[str, int]], nn.Module]
Scaling = Literal["own-width", "keep"]


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a model, or its user, knows about its axes.

    Attributes:
        freeze: tensors (``embed.weight``) or dimensions (``head.weight:0``) to keep whole; ``*`` allowed.
        name: ``tensor:dim`` pattern, or a derived name, to the name wanted.
        tie: groups of ``tensor:dim`` that must share their indices.
        kind: axis name to kind, e.g. ``{"attn.heads": "width"}`` to cut heads.
        factory: builds the module for given axis sizes, instead of the traced graph.
        scaling: whether numbers derived from a width (1/√d) use the sub-model's own width.
    """

    freeze: Sequence[str] = ()
    name: Mapping[str, str] = field(default_factory=dict)
    tie: Sequence[Sequence[str]] = ()
    kind: Mapping[str, Kind] = field(default_factory=dict)
    factory: Factory | None = None
    scaling: Scaling = "own-width"


def trace(model: nn.Module, example: Any, hints: Hints | None = None) -> Axes:
    """Derive and prove the axes of ``model``.

    Args:
        model: any module ``torch.export`` can capture. It is not changed.
        example: what ``forward`` takes: a tensor, a tuple, or a dict of keyword arguments. Other batch
            sizes, and other lengths of integer sequences, work too where the model's code allows.
        hints: names, freezes and overrides; by default the model's own ``slicing_hints()``, if it has one.

    Raises:
        FedrolexError: the model cannot be traced, or nothing in it can be cut, or the proof fails.
    """
    if hints is None:
        own = getattr(model, "slicing_hints", None)
        hints = own() if callable(own) else Hints()
    if next(iter(model.parameters()), None) is None:
        raise FedrolexError("the model has no parameters: there is nothing to cut")
    inputs = Inputs.of(model, example)
    try:
        axes = _Trace(model, inputs, hints).proved()
    except FedrolexError:
        raise
    except Exception as failure:
        raise FedrolexError(
            f"the model could not be traced: {type(failure).__name__}: {one_line(failure)}"
        ) from failure
    return axes if hints.factory is None else replace(axes, build=FactoryBuilder(hints.factory))


class FactoryBuilder:
    """Builds sub-models with the model's own factory; the traced graph only served to derive the axes."""

    constants: Mapping[str, Tensor] = {}

    def __init__(self, factory: Factory) -> None:
        self.factory = factory

    def __call__(self, widths: Mapping[str, int], constants: Mapping[str, Tensor]) -> nn.Module:
        """The factory's module for these widths."""
        return self.factory(dict(widths))


class _Trace:
    """One trace: capture both modes, walk them, decide, prove."""

    def __init__(self, model: nn.Module, inputs: Inputs, hints: Hints) -> None:
        self.model, self.inputs, self.hints = model, inputs, hints
        self.notes: list[Note] = []
        self.own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.aliases = _aliases(model, self.own)
        self.variances = [name for name in self.own if name.endswith("running_var")]
        self.modes = self._capture()
        captured = {n: t for mode in self.modes.values() for n, t in mode.tensors.items()}
        self.tensors = {**captured, **self.own}
        self.roles: dict[str, Role] = {
            n: "parameter" if isinstance(t, nn.Parameter) else "buffer" for n, t in self.own.items()
        }
        self.roles.update({n: "constant" for n in captured if n not in self.own})
        self.ties = self._walk()

    # --- what the model computes ---

    def _capture(self) -> dict[bool, Captured]:
        """The graphs for training (True) and evaluation (False)."""
        try:
            training = self._canonical(capture(self.model, self.inputs, training=True))
        except FedrolexError as failure:
            try:
                evaluation = self._canonical(capture(self.model, self.inputs, training=False))
            except FedrolexError:
                raise failure from failure.__cause__
            self.notes.append(
                Note("training mode", f"cannot be traced, sub-models train on the evaluation graph ({failure})")
            )
            return {True: evaluation, False: evaluation}
        evaluation = evaluation_of(training)
        if not self._is_evaluation(evaluation):
            evaluation = self._canonical(capture(self.model, self.inputs, training=False))
        return {True: training, False: evaluation}

    def _canonical(self, captured: Captured) -> Captured:
        """Tied tensors under their first name."""
        for node in captured.graph.nodes:
            if node.op == "get_attr":
                node.target = self.aliases.get(str(node.target), node.target)
        captured.tensors = {self.aliases.get(n, n): t for n, t in captured.tensors.items()}
        return captured

    def _is_evaluation(self, derived: Captured) -> bool:
        """Whether the training graph with its switches turned is what the module computes in evaluation."""
        state = generic(self.own, self.variances)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad(), quiet():
                named = dict(zip(self.inputs.names, self.inputs.values, strict=True))
                wanted = torch.func.functional_call(self.model, state, (), {**named, **self.inputs.others})
                found = _run(derived, {**derived.tensors, **state}, self.inputs.values)
        except Exception:
            return False
        finally:
            for module, mode in modes.items():
                module.training = mode
        pairs = [[v for v in values if isinstance(v, Tensor)] for values in (found, pytree.tree_leaves(wanted))]
        return len(pairs[0]) == len(pairs[1]) and all(distance(a, b) < 1e-5 for a, b in zip(*pairs, strict=True))

    def _walk(self) -> Ties:
        ties = Ties()
        for mode in dict.fromkeys((self.modes[True], self.modes[False])):
            walk(mode, self.inputs.values, ties)
        for name in self.roles:
            if name not in ties.dims:
                shape = self.tensors[name].shape
                ties.dims[name] = tuple(Unknown(n, "not used by forward on this example") for n in shape)
        apply_overrides(ties, self.roles, self.hints.freeze, self.hints.tie)
        return ties

    # --- what follows from it ---

    def _decide(self) -> tuple[Resolution, Trial]:
        """The axes as they stand, ready to be tried."""
        resolution = Resolution(self.ties, self.roles, self.tensors, self.hints.name, self.hints.kind)
        layouts = resolution.tensor_layouts()
        found = resolution.axes(layouts)
        full = {name: axis.size for name, axis in found.items()}
        programs: dict[bool, Program] = {}
        kept: dict[bool, Sequence[int]] = {}
        for place, mode in enumerate((True, False)):
            seen = self.ties.walks[min(place, len(self.ties.walks) - 1)]
            scales = resolution.scales(seen.scalars, follow=self.hints.scaling == "own-width")
            programs[mode] = Program(self.modes[mode], resolution.changes(seen.edits), scales, full)
            kept[mode] = seen.kept
        transient = _transient(self.model)
        notes = (*self.notes, *self._notes(programs[True]))
        builder = GraphBuilder(programs, self.inputs, layouts, self.tensors, self.aliases, transient)
        axes = Axes(found, layouts, self.aliases, tuple(resolution.frozen()), notes, builder)
        still = {mode: replace(p, captured=without_dropout(p.captured)) for mode, p in programs.items()}
        quiet_builder = GraphBuilder(still, self.inputs, layouts, self.tensors, self.aliases, transient)
        return resolution, Trial(axes, quiet_builder, generic(self.own, self.variances), self.inputs, kept)

    def proved(self) -> Axes:
        """Axes that pass every proof; an axis that fails on its own is frozen and reported."""
        while True:
            resolution, trial = self._decide()
            axes = trial.axes
            if not axes.cut_axes:
                raise FedrolexError(f"no axis of this model can be cut: {self._why_nothing(axes)}")
            flaw, failing = _try(trial)
            if flaw is None:
                return self._with_batch_note(trial)
            if not failing:
                raise FedrolexError(f"the derived axes could not be proved, so this model is refused: {flaw}")
            for leaf, name in resolution.names.items():
                if name in failing:
                    freeze(leaf, f"failed its proof: {failing[name]}")

    def _notes(self, program: Program) -> list[Note]:
        notes = []
        for scale in program.scales:
            power = {0.5: "√", -0.5: "1/√", 1.0: "", -1.0: "1/"}[scale.power]
            does = "sub-models use their own width" if scale.follows else "kept as it is"
            notes.append(Note(scale.node, f"{scale.value:.6g} = {power}size of {show(scale.axis)}: {does}"))
        for name, count in self.ties.unknown.items():
            notes.append(Note(name, f"no rule for this operator ({count} uses): what it touches is frozen"))
        if self.ties.exposed:
            notes.append(
                Note("outputs", f"{self.ties.exposed} inner values are returned too: sub-models return narrower ones")
            )
        return notes

    def _why_nothing(self, axes: Axes) -> str:
        if self.ties.unknown:
            return f"there is no rule for {', '.join(self.ties.unknown)}"
        return "; ".join(list(dict.fromkeys(note.what for note in axes.frozen))[:3]) or "it has inputs and outputs only"

    def _with_batch_note(self, trial: Trial) -> Axes:
        fixed = None if self.modes[True].any_batch else "the model's code depends on it"
        flaw = fixed or trial.any_batch()
        if flaw is None:
            return trial.axes
        return replace(trial.axes, notes=(*trial.axes.notes, Note("batch size", f"fixed at the example's: {flaw}")))


def _try(trial: Trial) -> tuple[str | None, dict[str, str]]:
    """The first proof that fails, and the axes that fail it on their own."""
    flaw = trial.permutation()
    if flaw is not None:
        alone = {name: trial.permutation([name]) for name in trial.axes.axes}
        return flaw, {name: why for name, why in alone.items() if why is not None}
    for beta in (HALF, QUARTER):
        flaw = trial.narrower(beta)
        if flaw is not None:
            alone = {axis.name: trial.narrower(beta, [axis.name]) for axis in trial.axes.cut_axes}
            return flaw, {name: why for name, why in alone.items() if why is not None}
    return None, {}


def _aliases(model: nn.Module, own: Mapping[str, Tensor]) -> dict[str, str]:
    """Other names of tensors that the model holds under several."""
    first = {id(tensor): name for name, tensor in own.items()}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first[id(tensor)] for name, tensor in every if name not in own}


def _transient(model: nn.Module) -> list[str]:
    """Buffers that are not part of the state dict."""
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    ]


def _run(captured: Captured, tensors: Mapping[str, Tensor], values: Sequence[Tensor]) -> Sequence[Any]:
    """Run a captured graph at full width on given tensors."""
    holder = nn.Module()
    holder.slicing_device = values[0].device  # type: ignore[assignment]
    for name, value in {**tensors, **captured.modules}.items():
        register(holder, name, value.detach().clone() if isinstance(value, Tensor) else value)
    return Program(captured, {}, (), {}).function({})(holder, *values)
