"""``trace(model, example)``: the axes of any module, derived from what it computes, and proved.

Capture both modes, check that the graphs are the module, walk them, decide, prove; what fails alone is frozen.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedrolex.core import FedrolexError, check_words, in_one_line
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.axis import Kind, Note, Role
from fedrolex.slicing.capture import Captured, capture
from fedrolex.slicing.complaints import one_line
from fedrolex.slicing.fidelity import Beside, generic, unlike
from fedrolex.slicing.infer import Unknown, freeze
from fedrolex.slicing.inputs import FEW, Inputs, Limits, limit_in_words
from fedrolex.slicing.layout import show
from fedrolex.slicing.modes import both_modes
from fedrolex.slicing.program import Program
from fedrolex.slicing.proof import WIDTHS, Trial
from fedrolex.slicing.resolve import Resolution, Scaling, apply_overrides
from fedrolex.slicing.rules.contractions import SPATIAL
from fedrolex.slicing.sizes import pinned
from fedrolex.slicing.submodel import GraphBuilder
from fedrolex.slicing.switches import evaluation_of, without_chance
from fedrolex.slicing.walk import INPUT, Ties, walk

TYPICAL = Fraction(1, 4)  # the capacity at which a trace looks whether much can be cut
Factory = Callable[[Mapping[str, int]], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Hints:
    """What a model, or its user, knows about its axes.

    Attributes:
        freeze: tensors (``embed.weight``) or dimensions (``head.weight:0``) to keep whole; ``*`` allowed.
        name: ``tensor:dim`` pattern, or a derived name, to the name wanted.
        tie: groups of ``tensor:dim`` that must share their indices.
        kind: axis name to kind, e.g. ``{"attn.heads": "width"}`` to cut heads.
        factory: builds the module for given axis sizes, instead of the traced graph.
        scaling: which numbers that are a power of a width (1/√d) use the sub-model's own: those that are beyond
            coincidence (``own-width``), none (``keep``) or every one that is reported (``all``).
        evaluation_only: trace evaluation alone and train sub-models on it: dropout off, norms on running
            statistics. For models whose training mode cannot be captured.
    """

    freeze: Sequence[str] = ()
    name: Mapping[str, str] = field(default_factory=dict)
    tie: Sequence[Sequence[str]] = ()
    kind: Mapping[str, Kind] = field(default_factory=dict)
    factory: Factory | None = None
    scaling: Scaling = "own-width"
    evaluation_only: bool = False

    def __post_init__(self) -> None:
        check_words("hints", self)
        if self.factory is not None and not callable(self.factory):
            raise FedrolexError(f"hints.factory is a {type(self.factory).__name__}: give a function of axis sizes")


def trace(model: nn.Module, example: Any, hints: Hints | None = None, *, whole: bool = False) -> Axes:
    """Derive and prove the axes of ``model``.

    Args:
        model: any module ``torch.export`` can capture. It is not changed.
        example: what ``forward`` takes: a tensor, a tuple, or a dict of keyword arguments. Other batch sizes, and
            other lengths of integer sequences, work too where the model's code allows; other sizes of images
            and lengths of floats where the code does not ask for them, and are refused otherwise.
        hints: names, freezes and overrides; by default the model's own ``slicing_hints()``, if it has one.
        whole: take a model in which nothing can be cut, too: it is only used as it is.

    Raises:
        FedrolexError: the model cannot be traced, or nothing in it can be cut, or the proof fails.
    """
    if not isinstance(model, nn.Module):
        kind = isinstance(model, type)
        what = f"the class {model.__name__}: give an instance" if kind else f"a {type(model).__name__}"
        raise FedrolexError(f"model is {what}, not an nn.Module")
    if hasattr(model, "_orig_mod"):
        raise FedrolexError("the model is compiled: trace the one it was compiled from (model._orig_mod)")
    hints = own_hints(model) if hints is None else hints
    if not isinstance(hints, Hints):
        raise FedrolexError(f"hints is a {type(hints).__name__}: give Hints(...)")
    if next(iter(model.parameters()), None) is None:
        raise FedrolexError("the model has no parameters: there is nothing to cut")
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise FedrolexError("the model has lazy layers without a size: run it once on the example first")
    hooked = [name or "the model" for name, module in model.named_modules() if module._backward_hooks]
    hooked += [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    if hooked:
        raise FedrolexError(f"{hooked[0]} has a backward hook, which sub-models would not call: remove it")
    inputs = Inputs.of(model, example)
    try:
        tracing = _Trace(model, inputs, hints)
        axes = tracing.proved(whole)
        tracing.let_go()
    except FedrolexError:
        raise
    except Exception as error:
        raise FedrolexError(f"the model could not be traced: {type(error).__name__}: {one_line(error)}") from error
    return axes if hints.factory is None else replace(axes, build=FactoryBuilder(hints.factory))


def own_hints(model: nn.Module) -> Hints:
    """What the model itself says about its axes."""
    own = getattr(model, "slicing_hints", None)
    return own() if callable(own) else Hints()


@dataclass(frozen=True)
class FactoryBuilder:
    """Builds sub-models with the model's own factory; the traced graph only served to derive the axes."""

    factory: Factory
    constants: ClassVar[Mapping[str, Tensor]] = {}

    def __call__(self, widths: Mapping[str, int], constants: Mapping[str, Tensor]) -> nn.Module:
        """The factory's module for these widths."""
        with in_one_line("the factory of the hints failed"):
            made = self.factory(dict(widths))
        if not isinstance(made, nn.Module):
            raise FedrolexError(f"the factory of the hints gives a {type(made).__name__}: let it give an nn.Module")
        return made


class _Trace:
    """One trace: capture both modes, walk them, decide, prove."""

    def __init__(self, model: nn.Module, inputs: Inputs, hints: Hints) -> None:
        self.model, self.inputs, self.hints = model, inputs, hints
        self.few = inputs.few()
        self.notes: list[Note] = []
        self.own: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.aliases = _aliases(model, self.own)
        self.dtype = next((t.dtype for t in self.own.values() if t.is_floating_point()), torch.float32)
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
        """The graphs for training (True) and evaluation (False), each checked against the module."""
        on, off = both_modes(self.model)
        if self.hints.evaluation_only:
            self.notes.append(Note("training mode", "is evaluation: dropout off, norms on running statistics"))
            evaluation = self._graph(off, "in evaluation")
            return {True: evaluation, False: evaluation}
        if not all(on.values()):
            some = next(name for name, mode in on.items() if not mode)
            self.notes.append(Note("training mode", f"as the model is now: {some} stays in evaluation"))
        try:
            training = self._graph(on, "in training")
        except FedrolexError as failure:
            try:
                self._graph(off, "in evaluation")
            except FedrolexError:
                raise failure from failure.__cause__
            remedy = "evaluation can be traced: Hints(evaluation_only=True), or --evaluation-only, cuts that"
            raise FedrolexError(f"{failure}; {remedy}") from failure
        switched = evaluation_of(training)
        if switched is None or unlike(Beside(self.model, switched, self.few, off)) is not None:
            switched = self._graph(off, "in evaluation")
        return {True: training, False: switched}

    def _graph(self, modes: Mapping[str, bool], when: str) -> Captured:
        """The graph in these modes, tied tensors under their first name, if it does what the module does."""
        captured = capture(self.model, self.inputs, modes)
        for node in captured.graph.nodes:
            if node.op == "get_attr":
                node.target = self.aliases.get(str(node.target), node.target)
        captured.tensors = {self.aliases.get(n, n): t for n, t in captured.tensors.items()}
        flaw, limits = self._compared(captured, modes)
        if flaw is not None:
            raise FedrolexError(f"the traced graph is not what the model computes {when}: {flaw}")
        captured.limits |= limits
        return captured

    def _compared(self, captured: Captured, modes: Mapping[str, bool]) -> tuple[str | None, Limits]:
        """How the graph differs from the module, and the sizes it is bound to: on few samples, if it takes so few."""
        batch = [span for (_, dim), span in captured.limits.items() if dim == 0]
        if not all(low <= FEW <= high for low, high in batch):
            self.few = self.inputs
        beside = Beside(self.model, captured, self.few, modes)
        flaw = unlike(beside)
        limits = {} if flaw else pinned(beside)
        if self.few is not self.inputs and (flaw or any(dim == 0 for _, dim in limits)):
            self.few = self.inputs
            return self._compared(captured, modes)
        return flaw, limits

    def _walk(self) -> Ties:
        ties = Ties()
        for mode in dict.fromkeys((self.modes[True], self.modes[False])):
            walk(mode, self.inputs.values, ties)
            if not ties.walks[-1].kept:
                kinds = ", ".join(mode.left_out) or "nothing"
                raise FedrolexError(f"the model returns no tensor that can be reached ({kinds}): return tensors")
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
            scales = resolution.scales(seen.scalars, self.hints.scaling)
            programs[mode] = Program(self.modes[mode], resolution.changes(seen.edits), scales, full, self.dtype)
            kept[mode] = seen.kept
        transient = _transient(self.model)
        notes = (*self.notes, *self._notes(programs[True]))
        builder = GraphBuilder(programs, self.inputs, layouts, self.tensors, self.aliases, transient)
        axes = Axes(found, layouts, self.aliases, tuple(resolution.frozen()), notes, builder)
        still = {mode: replace(p, captured=without_chance(p.captured)) for mode, p in programs.items()}
        calm = GraphBuilder(still, self.inputs, layouts, self.tensors, self.aliases, transient)
        return resolution, Trial(axes, calm, generic(self.own), self.few, kept)

    def proved(self, whole: bool) -> Axes:
        """Axes that pass every proof; an axis that fails on its own is frozen and reported."""
        while True:
            resolution, trial = self._decide()
            axes = trial.axes
            if not axes.cut_axes:
                if whole:
                    return axes
                raise FedrolexError(f"no axis of this model can be cut: {self._why_nothing(axes)}")
            flaw, failing = _try(trial)
            if flaw is None:
                return replace(axes, notes=(*axes.notes, *_little(axes)))
            if not failing:
                raise FedrolexError(f"the derived axes could not be proved, so this model is refused: {flaw}")
            for leaf, name in resolution.names.items():
                if name in failing:
                    freeze(leaf, f"failed its proof: {failing[name]}")

    def let_go(self) -> None:
        """Axes may outlive the model: they keep none of its weights."""
        for mode in self.modes.values():
            mode.tensors.clear()

    def _notes(self, program: Program) -> list[Note]:
        notes = []
        for scale in program.scales:
            power = {0.5: "√", -0.5: "1/√", 1.0: "", -1.0: "1/", 0.25: "∜", -0.25: "1/∜"}[scale.power]
            does = "sub-models use their own width" if scale.follows else "kept as it is"
            notes.append(Note(scale.node, f"{scale.value:.6g} = {power}size of {show(scale.axis)}: {does}"))
        for name, count in self.ties.without_rule.items():
            notes.append(Note(name, f"no rule for this operator ({count} uses): what it touches is frozen"))
        exposed = max(len(one.exposed) for one in self.ties.walks)
        if exposed:
            notes.append(Note("outputs", f"inner values are returned too ({exposed}): sub-models return narrower ones"))
        if any(mode.whole_layers for mode in self.modes.values()):
            notes.append(Note("chance", "a single random number decides what is run: taken as 1, no layer is dropped"))
        for mode in dict.fromkeys(self.modes.values()):
            notes.extend(Note("outputs", f"a {kind} cannot be taken apart and is left out") for kind in mode.left_out)
            for (place, dim), (low, high) in mode.limits.items():
                what = f"must be {limit_in_words(low, high)}"
                notes.append(Note(f"dimension {dim} of {self.inputs.names[place]}", what))
        return list(dict.fromkeys(notes))

    def _why_nothing(self, axes: Axes) -> str:
        if self.ties.without_rule:
            return f"there is no rule for {', '.join(self.ties.without_rule)}"
        plain = (SPATIAL, INPUT)
        reasons = list(dict.fromkeys(note.what for note in axes.frozen if note.what not in plain))
        failed = [why for why in reasons if why.startswith("failed its proof")]
        return "; ".join((failed or reasons)[:3]) or "there is nothing between its inputs and its outputs"


def _try(trial: Trial) -> tuple[str | None, dict[str, str]]:
    """The first proof that fails, and the axes that fail it on their own."""
    flaw = trial.permutation()
    if flaw is not None:
        alone = {name: trial.permutation([name]) for name in trial.axes.axes}
        return flaw, {name: why for name, why in alone.items() if why is not None}
    for beta in WIDTHS:
        flaw = trial.narrower(beta)
        if flaw is not None:
            alone = {axis.name: trial.narrower(beta, [axis.name]) for axis in trial.axes.cut_axes}
            return flaw, {name: why for name, why in alone.items() if why is not None}
    return None, {}


def _little(axes: Axes) -> list[Note]:
    """A warning where sub-models are hardly smaller than the model."""
    share = axes.parameters(TYPICAL) / axes.parameters()
    what = f"sub-models of capacity {TYPICAL} keep {share:.0%} of them: little can be cut, see what is frozen and why"
    return [Note("parameters", what)] if share > 0.5 else []


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
