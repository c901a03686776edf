"""The smaller module: ordinary parameters and buffers under the model's own names, run by a traced program."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from fedrolex.core import FedrolexError
from fedrolex.slicing.axis import TensorLayout
from fedrolex.slicing.inputs import Inputs, Limits, limit_in_words
from fedrolex.slicing.layout import shape
from fedrolex.slicing.program import Program, arguments_of, compiled, register

NORMS = "slicing_norms"  # where a sub-model has the batch norms of its evaluation that were captured without statistics


@dataclass(frozen=True)
class Code:
    """How a sub-model runs in one mode: a graph, and the Python function made of that graph."""

    graph: fx.Graph
    function: Callable[..., tuple[Any, ...]]
    inputs: Inputs
    out_spec: Any
    limits: Limits

    @staticmethod
    def of(program: Program, widths: Mapping[str, int], inputs: Inputs, training: bool) -> Code:
        """A program's code for these widths; in evaluation, batch norms can be given statistics."""
        graph = program.graph(widths)
        if not training:
            _call_norms(graph)
        return Code(graph, compiled(graph), inputs, program.captured.out_spec, program.captured.limits)

    def flat(self, module: nn.Module, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The outputs one after the other."""
        for (place, dim), (low, high) in self.limits.items():
            found = tensors[place].shape[dim]
            if not low <= found <= high:
                name = f"dimension {dim} of {self.inputs.names[place]}"
                raise ValueError(f"{name} is {found}; this sub-model was traced for {limit_in_words(low, high)}")
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restored even if a no_grad region raises
            return self.function(module, *tensors)


class GraphNorm(nn.Module):
    """A batch norm that was captured without statistics, in the evaluation of a sub-model.

    It takes the statistics of the batch until it has ``running_mean`` and ``running_var`` of its own, ``(channels,)``:
    see :mod:`fedrolex.models.norms`. In training it is not called: every batch has statistics of its own.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)

    def forward(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, cudnn: bool) -> Tensor:
        """Normalised values, scaled and shifted; same shape."""
        mean, variance = self.running_mean, self.running_var
        return torch.batch_norm(x, weight, bias, mean, variance, mean is None, 0.0, eps, cudnn)


def _call_norms(graph: fx.Graph) -> None:
    """Turn the batch norms without statistics of a graph into calls of :class:`GraphNorm`, in place."""
    static = [
        node
        for node in graph.nodes
        if node.target is torch.ops.aten.batch_norm.default and arguments_of(node).get("running_mean") is None
    ]
    for place, node in enumerate(static):
        named = arguments_of(node)
        with graph.inserting_before(node):
            given = tuple(named.get(name) for name in ("input", "weight", "bias", "eps", "cudnn_enabled"))
            node.replace_all_uses_with(graph.call_module(f"{NORMS}.{place}", given))
        graph.erase_node(node)


class SubModel(nn.Module):
    """A sub-network that behaves like any module: train and eval, devices, state dict, deep copies.

    Its tensors carry the names they have in the full model; ``forward`` takes and returns what the full
    model does. It is made by :meth:`fedrolex.slicing.axes.Axes.cut`.
    """

    def __init__(self, code: Mapping[bool, Code], device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.slicing_code = dict(code)
        self.slicing_device = device
        self.slicing_dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The sub-network's output, in the form the full model returns."""
        code = self.slicing_code[self.training]
        flat = code.flat(self, code.inputs.flatten(args, kwargs))
        return pytree.tree_unflatten(list(flat), code.out_spec)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SubModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        first = next((p for p in self.parameters() if p.is_floating_point()), None)
        if first is not None:
            self.slicing_device, self.slicing_dtype = first.device, first.dtype
        return self

    def __reduce__(self) -> NoReturn:
        raise FedrolexError("a sub-model cannot be pickled: save its state_dict(), and cut it again where it is needed")

    def __deepcopy__(self, memo: dict[int, Any]) -> SubModel:
        twin = SubModel.__new__(type(self))
        memo[id(self)] = twin
        own = self.__dict__.items()
        twin.__dict__.update({k: v if k == "slicing_code" else copy.deepcopy(v, memo) for k, v in own})
        return twin


@dataclass(eq=False)
class GraphBuilder:
    """Builds sub-models from the traced programs; code for the same widths is made once.

    Attributes:
        programs: evaluation (False) and training (True).
        inputs: how the model is called.
        tensors: layouts by name.
        like: the traced model's tensors, for dtype and device.
        aliases: other names of tied tensors.
        transient: buffers that are not part of the state dict.
    """

    programs: Mapping[bool, Program]
    inputs: Inputs
    tensors: Mapping[str, TensorLayout]
    like: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    transient: Sequence[str]

    def __post_init__(self) -> None:
        own = {name: self.like[name] for name, tensor in self.tensors.items() if tensor.role == "constant"}
        self.constants = {name: tensor.detach().clone() for name, tensor in own.items()}
        self.like = {n: torch.empty(0, dtype=t.dtype, device=t.device) for n, t in self.like.items()}
        self._code: dict[tuple[tuple[str, int], ...], dict[bool, Code]] = {}

    def code(self, widths: Mapping[str, int]) -> dict[bool, Code]:
        """Code for training and evaluation at these widths."""
        key = tuple(sorted(widths.items()))
        if key not in self._code:
            self._code[key] = {mode: Code.of(p, widths, self.inputs, mode) for mode, p in self.programs.items()}
        return self._code[key]

    def __call__(self, widths: Mapping[str, int], constants: Mapping[str, Tensor]) -> SubModel:
        """A module of these widths; parameters and buffers are not filled in yet."""
        first = next(self.like[n] for n, t in self.tensors.items() if t.role == "parameter")
        module = SubModel(self.code(widths), first.device, self.programs[True].dtype)
        made: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            like = self.like[name]
            if tensor.role == "constant":
                made[name] = constants[name]
            else:
                made[name] = torch.zeros(shape(tensor.dims, widths), dtype=like.dtype, device=like.device)
            if tensor.role == "parameter":
                made[name] = nn.Parameter(made[name], requires_grad=like.dtype.is_floating_point)
            register(module, name, made[name], persistent=tensor.role == "buffer" and name not in self.transient)
        for alias, name in self.aliases.items():
            register(module, alias, made[name], persistent=name not in self.transient)
        for program in self.programs.values():
            for name, subgraph in program.captured.modules.items():
                register(module, name, subgraph)
        for node in module.slicing_code[False].graph.nodes:
            if node.op == "call_module":
                register(module, str(node.target), GraphNorm())
        return module
