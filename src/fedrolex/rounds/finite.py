"""Whether tensors hold only finite values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """The first tensor with a value that is not finite, or None; the device is asked once if all is well."""
    real = [t for t in tensors.values() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta]
    strided = [t for t in real if t.layout is torch.strided and t.numel()]
    if len(strided) == len(real) and real:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(strided)])
        if bool(norms.isfinite().all()):
            return None
    suspects = (n for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point())
    return next((n for n in suspects if not bool(tensors[n].isfinite().all())), None)
