"""One trace for all networks that differ in nothing but their weights.

Runs that are compared, seeds side by side and the cells of a table train the same network again and again, and a trace
takes seconds. It depends on what a network computes, not on its weights.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.trace import trace

KEPT = 16  # traces
TENSORS = ("_parameters", "_buffers", "_modules")
MODELS = "fedrolex.models."
PLAIN = (bool, int, float, str, type(None))
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
    if not type(model).__module__.startswith(MODELS) or not isinstance(example, Tensor):
        return None
    if any(tensor._backward_hooks for tensor in model.parameters()):
        return None
    places: dict[int, int] = {}  # of what is there under several names, the first
    parts: list[Hashable] = []
    for name, part in model.named_modules(remove_duplicate=False):
        own = {key: value for key, value in vars(part).items() if key not in TENSORS}
        if not type(part).__module__.startswith((MODELS, "torch.nn.")) or not all(map(_is_plain, own.values())):
            return None
        place = places.setdefault(id(part), len(places))
        parts.append((name, place, type(part), type(part).forward, repr(own)))
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for name, tensor in (*parameters, *buffers, ("", example)):
        place = places.setdefault(id(tensor), len(places))
        about = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference())
        parts.append((name, place, *about))
    mode = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    return (*parts, *mode, () if example.is_floating_point() else tuple(example.flatten().tolist()))


def _is_plain(value: object) -> bool:
    """Whether a representation says all of a value: plain ones, and the settings of this package's models."""
    if isinstance(value, OrderedDict):
        return not value  # hooks
    if type(value) is dict:
        return all(map(_is_plain, (*value, *value.values())))
    if type(value) in (tuple, list, set):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in PLAIN or type(value).__module__.startswith(MODELS)
