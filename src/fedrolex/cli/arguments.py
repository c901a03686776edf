"""Reading models and examples from command-line words. Nothing is evaluated: values are YAML scalars."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.cli.options import INPUT
from fedrolex.core import FedrolexError, in_one_line
from fedrolex.core.importing import resolve
from fedrolex.recipes.decode import read_yaml

INTEGERS = (
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*(\(\))?")


def read_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words as keyword arguments.

    A value is a YAML scalar or list. ``NAME=MODULE:OBJECT`` is that object; with ``NAME.KEY=VALUE`` words
    beside it (or ``()`` behind it) it is called with those, so a configuration object can be built::

        --arg config=transformers:GPT2Config --arg config.n_layer=2
    """
    flat: dict[str, Any] = {}
    nested: dict[str, list[str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise FedrolexError(f"--arg {pair!r} is not NAME=VALUE")
        outer, dot, rest = name.partition(".")
        if dot:
            nested.setdefault(outer, []).append(f"{rest}={value}")
        else:
            flat[name] = _value(name, value)
    for outer, inner in nested.items():
        if not callable(flat.get(outer)):
            raise FedrolexError(f"--arg {outer}.{inner[0]} needs --arg {outer}=MODULE:OBJECT to be called with it")
        flat[outer] = call(flat[outer], inner, f"--arg {outer}")
    return flat


def _value(name: str, text: str) -> Any:
    if _REFERENCE.fullmatch(text):
        found = resolve(text.removesuffix("()"))
        return call(found, [], f"--arg {name}") if text.endswith("()") else found
    return read_yaml(text, f"--arg {name}: cannot read {text!r}: it")


def call(factory: Any, pairs: Sequence[str], what: str) -> Any:
    """Call a factory with ``NAME=VALUE`` words."""
    arguments = read_arguments(pairs)
    with in_one_line(f"{what}: calling it failed"):
        return factory(**arguments)


def build_model(path: str, pairs: Sequence[str]) -> nn.Module:
    """The module that ``MODULE:FACTORY`` makes with these arguments."""
    model = resolve(path)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise FedrolexError(f"{path} is a {type(model).__name__}: give a function or class that makes a module")
        model = call(model, pairs, path)
    elif pairs:
        raise FedrolexError(f"{path} is a module that is made already, --arg {pairs[0]} does nothing: leave it out")
    if not isinstance(model, nn.Module):
        raise FedrolexError(f"{path} made a {type(model).__name__}, not a torch.nn.Module")
    return model


def read_inputs(words: Sequence[str], model: nn.Module | None = None) -> Any:
    """``[NAME=]SHAPE[:DTYPE[:HIGH]]`` words as an example: positional tensors, or keyword ones if named.

    Without words, what the model's ``slicing_example()`` returns, or images of 224×224.

    Real dtypes are drawn from a normal distribution, integers from 0 … HIGH − 1 (10 by default), e.g.
    ``2x3x32x32``, ``2x20:int64:1000``, ``input_ids=2x16:int64``.
    """
    own = getattr(model, "slicing_example", None)
    if not words and callable(own):
        return own()
    positional: list[Tensor] = []
    named: dict[str, Tensor] = {}
    for word in words or [INPUT]:
        name, equals, spec = word.rpartition("=")
        tensor = _tensor(word, spec)
        if equals:
            named[name] = tensor
        else:
            positional.append(tensor)
    if named and positional:
        raise FedrolexError(f"some of --input {' --input '.join(words)} have a name: give all inputs one, or none")
    return named or tuple(positional)


def _tensor(word: str, spec: str) -> Tensor:
    shape_text, _, rest = spec.partition(":")
    dtype_text, _, high_text = rest.partition(":")
    if not re.fullmatch("[0-9]{1,18}(x[0-9]{1,18})*", shape_text):
        raise FedrolexError(f"--input {word!r}: {shape_text!r} is not a shape: give e.g. 2x3x32x32 or 2x20:int64:1000")
    shape = [int(n) for n in shape_text.split("x")]
    if 0 in shape:
        raise FedrolexError(f"--input {word!r}: a dimension is 0")
    dtype = getattr(torch, dtype_text or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise FedrolexError(f"--input {word!r}: {dtype_text!r} is not a dtype: give e.g. float32 or int64")
    most = min(torch.iinfo(dtype).max + 1, 2**63 - 1) if dtype in INTEGERS else 0
    if high_text and not (re.fullmatch("[0-9]{1,19}", high_text) and 1 <= int(high_text) <= most):
        wanted = f"integers are drawn from 0 to HIGH - 1, give 1 to {most}" if most else "only integers have one"
        raise FedrolexError(f"--input {word!r}: {high_text!r} is not a number of values: {wanted}")
    high = 2 if dtype is torch.bool else int(high_text or 10)
    generator = torch.Generator().manual_seed(0)
    with in_one_line(f"--input {word!r}"):
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.randint(0, high, shape, generator=generator).to(dtype)
