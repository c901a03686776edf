"""Two other readings of a training graph: evaluation, and training without chance."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from fedrolex.slicing.capture import Captured
from fedrolex.slicing.program import arguments_of, set_arguments

aten = torch.ops.aten
OFF = {"training": False, "train": False, "use_input_stats": False, "dropout_p": 0.0}
CHANCE = {
    "rand_like": aten.full_like.default, "randn_like": aten.full_like.default, "rand": aten.full.default,
    "randn": aten.full.default, "bernoulli": aten.ones_like.default, "bernoulli_": aten.fill_.Scalar,
    "uniform_": aten.fill_.Scalar, "normal_": aten.fill_.Scalar, "exponential_": aten.fill_.Scalar,
}  # fmt: skip


def evaluation_of(training: Captured) -> Captured | None:
    """The training graph with dropout off, every path taken, and norms on their running statistics.

    That is what evaluation means for most models, not for all: the caller compares the result with the
    module. None where it certainly is not, because the graph draws other random numbers of its own.
    """
    counters = {name for name, tensor in training.tensors.items() if not tensor.is_floating_point()}
    instead = {**_paths(training.graph), **{n: None for n in training.graph.nodes if _counts(n, counters)}}
    if any(_name(node) in CHANCE and node not in instead for node in training.graph.nodes):
        return None

    def switch(node: fx.Node) -> None:
        named = arguments_of(node)
        if named.get("running_mean", True) is not None:
            named.update({argument: off for argument, off in OFF.items() if argument in named})
        set_arguments(node, named)

    return replace(training, graph=_rewritten(training.graph, switch, instead))


def without_chance(captured: Captured) -> Captured:
    """The same graph with dropout off and every random draw replaced by a constant: what a proof can compare."""

    def switch(node: fx.Node) -> None:
        named = arguments_of(node)
        if "running_mean" not in named:
            named.update({argument: off for argument, off in OFF.items() if argument in named})
        constant = CHANCE.get(_name(node))
        if constant is not None:
            node.target = constant
            known = {argument.name for argument in constant._schema.arguments}
            named = {argument: value for argument, value in named.items() if argument in known}
            named.update({name: 0.5 for name in ("fill_value", "value") if name in known})
        set_arguments(node, named)

    return replace(captured, graph=_rewritten(captured.graph, switch, {}))


Instead = dict[fx.Node, fx.Node | None]
"""Nodes that are left out of a graph, each with the one in its place, if there is one."""


def _rewritten(graph: fx.Graph, switch: Callable[[fx.Node], None], instead: Instead) -> fx.Graph:
    new = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in instead:
            other = instead[node]
            if other is not None:
                values[node] = values[other]
            continue
        values[node] = new.node_copy(node, lambda n: values[n])
        if isinstance(node.target, torch._ops.OpOverload):
            switch(values[node])
    return new


def _paths(graph: fx.Graph) -> Instead:
    """Stochastic depth: in place of each product ``x * empty.bernoulli_(p).div_(p)`` its ``x``."""
    found: Instead = {}
    for node in graph.nodes:
        if _name(node) != "bernoulli_" or len(node.args[0].users) > 1:
            continue
        chain = [node.args[0], node]
        while [_name(user) for user in chain[-1].users] in (["div"], ["div_"]):
            chain.append(next(iter(chain[-1].users)))
        products = {user: user.args[0] for user in chain[-1].users}
        if all(_name(user) == "mul" and x is not chain[-1] for user, x in products.items()):
            found.update({**dict.fromkeys(chain), **products})
    return found


def _name(node: fx.Node) -> str:
    return node.target._schema.name.split("::")[-1] if isinstance(node.target, torch._ops.OpOverload) else ""


def _counts(node: fx.Node, counters: set[str]) -> bool:
    """Whether a node only advances a counter, as batch norms do in training."""
    first = node.args[0] if node.args else None
    return (
        _name(node) == "add_"
        and not node.users
        and isinstance(first, fx.Node)
        and first.op == "get_attr"
        and first.target in counters
    )
