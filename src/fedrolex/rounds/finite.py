"""Whether tensors hold only finite values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def not_finite(tensors: Mapping[str, Any]) -> str | None:
    """The first tensor with a value that is not finite, or None; the device is asked once if all is well."""
    found = {n: t for n, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point() and not t.is_meta}
    if found and all(t.layout is torch.strided and t.numel() for t in found.values()):
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(list(found.values()))])
        if bool(norms.isfinite().all()):
            return None
    return next((name for name, tensor in found.items() if not bool(tensor.isfinite().all())), None)
