"""Rules for operations that move indices about: views, permutations, concatenations, factories."""

import math
from collections.abc import Sequence

from fedrolex.slicing.infer import REGROUPED, Dim, Unknown, can_divide, concat, divide, freeze, product, unify
from fedrolex.slicing.rules.call import Call, Dims, Result, Traced, fixed, freeze_all, rule, wrap, wrap_all


def regroup(x: Traced, shape: Sequence[int]) -> list[Dim]:
    """The dimensions of a row-major view of ``x`` with another shape.

    Dimensions are matched in the smallest groups of equal size; inside a group the innermost
    dimensions are split off one after the other.
    """
    result: list[Dim] = []
    i = o = 0
    while i < len(x.shape) or o < len(shape):
        start_i, start_o = i, o
        size_i = x.shape[i] if i < len(x.shape) else 1
        size_o = shape[o] if o < len(shape) else 1
        i, o = min(i + 1, len(x.shape)), min(o + 1, len(shape))
        while size_i != size_o:
            if size_i < size_o and i < len(x.shape):
                size_i *= x.shape[i]
                i += 1
            elif o < len(shape):
                size_o *= shape[o]
                o += 1
            else:
                i, o = len(x.shape), len(shape)
                break
        result.extend(_regroup_one(x.dims[start_i:i], shape[start_o:o]))
    return result


def _regroup_one(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    if 0 in shape:
        return fixed(shape, "empty")
    rest = product(dims) if dims else Unknown(1, "size one")
    result: list[Dim] = []
    for n in reversed(shape):
        if n == 1:
            result.append(Unknown(1, "size one"))
            continue
        if not can_divide(rest, n):
            for dim in dims:
                freeze(dim, REGROUPED)
            return fixed(shape, REGROUPED)
        rest, inner = divide(rest, n)
        result.append(inner)
    return result[::-1]


@rule("view", "reshape", "_unsafe_view", "view_as", "reshape_as", "_reshape_alias", "flatten", "unsqueeze", "ravel")
def view(call: Call) -> Dims:
    out = regroup(call.arg["self"], call.shapes[0])
    if "other" in call.arg:
        for a, b in zip(out, call.arg["other"].dims, strict=True):
            unify(a, b)
    if "size" in call.arg or "shape" in call.arg:
        call.rewrite["size" if "size" in call.arg else "shape"] = list(out)
    return out


@rule("squeeze")
def squeeze(call: Call) -> Dims:
    """Only what had size one at full width goes: a dimension cut to one index stays."""
    x = call.arg["self"]
    gone = [d for d in wrap_all(call.arg.get("dim"), len(x.dims)) if x.shape[d] == 1]
    call.replace = ("squeeze.dims", {"self": x, "dim": gone})
    return [dim for d, dim in enumerate(x.dims) if d not in gone]


@rule("unflatten")
def unflatten(call: Call) -> Dims:
    x = call.arg["self"]
    out = regroup(x, call.shapes[0])
    dim = wrap(call.arg["dim"], len(x.dims))
    call.rewrite["sizes"] = out[dim : dim + len(call.arg["sizes"])]
    return out


def permutation_of(call: Call) -> list[int] | None:
    """The order of the input's dimensions in the output of a permuting operation, or None for another one."""
    x = call.arg.get("self")
    if not isinstance(x, Traced):
        return None
    rank = len(x.dims)
    order = list(range(rank))
    match call.name:
        case "permute":
            return [wrap(d, rank) for d in call.arg["dims"]]
        case "t" | "numpy_T" | "matrix_H":
            return order[::-1]
        case "mT" | "mH" | "adjoint":
            return [*order[:-2], order[-1], order[-2]]
        case "transpose" | "swapaxes" | "swapdims":
            names = ("dim0", "dim1") if "dim0" in call.arg else ("axis0", "axis1")
            a, b = (wrap(call.arg[name], rank) for name in names)
            order[a], order[b] = order[b], order[a]
            return order
        case "movedim" | "moveaxis":
            source, target = (wrap_all(call.arg[name], rank) for name in ("source", "destination"))
            rest = [d for d in order if d not in source]
            for place, dim in sorted(zip(target, source, strict=True)):
                rest.insert(place, dim)
            return rest
    return None


@rule(
    "permute", "t", "numpy_T", "matrix_H", "mT", "mH", "adjoint", "transpose", "swapaxes", "swapdims", "movedim",
    "moveaxis",
)  # fmt: skip
def permute(call: Call) -> Dims:
    order = permutation_of(call)
    assert order is not None
    return [call.arg["self"].dims[d] for d in order]


@rule("expand", "expand_as", "broadcast_to")
def expand(call: Call) -> Dims:
    """Dimensions of size 1 grow; what they grow to has no structure of its own."""
    x, shape = call.arg["self"], call.shapes[0]
    new = len(shape) - len(x.dims)
    grown = zip(x.dims, x.shape, shape[new:], strict=True)
    out = [*map(Unknown, shape[:new]), *(dim if before == n else Unknown(n) for dim, before, n in grown)]
    if call.name == "expand_as":
        for a, b in zip(out, call.arg["other"].dims, strict=True):
            unify(a, b)
    else:
        call.rewrite["size"] = list(out)
    return out


@rule("repeat", "tile")
def repeat(call: Call) -> Dims:
    x = call.arg["self"]
    key = "repeats" if "repeats" in call.arg else "dims"
    times = list(call.arg[key])
    times = [1] * (len(x.dims) - len(times)) + times
    dims = [*fixed([1] * (len(times) - len(x.dims)), "size one"), *x.dims]
    copies = [Unknown(n) for n in times]
    call.rewrite[key] = list(copies)
    return [product((copy, dim)) if n > 1 else dim for copy, dim, n in zip(copies, dims, times, strict=True)]


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Dims:
    x, times, dim = call.arg.get("self"), call.arg.get("repeats"), call.arg.get("dim")
    if not isinstance(x, Traced) or not isinstance(times, int) or dim is None:
        freeze_all(call.tensors(), "repeat_interleave with uneven repeats")
        return fixed(call.shapes[0], "repeat_interleave")
    dim = wrap(dim, len(x.dims))
    copies = Unknown(times)
    call.rewrite.update(repeats=copies, output_size=None)
    return [*x.dims[:dim], product((x.dims[dim], copies)), *x.dims[dim + 1 :]]


@rule("cat", "concat", "concatenate")
def cat(call: Call) -> Dims:
    tensors = [t for t in call.arg["tensors"] if t.shape != (0,)]
    first = tensors[0]
    dim = wrap(call.arg["dim"], len(first.dims))
    for other in tensors[1:]:
        for place, (a, b) in enumerate(zip(first.dims, other.dims, strict=True)):
            if place != dim:
                unify(a, b)
    return [*first.dims[:dim], concat([t.dims[dim] for t in tensors]), *first.dims[dim + 1 :]]


@rule("stack")
def stack(call: Call) -> Dims:
    tensors = call.arg["tensors"]
    first = tensors[0]
    for other in tensors[1:]:
        for a, b in zip(first.dims, other.dims, strict=True):
            unify(a, b)
    dim = wrap(call.arg["dim"], len(first.dims) + 1)
    return [*first.dims[:dim], Unknown(len(tensors), "stacked tensors"), *first.dims[dim:]]


@rule("pad", "constant_pad_nd")
def pad(call: Call) -> Dims:
    """A constant border is a fixed part before and after; any other border ties neighbours together."""
    x, amounts = call.arg["self"], call.arg["pad"]
    out = list(x.dims)
    constant = call.name == "constant_pad_nd" or call.arg.get("mode", "constant") == "constant"
    for pair in range(len(amounts) // 2):
        place = len(x.dims) - 1 - pair
        before, after = amounts[2 * pair : 2 * pair + 2]
        if constant and before >= 0 and after >= 0:
            out[place] = concat([Unknown(before, "padding"), x.dims[place], Unknown(after, "padding")])
        elif before or after:
            freeze(x.dims[place], "padded with its own values")
            out[place] = Unknown(call.shapes[0][place], "padding")
    return out


@rule("pixel_shuffle", "pixel_unshuffle")
def pixel_shuffle(call: Call) -> Dims:
    """Channel × r × r becomes channel and finer space (or back)."""
    x = call.arg["self"]
    *lead, channels, height, width = x.dims
    freeze(height, "a position in space")
    freeze(width, "a position in space")
    new_height, new_width = fixed(call.shapes[0][-2:], "a position in space")
    if call.name == "pixel_unshuffle":
        factor = Unknown(call.arg["downscale_factor"] ** 2, "a position in space")
        return [*lead, product((channels, factor)), new_height, new_width]
    square = call.arg["upscale_factor"] ** 2
    if not can_divide(channels, square):
        freeze(channels, REGROUPED)
        return [*lead, *fixed(call.shapes[0][-3:], REGROUPED)]
    outer, inner = divide(channels, square)
    freeze(inner, "a position in space")
    return [*lead, outer, new_height, new_width]


@rule("channel_shuffle")
def channel_shuffle(call: Call) -> Dims:
    x, groups = call.arg["self"], call.arg["groups"]
    if not can_divide(x.dims[1], x.shape[1] // groups):
        freeze(x.dims[1], REGROUPED)
        return list(x.dims)
    outer, inner = divide(x.dims[1], x.shape[1] // groups)
    call.rewrite["groups"] = outer
    return [x.dims[0], product((inner, outer)), *x.dims[2:]]


@rule("im2col")
def im2col(call: Call) -> Dims:
    x = call.arg["self"]
    *lead, channels, height, width = x.dims
    freeze(height, "a position in space")
    freeze(width, "a position in space")
    window = Unknown(math.prod(call.arg["kernel_size"]), "a position in space")
    return [*lead, product((channels, window)), *fixed(call.shapes[0][-1:], "a position in space")]


@rule("unfold")
def unfold(call: Call) -> Dims:
    x = call.arg["self"]
    dim = wrap(call.arg["dimension"], len(x.dims))
    freeze(x.dims[dim], "cut into overlapping pieces")
    new, length = fixed((call.shapes[0][dim], call.shapes[0][-1]), "unfold")
    return [*x.dims[:dim], new, *x.dims[dim + 1 :], length]


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "rand", "randn")
def constant_fill(call: Call) -> Dims:
    """Every index is like every other, so the sizes follow whatever the tensor meets."""
    out = [Unknown(n) for n in call.shapes[0]]
    call.rewrite["size"] = list(out)
    return out


@rule(
    "arange", "eye", "linspace", "logspace", "scalar_tensor", "tensor", "randint", "randperm", "tril_indices",
    "triu_indices", "hann_window",
)  # fmt: skip
def numbered(call: Call) -> Dims:
    """Each index has a value of its own, which a smaller tensor made the same way would not have."""
    return fixed(call.shapes[0], "numbered by the code")


@rule("meshgrid", "broadcast_tensors")
def meshgrid(call: Call) -> Result:
    freeze_all(call.tensors(), call.name)
    return [fixed(shape, call.name) for shape in call.shapes]
