"""What a number needs beside it."""

import os
import platform
from typing import Any

import torch

from fedrolex.core.version import code_version


def environment() -> dict[str, Any]:
    """Code, libraries and machine."""
    return {
        "fedrolex": code_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
