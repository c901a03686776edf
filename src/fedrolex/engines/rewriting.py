"""Training code of traced sub-models, rewritten for eager steps on a CPU: the same numbers with less memory traffic.

Max pooling goes back in the layout of the gradient it is given. After a flattening that is channels first, so images
that are channels last would be copied there and back; here the small gradient is laid out like the images first.

A large linear layer costs less to compute with than to store the gradient of. With plain SGD the gradient is not
needed beside the step, so the layer takes it on its way back: a product that adds to the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from fedrolex.slicing.submodel import SubModel

LARGE = 2**18  # weights of a linear layer from which it is worth its while to take the step itself
aten = torch.ops.aten


class Descent:
    """Linear layers that can take their own steps of plain SGD.

    Attributes:
        weights: names of what they move.
    """

    def __init__(self, weights: set[str]) -> None:
        self.weights = weights
        self._rate: float | None = None
        self._shrink = 1.0

    @contextmanager
    def going(self, rate: float, weight_decay: float) -> Iterator[None]:
        """While it is entered, gradients that come to the layers are used up there; else they are handed on."""
        self._rate, self._shrink = rate, 1 - rate * weight_decay
        try:
            yield
        finally:
            self._rate = None

    def take(self, x: Tensor, change: Tensor, weight: Tensor) -> Tensor | None:
        """The weight's gradient, or nothing where the step was taken; the others are ``(examples, nodes)``."""
        if self._rate is None:
            return change.t() @ x
        weight.addmm_(change.t(), x, beta=self._shrink, alpha=-self._rate)
        return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, descent: Descent) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.descent = descent
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor, None]:
        x, weight = ctx.saved_tensors
        change = gradients[0]
        back = change @ weight if ctx.needs_input_grad[0] else None  # before the weights move
        flat = change.reshape(-1, change.shape[-1])
        return back, ctx.descent.take(x.reshape(-1, x.shape[-1]), flat, weight), flat.sum(0), None


def linear(x: Tensor, weight: Tensor, bias: Tensor, descent: Descent) -> Tensor:
    """``nn.functional.linear`` that may take its own step."""
    found: Tensor = _Linear.apply(x, weight, bias, descent)
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
    for node in graph.find_nodes(op="call_function", target=aten.max_pool2d.default):
        with graph.inserting_after(node):
            after = graph.call_function(laid_out, (node,))
        node.replace_all_uses_with(after, delete_user_cb=lambda user, own=after: user is not own)
    descent = Descent(set())
    trained = dict(module.named_parameters(remove_duplicate=False))
    for node in graph.find_nodes(op="call_function", target=aten.linear.default):
        names = [str(each.target) for each in node.args[1:] if isinstance(each, fx.Node) and each.op == "get_attr"]
        if len(names) == 2 and trained[names[0]].numel() >= LARGE and all(_alone(graph, trained, n) for n in names):
            with graph.inserting_before(node):
                own = graph.get_attr("slicing_descent")
            node.target, node.args = linear, (*node.args, own)
            descent.weights.add(names[0])
    module.slicing_code[True] = replace(code, graph=graph)
    module.slicing_descent = descent  # type: ignore[assignment]
    return descent if descent.weights else None


def _alone(graph: fx.Graph, trained: dict[str, nn.Parameter], name: str) -> bool:
    """Whether a tensor is trained, has no other name, and is used once."""
    mine = trained.get(name)
    uses = sum(len(node.users) for node in graph.find_nodes(op="get_attr", target=name))
    return mine is not None and mine.requires_grad and uses == 1 and sum(p is mine for p in trained.values()) == 1
