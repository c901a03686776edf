"""Is the captured graph the module?

Proofs reason about the graph. Before they do, the graph is run beside the module: the same weights, the
same random numbers, and then outputs, gradients and buffers must agree. What export does not see (a custom
backward, a buffer that is reassigned) shows here.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fedrolex.slicing.capture import Captured, SingleDraws
from fedrolex.slicing.complaints import one_line, quiet
from fedrolex.slicing.inputs import Inputs
from fedrolex.slicing.modes import twin
from fedrolex.slicing.program import Program, compiled, register


def generic(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy of ``state`` in which no floating tensor is constant.

    Weights that vary keep their values; constant ones (norms, zero biases, zero heads, layer scales) get
    noise around their value. Variances stay positive.
    """
    generator = torch.Generator().manual_seed(20220)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        value = tensor.detach().clone()
        if value.is_floating_point() and value.numel() > 1 and bool((value == value.flatten()[0]).all()):
            noise = torch.rand(value.shape, generator=generator, dtype=torch.float64).to(value)
            first = float(value.flatten()[0])
            if name.endswith("running_var"):
                value = 0.5 + noise
            elif abs(first) > 0.05:
                value = value * (0.5 + noise)
            else:
                value = (noise - 0.5) * 0.6
        result[name] = value
    return result


def distance(a: Tensor, b: Tensor) -> float:
    """Relative distance ‖a − b‖ / ‖b‖; 0 for equal tensors, NaNs and infinities in the same places included."""
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return float("inf")
    error = float(torch.linalg.vector_norm((a - b)[~same]))
    scale = float(torch.linalg.vector_norm(b[b.isfinite()]))
    return error / scale if scale > 0 else float("inf")


@dataclass(frozen=True)
class Ran:
    """One run of a module or of a graph: what came out, gradients of its parameters, its buffers afterwards."""

    structure: Any
    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Beside:
    """A module and a graph of it, to be run on the same weights and with the same random numbers.

    Attributes:
        model: the module; it is never run itself, only copies are.
        captured: the graph.
        inputs: the example.
        wanted: the mode of every sub-module.
    """

    model: nn.Module
    captured: Captured
    inputs: Inputs
    wanted: Mapping[str, bool]

    def module_on(self, values: Sequence[Tensor], *, gradients: bool = False) -> Ran | str:
        """What the module does with these inputs, or in one line why it does not take them."""
        module = twin(self.model, self.wanted, self._state)
        module.zero_grad()

        def call() -> Any:
            with SingleDraws(as_one=True) if self.captured.whole_layers else nullcontext():
                return self.inputs.call(module, [v.clone() for v in values])

        return _measure(call, module, gradients)

    def graph_on(self, values: Sequence[Tensor], *, gradients: bool = False) -> Ran | str:
        """What the graph does with these inputs, or in one line why it does not take them."""
        holder, captured = self._holder(), self.captured

        def call() -> Any:
            return pytree.tree_unflatten(list(self._function(holder, *(v.clone() for v in values))), captured.out_spec)

        ran = _measure(call, holder, gradients)
        own = dict(self.model.named_buffers())
        return ran if isinstance(ran, str) else replace(ran, buffers={n: b for n, b in ran.buffers.items() if n in own})

    def _holder(self) -> nn.Module:
        """A module of the graph's tensors."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        holder = nn.Module()
        holder.slicing_device, holder.slicing_dtype = self._first.device, self._first.dtype  # type: ignore[assignment]
        constants = {n: t.detach() for n, t in self.captured.tensors.items() if n not in own}
        for name, value in {**constants, **self._state}.items():
            original = own.get(name)
            if isinstance(original, nn.Parameter):  # whose values no run changes
                register(holder, name, nn.Parameter(value, requires_grad=original.requires_grad))
            else:
                register(holder, name, value.clone())
        for name, subgraph in self.captured.modules.items():
            register(holder, name, subgraph)
        return holder

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        """Generic weights, none of which is what it was: a graph that holds a weight as a constant shows."""
        parameters = dict(self.model.named_parameters())
        state = generic({**parameters, **dict(self.model.named_buffers())})
        for name in parameters:
            if state[name].is_floating_point():
                state[name].mul_(1.03125)
        return state

    @cached_property
    def _first(self) -> Tensor:
        own = [*self.model.parameters(), *self.model.buffers()]
        return next((tensor for tensor in own if tensor.is_floating_point()), own[0])

    @cached_property
    def _function(self) -> Callable[..., tuple[Any, ...]]:
        return compiled(Program(self.captured, {}, (), {}, self._first.dtype).graph({}))


def unlike(beside: Beside) -> str | None:
    """None where the graph does what the module does on the example, else what differs, in one line."""
    module = beside.module_on(beside.inputs.values, gradients=True)
    graph = beside.graph_on(beside.inputs.values, gradients=True)
    if isinstance(module, str) or isinstance(graph, str):
        return f"it does not run: {module if isinstance(module, str) else graph}"
    if graph.structure != module.structure and not beside.captured.left_out:
        return "it returns something else"
    for what, found, expected in (
        ("output", graph.outputs, module.outputs),
        ("the gradient of", graph.gradients, module.gradients),
        ("the buffer", graph.buffers, module.buffers),
    ):
        for name in {**found, **expected}:
            if (name in found) != (name in expected):
                return f"{what} {name} is {'extra' if name in found else 'missing'}"
            error = distance(found[name], expected[name])
            if not error <= _tolerance(expected[name]):
                return f"{what} {name} differs by {error:.1e}"
    return None


def same_outputs(graph: Ran | str, module: Ran) -> bool:
    """Whether a graph returned what the module did."""
    if isinstance(graph, str):
        return False
    pairs = [(graph.outputs.get(name), expected) for name, expected in module.outputs.items()]
    return all(found is not None and distance(found, expected) <= _tolerance(expected) for found, expected in pairs)


def _tolerance(tensor: Tensor) -> float:
    return float(torch.finfo(tensor.dtype).eps ** 0.5) if tensor.is_floating_point() else 0.0


def _measure(call: Callable[[], Any], module: nn.Module, gradients: bool) -> Ran | str:
    try:
        with torch.random.fork_rng(devices=[]), quiet(), torch.enable_grad():
            torch.manual_seed(11)
            leaves, structure = pytree.tree_flatten(call())
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            reached = [o for o in outputs if gradients and o.requires_grad and o.is_floating_point()]
            losses = [(o.double() * _ramp(o)).sum() for o in reached]
            if losses:
                torch.stack(losses).sum().backward()
    except Exception as failure:
        return one_line(failure)
    given = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return Ran(structure, {str(i): o.detach() for i, o in enumerate(outputs)}, given, buffers)


def _ramp(output: Tensor) -> Tensor:
    """A fixed weighting of an output, so that its gradient is not the same everywhere."""
    return torch.linspace(0.5, 1.5, output.numel(), dtype=torch.float64, device=output.device).view(output.shape)
