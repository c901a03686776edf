"""Which device a run is on."""

import torch

from fedrolex.core.errors import FedrolexError


def pick_device(name: str) -> torch.device:
    """``auto`` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise FedrolexError("device is cuda, but there is no CUDA device here: use cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
