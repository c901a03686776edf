"""Rules for operations that take a part of a tensor: splits, slices, look-ups."""

from fedrolex.slicing.infer import REGROUPED, Dim, Unknown, can_cut, can_divide, concat, cut_at, divide, freeze, unify
from fedrolex.slicing.rules.call import Call, Dims, Result, ToTheEnd, Traced, broadcast, fixed, freeze_all, rule, wrap


@rule("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_chunk")
def split(call: Call) -> Result:
    """Pieces may become unequal in a sub-model, so every spelling becomes a split by sizes."""
    x = next(call.arg[name] for name in ("self", "tensor") if name in call.arg)
    dim = wrap(call.arg["dim"], len(x.dims))
    pieces: list[Dim] = []
    rest = x.dims[dim]
    for shape in call.shapes:
        if not can_cut(rest, shape[dim]):
            freeze(x.dims[dim], REGROUPED)
            pieces = [Unknown(s[dim], REGROUPED) for s in call.shapes]
            break
        piece, rest = cut_at(rest, shape[dim])
        pieces.append(piece)
    call.replace = ("split_with_sizes", {"self": x, "split_sizes": list(pieces), "dim": dim})
    return [[*x.dims[:dim], piece, *x.dims[dim + 1 :]] for piece in pieces]


@rule("slice", "narrow")
def slice_(call: Call) -> Dims:
    x = call.arg["self"]
    dim = wrap(call.arg["dim"], len(x.dims))
    total, length = x.shape[dim], call.shapes[0][dim]
    start = call.arg.get("start")
    start = 0 if start is None else max(0, min(total, start + total if start < 0 else start))
    step = call.arg.get("step", 1)
    if length == total and step == 1:
        call.rewrite.update({"length": x.dims[dim]} if call.name == "narrow" else {"end": ToTheEnd(x.dims[dim])})
        return list(x.dims)
    if step > 1 and start < step and total % step == 0 and length == total // step and can_divide(x.dims[dim], step):
        outer, inner = divide(x.dims[dim], step)
        freeze(inner, "places in a slice with a step")
        call.rewrite["end"] = ToTheEnd(x.dims[dim])
        return [*x.dims[:dim], outer, *x.dims[dim + 1 :]]
    if step != 1 or not can_cut(x.dims[dim], start):
        freeze(x.dims[dim], "sliced with a step" if step != 1 else REGROUPED)
        return [*x.dims[:dim], Unknown(length, "slice"), *x.dims[dim + 1 :]]
    before, rest = cut_at(x.dims[dim], start)
    if not can_cut(rest, length):
        freeze(x.dims[dim], REGROUPED)
        return [*x.dims[:dim], Unknown(length, "slice"), *x.dims[dim + 1 :]]
    kept, _ = cut_at(rest, length)
    if call.name == "narrow":
        call.rewrite.update(start=before, length=kept)
    else:
        end = ToTheEnd(x.dims[dim]) if start + length == total else concat([before, kept])
        call.rewrite.update(start=before, end=end)
    return [*x.dims[:dim], kept, *x.dims[dim + 1 :]]


@rule("select", "unbind")
def select(call: Call) -> Result:
    x = call.arg["self"]
    dim = wrap(call.arg["dim"], len(x.dims))
    freeze(x.dims[dim], "single indices are picked from it")
    rest = [*x.dims[:dim], *x.dims[dim + 1 :]]
    return [rest for _ in call.shapes]


@rule("index_select")
def index_select(call: Call) -> Dims:
    x, index = call.arg["self"], call.arg["index"]
    dim = wrap(call.arg["dim"], len(x.dims))
    freeze(x.dims[dim], "single indices are picked from it")
    return [*x.dims[:dim], *(index.dims or fixed([1], "index")), *x.dims[dim + 1 :]]


@rule("index", "_unsafe_index")
def index(call: Call) -> Dims:
    """Fancy indexing: indexed dimensions stay whole, the others pass through."""
    x, indices = call.arg["self"], list(call.arg["indices"])
    indices += [None] * (len(x.dims) - len(indices))
    picked = [place for place, item in enumerate(indices) if item is not None]
    if len(indices) != len(x.dims) or not picked:
        freeze_all(call.tensors(), "indexed by a mask")
        return fixed(call.shapes[0], "index")
    for place in picked:
        freeze(x.dims[place], "single indices are picked from it")
    new = len(call.shapes[0]) - (len(x.dims) - len(picked))
    together = picked == list(range(picked[0], picked[-1] + 1))
    first = picked[0] if together else 0
    chosen = broadcast([indices[place] for place in picked], call.shapes[0][first : first + new])
    kept = [dim for place, dim in enumerate(x.dims) if place not in picked]
    return [*kept[:first], *chosen, *kept[first:]]


@rule("index_add", "index_copy")
def index_add(call: Call) -> Dims:
    """Rows of another tensor go to numbered places: those stay whole, what is inside a row is shared."""
    x, source = call.arg["self"], call.arg["source"]
    dim = wrap(call.arg["dim"], len(x.dims))
    for place, (a, b) in enumerate(zip(x.dims, source.dims, strict=True)):
        if place == dim:
            freeze(a, "single indices are changed in it")
        else:
            unify(a, b)
    return list(x.dims)


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Dims:
    """Values go to places given by several indices, or by a mask: dimensions up to the last indexed one stay whole."""
    x, values = call.arg["self"], call.arg["values"]
    inside = 0
    for place, index in enumerate(call.arg["indices"]):
        if index is not None:
            covered = len(index.shape) if x.shape[place : place + len(index.shape)] == index.shape else 1
            inside = max(inside, place + covered)
    for dim in (*x.dims[:inside], *values.dims[: max(0, len(values.dims) - len(x.dims) + inside)]):
        freeze(dim, "single indices are changed in it")
    rows = Traced(x.shape[inside:], x.dims[inside:])
    given = min(len(values.dims), len(rows.dims))
    broadcast([rows, Traced(values.shape[-given:], values.dims[-given:])] if given else [rows], rows.shape)
    return list(x.dims)


@rule("gather", "take_along_dim")
def gather(call: Call) -> Dims:
    x, index = call.arg["self"], call.arg.get("index", call.arg.get("indices"))
    if index is None or call.arg["dim"] is None or len(index.dims) != len(x.dims):
        freeze_all(call.tensors(), call.name)
        return fixed(call.shapes[0], call.name)
    dim = wrap(call.arg["dim"], len(x.dims))
    for place, (a, b) in enumerate(zip(x.dims, index.dims, strict=True)):
        if place == dim or x.shape[place] != index.shape[place]:
            freeze(a, "single indices are picked from it")
        else:
            unify(a, b)
    return list(index.dims)
