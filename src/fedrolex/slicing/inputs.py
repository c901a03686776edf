"""How a model is called: the example's tensors by name, and everything else as constants."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from fedrolex.core import FedrolexError

FEW = 2
"""Samples that are enough to compare a graph with its module, and to prove axes."""
Place = tuple[int, int]
"""An input by its number, and one of its dimensions."""
UNBOUNDED = 2**62
Limits = dict[Place, tuple[int, int]]
"""The smallest and the largest size that a dimension may have; 0 and :data:`UNBOUNDED` where there is none."""


@dataclass(frozen=True)
class Inputs:
    """Which arguments are tensors, and in which order they enter the graph.

    Attributes:
        names: argument names of the tensors, in graph order.
        values: the example tensors.
        others: the remaining arguments, part of the graph as constants.
        positional: names of the arguments of ``forward`` that can be given by position.
    """

    names: tuple[str, ...]
    values: tuple[Tensor, ...]
    others: Mapping[str, Any]
    positional: tuple[str, ...]

    @staticmethod
    def of(model: nn.Module, example: Any) -> Inputs:
        """Read an example: a tensor, a tuple of positional arguments, or a dict of keyword arguments."""
        positional = _positional(model)
        match example:
            case Tensor():
                bound = bind(positional, (example,), {})
            case list() | tuple():
                bound = bind(positional, example, {})
            case Mapping():
                bound = bind(positional, (), example)
            case _:
                kind = type(example).__name__
                remedy = "give a tensor, a tuple of arguments or a dict of keyword ones"
                raise FedrolexError(f"example is a {kind}: {remedy}")
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in bound.items() if name not in tensors}
        for name, value in others.items():
            if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
                kind = type(value).__name__
                raise FedrolexError(f"argument {name} is a {kind} that holds tensors: give every tensor by itself")
        if not tensors:
            raise FedrolexError("example holds no tensor: the model needs at least one to be traced")
        empty = next((name for name, value in tensors.items() if not value.numel()), None)
        if empty is not None:
            raise FedrolexError(f"example {empty} is empty {tuple(tensors[empty].shape)}: give a batch of at least one")
        return Inputs(tuple(tensors), _at_least_two(tuple(tensors.values())), others, positional)

    def few(self) -> Inputs:
        """These inputs cut to two samples (:data:`FEW`); unchanged where tensors differ in the size of their batch."""
        sizes = {value.shape[0] for value in self.values if value.dim()}
        if len(sizes) != 1 or max(sizes) <= FEW:
            return self
        return replace(self, values=tuple(value[:FEW] if value.dim() else value for value in self.values))

    def call(self, model: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """Call the model with these tensors in place of the example's."""
        named = {**self.others, **dict(zip(self.names, tensors, strict=True))}
        args: list[Any] = []
        for name in (*self.positional, *(f"arg{i}" for i in range(len(self.positional), 64))):
            if name not in named:
                break
            args.append(named.pop(name))
        return model(*args, **named)

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors of a call to a sub-model, in graph order."""
        bound = bind(self.positional, args, kwargs)
        said = [f"{name} is missing" for name in self.names if bound.get(name) is None]
        for name, value in bound.items():
            known = name in self.names or value is None or (name in self.others and self.others[name] is value)
            if not known and not _equal(self.others.get(name), value):
                said.append(f"{name} was not part of the trace")
        if said:
            raise TypeError(f"this sub-model was traced with ({', '.join(self.names)}): {', '.join(said)}")
        return [bound[name] for name in self.names]

    def __str__(self) -> str:
        return ", ".join(
            f"{name}: {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
            for name, value in zip(self.names, self.values, strict=True)
        )


def bind(positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name; positional ones beyond the named parameters are called ``arg5``, ``arg6``, …"""
    named = {positional[i] if i < len(positional) else f"arg{i}": value for i, value in enumerate(args)}
    twice = next((name for name in kwargs if name in named), None)
    if twice is not None:
        raise TypeError(f"argument {twice} was given twice")
    return {**named, **kwargs}


def limit_in_words(low: int, high: int) -> str:
    """The sizes that a limit allows: ``7``, ``at least 5``, ``at most 100`` or ``5 to 100``."""
    if low == high:
        return str(low)
    if high == UNBOUNDED:
        return f"at least {low}"
    return f"{low} to {high}" if low else f"at most {high}"


def is_sentence(value: Tensor) -> bool:
    """Whether an input is taken for sequences of integers (batch, length), of any length."""
    return value.dim() == 2 and not value.is_floating_point()


def _positional(model: nn.Module) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds)


def _equal(a: Any, b: Any) -> bool:
    plain = (bool, int, float, str, type(None))
    return isinstance(a, plain) and isinstance(b, plain) and a == b


def _at_least_two(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Export specialises sizes 0 and 1, so a batch of one is traced as a batch of two."""
    batched = [value for value in values if value.dim()]
    if not batched or any(value.shape[0] != 1 for value in batched):
        return values
    return tuple(torch.cat([value, value]) if value.dim() else value for value in values)
