"""The random baseline as it was published, for comparison only.

The published code draws an independent set of channels for every convolution. Layers that follow one
another still fit, but an identity shortcut then adds channels that do not belong together: the cut is not
a sub-network of the model, not even at full capacity. :class:`~fedrolex.slicing.schemes.Random` draws once
an axis and is what Federated Dropout should be.
"""

from dataclasses import dataclass
from fractions import Fraction

from fedrolex.core import shuffle
from fedrolex.slicing.axes import Axes
from fedrolex.slicing.axis import Axis
from fedrolex.slicing.layout import Ref
from fedrolex.slicing.schemes import Random
from fedrolex.slicing.windows import Span, Window, pick


@dataclass(frozen=True, kw_only=True)
class RandomMiswired(Random):
    """Random windows with the published wiring: every writer of an axis draws indices of its own.

    Readers take the indices of the writer last seen, in the model's order of tensors; a 1×1 shortcut
    convolution takes those of the writer before it. Indices stay in the order they were drawn.
    """

    def _window(self, axes: Axes, round: int, beta: Fraction, client: int) -> Window:
        wiring: dict[tuple[str, int], Span] = {}
        current: dict[str, Span] = {}
        for name, tensor in axes.tensors.items():
            for dim, layout in enumerate(tensor.dims):
                if not isinstance(layout, Ref) or axes.axes[layout.axis].kind != "width":
                    continue
                axis = axes.axes[layout.axis]
                writes = tensor.role == "parameter" and bool(tensor.reads) and dim not in tensor.reads
                shortcut = writes and axis.name in current and axes.shape(name)[2:] == (1, 1)
                if axis.name not in current or (writes and not shortcut):
                    current[axis.name] = self._drawn(axis, name, round, beta, client)
                wiring[name, dim] = current[axis.name]
        spans = {a.name: current[a.name] for a in axes.cut_axes if a.name in current}
        return Window(spans, wiring)

    def _drawn(self, axis: Axis, writer: str, round: int, beta: Fraction, client: int) -> Span:
        who = {"round": "", "capacity": beta, "client": client}[self.scope]
        order = shuffle(axis.size, self.seed, "miswired", round, self.scope, who, writer)
        return pick(order[: self.width(axis, beta)], axis.size)
