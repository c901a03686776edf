"""A traced graph for any widths: the same operations, with every constant that is a width recomputed.

A :class:`Program` is one mode (training or evaluation) of one model. :meth:`Program.function` turns it
into plain Python code for given widths; the code reads its tensors from the module it is called on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fedrolex.slicing.capture import Captured
from fedrolex.slicing.layout import Cat, Fixed, Layout, Prod, Ref, refs, size

LAYOUT = (Fixed, Ref, Prod, Cat)


@dataclass(frozen=True)
class Change:
    """New arguments of one node; a :data:`Layout` in them stands for its size.

    Attributes:
        arguments: schema argument name to new value.
        operator: another ATen operator to call instead, with exactly ``arguments``.
    """

    arguments: Mapping[str, Any]
    operator: str | None = None


@dataclass(frozen=True)
class Scale:
    """A number in the graph that is a power of an axis' size, such as 1/√d.

    Attributes:
        node: operation that holds it.
        argument: which of its arguments.
        value: the number in the full model.
        axis: the axis it was (probably) computed from.
        power: value = size ** power.
        follows: whether sub-models use their own width instead of the full one.
    """

    node: str
    argument: str
    value: float
    axis: Layout
    power: float
    follows: bool

    def at(self, widths: Mapping[str, int], full: Mapping[str, int]) -> float:
        """The number a sub-model of these widths uses."""
        if not self.follows:
            return self.value
        return self.value * float((size(self.axis, widths) / size(self.axis, full)) ** self.power)


@dataclass(frozen=True)
class Program:
    """One mode of a model.

    Attributes:
        captured: the graph at full width.
        changes: node name to its width-dependent arguments.
        scales: numbers derived from widths.
        full: full size of every axis.
    """

    captured: Captured
    changes: Mapping[str, Change]
    scales: Sequence[Scale]
    full: Mapping[str, int]

    def function(self, widths: Mapping[str, int], *, wide: bool = False) -> Callable[..., tuple[Any, ...]]:
        """Code for these widths, to be called as ``function(module, *inputs)``.

        Args:
            widths: size of every axis.
            wide: compute in float64 where the graph says float32 (for proofs).
        """
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        scales = {(s.node, s.argument): s.at(widths, self.full) for s in self.scales}
        for node in self.captured.graph.nodes:
            if node.op == "get_attr":
                values[node] = graph.create_node("get_attr", node.target, name=node.name)
                continue
            copied = graph.node_copy(node, lambda n: values[n])
            values[node] = copied
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            if node.name in self.changes:
                self._change(copied, self.changes[node.name], widths)
            named = arguments_of(copied)
            for argument in named:
                if (node.name, argument) in scales:
                    named[argument] = scales[node.name, argument]
                elif isinstance(named[argument], torch.device):
                    named[argument] = _device_of(graph, copied)
                elif wide and named[argument] is torch.float32:
                    named[argument] = torch.float64
            set_arguments(copied, named)
        placeholders = {str(node.target): None for node in graph.nodes if node.op == "get_attr"}
        code = fx.GraphModule(placeholders, graph, class_name="SubModelCode")
        return type(code).forward

    def _change(self, node: fx.Node, change: Change, widths: Mapping[str, int]) -> None:
        named = arguments_of(node)
        sized = _Sizes(node, widths, self.full)
        if change.operator is not None:
            if not any(_depends(value) for value in change.arguments.values()):
                return
            node.target = getattr(torch.ops.aten, change.operator).default
            first = next(v for v in named.values() if isinstance(v, fx.Node))
            named = {k: first if v is None else sized(v, None) for k, v in change.arguments.items()}
        else:
            for name, new in change.arguments.items():
                if _depends(new) or not isinstance(new, LAYOUT):
                    named[name] = sized(new, named.get(name))
        set_arguments(node, named)


def _depends(value: Any) -> bool:
    if isinstance(value, list):
        return any(_depends(item) for item in value)
    return isinstance(value, LAYOUT) and any(True for _ in refs(value))


@dataclass(frozen=True)
class _Sizes:
    """Turns layouts into numbers for one node of the new graph."""

    node: fx.Node
    widths: Mapping[str, int]
    full: Mapping[str, int]

    def __call__(self, new: Any, old: Any) -> Any:
        """``new`` with layouts as numbers; a size that no axis is part of (the batch) stays as it was."""
        if isinstance(new, list):
            before = list(old) if isinstance(old, list | tuple) else [None] * len(new)
            return [self(n, o) for n, o in zip(new, before, strict=True)]
        if not isinstance(new, LAYOUT):
            return new
        if old == -1 or (old is not None and not _depends(new)):
            return old
        return self._scaled(new, old) if isinstance(old, fx.Node) else size(new, self.widths)

    def _scaled(self, new: Layout, old: fx.Node) -> fx.Node:
        """A size computed at run time from the batch and an axis (batch × heads), for the axis' new width."""
        after, before = size(new, self.widths), size(new, self.full)
        if after == before:
            return old
        graph = self.node.graph
        with graph.inserting_before(self.node):
            return graph.call_function(operator.floordiv, (graph.call_function(operator.mul, (old, after)), before))


def _device_of(graph: fx.Graph, before: fx.Node) -> fx.Node:
    """The device the sub-model is on now: tensors the graph makes follow it."""
    with graph.inserting_before(before):
        return graph.create_node("get_attr", "slicing_device")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments given to an ATen call, by schema name; defaults are left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def set_arguments(node: fx.Node, named: Mapping[str, Any]) -> None:
    """Write arguments back, by keyword wherever one before was left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in node.target._schema.arguments:
        if argument.name not in named:
            continue
        if len(args) == len(kwargs) == 0 or not (kwargs or argument.kwarg_only):
            if argument.kwarg_only or len(args) != _place(node.target, argument.name):
                kwargs[argument.name] = named[argument.name]
            else:
                args.append(named[argument.name])
        else:
            kwargs[argument.name] = named[argument.name]
    node.args, node.kwargs = tuple(args), kwargs


def _place(target: torch._ops.OpOverload, name: str) -> int:
    return [argument.name for argument in target._schema.arguments].index(name)


# --- training and evaluation as two readings of one graph ---

SWITCHES = {"training": False, "train": False, "use_input_stats": False, "dropout_p": 0.0}


def evaluation_of(captured: Captured) -> Captured:
    """The training graph with dropout off and norms on their running statistics.

    That is what evaluation means for most models, not for all (stochastic depth is a Python branch): the
    caller compares the result with the module and captures again where they differ.
    """
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    counters = {name for name, tensor in captured.tensors.items() if not tensor.is_floating_point()}
    for node in captured.graph.nodes:
        if _updates_a_counter(node, counters):
            continue
        values[node] = graph.node_copy(node, lambda n: values[n])
        if isinstance(node.target, torch._ops.OpOverload):
            named = arguments_of(values[node])
            has_statistics = named.get("running_mean", True) is not None
            for argument in SWITCHES:
                if argument in named and has_statistics:
                    named[argument] = SWITCHES[argument]
            set_arguments(values[node], named)
    return Captured(graph, captured.tensors, captured.modules, captured.out_spec, captured.any_batch)


def _updates_a_counter(node: fx.Node, counters: set[str]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.name.endswith("_"):
        return False
    first = node.args[0]
    return isinstance(first, fx.Node) and first.op == "get_attr" and first.target in counters and not node.users


def without_dropout(captured: Captured) -> Captured:
    """The same graph with dropout off and everything else as it is: what a proof can compare."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        values[node] = graph.node_copy(node, lambda n: values[n])
        if isinstance(node.target, torch._ops.OpOverload) and "running_mean" not in arguments_of(values[node]):
            named = arguments_of(values[node])
            for argument in ("train", "dropout_p"):
                if argument in named:
                    named[argument] = SWITCHES[argument]
            set_arguments(values[node], named)
    return Captured(graph, captured.tensors, captured.modules, captured.out_spec, captured.any_batch)
