"""A module as one flat graph of ATen operations, through ``torch.export``.

The graph is the only view of the model the rest of slicing has: no module classes, no attributes, no
names of layers beyond those of its tensors. Training and evaluation are two graphs of the same tensors.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fedrolex.errors import FedrolexError

PREFIX = "model."


@dataclass(frozen=True)
class Inputs:
    """How the model is called: which arguments are tensors, in which order they enter the graph.

    Attributes:
        names: argument names of the tensors, in graph order.
        values: the example tensors.
        others: the remaining arguments, part of the graph as constants.
        parameters: names of the positional parameters of ``forward``, to bind later calls.
    """

    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    others: Mapping[str, Any]
    parameters: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, example: Any) -> Inputs:
        """Read an example: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(example, Tensor):
            args = (example,)
        elif isinstance(example, Mapping):
            kwargs = dict(example)
        elif isinstance(example, list | tuple):
            args = tuple(example)
        else:
            kind = type(example).__name__
            raise FedrolexError(f"example is a {kind}: give a tensor, a tuple of arguments or a dict of keyword ones")
        parameters = positional_parameters(model)
        bound = bind(parameters, args, kwargs)
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        if not tensors:
            raise FedrolexError("example holds no tensor: the model needs at least one to be traced")
        values = tuple(_at_least_two(value) for value in tensors.values())
        others = {name: value for name, value in bound.items() if name not in tensors}
        return Inputs(tuple(tensors), values, others, parameters)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call, in graph order."""
        bound = bind(self.parameters, args, kwargs)
        missing = [name for name in self.names if bound.get(name) is None]
        extra = [
            n
            for n in bound
            if n not in self.names and not (n in self.others and self.others[n] == bound[n]) and bound[n] is not None
        ]
        if missing or extra:
            said = ", ".join(
                [*(f"{n} is missing" for n in missing), *(f"{n} was not part of the trace" for n in extra)]
            )
            raise TypeError(f"this sub-model was traced with ({', '.join(self.names)}): {said}")
        return [bound[name] for name in self.names]


def positional_parameters(model: nn.Module) -> tuple[str, ...]:
    """Names of the arguments of ``model.forward`` that can be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds)


def bind(parameters: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; positional ones beyond the named parameters are called ``arg5``, ``arg6``, …"""
    named = {parameters[i] if i < len(parameters) else f"arg{i}": value for i, value in enumerate(args)}
    for name in kwargs:
        if name in named:
            raise TypeError(f"argument {name} was given twice")
    return {**named, **kwargs}


def _at_least_two(value: Tensor) -> Tensor:
    """Export specialises sizes 0 and 1, so a batch of one is traced as a batch of two."""
    return torch.cat([value, value]) if value.dim() and value.shape[0] == 1 else value


class _Call(nn.Module):
    """The model as a function of positional tensors: the one calling convention every torch version exports alike."""

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.model = model
        self.names = inputs.names
        self.others = dict(inputs.others)
        self.parameters_in_order = inputs.parameters

    def forward(self, *tensors: Tensor) -> Any:
        named = dict(zip(self.names, tensors, strict=True))
        args: list[Any] = []
        for name in [*self.parameters_in_order, *(f"arg{i}" for i in range(len(self.parameters_in_order), 64))]:
            if name in named:
                args.append(named.pop(name))
            elif name in self.others:
                args.append(self.others[name])
            else:
                break
        taken = set([*self.parameters_in_order, *(f"arg{i}" for i in range(64))][: len(args)])
        rest = {name: value for name, value in self.others.items() if name not in taken}
        return pytree.tree_map(_tensor_or_plain, self.model(*args, **named, **rest))


def _tensor_or_plain(leaf: Any) -> Any:
    """Outputs that are neither tensors nor plain values (a cache object) are not part of a sub-model's output."""
    return leaf if isinstance(leaf, Tensor | int | float | bool | str | None) else None


@dataclass(eq=False)
class Captured:
    """One mode of a model as a graph.

    Attributes:
        graph: flat graph; placeholders are the input tensors, ``get_attr`` targets are tensor names.
        tensors: every tensor the graph reads that is not an input, by name.
        modules: sub-graphs that higher-order operators call, by name.
        out_spec: how the flat outputs form what the model returned.
        any_batch: whether the first dimension of the inputs may have any size.
    """

    graph: fx.Graph
    tensors: dict[str, Tensor]
    modules: dict[str, nn.Module] = field(default_factory=dict)
    out_spec: Any = None
    any_batch: bool = True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own warnings and logs about tracing from a user who asked for axes."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def capture(model: nn.Module, inputs: Inputs, *, training: bool) -> Captured:
    """Export ``model`` in one mode, with a free batch size where the model allows one.

    Raises:
        FedrolexError: the model does not accept the example, or cannot be exported; the line says why.
    """
    wrapped = _Call(copy.copy(model), inputs)
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    wrapped.train(training)
    try:
        _accepts(wrapped, inputs)
        program, any_batch = _export(wrapped, inputs)
    finally:
        for module, mode in modes.items():
            module.training = mode
    with quiet():
        unlifted = program.module(check_guards=False)
    captured = Captured(fx.Graph(), {}, out_spec=program.call_spec.out_spec, any_batch=any_batch)
    _flatten(unlifted, captured)
    return captured


def one_line(error: BaseException) -> str:
    """The first telling line of an exception's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 240 else text[:237] + "..."


def _accepts(wrapped: nn.Module, inputs: Inputs) -> None:
    saved = {name: buffer.clone() for name, buffer in wrapped.named_buffers()}
    try:
        with torch.no_grad(), quiet():
            wrapped(*inputs.values)
    except Exception as error:
        shapes = ", ".join(
            f"{n}: {tuple(v.shape)} {str(v.dtype).removeprefix('torch.')}"
            for n, v in zip(inputs.names, inputs.values, strict=True)
        )
        raise FedrolexError(f"the model does not accept the example ({shapes}): {one_line(error)}") from error
    finally:
        for name, buffer in wrapped.named_buffers():
            if name in saved and saved[name].shape == buffer.shape:
                buffer.copy_(saved[name])


def _export(wrapped: nn.Module, inputs: Inputs) -> tuple[Any, bool]:
    auto = torch.export.Dim.AUTO
    batch = tuple({0: auto} if value.dim() else None for value in inputs.values)
    sentences = tuple(
        {0: auto, 1: auto} if value.dim() == 2 and not value.is_floating_point() else free
        for value, free in zip(inputs.values, batch, strict=True)
    )
    failure: Exception | None = None
    for shapes in ((sentences,), (batch,), None):
        try:
            with quiet():
                program = torch.export.export(wrapped, inputs.values, dynamic_shapes=shapes, strict=False)
            return program, shapes is not None and _batch_is_free(program)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    raise FedrolexError(f"the model cannot be traced by torch.export: {one_line(failure)}") from failure


def _batch_is_free(program: Any) -> bool:
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    users = [placeholders[name].meta["val"] for name in program.graph_signature.user_inputs if name in placeholders]
    return all(not isinstance(value.shape[0], int) for value in users if isinstance(value, Tensor) and value.dim())


# --- flattening: higher-order regions inlined, guards dropped, names without the wrapper's prefix ---


def _flatten(module: fx.GraphModule, into: Captured) -> None:
    graph = into.graph
    values: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = graph.placeholder(node.name)
            values[node].meta = dict(node.meta)
        elif node.op == "output":
            flat, _ = pytree.tree_flatten(node.args)
            graph.output(tuple(values[n] if isinstance(n, fx.Node) else n for n in flat))
        else:
            _copy(module, module, node, values, into, "")


def _copy(
    root: fx.GraphModule, module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], into: Captured, path: str
) -> None:
    """Copy one node into the flat graph, inlining regions that only switch gradients or autocast off."""

    def known(n: fx.Node) -> Any:
        return values[n]

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
        _inline(root, node, values, into, detach=name == "wrap_with_set_grad_enabled")
        return
    if any(isinstance(values.get(n), tuple) for n in node.all_input_nodes):
        _keep_region(node, values, into)
        return
    args: Any = fx.map_arg(node.args, known)
    kwargs = fx.map_arg(node.kwargs, known)
    if name == "getitem" and isinstance(args[0], list):
        values[node] = args[0][args[1]]
        return
    values[node] = into.graph.create_node("call_function", node.target, args, kwargs, name=node.name)
    values[node].meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}


def _inline(root: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any], into: Captured, detach: bool) -> None:
    place = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and isinstance(values[arg], tuple))
    region, path = values[node.args[place]]  # type: ignore[index]
    enabled = node.args[0] if detach else node.args[2]
    if not detach and enabled:
        raise FedrolexError(
            "the model switches autocast on inside forward: trace it without, and use autocast around it"
        )
    given = [values[arg] if isinstance(arg, fx.Node) else arg for arg in node.args[place + 1 :]]
    inner: dict[fx.Node, Any] = {}
    for below in region.graph.nodes:
        if below.op == "placeholder":
            inner[below] = given.pop(0)
        elif below.op == "output":
            results = [inner[n] if isinstance(n, fx.Node) else n for n in pytree.tree_leaves(below.args[0])]
        else:
            _copy(root, region, below, inner, into, path)
    into.modules.pop(path[:-1], None)
    if detach and not enabled:
        results = [
            into.graph.call_function(torch.ops.aten.detach.default, (r,)) if isinstance(r, fx.Node) else r
            for r in results
        ]
    values[node] = results


def _keep_region(node: fx.Node, values: dict[fx.Node, Any], into: Captured) -> None:
    """A region we do not look into (a scan, a branch): kept as it is, its operands will be frozen."""

    def known(n: fx.Node) -> Any:
        value = values[n]
        if isinstance(value, tuple):
            return into.graph.create_node("get_attr", value[1][:-1])
        return value

    args, kwargs = fx.map_arg(node.args, known), fx.map_arg(node.kwargs, known)
    values[node] = into.graph.create_node("call_function", node.target, args, kwargs, name=node.name)


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
