"""Rules for operations that sum over a dimension: linear layers, convolutions, matrix products, attention."""

from collections.abc import Sequence
from typing import Any

from fedrolex.slicing.infer import Dim, can_divide, concat, divide, freeze, mark, product, size_of, unify
from fedrolex.slicing.rules.call import Call, Dims, Result, Traced, broadcast, fixed, freeze_all, rule, wrap

SPATIAL = "a position in space or time"


@rule("linear")
def linear(call: Call) -> Dims:
    x, weight, bias = call.arg["input"], call.arg["weight"], call.arg["bias"]
    unify(x.dims[-1], call.contract(weight, len(weight.dims) - 1))
    if bias is not None:
        unify(bias.dims[0], weight.dims[0])
    return [*x.dims[:-1], *weight.dims[:-1]]


@rule("bilinear")
def bilinear(call: Call) -> Dims:
    left, right, weight, bias = (call.arg[name] for name in ("input1", "input2", "weight", "bias"))
    unify(left.dims[-1], call.contract(weight, 1))
    unify(right.dims[-1], call.contract(weight, 2))
    for a, b in zip(left.dims[:-1], right.dims[:-1], strict=True):
        unify(a, b)
    if bias is not None:
        unify(bias.dims[0], weight.dims[0])
    return [*left.dims[:-1], weight.dims[0]]


def _grouped(channels: Dim, groups: int) -> tuple[Dim, Dim] | None:
    """(groups, channels in a group), or None where the channels cannot be regrouped so."""
    inner = size_of(channels) // groups
    return divide(channels, inner) if can_divide(channels, inner) else None


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution(call: Call) -> Dims:
    x, weight, bias = call.arg["input"], call.arg["weight"], call.arg["bias"]
    transposed = call.name.startswith("conv_transpose") or call.arg.get("transposed", False)
    groups = call.arg["groups"]
    channel = len(x.dims) - (len(weight.dims) - 2) - 1
    for dim in (*x.dims[channel + 1 :], *weight.dims[2:]):
        freeze(dim, SPATIAL)
    if groups == 1:
        read, written = (0, 1) if transposed else (1, 0)
        unify(x.dims[channel], call.contract(weight, read))
        out = weight.dims[written]
    else:
        out = _grouped_convolution(call, x.dims[channel], weight, groups, transposed)
    if bias is not None:
        unify(bias.dims[0], out)
    return [*x.dims[:channel], out, *fixed(call.shapes[0][channel + 1 :], SPATIAL)]


def _grouped_convolution(call: Call, channels: Dim, weight: Traced, groups: int, transposed: bool) -> Dim:
    """Groups stay whole by default and the channels inside each are cut; depthwise, a group *is* a channel."""
    outside = _grouped(channels, groups)
    stored = _grouped(weight.dims[0], groups)
    if outside is None or stored is None:
        for dim in (channels, *weight.dims[:2]):
            freeze(dim, "its channels do not split into the convolution's groups")
        return weight.dims[0] if not transposed else fixed([size_of(weight.dims[1]) * groups], "grouped")[0]
    unify(outside[0], stored[0])
    if size_of(outside[1]) > 1:
        mark(outside[0], "groups")
    call.rewrite["groups"] = outside[0]
    if transposed:
        unify(outside[1], stored[1])
        call.contract(weight, 0)
        return product((stored[0], weight.dims[1]))
    unify(outside[1], call.contract(weight, 1))
    return weight.dims[0]


def _matmul(call: Call, a: Traced, b: Traced) -> list[Dim]:
    """Dimensions of ``a @ b``; dimensions both carry along are independent problems, so "heads"."""
    if a.origin is None and b.origin is None:
        mark(a.dims[-1], "qk")
    unify(call.contract(a, len(a.dims) - 1), call.contract(b, max(len(b.dims) - 2, 0)))
    if len(b.dims) == 1:
        return list(a.dims[:-1])
    if len(a.dims) == 1:
        return [*b.dims[:-2], b.dims[-1]]
    batch = broadcast([Traced(t.shape[:-2], t.dims[:-2]) for t in (a, b)], call.shapes[0][:-2])
    for back in range(3, 1 + min(len(a.dims), len(b.dims))):
        if a.shape[-back] == b.shape[-back] > 1:
            mark(a.dims[-back], "heads")
    return [*batch, a.dims[-2], b.dims[-1]]


@rule("inner")
def inner(call: Call) -> Dims:
    """The last dimensions of both are summed over; the others follow one another."""
    a, b = call.arg["self"], call.arg["other"]
    unify(call.contract(a, len(a.dims) - 1), call.contract(b, len(b.dims) - 1))
    return [*a.dims[:-1], *b.dims[:-1]]


@rule("matmul", "mm", "bmm", "mv", "dot", "vdot")
def matmul(call: Call) -> Dims:
    other = next(call.arg[name] for name in ("other", "mat2", "vec", "tensor") if name in call.arg)
    return _matmul(call, call.arg["self"], other)


@rule("addmm", "baddbmm", "addmv")
def addmm(call: Call) -> Dims:
    first = next(call.arg[name] for name in ("mat1", "batch1", "mat") if name in call.arg)
    second = next(call.arg[name] for name in ("mat2", "batch2", "vec") if name in call.arg)
    out = _matmul(call, first, second)
    return broadcast([Traced(call.shapes[0], tuple(out)), call.arg["self"]], call.shapes[0])


@rule("transformers::grouped_mm_fallback")
def grouped_matmul(call: Call) -> Dims:
    """Rows are multiplied by one of several matrices, such as an expert's: (rows, K) by (groups, K, N)."""
    rows, matrices = call.arg["input"], call.arg["weight"]
    freeze(matrices.dims[0], "one matrix for each group of rows")
    unify(rows.dims[1], call.contract(matrices, 1))
    return [rows.dims[0], matrices.dims[2]]


@rule("outer")
def outer(call: Call) -> Dims:
    return [call.arg["self"].dims[0], call.arg["vec2"].dims[0]]


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Dims:
    """q and k share their indices inside a head; v has its own; heads are kept whole by default."""
    q, k, v, mask = (call.arg[name] for name in ("query", "key", "value", "attn_mask"))
    unify(call.contract(q, len(q.dims) - 1), k.dims[-1])
    unify(k.dims[-2], v.dims[-2])
    mark(q.dims[-1], "qk")
    mark(v.dims[-1], "v")
    batch = [_attention_batch(q, k, v, place) for place in range(len(q.dims) - 2)]
    if mask is not None:
        scores = Traced((*q.shape[:-1], k.shape[-2]), (*batch, q.dims[-2], k.dims[-2]))
        broadcast([scores, mask], scores.shape)
    return [*batch, q.dims[-2], v.dims[-1]]


def _attention_batch(q: Traced, k: Traced, v: Traced, place: int) -> Dim:
    """One batch dimension of attention; with grouped queries, q has several heads to each of k and v."""
    heads, kept = q.dims[place], k.dims[place]
    if k.shape[place] == q.shape[place]:
        unify(heads, kept)
    elif k.shape[place] > 1:
        repeats = q.shape[place] // k.shape[place]
        if can_divide(heads, repeats):
            unify(divide(heads, repeats)[0], kept)
        else:
            freeze(heads, "query heads do not split over key heads")
            freeze(kept, "query heads do not split over key heads")
    if v.shape[place] == k.shape[place]:
        unify(kept, v.dims[place])
    if q.shape[place] > 1:
        mark(heads, "heads")
    return heads


@rule("einsum")
def einsum(call: Call) -> Dims:
    """Letters are dimensions: equal letters are tied, letters missing on the right are summed over."""
    operands: list[Traced] = list(call.arg["tensors"])
    equation = _spelled_out(call.arg["equation"].replace(" ", ""), operands)
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if "." in equation or "->" not in equation or any(len(set(term)) < len(term) for term in terms):
        freeze_all(operands, "an einsum with an ellipsis or a repeated letter")
        return fixed(call.shapes[0], "einsum")
    letters: dict[str, Dim] = {}
    for term, operand in zip(terms, operands, strict=True):
        for place, letter in enumerate(term):
            if operand.shape[place] == 1:
                letters.setdefault(letter, operand.dims[place])
            elif letter in letters and size_of(letters[letter]) > 1:
                unify(letters[letter], operand.dims[place])
            else:
                letters[letter] = operand.dims[place]
            if letter not in right:
                call.contract(operand, place)
                if all(other.origin is None for other in operands):
                    mark(operand.dims[place], "qk")
    shared = [letter for letter in right if len(terms) == 2 and all(letter in term for term in terms)]
    apart = [{*term} & {*right} - {*shared} for term in terms]
    if len(terms) == 2 and all(apart) and {*left} - {*right} - {","}:
        for letter in shared:
            mark(letters[letter], "heads")
    return [letters[letter] for letter in right]


def _spelled_out(equation: str, operands: Sequence[Traced]) -> str:
    """The equation with ``...`` written as capital letters, aligned from the right."""
    left, arrow, right = equation.partition("->")
    terms = []
    longest = 0
    for term, operand in zip(left.split(","), operands, strict=True):
        extra = len(operand.dims) - len(term.replace("...", ""))
        longest = max(longest, extra if "..." in term else 0)
        terms.append(term.replace("...", "ZYXWVUTS"[:extra][::-1]) if "..." in term else term)
    return ",".join(terms) + arrow + right.replace("...", "ZYXWVUTS"[:longest][::-1])


def _gates(weights: Sequence[Traced], hidden: Dim, gates: int) -> None:
    """Recurrent weights stack their gates: rows are gate × hidden."""
    for weight in weights:
        rows = weight.dims[0]
        if not can_divide(rows, size_of(hidden)):
            freeze(rows, "rows of a recurrent layer that are not gates × hidden")
            continue
        gate, inner = divide(rows, size_of(hidden))
        if gates > 1:
            freeze(gate, "the gates of a recurrent layer")
        unify(inner, hidden)


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> Result:
    """All layers and directions of one recurrent module share the hidden axis: its state is one tensor."""
    x: Any = call.arg.get("input")
    params: Any = call.arg.get("params") or []
    states: Any = call.arg.get("hx")
    states = [states] if isinstance(states, Traced) else list(states or [])
    layers, directions = call.arg.get("num_layers", 1), 2 if call.arg.get("bidirectional") else 1
    per_cell = len(params) // (layers * directions)
    plain = x is not None and "batch_first" in call.arg and per_cell == (4 if call.arg["has_biases"] else 2)
    if not plain or (call.name == "lstm" and states[0].shape[-1] != states[1].shape[-1]):
        freeze_all(call.tensors(), f"a form of {call.name} that is not followed")
        return [fixed(shape, call.name) for shape in call.shapes]
    hidden = states[0].dims[-1]
    for state in states[1:]:
        unify(state.dims[-1], hidden)
    below = x.dims[-1]
    for layer in range(layers):
        for direction in range(directions):
            first = (layer * directions + direction) * per_cell
            cell = params[first : first + per_cell]
            _gates(cell, hidden, GATES[call.name])
            unify(call.contract(cell[0], 1), below)
            unify(call.contract(cell[1], 1), hidden)
        below = concat([hidden] * directions)
    for state in states:
        freeze(state.dims[0], "layers of a recurrent module")
    return [[*x.dims[:-1], below], *[list(states[0].dims) for _ in states]]


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(call: Call) -> Result:
    x, states = call.arg["input"], call.arg["hx"]
    states = [states] if isinstance(states, Traced) else list(states)
    hidden = states[0].dims[-1]
    for state in states[1:]:
        unify(state.dims[-1], hidden)
        unify(state.dims[0], states[0].dims[0])
    weights = [call.arg[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if call.arg[name] is not None]
    _gates(weights, hidden, GATES[call.name.removesuffix("_cell")])
    unify(call.contract(call.arg["w_ih"], 1), x.dims[-1])
    unify(call.contract(call.arg["w_hh"], 1), hidden)
    return [list(states[0].dims) for _ in call.shapes]


@rule("tensordot")
def tensordot(call: Call) -> Dims:
    a, b = call.arg["self"], call.arg["other"]
    left = [wrap(d, len(a.dims)) for d in call.arg["dims_self"]]
    right = [wrap(d, len(b.dims)) for d in call.arg["dims_other"]]
    for d, e in zip(left, right, strict=True):
        unify(call.contract(a, d), call.contract(b, e))
    return [*(x for d, x in enumerate(a.dims) if d not in left), *(x for d, x in enumerate(b.dims) if d not in right)]


@rule("cdist", "_cdist_forward")
def cdist(call: Call) -> Dims:
    a, b = call.arg["x1"], call.arg["x2"]
    unify(call.contract(a, len(a.dims) - 1), call.contract(b, len(b.dims) - 1))
    batch = broadcast([Traced(t.shape[:-2], t.dims[:-2]) for t in (a, b)], call.shapes[0][:-2])
    return [*batch, a.dims[-2], b.dims[-2]]


@rule("cosine_similarity")
def cosine_similarity(call: Call) -> Dims:
    a, b, dim = call.arg["x1"], call.arg["x2"], call.arg["dim"]
    if len(a.dims) != len(b.dims):
        freeze_all((a, b), "cosine similarity of tensors of different rank")
        return fixed(call.shapes[0], "cosine similarity")
    merged = broadcast([a, b], [max(n) for n in zip(a.shape, b.shape, strict=True)])
    return [d for place, d in enumerate(merged) if place != wrap(dim, len(merged))]
