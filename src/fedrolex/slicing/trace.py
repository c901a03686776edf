"""``trace(model, example)``: the axes of any module, derived from what it computes, and proved.

    axes = trace(model, torch.randn(2, 3, 32, 32))
    small = axes.cut(model, Rolling()(round=0, capacity="1/4", client=0, axes=axes))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedrolex.errors import FedrolexError
from fedrolex.slicing import proof
from fedrolex.slicing.axes import Axes, Kind, Note
from fedrolex.slicing.capture import Captured, Inputs, capture, quiet
from fedrolex.slicing.infer import freeze as freeze_dim
from fedrolex.slicing.layout import show
from fedrolex.slicing.program import Program, Scale, evaluation_of, tensors_only, without_dropout
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
        example: what ``forward`` takes: a tensor, a tuple, or a dict of keyword arguments; batch ≥ 2
            and the largest lengths that will be used.
        hints: names, freezes and overrides; by default the model's own ``slicing_hints()``, if it has one.

    Raises:
        FedrolexError: the model cannot be traced, or nothing in it can be cut, or the proof fails.
    """
    if hints is None:
        own = getattr(model, "slicing_hints", None)
        hints = own() if callable(own) else Hints()
    inputs = Inputs.of(model, example)
    if not any(True for _ in model.parameters()):
        raise FedrolexError("the model has no parameters: there is nothing to cut")
    work = _Work(model, inputs, hints)
    axes = work.proved()
    return axes if hints.factory is None else replace(axes, build=FactoryBuilder(hints.factory))


class FactoryBuilder:
    """Builds sub-models with the model's own factory; the traced graph was only used to derive the axes."""

    def __init__(self, factory: Factory) -> None:
        self.factory = factory

    def __call__(self, widths: Mapping[str, int], constants: Mapping[str, Tensor]) -> nn.Module:
        """The factory's module for these widths."""
        return self.factory(dict(widths))


class _Work:
    """One trace in progress."""

    def __init__(self, model: nn.Module, inputs: Inputs, hints: Hints) -> None:
        self.model, self.inputs, self.hints = model, inputs, hints
        self.notes: list[Note] = []
        self.ties = Ties()
        self.modes = self._capture()
        self.own = _own_tensors(model)
        self.roles, self.aliases = self._roles()
        self.tensors = {**{n: t for c in self.modes.values() for n, t in c.tensors.items()}, **self.own}
        self._walk()
        apply_overrides(self.ties, self.roles, hints.freeze, hints.tie)

    # --- capturing ---

    def _capture(self) -> dict[bool, Captured]:
        try:
            training = capture(self.model, self.inputs, training=True)
        except FedrolexError as failure:
            try:
                evaluation = capture(self.model, self.inputs, training=False)
            except FedrolexError:
                raise failure from failure.__cause__
            self.notes.append(Note("training mode", f"cannot be traced ({failure}); sub-models train on the evaluation graph"))
            return {True: evaluation, False: evaluation}
        derived = evaluation_of(training)
        if not self._is_evaluation(derived):
            derived = capture(self.model, self.inputs, training=False)
        return {True: training, False: derived}

    def _is_evaluation(self, derived: Captured) -> bool:
        """Whether switching dropout and norms in the training graph gives what the module computes in eval."""
        state = proof.generic(_own_tensors(self.model), _variances(self.model))
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
        a, b = tensors_only(found), tensors_only(torch.utils._pytree.tree_leaves(wanted))
        return len(a) == len(b) and all(proof.distance(x, y) < 1e-5 for x, y in zip(a, b, strict=True))

    def _roles(self) -> tuple[dict[str, str], dict[str, str]]:
        """Role of every tensor, in the model's order, and the other names of tied ones."""
        captured = {n: t for c in self.modes.values() for n, t in c.tensors.items()}
        roles = {n: "parameter" if isinstance(t, nn.Parameter) else "buffer" for n, t in self.own.items()}
        aliases: dict[str, str] = {}
        every = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers(remove_duplicate=False)]
        canonical = {id(t): n for n, t in self.own.items()}
        for name, tensor in every:
            if name not in self.own:
                aliases[name] = canonical[id(tensor)]
        roles.update({n: "constant" for n in captured if n not in self.own and n not in aliases})
        return roles, aliases

    def _walk(self) -> None:
        for captured in self.modes.values():
            for node in captured.graph.nodes:
                if node.op == "get_attr" and node.target in self.aliases:
                    node.target = self.aliases[node.target]
            captured.tensors = {self.aliases.get(n, n): t for n, t in captured.tensors.items()}
        training, evaluation = self.modes[True], self.modes[False]
        walk(training, self.inputs.values, self.ties)
        derived = [n.name for n in evaluation.graph.nodes if n.op == "call_function"]
        walked = {n.name for n in training.graph.nodes}
        self.separate = training is not evaluation and not set(derived) <= walked
        if self.separate or evaluation.graph is not training.graph:
            walk(evaluation, self.inputs.values, self.ties)
        for name in self.roles:
            if name not in self.ties.dims:
                shape = self.tensors[name].shape
                self.ties.dims[name] = tuple(_unused(n) for n in shape)

    # --- deciding ---

    def axes(self) -> tuple[Axes, GraphBuilder, dict[bool, Sequence[int]]]:
        """The axes as they stand now, with a builder for them."""
        resolution = Resolution(self.ties, self.roles, self.tensors, self.hints.name, self.hints.kind)
        layouts = resolution.tensor_layouts()
        found = resolution.axes(layouts)
        full = {name: axis.size for name, axis in found.items()}
        programs: dict[bool, Program] = {}
        kept: dict[bool, Sequence[int]] = {}
        follow = self.hints.scaling == "own-width"
        for place, mode in enumerate((True, False)):
            walked = min(place, len(self.ties.edits) - 1)
            scales = resolution.scales(self.ties.scalars[walked], follow)
            programs[mode] = Program(self.modes[mode], resolution.changes(self.ties.edits[walked]), scales, full)
            kept[mode] = self.ties.kept[walked]
        transient = _transient(self.model)
        builder = GraphBuilder(programs, self.inputs, layouts, self.tensors, self.aliases, transient)
        axes = Axes(found, layouts, self.aliases, tuple(resolution.frozen()), self._notes(programs[True].scales), builder)
        return axes, builder, kept

    def _notes(self, scales: Iterable[Scale]) -> tuple[Note, ...]:
        notes = list(self.notes)
        for scale in scales:
            power = {0.5: "√", -0.5: "1/√", 1.0: "", -1.0: "1/"}[scale.power]
            does = "sub-models use their own width" if scale.follows else "kept as it is"
            notes.append(Note(scale.node, f"{scale.value:.6g} = {power}size of {show(scale.axis)}: {does}"))
        for name, count in self.ties.unknown.items():
            notes.append(Note(name, f"no rule for this operator ({count} uses): what it touches is frozen"))
        if self.ties.exposed:
            notes.append(Note("outputs", f"{self.ties.exposed} inner values are returned too: sub-models return theirs, narrower"))
        if not self.modes[True].any_batch:
            notes.append(Note("batch size", "fixed at the example's: the model's code depends on it"))
        return tuple(notes)

    def proved(self) -> Axes:
        """Axes that pass every proof; an axis that fails on its own is frozen and reported."""
        for _ in range(4):
            axes, builder, kept = self.axes()
            if not axes.cut_axes:
                raise FedrolexError(f"no axis of this model can be cut: {_why_nothing(axes, self.ties)}")
            trial = self._trial(axes, builder, kept)
            flaw, failing = self._failing(trial)
            if flaw is None:
                return self._with_batch_note(axes, trial)
            if not failing:
                break
            for name, why in failing.items():
                self._freeze(axes, name, f"failed its proof: {why.what}")
        raise FedrolexError(f"the derived axes could not be proved, so this model is refused: {flaw.what}")

    def _failing(self, trial: proof.Trial) -> tuple[proof.Flaw | None, dict[str, proof.Flaw]]:
        names = list(trial.axes.axes)
        cut = [axis.name for axis in trial.axes.cut_axes]
        flaw = proof.permutation_flaw(trial)
        if flaw is not None:
            return flaw, proof.culprits(names, lambda only: proof.permutation_flaw(trial, only))
        for beta in (Fraction(1, 2), Fraction(1, 4)):
            flaw = proof.half_flaw(trial, beta)
            if flaw is not None:
                return flaw, proof.culprits(cut, lambda only, b=beta: proof.half_flaw(trial, b, only))  # type: ignore[misc]
        return None, {}

    def _trial(self, axes: Axes, builder: GraphBuilder, kept: Mapping[bool, Sequence[int]]) -> proof.Trial:
        quiet_programs = {m: replace(p, captured=without_dropout(p.captured)) for m, p in builder.programs.items()}
        tensors = {**self.tensors, **self.own}
        still = GraphBuilder(quiet_programs, self.inputs, builder.tensors, tensors, self.aliases, list(builder.transient))
        state = proof.generic({n: t for n, t in self.own.items() if n in axes.tensors}, _variances(self.model))
        return proof.Trial(axes, still, state, self.inputs, kept)

    def _freeze(self, axes: Axes, name: str, why: str) -> None:
        tensor, dim = axes.axes[name].members[0]
        resolution = Resolution(self.ties, self.roles, self.tensors, self.hints.name, self.hints.kind)
        for leaf, found in resolution.names.items():
            if found == name:
                freeze_dim(leaf, why)
        del tensor, dim

    def _with_batch_note(self, axes: Axes, trial: proof.Trial) -> Axes:
        if not self.modes[True].any_batch:
            return axes
        flaw = proof.batch_flaw(trial)
        return axes if flaw is None else replace(axes, notes=(*axes.notes, Note("batch size", f"fixed at the example's: {flaw.what}")))


def _unused(size: int) -> Any:
    from fedrolex.slicing.infer import Unknown

    return Unknown(size, "not used by forward on this example")


def _why_nothing(axes: Axes, ties: Ties) -> str:
    if ties.unknown:
        return f"operators without a rule froze it ({', '.join(ties.unknown)})"
    reasons = list(dict.fromkeys(note.what for note in axes.frozen))
    return "; ".join(reasons[:3]) or "every dimension is an input or an output"


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _transient(model: nn.Module) -> list[str]:
    names = []
    for path, module in model.named_modules():
        names.extend(f"{path}.{n}" if path else n for n in module._non_persistent_buffers_set)
    return names


def _variances(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if name.endswith("running_var")]


def _run(captured: Captured, tensors: Mapping[str, Tensor], values: Sequence[Tensor]) -> list[Any]:
    """Run a captured graph at full width on given tensors."""
    program = Program(captured, {}, (), {})
    holder = nn.Module()
    holder.slicing_device = values[0].device  # type: ignore[assignment]
    from fedrolex.slicing.submodel import _register

    for name, tensor in tensors.items():
        _register(holder, name, tensor.detach().clone(), persistent=False)
    for name, module in captured.modules.items():
        _register(holder, name, module, persistent=False)
    return list(program.function({})(holder, *values))
