"""Walk a captured graph once, on the example, tying dimensions together by the rule of each operation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from fedrolex.slicing.capture import Captured
from fedrolex.slicing.infer import Dim, Unknown, freeze, mark, size_of
from fedrolex.slicing.program import arguments_of, register
from fedrolex.slicing.rules import RULES, Call, Traced
from fedrolex.slicing.rules.call import fixed, freeze_all, traced_in
from fedrolex.slicing.rules.elementwise import pointwise
from fedrolex.slicing.rules.shapes import permutation_of


@dataclass(frozen=True)
class Summed:
    """A dimension that was summed over a few operations ago.

    Attributes:
        dim: the dimension.
        weights: whether it was summed against a parameter (a linear layer) rather than another activation.
        ago: operations since.
    """

    dim: Dim
    weights: bool
    ago: int = 0


@dataclass
class Scalar:
    """A number in the graph, with the dimensions it may have been computed from.

    Attributes:
        node: name of the operation.
        argument: its schema argument.
        value: the number.
        around: dimensions of the operands.
        summed: dimensions summed over shortly before.
        embedded: whether it multiplies what an embedding returned.
        divides: whether values are divided by it, not multiplied.
    """

    node: str
    argument: str
    value: float
    around: list[Dim]
    summed: list[Summed]
    embedded: bool
    divides: bool


@dataclass
class Walk:
    """What walking one graph found.

    Attributes:
        edits: node name to the call whose constants are really widths.
        scalars: numbers that might be derived from a width.
        kept: the flat outputs that keep their shape.
        exposed: the flat outputs that are intermediate values, cut with the model.
        without_rule: operators that have none and froze their operands, and how often.
    """

    edits: dict[str, Call] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    without_rule: Counter[str] = field(default_factory=Counter)


@dataclass
class Ties:
    """What walking one or more graphs of a model found.

    Attributes:
        dims: dimensions of every tensor by its name.
        reads: (tensor, dimension) pairs that are contracted over.
        walks: what belongs to each graph alone, in the order they were walked.
    """

    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    reads: set[tuple[str, int]] = field(default_factory=set)
    walks: list[Walk] = field(default_factory=list)

    @property
    def without_rule(self) -> Counter[str]:
        """Operators without a rule, and how often the graph that uses them most does."""
        return reduce(Counter.__or__, (one.without_rule for one in self.walks), Counter())


def walk(captured: Captured, inputs: Sequence[Tensor], ties: Ties) -> None:
    """Run the graph on ``inputs`` and add what it ties together to ``ties``."""
    for name, tensor in captured.tensors.items():
        if name not in ties.dims:
            ties.dims[name] = tuple(Unknown(n) if n != 1 else Unknown(1, "size one") for n in tensor.shape)
    walker = _Walker(captured, ties)
    with torch.no_grad():
        walker.run(*(value.clone() for value in inputs))
    ties.walks.append(walker.found)


INPUT = "tied to an input of the model"
SCALED = {
    "mul": ("other", "self"), "div": ("other",), "true_divide": ("other",), "add": ("alpha",), "sub": ("alpha",),
    "addcmul": ("value",), "scaled_dot_product_attention": ("scale",), "multiply": ("other",), "divide": ("other",),
}  # fmt: skip
DIVIDE = {"div", "true_divide", "divide"}


class _Walker(fx.Interpreter):
    """Interprets the graph; beside each value it keeps the :class:`Traced` view of it."""

    def __init__(self, captured: Captured, ties: Ties) -> None:
        root = torch.nn.Module()
        for name, module in captured.modules.items():
            register(root, name, module)
        super().__init__(root, graph=captured.graph)
        self.captured = captured
        self.tensors = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
        self.ties = ties
        self.traced: dict[fx.Node, Any] = {}
        self.summed: dict[fx.Node, list[Summed]] = {}
        self.constant: set[fx.Node] = set()
        self.found = Walk()

    def fetch_attr(self, target: str) -> Any:
        return self.tensors[target] if target in self.tensors else super().fetch_attr(target)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        self.traced[n] = self._trace(n, result)
        return result

    def _trace(self, node: fx.Node, result: Any) -> Any:
        if node.op == "placeholder":
            return _whole(result, INPUT)
        if node.op == "get_attr":
            if not isinstance(result, Tensor):
                return result
            name = str(node.target)
            if result.numel() == 1 and not isinstance(self.captured.tensors[name], torch.nn.Parameter):
                self.constant.add(node)
            return Traced(tuple(result.shape), self.ties.dims[name], (name, tuple(range(result.dim()))))
        if node.op == "output":
            self._outputs(node)
            return None
        return self._operation(node, result)

    # --- operations ---

    def _operation(self, node: fx.Node, result: Any) -> Any:
        if not isinstance(node.target, torch._ops.OpOverload):
            args: Any = fx.map_arg((*node.args, *node.kwargs.values()), self.traced.__getitem__)
            if getattr(node.target, "__name__", "") == "getitem":
                return args[0][args[1]]
            return self._opaque(str(node.target), traced_in(args), result)
        shapes = [tuple(t.shape) for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        given: Any = fx.map_arg(arguments_of(node), self.traced.__getitem__)
        arg = {**{a.name: a.default_value for a in node.target._schema.arguments}, **given}
        call = Call(operator_name(node.target), arg, shapes, _unused(node, len(shapes)))
        if not shapes:
            self._decides(call)
            return result
        found = self._apply(node.target, call)
        if found is None:
            return self._opaque(f"{node.target.namespace}::{call.name}", call.tensors(), result)
        if call.rewrite or call.replace:
            self.found.edits[node.name] = call
        self.ties.reads.update(call.reads)
        self._note_scalars(node, call)
        dims, origin = iter(found), self._origin(call)
        return pytree.tree_map_only(Tensor, lambda t: Traced(tuple(t.shape), tuple(next(dims)), origin), result)

    @staticmethod
    def _decides(call: Call) -> None:
        """A plain number was made of a tensor: of one of its sizes, or of its values."""
        if call.name == "sym_size":
            freeze(call.arg["self"].dims[call.arg["dim"]], "its size is used as a number")
        else:
            freeze_all(call.tensors(), f"its values decide what the code does ({call.name})")

    def _apply(self, target: torch._ops.OpOverload, call: Call) -> list[Sequence[Dim]] | None:
        known = RULES.get(call.name, pointwise if torch.Tag.pointwise in target.tags else None)
        rule = known if target.namespace == "aten" else RULES.get(f"{target.namespace}::{call.name}")
        if rule is None:
            return None
        try:
            found: Any = rule(call)
            several = len(call.shapes) > 1 or (len(found) > 0 and isinstance(found[0], list))
            results: list[Sequence[Dim]] = list(found) if several else [found]
            sizes = [tuple(size_of(dim) for dim in dims) for dims in results]
        except (LookupError, TypeError, AttributeError, ValueError, StopIteration):
            return None
        return results if sizes == call.shapes else None

    def _opaque(self, name: str, operands: Sequence[Traced], result: Any) -> Any:
        """No rule: operands stay whole, the result is whole."""
        if operands:
            freeze_all(operands, f"no rule for {name}")
            self.found.without_rule[name] += 1
        return _whole(result, f"made by {name}")

    @staticmethod
    def _origin(call: Call) -> tuple[str, tuple[int, ...]] | None:
        order = permutation_of(call)
        if order is None or call.arg["self"].origin is None:
            return None
        name, before = call.arg["self"].origin
        return name, tuple(before[d] for d in order)

    # --- numbers that may be derived from a width ---

    def _note_scalars(self, node: fx.Node, call: Call) -> None:
        """Remember numbers that multiply or divide, with the dimensions they could be about."""
        before = [s for n in node.all_input_nodes for s in self.summed.get(n, [])]
        if call.contracted:
            self.summed[node] = [Summed(dim, weights=bool(call.reads)) for dim in call.contracted]
        elif call.name not in ("softmax", "layer_norm", "batch_norm"):
            self.summed[node] = [Summed(s.dim, s.weights, s.ago + 1) for s in before if s.ago < 6 and not s.weights]
        if self._is_constant(node):
            self.constant.add(node)
            return
        for argument in SCALED.get(call.name, ()):
            value = self._number(arguments_of(node).get(argument))
            if value is not None:
                around = [d for t in call.tensors() for d in t.dims]
                embedded = "embedding" in map(_name, node.all_input_nodes)
                divides = call.name in DIVIDE
                self.found.scalars.append(Scalar(node.name, argument, value, around, before, embedded, divides))

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node is computed from constants alone."""
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        return all(n in self.constant for n in node.all_input_nodes)

    def _number(self, given: Any) -> float | None:
        """An argument as a number: written in the graph, or a constant tensor of one element."""
        if isinstance(given, fx.Node):
            tensor: Any = self.env.get(given)
            single = given in self.constant and isinstance(tensor, Tensor) and tensor.numel() == 1
            return float(tensor) if single and tensor.is_floating_point() else None
        return float(given) if isinstance(given, int | float) and not isinstance(given, bool) else None

    # --- outputs ---

    def _outputs(self, node: fx.Node) -> None:
        """The first output, and every output that nothing else reads, keeps its shape."""
        leaves: Any = node.args[0]
        for place, leaf in enumerate(leaves):
            traced = self.traced[leaf] if isinstance(leaf, fx.Node) else None
            if not isinstance(traced, Traced):
                continue
            if self.found.kept and any(user.op != "output" for user in leaf.users):
                self.found.exposed.append(place)
            else:
                self.found.kept.append(place)
                self._keep(traced)

    @staticmethod
    def _keep(traced: Traced) -> None:
        """Freeze an output, except its classes (last, or second of an image), which a window may select from."""
        rank = len(traced.dims)
        classes = rank - 1 if rank < 4 else 1
        for place, dim in enumerate(traced.dims):
            if place == classes:
                mark(dim, "outputs")
            else:
                freeze(dim, "an output of the model")


def _name(node: fx.Node) -> str:
    return operator_name(node.target) if isinstance(node.target, torch._ops.OpOverload) else ""


def operator_name(target: torch._ops.OpOverload) -> str:
    """``aten::relu_`` as ``relu``, ``aten::__and__`` as ``__and__``."""
    name = target._schema.name.split("::")[-1]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _unused(node: fx.Node, count: int) -> set[int]:
    if count < 2:
        return set()
    used = {user.args[1] for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.users}
    return set(range(count)) - {u for u in used if isinstance(u, int)}


def _whole(result: Any, why: str) -> Any:
    """The traced view of a result that is never cut; what is not a tensor stays."""
    return pytree.tree_map_only(Tensor, lambda t: Traced(tuple(t.shape), tuple(fixed(t.shape, why))), result)
