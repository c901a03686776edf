"""Cut any model, prove the cut, fold what comes back. Knows nothing of federated learning.

In short::

    axes = trace(model, example)  # derive and prove the axes
    window = Rolling().window(axes, round=3, capacity="1/4")  # which indices
    small = axes.cut(model, window)  # a real, smaller module
    fold = Fold(axes, axes.state(model))  # the server's average
    fold.add("client 0", axes.state(small, window), window)
    axes.load(model, fold.average())
"""

from fedrolex.slicing.axes import Axes
from fedrolex.slicing.axis import Axis, Note, TensorLayout
from fedrolex.slicing.complaints import one_line
from fedrolex.slicing.fold import Fold
from fedrolex.slicing.layout import Cat, Fixed, Layout, Prod, Ref, refs
from fedrolex.slicing.published import RandomMiswired
from fedrolex.slicing.regions import Region
from fedrolex.slicing.schemes import Blocks, Ordered, Random, Rolling, Scheme, Scope, Select, Static, spread
from fedrolex.slicing.trace import Hints, trace
from fedrolex.slicing.windows import WHOLE, Arc, Capacity, Pick, Rounding, Span, Window, exact, pick, width

__all__ = [
    "WHOLE", "Arc", "Axes", "Axis", "Blocks", "Capacity", "Cat", "Fixed", "Fold", "Hints", "Layout", "Note", "Ordered",
    "Pick", "Prod", "Random", "RandomMiswired", "Ref", "Region", "Rolling", "Rounding", "Scheme", "Scope", "Select",
    "Span", "Static", "TensorLayout", "Window", "exact", "one_line", "pick", "refs", "spread", "trace", "width",
]  # fmt: skip
