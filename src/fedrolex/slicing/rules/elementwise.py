"""Rules for operations that keep dimensions as they are, or only drop some: norms, reductions, pools, activations."""

from fedrolex.slicing.infer import Dim, Unknown, can_cut, can_divide, cut_at, divide, freeze, mark, unify
from fedrolex.slicing.rules.call import Call, Dims, Result, Traced, broadcast, fixed, freeze_all, rule, wrap, wrap_all
from fedrolex.slicing.rules.contractions import SPATIAL


def pointwise(call: Call) -> Dims:
    """Operands are broadcast against each other; dimensions that meet are tied."""
    return broadcast(call.tensors(), call.shapes[0])


@rule(
    "alias", "bernoulli", "celu", "clone", "contiguous", "copysign", "detach", "dropout", "alpha_dropout",
    "feature_dropout", "feature_alpha_dropout", "elu", "empty_like", "full_like", "gelu", "hardshrink",
    "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lift_fresh", "lift_fresh_copy", "log_sigmoid", "logit",
    "mish", "native_dropout", "ones_like", "rand_like", "randn_like", "relu", "relu6", "rrelu", "rrelu_with_noise",
    "selu", "sigmoid", "silu", "softplus", "square", "tanh", "to", "_to_copy", "zeros_like", "zero", "fill",
    "nan_to_num", "uniform", "normal", "threshold", "bitwise_not", "logical_not", "masked_fill", "where", "lerp",
    "rsub", "sub", "add", "mul", "div", "pow", "clamp", "clip", "clamp_min", "clamp_max", "maximum", "minimum",
    "copy", "true_divide", "float_power", "floor_divide", "remainder", "addcmul", "addcdiv", "absolute",
    "exponential", "random", "geometric", "log_normal", "cauchy", "real", "imag", "conj", "_conj", "complex",
    "resolve_conj", "resolve_neg", "conj_physical", "_weight_norm", "__and__", "__or__", "__xor__", "__lshift__",
    "__rshift__",
)  # fmt: skip
def same(call: Call) -> Result:
    """Elementwise, whatever the operator's tags say."""
    if len(call.shapes) > 1:
        first = broadcast([t for t in call.tensors() if t.shape == call.shapes[0]], call.shapes[0])
        return [first if shape == call.shapes[0] else fixed(shape, call.name) for shape in call.shapes]
    return pointwise(call)


@rule("view_as_real", "view_as_complex")
def as_pairs(call: Call) -> Dims:
    """Complex numbers are pairs in a last dimension of two."""
    x = call.arg["self"]
    if call.name == "view_as_real":
        return [*x.dims, Unknown(2, "real and imaginary part")]
    freeze(x.dims[-1], "real and imaginary part")
    return list(x.dims[:-1])


@rule("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_fft2", "fft_ifft2", "fft_rfft2", "fft_irfft2", "fft_fftn",
      "fft_ifftn", "fft_rfftn", "fft_irfftn")  # fmt: skip
def fourier(call: Call) -> Dims:
    x = call.arg["self"]
    along = wrap_all(call.arg.get("dim"), len(x.dims))
    for d in along:
        freeze(x.dims[d], f"the order of its indices matters to {call.name}")
    return [Unknown(n, call.name) if d in along else x.dims[d] for d, n in enumerate(call.shapes[0])]


@rule("prelu")
def prelu(call: Call) -> Dims:
    x, weight = call.arg["self"], call.arg["weight"]
    if weight.dims and weight.shape[0] > 1:
        unify(weight.dims[0], x.dims[1])
    return list(x.dims)


@rule("batch_norm", "instance_norm", "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm")
def batch_norm(call: Call) -> Dims:
    x = call.arg["input"]
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call.arg.get(name) is not None:
            unify(call.arg[name].dims[0], x.dims[1])
    return list(x.dims)


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Dims:
    x = call.arg["input"]
    count = len(call.arg["normalized_shape"])
    tail = x.dims[-count:]
    for name in ("weight", "bias"):
        if call.arg.get(name) is not None:
            for a, b in zip(call.arg[name].dims, tail, strict=True):
                unify(a, b)
    call.rewrite["normalized_shape"] = list(tail)
    return list(x.dims)


@rule("group_norm")
def group_norm(call: Call) -> Dims:
    x, groups = call.arg["input"], call.arg["num_groups"]
    for name in ("weight", "bias"):
        if call.arg.get(name) is not None:
            unify(call.arg[name].dims[0], x.dims[1])
    inner = x.shape[1] // groups
    if groups > 1 and not can_divide(x.dims[1], inner):
        freeze(x.dims[1], "its channels do not split into the norm's groups")
    elif groups > 1:
        outer, _ = divide(x.dims[1], inner)
        if inner > 1:
            mark(outer, "groups")
        call.rewrite["num_groups"] = outer
    return list(x.dims)


@rule("softmax", "log_softmax", "_softmax", "_log_softmax", "type_as")
def as_first(call: Call) -> Dims:
    """The result has the dimensions of the first operand."""
    return list(call.tensors()[0].dims)


@rule(
    "cumsum", "cumprod", "logcumsumexp", "flip", "roll", "cummax", "cummin", "sort", "argsort", "diff", "renorm",
    "tril", "triu",
)  # fmt: skip
def ordered(call: Call) -> Result:
    """The result depends on the order of indices along some dimensions: those stay whole."""
    x = call.tensors()[0]
    dims = [-2, -1] if call.name in ("tril", "triu") else call.arg.get("dim", call.arg.get("dims"))
    for d in wrap_all(None if dims == [] else dims, len(x.dims)):
        freeze(x.dims[d], f"the order of its indices matters to {call.name}")
    return [list(x.dims) if shape == x.shape else fixed(shape, call.name) for shape in call.shapes]


@rule(
    "sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "norm", "linalg_vector_norm", "any", "all",
    "nansum", "var_mean", "std_mean", "nanmean", "count_nonzero",
)  # fmt: skip
def reduction(call: Call) -> Result:
    x = call.tensors()[0]
    dims = call.arg.get("dim")
    along = set(wrap_all(None if dims == [] else dims, len(x.dims)))
    call.contracted.extend(x.dims[d] for d in along)
    if call.arg.get("keepdim", False):
        out: list[Dim] = [Unknown(1, "size one") if d in along else dim for d, dim in enumerate(x.dims)]
    else:
        out = [dim for d, dim in enumerate(x.dims) if d not in along]
    return [out for _ in call.shapes]


@rule("max", "min", "median", "mode", "argmax", "argmin", "topk", "kthvalue")
def choose(call: Call) -> Result:
    """Largest elements: the value needs no order of indices, its place does."""
    x = call.tensors()[0]
    if call.name in ("max", "min") and call.arg.get("other") is not None:
        return pointwise(call)
    only_value = call.name in ("max", "min") and (len(call.shapes) == 1 or 1 in call.unused)
    along = wrap_all(call.arg.get("dim"), len(x.dims))
    if not only_value:
        for d in along:
            freeze(x.dims[d], f"the places of its indices matter to {call.name}")
    if len(call.shapes[0]) == len(x.dims):
        return [[Unknown(n, call.name) if d in along else x.dims[d] for d, n in enumerate(s)] for s in call.shapes]
    return [[dim for d, dim in enumerate(x.dims) if d not in along] for _ in call.shapes]


@rule(
    "avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "adaptive_max_pool3d", "max_pool2d_with_indices", "max_pool1d_with_indices", "max_pool3d_with_indices",
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "fractional_max_pool2d",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_linear1d", "upsample_trilinear3d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "grid_sampler", "max_unpool2d", "affine_grid_generator",
)  # fmt: skip
def spatial(call: Call) -> Result:
    """Mixes positions in space; channels, and what lies before them, pass through."""
    x = call.tensors()[0]
    changed = [d for d in range(len(x.dims)) if any(len(s) != len(x.dims) or s[d] != x.shape[d] for s in call.shapes)]
    count = next((int(c) for c in call.name if c.isdigit()), 2)
    first = min([len(x.dims) - count, *changed])
    for tensor in call.tensors():
        for dim in tensor.dims[first if tensor is x else 0 :]:
            freeze(dim, SPATIAL)
    if any(len(shape) != len(x.dims) for shape in call.shapes):
        freeze_all(call.tensors(), call.name)
        return [fixed(shape, call.name) for shape in call.shapes]
    return [[*x.dims[:first], *fixed(shape[first:], SPATIAL)] for shape in call.shapes]


@rule("glu")
def glu(call: Call) -> Dims:
    """Two halves multiply each other: they share their indices."""
    x, dim = call.arg["self"], wrap(call.arg["dim"], len(call.arg["self"].dims))
    half = x.shape[dim] // 2
    if not can_cut(x.dims[dim], half):
        freeze(x.dims[dim], "its two halves are regrouped")
        return [*x.dims[:dim], Unknown(half, "glu"), *x.dims[dim + 1 :]]
    gated, gate = cut_at(x.dims[dim], half)
    unify(gated, gate)
    return [*x.dims[:dim], gated, *x.dims[dim + 1 :]]


@rule("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "multi_margin_loss", "multilabel_margin_loss")
def class_loss(call: Call) -> Dims:
    freeze_all(call.tensors(), f"classes or samples of {call.name}")
    return fixed(call.shapes[0], "loss")


@rule(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "poisson_nll_loss", "soft_margin_loss",
)  # fmt: skip
def paired_loss(call: Call) -> Dims:
    first: Traced = call.tensors()[0]
    merged = broadcast(call.tensors(), first.shape)
    return merged if call.shapes[0] == first.shape else fixed(call.shapes[0], "loss")


@rule("embedding")
def embedding(call: Call) -> Dims:
    """Rows are looked up by number: whole unless a window selects from them."""
    weight, indices = call.arg["weight"], call.arg["indices"]
    mark(weight.dims[0], "rows")
    if weight.origin is not None:
        call.reads.append((weight.origin[0], weight.origin[1][0]))
    return [*indices.dims, weight.dims[1]]


@rule("embedding_bag", "_embedding_bag")
def embedding_bag(call: Call) -> Result:
    weight = call.arg["weight"]
    mark(weight.dims[0], "rows")
    first = [Unknown(call.shapes[0][0], "bags"), weight.dims[1]]
    return [first, *(fixed(shape, "bags") for shape in call.shapes[1:])]


@rule("one_hot", "bincount", "histc")
def one_hot(call: Call) -> Dims:
    x = call.tensors()[0]
    kept = list(x.dims) if call.name == "one_hot" else []
    return [*kept, *fixed(call.shapes[0][len(kept) :], call.name)]
