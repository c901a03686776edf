"""How many multiplications a computation takes."""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def macs_of(call: Callable[[], object]) -> int:
    """Multiply-accumulates of the convolutions and matrix products of a call, as PyTorch counts them."""
    counter = FlopCounterMode(display=False)
    # Fused attention is not counted on every device; its plain form is, everywhere alike.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        call()
    return counter.get_total_flops() // 2
