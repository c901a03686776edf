"""What a rule sees of one operation in the traced graph, and the table of rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.utils._pytree as pytree

from fedrolex.slicing.infer import Dim, Unknown, freeze, unify


@dataclass(frozen=True)
class Traced:
    """A tensor in the traced graph: its shape in the example run and what each dimension is made of.

    ``origin`` names the parameter this tensor is (a permutation of), with the parameter's dimension behind
    each of its own.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    origin: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class ToTheEnd:
    """In :attr:`Call.rewrite`: the end of a slice that takes all there is of a dimension."""

    dim: Dim


@dataclass
class Call:
    """One operation: arguments by their schema names, with :class:`Traced` in place of tensors.

    A rule ties the dimensions of the arguments together and returns the dimensions of the result. Where the
    operation holds a constant that is really a width (a view's sizes, a convolution's groups), the rule
    says so in :attr:`rewrite`; a :data:`Dim` there stands for its size in the sub-model.

    Attributes:
        name: operator name without namespace and in-place underscore, e.g. ``conv2d``.
        arg: schema argument name to value.
        shapes: the shapes of the tensors the operation returned.
        unused: places in a tuple result that nothing reads.
        rewrite: argument name to its new value.
        replace: operator and arguments to use instead, where sizes alone do not do.
        reads: (parameter, dimension) pairs this operation contracts over.
        contracted: dimensions summed over, so no longer visible in the result.
    """

    name: str
    arg: dict[str, Any]
    shapes: list[tuple[int, ...]]
    unused: set[int] = field(default_factory=set)
    rewrite: dict[str, Any] = field(default_factory=dict)
    replace: tuple[str, dict[str, Any]] | None = None
    reads: list[tuple[str, int]] = field(default_factory=list)
    contracted: list[Dim] = field(default_factory=list)

    def tensors(self) -> list[Traced]:
        """Every tensor among the arguments, lists flattened."""
        return traced_in(list(self.arg.values()))

    def contract(self, tensor: Traced, dim: int) -> Dim:
        """Note that ``dim`` of ``tensor`` is summed over, and return it."""
        if tensor.origin is not None:
            name, order = tensor.origin
            self.reads.append((name, order[dim]))
        self.contracted.append(tensor.dims[dim])
        return tensor.dims[dim]


def traced_in(values: Any) -> list[Traced]:
    """The tensors among nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Traced)]


Dims = Sequence[Dim]
Result = Dims | Sequence[Dims]
"""The dimensions of a rule's one result, or of each of several."""
Rule = Callable[[Call], Result]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated function for these operator names."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def fixed(shape: Sequence[int], why: str) -> list[Dim]:
    """New dimensions that are never cut."""
    return [Unknown(n, why) for n in shape]


def freeze_all(tensors: Sequence[Traced], why: str) -> None:
    """Freeze every dimension of every tensor."""
    for tensor in tensors:
        for dim in tensor.dims:
            freeze(dim, why)


def broadcast(tensors: Sequence[Traced], shape: Sequence[int]) -> list[Dim]:
    """Dimensions of an elementwise result: dimensions of equal size are tied, ones of size 1 ignored."""
    result: list[Dim] = []
    for back in range(len(shape), 0, -1):
        wanted = shape[len(shape) - back]
        meeting = [t.dims[-back] for t in tensors if len(t.dims) >= back and t.shape[-back] == wanted]
        if not meeting:
            meeting = [Unknown(wanted, "size not found in any operand")]
        for other in meeting[1:]:
            unify(meeting[0], other)
        result.append(meeting[0])
    return result


def wrap(dim: int, rank: int) -> int:
    """A possibly negative dimension as a non-negative one."""
    return dim + rank if dim < 0 else dim


def wrap_all(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """One dimension, several, or for None all of them, as non-negative ones."""
    chosen = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
    return [wrap(dim, rank) for dim in chosen]
