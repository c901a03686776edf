"""A module as one flat graph of ATen operations, through ``torch.export``.

The graph is the only view of the model the rest of slicing has: no module classes, no attributes, no
names of layers beyond those of its tensors. Training and evaluation are two graphs of the same tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from fedrolex.core import FedrolexError
from fedrolex.slicing.complaints import one_line, quiet
from fedrolex.slicing.inputs import UNBOUNDED, Inputs, Limits, is_sentence
from fedrolex.slicing.modes import twin

PREFIX = "model."


class SingleDraws(TorchFunctionMode):
    """Watches out for single random numbers, with which models choose layers to leave out.

    Attributes:
        as_one: whether 1 is given in place of such a number: a layer that a small draw leaves out never is.
        drawn: whether such a number was drawn.
    """

    def __init__(self, *, as_one: bool) -> None:
        super().__init__()
        self.as_one = as_one
        self.drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        single = func is torch.rand and all(n == 1 for n in pytree.tree_leaves((kwargs or {}).get("size", args)))
        self.drawn = self.drawn or single
        return _One(1.0) if single and self.as_one else func(*args, **(kwargs or {}))


class _One(float):
    """A draw of 1 that is known: code may compare it, or ask for its ``item()``."""

    def item(self) -> float:
        return 1.0


class _Call(nn.Module):
    """The model as a function of positional tensors: the one calling convention every torch version exports alike."""

    def __init__(self, model: nn.Module, inputs: Inputs, *, whole_layers: bool = False) -> None:
        super().__init__()
        self.model = model
        self.inputs = inputs
        self.whole_layers = whole_layers
        self.left_out: set[str] = set()

    def forward(self, *tensors: Tensor) -> Any:
        with SingleDraws(as_one=True) if self.whole_layers else contextlib.nullcontext():
            return pytree.tree_map(self._plain, self.inputs.call(self.model, tensors))

    def _plain(self, leaf: Any) -> Any:
        """Outputs that are neither tensors nor plain values (a cache object) are left out."""
        if isinstance(leaf, Tensor | int | float | bool | str | None):
            return leaf
        self.left_out.add(type(leaf).__name__)
        return None


@dataclass(eq=False)
class Captured:
    """One mode of a model as a graph.

    Attributes:
        graph: flat graph; placeholders are the input tensors, ``get_attr`` targets are tensor names.
        tensors: every tensor the graph reads that is not an input, by name.
        modules: sub-graphs that higher-order operators call, by name.
        out_spec: how the flat outputs form what the model returned.
        limits: the sizes of inputs that the graph is right for.
        left_out: types of outputs that are not part of the graph.
        whole_layers: whether single random numbers were taken as 1 (:class:`SingleDraws`), for lack of another way.
    """

    graph: fx.Graph
    tensors: dict[str, Tensor]
    modules: dict[str, nn.Module] = field(default_factory=dict)
    out_spec: Any = None
    limits: Limits = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    whole_layers: bool = False


def capture(model: nn.Module, inputs: Inputs, wanted: Mapping[str, bool]) -> Captured:
    """Export a copy of ``model`` with its sub-modules in the modes ``wanted``, batch size free where it allows.

    Raises:
        FedrolexError: the model does not accept the example, or cannot be exported; the line says why.
    """
    draws = _draws_single_numbers(_Call(twin(model, wanted), inputs), inputs)
    wrapped, program = _export(model, inputs, wanted, draws)
    with quiet():
        unlifted = program.module(check_guards=False)
    left_out = tuple(sorted(wrapped.left_out))
    limits = _limits(program, inputs)
    captured = Captured(fx.Graph(), {}, {}, program.call_spec.out_spec, limits, left_out, wrapped.whole_layers)
    placeholders = (captured.graph.placeholder(n.name) for n in unlifted.graph.nodes if n.op == "placeholder")
    captured.graph.output(tuple(_flatten(unlifted, placeholders, captured)))
    own = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    captured.tensors = {name: own.get(name, tensor) for name, tensor in captured.tensors.items()}
    for tensor in (*wrapped.parameters(), *wrapped.buffers()):  # programs are cycles: the copy would stay for a while
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return captured


def _draws_single_numbers(wrapped: nn.Module, inputs: Inputs) -> bool:
    """Whether the model draws single random numbers; raise where it does not take the example at all."""
    draws = SingleDraws(as_one=False)
    try:
        with torch.no_grad(), quiet(), draws:
            wrapped(*(value.clone() for value in inputs.values))
    except Exception as error:
        raise FedrolexError(f"the model does not accept the example ({inputs}): {one_line(error)}") from error
    return draws.drawn


def _export(model: nn.Module, inputs: Inputs, wanted: Mapping[str, bool], draws: bool) -> tuple[_Call, Any]:
    """What was exported, and its program: free in the sizes of batch and sentences, or of the batch, or in none.

    Where that fails and the model ``draws`` single random numbers, they are taken as 1. Every try has a copy of its
    own: one that fails leaves traces in what a model remembers.
    """
    auto = torch.export.Dim.AUTO
    batch = tuple({0: auto} if value.dim() else None for value in inputs.values)
    sentences = tuple(
        {0: auto, 1: auto} if is_sentence(value) else free for value, free in zip(inputs.values, batch, strict=True)
    )
    free = [(sentences,), (batch,), None] if sentences != batch else [(batch,), None]
    failure: Exception | None = None
    for whole_layers, shapes in itertools.product((False, True) if draws else (False,), free):
        wrapped = _Call(twin(model, wanted), inputs, whole_layers=whole_layers)
        try:
            with quiet():
                values = tuple(value.clone() for value in inputs.values)
                return wrapped, torch.export.export(wrapped, values, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise FedrolexError(f"the model cannot be traced by torch.export: {one_line(failure)}") from failure


def _limits(program: Any, inputs: Inputs) -> Limits:
    """Sizes the exported graph is right for: the batch, and what export says about free sizes."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    found: Limits = {}
    for place, (name, example) in enumerate(zip(program.graph_signature.user_inputs, inputs.values, strict=True)):
        traced = placeholders[name].meta["val"]
        for dim, size in enumerate(traced.shape):
            if isinstance(size, int):
                if dim == 0:
                    found[place, dim] = (example.shape[0], example.shape[0])
                continue
            allowed = program.range_constraints.get(size.node.expr)
            if allowed is not None:
                low, high = int(allowed.lower), int(min(allowed.upper, UNBOUNDED))
                found[place, dim] = (low if low > 2 else 0, high)
    return {where: span for where, span in found.items() if span != (0, UNBOUNDED)}


# --- flattening: sub-graphs inlined, guards dropped, names without the wrapper's prefix ---


def _flatten(module: fx.GraphModule, given: Iterator[Any], into: Captured, path: str = "") -> list[Any]:
    """Copy a graph into the flat one, with what is ``given`` for its placeholders; returns its flat outputs."""
    values: dict[fx.Node, Any] = {}
    *nodes, output = module.graph.nodes
    for node in nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        else:
            _copy(module, node, values, into, path)
    return [values[n] if isinstance(n, fx.Node) else n for n in pytree.tree_leaves(output.args)]


def _copy(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], into: Captured, path: str) -> None:
    """Copy one node into the flat graph, inlining sub-graphs that only switch gradients or autocast off.

    Other sub-graphs (a scan, a branch) are kept as they are: their operands will be frozen.
    """

    def known(n: fx.Node) -> Any:
        value = values[n]
        return into.graph.create_node("get_attr", value[1][:-1]) if isinstance(value, tuple) else value

    if node.op == "call_module":
        if "guard" in str(node.target):
            return
        raise FedrolexError(f"the exported graph calls a module ({node.target}): this is not supported")
    if node.op == "get_attr":
        target = f"{path}{node.target}"
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, Tensor):
            name = target.removeprefix(PREFIX) if not path else target
            into.tensors[name] = value
            values[node] = into.graph.create_node("get_attr", name)
        else:
            values[node] = (value, f"{target}.")
            into.modules[target] = value
        return
    name = getattr(node.target, "__name__", str(node.target))
    if "assert" in name or name == "_guards_fn":
        return
    if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
        _inline(node, values, into, gradients=name == "wrap_with_set_grad_enabled")
        return
    args: Any = fx.map_arg(node.args, known)
    kwargs = fx.map_arg(node.kwargs, known)
    if name == "getitem" and isinstance(args[0], list):
        values[node] = args[0][args[1]]
        return
    values[node] = into.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    made = node.meta.get("val")
    values[node].meta = {"dtype": made.dtype} if isinstance(made, Tensor) else {}


def _inline(node: fx.Node, values: dict[fx.Node, Any], into: Captured, gradients: bool) -> None:
    place = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and isinstance(values[arg], tuple))
    subgraph, path = values[node.args[place]]  # type: ignore[index]
    enabled = node.args[0] if gradients else node.args[2]
    if not gradients and enabled:
        raise FedrolexError("the model switches autocast on inside forward: trace it without, put autocast around it")
    given = (values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args[place + 1 :])
    graph = into.graph
    if gradients:
        before = graph.call_function(torch.is_grad_enabled)
        graph.call_function(torch._C._set_grad_enabled, (enabled,))
    values[node] = _flatten(subgraph, given, into, path)
    into.modules.pop(path[:-1], None)
    if gradients:
        graph.call_function(torch._C._set_grad_enabled, (before,))
