"""A traced graph for any widths: the same operations, with every constant that is a width recomputed.

A :class:`Program` is one mode (training or evaluation) of one model. :meth:`Program.graph` is its graph at
given widths, which :func:`compiled` turns into plain Python code; the code reads its tensors (see :func:`register`),
its device and its dtype from the module that it is called on.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedrolex.slicing.capture import Captured
from fedrolex.slicing.layout import Cat, Fixed, Layout, Prod, Ref, has_axis, size

LAYOUT = (Fixed, Ref, Prod, Cat)
aten = torch.ops.aten


@dataclass(frozen=True)
class Change:
    """New arguments of one node; a :data:`Layout` in them stands for its size.

    Attributes:
        arguments: schema argument name to new value.
        operator: another ATen operator to call instead, with exactly ``arguments``; None in them stands for
            the tensor the node worked on.
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
        axis: the dimension it was (probably) computed from.
        power: value = size ** power.
        follows: whether sub-models use their own width instead of the full one.
    """

    node: str
    argument: str
    value: float
    axis: Layout
    power: float
    follows: bool

    def factor(self, widths: Mapping[str, int], full: Mapping[str, int]) -> float:
        """What a sub-model of these widths multiplies the number by."""
        return float((size(self.axis, widths) / size(self.axis, full)) ** self.power) if self.follows else 1.0


@dataclass(frozen=True)
class Program:
    """One mode of a model.

    Attributes:
        captured: the graph at full width.
        changes: node name to its width-dependent arguments.
        scales: numbers derived from widths.
        full: full size of every axis.
        dtype: the model's dtype when it was traced; where the graph names it, sub-models use their own.
    """

    captured: Captured
    changes: Mapping[str, Change]
    scales: Sequence[Scale]
    full: Mapping[str, int]
    dtype: torch.dtype

    def graph(self, widths: Mapping[str, int]) -> fx.Graph:
        """The graph at these widths; see :func:`compiled`."""
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        factors = {(s.node, s.argument): s.factor(widths, self.full) for s in self.scales}
        for node in self.captured.graph.nodes:
            if node.op == "get_attr":
                values[node] = graph.create_node("get_attr", node.target, name=node.name)
                continue
            if node.target is aten.sym_size.int:  # a size is asked of the tensor itself, which vmap can follow
                values[node] = graph.call_method("size", tuple(fx.map_arg(node.args, lambda n: values[n])))
                continue
            copied = values[node] = graph.node_copy(node, lambda n: values[n])
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                if node.name in self.changes:
                    self._change(copied, self.changes[node.name], widths)
                self._adapt(node.name, copied, factors)
        return graph

    def _change(self, node: fx.Node, change: Change, widths: Mapping[str, int]) -> None:
        named = arguments_of(node)
        sized = _Sizes(node, widths, self.full)
        if change.operator is not None:
            if not any(_depends(value) for value in change.arguments.values()) and "." not in change.operator:
                return
            name, _, overload = change.operator.partition(".")
            node.target = getattr(getattr(aten, name), overload or "default")
            first = next(v for v in named.values() if isinstance(v, fx.Node))
            named = {k: first if v is None else sized(v, None) for k, v in change.arguments.items()}
        else:
            for name, new in change.arguments.items():
                if _depends(new) or not isinstance(new, LAYOUT):
                    named[name] = sized(new, named.get(name))
        set_arguments(node, named)

    def _adapt(self, name: str, node: fx.Node, factors: Mapping[tuple[str, str], float]) -> None:
        """Numbers derived from widths, and the module's own device and dtype."""
        named = arguments_of(node)
        for argument, value in named.items():
            factor = factors.get((name, argument), 1.0)
            if factor != 1.0 and isinstance(value, fx.Node):
                with node.graph.inserting_before(node):
                    named[argument] = node.graph.call_function(aten.mul.Tensor, (value, factor))
            elif factor != 1.0:
                named[argument] = value * factor
            elif isinstance(value, torch.device):
                named[argument] = _own(node, "slicing_device")
            elif value is self.dtype:
                named[argument] = _own(node, "slicing_dtype")
        if named.get("dtype") is None and self._makes_default_dtype(node):
            named["dtype"] = _own(node, "slicing_dtype")
        set_arguments(node, named)

    def _makes_default_dtype(self, node: fx.Node) -> bool:
        """Whether a node makes a tensor of the model's dtype out of nothing, without saying so."""
        assert isinstance(node.target, torch._ops.OpOverload)
        takes = node.target._schema.arguments
        makes = any(a.name == "dtype" for a in takes) and not any("Tensor" in str(a.type) for a in takes)
        given = any("dtype" in arg.meta for arg in node.all_input_nodes)
        return makes and not given and node.meta.get("dtype") is self.dtype


def compiled(graph: fx.Graph) -> Callable[..., tuple[Any, ...]]:
    """A graph as code, to be called as ``function(module, *inputs)``."""
    code = fx.GraphModule({}, fx.Graph(), class_name="SubModelCode")
    code.graph = graph  # given late, so that its tensors need no place here: one may be called "code" or "graph"
    return type(code).forward


def _depends(value: Any) -> bool:
    if isinstance(value, list):
        return any(_depends(item) for item in value)
    return isinstance(value, LAYOUT) and has_axis(value)


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


def _own(before: fx.Node, attribute: str) -> fx.Node:
    """An attribute of the module the code runs on."""
    with before.graph.inserting_before(before):
        return before.graph.create_node("get_attr", attribute)


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments given to an ATen call, by schema name; defaults are left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def set_arguments(node: fx.Node, named: Mapping[str, Any]) -> None:
    """Write arguments back, by keyword from the first one that was left out."""
    assert isinstance(node.target, torch._ops.OpOverload)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name not in named:
            continue
        if argument.kwarg_only or len(args) != place:
            kwargs[argument.name] = named[argument.name]
        else:
            args.append(named[argument.name])
    node.args, node.kwargs = tuple(args), kwargs


def register(root: nn.Module, name: str, value: Any, *, persistent: bool = False) -> None:
    """Give ``root`` a parameter, buffer or module under a dotted name, making the modules in between."""
    *path, last = name.split(".")
    for step in path:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    elif isinstance(value, Tensor):
        root.register_buffer(last, value, persistent=persistent)
    elif not hasattr(root, last):
        root.add_module(last, value)
