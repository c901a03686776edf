"""The smaller module: ordinary parameters and buffers under the model's own names, run by a traced program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fedrolex.slicing.axes import TensorLayout
from fedrolex.slicing.capture import Inputs, register
from fedrolex.slicing.layout import shape
from fedrolex.slicing.program import Program


class SubModel(nn.Module):
    """A sub-network that behaves like any module: train and eval, devices, state dict, deep copies.

    Its tensors carry the names they have in the full model; ``forward`` takes and returns what the full
    model does. It is made by :meth:`fedrolex.slicing.axes.Axes.cut`.
    """

    slicing_device: torch.device

    def __init__(
        self, functions: Mapping[bool, Callable[..., Any]], inputs: Inputs, out_specs: Mapping[bool, Any]
    ) -> None:
        super().__init__()
        self._functions = dict(functions)
        self._inputs = inputs
        self._out_specs = dict(out_specs)
        self.slicing_device = torch.device("cpu")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The sub-network's output, in the form the full model returns."""
        flat = self.flat(*self._inputs.flatten(args, kwargs))
        return pytree.tree_unflatten(list(flat), self._out_specs[self.training])

    def flat(self, *tensors: Tensor) -> tuple[Any, ...]:
        """The outputs one after the other, from the input tensors in the order they were traced."""
        outputs: tuple[Any, ...] = self._functions[self.training](self, *tensors)
        return outputs

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SubModel:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        first = next(iter(self.parameters()), next(iter(self.buffers()), None))
        if first is not None:
            self.slicing_device = first.device
        return self


class GraphBuilder:
    """Builds sub-models from the traced programs; code for the same widths is made once.

    Args:
        programs: evaluation (False) and training (True).
        inputs: how the model is called.
        tensors: layouts by name.
        like: the traced model's tensors, for dtype, device and whether they want gradients.
        aliases: other names of tied tensors.
        transient: buffers that are not part of the state dict.
    """

    def __init__(
        self,
        programs: Mapping[bool, Program],
        inputs: Inputs,
        tensors: Mapping[str, TensorLayout],
        like: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        transient: Sequence[str],
    ) -> None:
        self.programs = programs
        self.inputs = inputs
        self.tensors = tensors
        self.like = {
            n: torch.empty(0, dtype=t.dtype, device=t.device, requires_grad=t.requires_grad) for n, t in like.items()
        }
        self.aliases = aliases
        self.transient = frozenset(transient)
        self.constants = {n: like[n].detach().clone() for n, t in tensors.items() if t.role == "constant"}
        self._functions: dict[tuple[tuple[str, int], ...], dict[bool, Callable[..., Any]]] = {}

    def functions(self, widths: Mapping[str, int], *, wide: bool = False) -> dict[bool, Callable[..., Any]]:
        """Code for training and evaluation at these widths."""
        if wide:
            return {mode: program.function(widths, wide=True) for mode, program in self.programs.items()}
        key = tuple(sorted(widths.items()))
        if key not in self._functions:
            self._functions[key] = {mode: program.function(widths) for mode, program in self.programs.items()}
        return self._functions[key]

    def __call__(
        self, widths: Mapping[str, int], constants: Mapping[str, Tensor], *, dtype: torch.dtype | None = None
    ) -> SubModel:
        """A module of these widths; parameters and buffers are not filled in yet.

        Args:
            widths: size of every axis.
            constants: the constant tensors at these widths.
            dtype: a floating dtype to use instead of the model's own; float64 code is made for it.
        """
        specs = {mode: program.captured.out_spec for mode, program in self.programs.items()}
        module = SubModel(self.functions(widths, wide=dtype is torch.float64), self.inputs, specs)
        made: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            like = self.like[name]
            wanted = dtype if dtype is not None and like.dtype.is_floating_point else like.dtype
            if tensor.role == "constant":
                made[name] = constants[name].to(wanted)
            else:
                made[name] = torch.zeros(shape(tensor.dims, widths), dtype=wanted, device=like.device)
            if tensor.role == "parameter":
                made[name] = nn.Parameter(made[name], requires_grad=like.requires_grad)
            register(module, name, made[name], persistent=tensor.role == "buffer" and name not in self.transient)
        for alias, name in self.aliases.items():
            register(module, alias, made[name], persistent=name not in self.transient)
        for program in self.programs.values():
            for name, region in program.captured.modules.items():
                register(module, name, region, persistent=False)
        first = next(iter(made.values()), None)
        module.slicing_device = torch.device("cpu") if first is None else first.device
        return module
