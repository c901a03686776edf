"""Walk a captured graph once, on the example, tying dimensions together by the rule of each operation."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from fedrolex.slicing.capture import Captured, register
from fedrolex.slicing.infer import Dim, Unknown, freeze, mark, size_of
from fedrolex.slicing.program import arguments_of
from fedrolex.slicing.rules import RULES, Call, Traced
from fedrolex.slicing.rules.call import fixed, freeze_all
from fedrolex.slicing.rules.elementwise import pointwise
from fedrolex.slicing.rules.shapes import permutation_of


@dataclass
class Edit:
    """What a node needs in a sub-model: new arguments in which a :data:`Dim` stands for its size."""

    rewrite: dict[str, Any]
    replace: tuple[str, dict[str, Any]] | None = None


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
        feeds: whether the result goes straight into a linear layer or matrix product.
    """

    node: str
    argument: str
    value: float
    around: list[Dim]
    summed: list[Summed]
    embedded: bool
    feeds: bool


@dataclass
class Walk:
    """What belongs to one graph.

    Attributes:
        edits: node name to the constants that are really widths.
        scalars: numbers that might be derived from a width.
        kept: the flat outputs that keep their shape.
        exposed: the flat outputs that are intermediate values, cut with the model.
        unknown: operators without a rule that froze their operands, and how often.
    """

    edits: dict[str, Edit] = field(default_factory=dict)
    scalars: list[Scalar] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)


@dataclass
class Ties:
    """What walking one or more graphs of a model found.

    Attributes:
        dims: dimensions of every tensor by its name.
        reads: (tensor, dimension) pairs that are contracted over.
        walks: what belongs to each graph, in the order they were walked.
    """

    dims: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    reads: set[tuple[str, int]] = field(default_factory=set)
    walks: list[Walk] = field(default_factory=list)

    @property
    def unknown(self) -> Counter[str]:
        """Operators without a rule, and how often the graph that uses them most does."""
        merged: Counter[str] = Counter()
        for one in self.walks:
            merged |= one.unknown
        return merged


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
FED = {"linear", "matmul", "mm", "bmm", "addmm"}


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
            return _view(result, lambda t: fixed(t.shape, INPUT))
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
        args: Any = fx.map_arg(node.args, self._known)
        kwargs: Any = fx.map_arg(node.kwargs, self._known)
        if getattr(node.target, "__name__", "") == "getitem":
            return args[0][args[1]]
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._opaque(str(node.target), [*args, *kwargs.values()], result)
        tensors = _tensors_of(result)
        name, shapes = operator_name(node.target), [tuple(t.shape) for t in tensors]
        call = Call(name, _by_name(node.target, args, kwargs), shapes, _unused(node, len(tensors)))
        if not tensors:
            self._decides(call)
            return result
        found = self._apply(node.target, call)
        if found is None:
            return self._opaque(f"{node.target.namespace}::{call.name}", list(call.arg.values()), result)
        if call.rewrite or call.replace:
            self.found.edits[node.name] = Edit(call.rewrite, call.replace)
        self.ties.reads.update(call.reads)
        self._note_scalars(node, call)
        return _assemble(result, found, self._origin(call))

    @staticmethod
    def _decides(call: Call) -> None:
        """A plain number was made of a tensor: of one of its sizes, or of its values."""
        if call.name == "sym_size":
            freeze(call.arg["self"].dims[call.arg["dim"]], "its size is used as a number")
        else:
            freeze_all(call.tensors(), f"its values decide what the code does ({call.name})")

    def _apply(self, target: torch._ops.OpOverload, call: Call) -> list[Sequence[Dim]] | None:
        rule = RULES.get(call.name)
        if target.namespace != "aten":
            return None
        if rule is None and torch.Tag.pointwise in target.tags:
            rule = pointwise
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

    def _opaque(self, name: str, values: Sequence[Any], result: Any) -> Any:
        """No rule: operands stay whole, the result is whole."""
        operands = [t for v in values for t in (v if isinstance(v, list | tuple) else [v]) if isinstance(t, Traced)]
        if operands:
            freeze_all(operands, f"no rule for {name}")
            self.found.unknown[name] += 1
        return _view(result, lambda t: fixed(t.shape, f"made by {name}"))

    @staticmethod
    def _origin(call: Call) -> tuple[str, tuple[int, ...]] | None:
        source = call.arg.get("self")
        order = permutation_of(call)
        if order is None or not isinstance(source, Traced) or source.origin is None:
            return None
        name, before = source.origin
        return name, tuple(before[d] for d in order)

    # --- numbers that may be derived from a width ---

    def _note_scalars(self, node: fx.Node, call: Call) -> None:
        """Remember numbers that multiply or divide, with the dimensions they could be about."""
        before = [s for n in node.all_input_nodes for s in self.summed.get(n, [])]
        if call.contracted:
            weights = bool(call.reads)
            self.summed[node] = [Summed(dim, weights) for dim in call.contracted]
        elif call.name not in ("softmax", "layer_norm", "batch_norm"):
            self.summed[node] = [Summed(s.dim, s.weights, s.ago + 1) for s in before if s.ago < 6 and not s.weights]
        if self._is_constant(node):
            self.constant.add(node)
            return
        for argument in SCALED.get(call.name, ()):
            value = self._number(node, argument, call.arg.get(argument))
            if value is not None:
                around = [d for t in call.tensors() for d in t.dims]
                embedded = "embedding" in map(_name, node.all_input_nodes)
                feeds = not FED.isdisjoint(map(_name, node.users))
                self.found.scalars.append(Scalar(node.name, argument, value, around, before, embedded, feeds))

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node is computed from constants alone."""
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        return all(n in self.constant for n in node.all_input_nodes)

    def _number(self, node: fx.Node, argument: str, value: Any) -> float | None:
        """An argument as a number: written in the graph, or a constant tensor of one element."""
        given = arguments_of(node).get(argument)
        if isinstance(given, fx.Node):
            tensor: Any = self.env.get(given)
            single = given in self.constant and isinstance(tensor, Tensor) and tensor.numel() == 1
            return float(tensor) if single and tensor.is_floating_point() else None
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if plain and argument in arguments_of(node) else None

    def _known(self, node: fx.Node) -> Any:
        return self.traced[node]

    # --- outputs ---

    def _outputs(self, node: fx.Node) -> None:
        """The first output, and every output that nothing else reads, keeps its shape."""
        leaves: Any = node.args[0]
        for place, leaf in enumerate(leaves):
            traced = self.traced[leaf] if isinstance(leaf, fx.Node) else None
            if not isinstance(traced, Traced):
                continue
            terminal = all(user.op == "output" for user in leaf.users)
            if self.found.kept and not terminal:
                self.found.exposed.append(place)
                continue
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


def _by_name(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {argument.name: argument.default_value for argument in target._schema.arguments}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def _tensors_of(result: Any) -> list[Tensor]:
    items = result if isinstance(result, list | tuple) else [result]
    return [item for item in items if isinstance(item, Tensor)]


def _unused(node: fx.Node, count: int) -> set[int]:
    if count < 2:
        return set()
    used = {user.args[1] for user in node.users if getattr(user.target, "__name__", "") == "getitem" and user.users}
    return set(range(count)) - {u for u in used if isinstance(u, int)}


def _view(result: Any, dims: Any) -> Any:
    """The Traced view of a result: tensors get dimensions, containers are walked, numbers stay."""
    if isinstance(result, Tensor):
        return Traced(tuple(result.shape), tuple(dims(result)))
    if isinstance(result, list | tuple):
        return [_view(item, dims) for item in result]
    return result


def _assemble(result: Any, found: Sequence[Sequence[Dim]], origin: tuple[str, tuple[int, ...]] | None) -> Any:
    if isinstance(result, Tensor):
        return Traced(tuple(result.shape), tuple(found[0]), origin)
    queue = list(found)
    return [Traced(tuple(i.shape), tuple(queue.pop(0))) if isinstance(i, Tensor) else i for i in result]
