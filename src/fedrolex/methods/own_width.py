"""Random weights for a narrow model, taken from a wide one's.

Layers draw weights with a variance of one over their inputs. A window's part of a wide model has fewer inputs, so its
weights are too small: they are made larger by √(inputs of the whole / inputs of the part).
"""

from math import prod, sqrt

from torch import Tensor

from fedrolex.clients import Network, Tensors
from fedrolex.slicing import Axes, Window


def at_own_width(axes: Axes, whole: Tensors, window: Window) -> dict[str, Tensor]:
    """Tensors of the whole model, new ones, in which the window's part is as if drawn at the window's widths."""
    found = {name: tensor.clone() for name, tensor in whole.items()}
    widths = axes.widths(window)
    for name, tensor in found.items():
        layout = axes.tensors[name]
        if layout.role == "parameter" and layout.floating and layout.reads:
            full, own = (prod(shape[dim] for dim in layout.reads) for shape in (tensor.shape, axes.shape(name, widths)))
            tensor *= sqrt(full / own)
    return found


def begin_at_own_width(network: Network, window: Window) -> None:
    """Make the window's part of a network as if drawn at the window's widths, in place."""
    axes, module = network.axes, network.module
    axes.load(module, at_own_width(axes, axes.state(module), window))
