"""One trace for all networks that differ in nothing but their weights.

Runs that are compared, seeds side by side and the cells of a table train the same network again and again, and a trace
takes seconds. It depends on what a network computes, not on its weights.
"""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.trace import trace

KEPT = 16  # traces
TENSORS = ("_parameters", "_buffers", "_modules")
PLAIN = (bool, int, float, str, tuple, set, dict, type(None))  # hooks are in dictionaries that keep an order
known: dict[Hashable, Axes] = {}


def traced_once(model: nn.Module, example: Any, *, whole: bool = False) -> Axes:
    """What :func:`~fedrolex.slicing.trace.trace` gives; a network of this package is traced once a process."""
    like = (kind(model, example), whole)
    if like[0] is None:
        return trace(model, example, whole=whole)
    if like not in known:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        known[like] = trace(model, example, whole=whole)
    return known[like]


def kind(model: nn.Module, example: Any) -> Hashable | None:
    """All that a trace depends on; None where that is not known: a user's code, hooks, settings that are objects."""
    if not (isinstance(model, nn.Module) and isinstance(example, Tensor)):
        return None
    if any(tensor._backward_hooks for tensor in model.parameters()):
        return None
    parts: list[Hashable] = []
    for name, part in model.named_modules():
        own = {key: value for key, value in vars(part).items() if key not in TENSORS}
        if not type(part).__module__.startswith(("fedrolex.models.", "torch.nn.")):
            return None
        if not all(_is_plain(value) for value in own.values() if value):
            return None
        parts.append((name, type(part), type(part).forward, repr(own)))
    tensors = [*model.named_parameters(), *model.named_buffers(), ("", example)]
    parts += [(name, t.shape, t.dtype, t.device, t.requires_grad, t.is_inference()) for name, t in tensors]
    mode = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*parts, *mode, () if example.is_floating_point() else tuple(example.flatten().tolist()))


def _is_plain(value: object) -> bool:
    """Whether a representation says all of a value: plain ones, and the settings of this package's models."""
    return type(value) in PLAIN or type(value).__module__.startswith("fedrolex.models.")
