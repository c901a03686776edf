"""Training code of traced sub-models, rewritten for eager steps on a CPU: the same numbers with less memory traffic.

ReLU is taken after max pooling instead of before, of as much less as pooling leaves; dropout after flattening, as its
mask is channels first. Code that changes tensors in place keeps its order.

Max pooling goes back in the layout of the gradient it is given. After a flattening that is channels first, so images
that are channels last would be copied there and back; here the small gradient is laid out like the images first.

A large linear layer costs less to compute with than to store the gradient of. With plain SGD the gradient is not
needed beside the step, so the layer takes it on its way back: a product that adds to the weights, block by block right
after the one that reads them, where batches are so small that weights are what fills the caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedrolex.slicing.submodel import SubModel

LARGE = 2**18  # weights of a linear layer from which it is worth its while to take the step itself
BLOCK = 2**18  # weights that a core's own cache holds beside a few examples
aten = torch.ops.aten


class Descent:
    """Linear layers that can take their own steps of plain SGD.

    Attributes:
        weights: what they move, by name.
    """

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._rate: float | None = None
        self._shrink = 1.0
        self._moved: set[str] = set()

    @contextmanager
    def going(self, rate: float, weight_decay: float) -> Iterator[None]:
        """While it is entered, gradients that come to the layers are used up there; else they are handed on."""
        self._rate, self._shrink = rate, 1 - rate * weight_decay
        self._moved.clear()
        try:
            yield
        finally:
            self._rate = None
        for name, weight in self.weights.items():
            if name not in self._moved and weight_decay:  # the loss does not reach it
                weight.detach().mul_(self._shrink)

    def back(self, name: str, x: Tensor, change: Tensor, needed: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of a layer's inputs, if needed, and of its weight, unless its step was taken.

        Args:
            name: of the weight.
            x: inputs ``(examples, inputs)``.
            change: the gradient of what came out, ``(examples, outputs)``.
            needed: whether the inputs' gradient is.
        """
        weight, found = self.weights[name], None
        if self._rate is None:
            return change @ weight if needed else None, change.t() @ x
        rows = BLOCK // weight.shape[1]
        if len(x) > rows or weight.element_size() < 4:  # the gradient, added up block by block, would cost more
            rows = len(weight)
        for part, own in zip(weight.split(rows), change.split(rows, 1), strict=True):
            if needed:  # before the weights move
                found = own @ part if found is None else found.addmm_(own, part)
            part.addmm_(own.t(), x, beta=self._shrink, alpha=-self._rate)
        self._moved.add(name)
        return found, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, descent: Descent, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)  # the weight only to be told if it was changed in between
        ctx.descent, ctx.name = descent, name
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None, None]:
        x, _ = ctx.saved_tensors
        change = gradients[0].reshape(-1, gradients[0].shape[-1])
        back, own = ctx.descent.back(ctx.name, x.reshape(-1, x.shape[-1]), change, ctx.needs_input_grad[0])
        return None if back is None else back.view_as(x), own, change.sum(0), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor, descent: Descent, name: str) -> Tensor:
    """``nn.functional.linear`` that may take its own step."""
    found: Tensor = _Linear.apply(x, weight, bias, descent, name)
    return found


def laid_out(images: Tensor) -> Tensor:
    """The same, whose gradient will be channels last if they are."""
    if images.requires_grad and images.is_contiguous(memory_format=torch.channels_last):
        images.register_hook(lambda gradient: gradient.contiguous(memory_format=torch.channels_last))
    return images


def rewrite(module: nn.Module) -> Descent | None:
    """Rewrite a sub-model's training code in place; returns the layers that can take their own steps, if any can.

    Only traced sub-models have code to rewrite. It is for eager autograd alone: not to be stacked or captured.
    """
    if not isinstance(module, SubModel):
        return None
    code = module.slicing_code[True]
    graph = fx.Graph()
    graph.output(graph.graph_copy(code.graph, {}))
    if not any(_changes(node.target) for node in graph.nodes):
        _swap(graph, aten.relu.default, aten.max_pool2d.default)
        _swap(graph, aten.dropout.default, aten.flatten.using_ints)
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d.default):
        relu = next((user for user in node.users if user.target is aten.relu.default), None)
        _put_after(graph, node if relu is None or len(node.users) > 1 else relu, laid_out)
    descent, trained = Descent(), dict(module.named_parameters(remove_duplicate=False))
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        x, *rest = node.args
        names = [name for place in rest if (name := _own(trained, graph, place)) is not None]
        if len(names) == 2 and x not in rest and _plain(*(trained[name] for name in names)):
            with graph.inserting_before(node):
                attribute = graph.get_attr("slicing_descent")
            node.target, node.args = linear, (*node.args, attribute, names[0])
            descent.weights[names[0]] = trained[names[0]]
    module.slicing_code = {**module.slicing_code, True: code.rewritten(graph)}
    module.slicing_descent = descent  # type: ignore[assignment]
    return descent if descent.weights else None


def _changes(target: Any) -> bool:
    """Whether an operation changes a tensor in place."""
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _swap(graph: fx.Graph, first: Any, then: Any) -> None:
    """Where one operation's result is for another alone, which comes right after it, take the other first."""
    for node in graph.find_nodes(op="call_function", target=then):
        before, *rest = node.args
        plain = len(rest) <= 3 and not node.kwargs  # pooling without dilation, which could pool nothing but padding
        if node.prev is before and before.target is first and len(before.users) == 1 and plain and not before.kwargs:
            node.args = (before.args[0], *rest)
            _put_after(graph, node, first, *before.args[1:])
            graph.erase_node(before)


def _put_after(graph: fx.Graph, node: fx.Node, function: Any, *rest: Any) -> None:
    """Have all who use a node use a function of it."""
    with graph.inserting_after(node):
        after = graph.call_function(function, (node, *rest))
    node.replace_all_uses_with(after, delete_user_cb=lambda user: user is not after)


def _plain(weight: Tensor, bias: Tensor) -> bool:
    """Whether these are a large linear layer of the usual kind."""
    return weight.numel() >= LARGE and weight.is_floating_point() and bias.shape == weight.shape[:1]


def _own(trained: Mapping[str, Tensor], graph: fx.Graph, place: object) -> str | None:
    """The name of a tensor that is trained, has no other name, and has one user in the graph."""
    if not isinstance(place, fx.Node) or place.op != "get_attr":
        return None
    name, mine = str(place.target), trained.get(str(place.target))
    users = sum(len(node.users) for node in graph.find_nodes(op="get_attr", target=place.target))
    alone = users == 1 and sum(each is mine for each in trained.values()) == 1
    return name if mine is not None and mine.requires_grad and alone else None
