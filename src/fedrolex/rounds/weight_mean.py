"""The mean of the server's weights over the last rounds, which may be judged in their place.

Where clients hold few labels, every round pulls the model towards the labels of its cohort, and the next one back. The
mean stands still between them. Training never sees it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fedrolex.clients import Tensors, copied
from fedrolex.rounds.server import State

PREFIX = "mean."  # of the sections that hold the means of others
COUNTED = "mean_rounds"  # the section that says how many there were


@dataclass(frozen=True)
class WeightMean:
    """An exponential mean over rounds.

    Attributes:
        rounds: a new round counts one part in so many, in the first rounds as much as every round before; 1 keeps no
            mean.
    """

    rounds: int = 1

    def begin(self, state: State, sections: Iterable[str]) -> State:
        """Means of sections, in sections of their own, and how many rounds they are of."""
        means = {f"{PREFIX}{section}": copied(state[section]) for section in sections}
        return {**means, COUNTED: {"rounds": torch.zeros(1, dtype=torch.int64)}}

    @torch.no_grad()
    def moved(self, state: State) -> State:
        """The means after a round that brought the server to ``state``; what is no fraction is new."""
        means = {section: own for section, own in state.items() if section.startswith(PREFIX)}
        if not means:
            return {}
        counted = {"rounds": state[COUNTED]["rounds"] + 1}
        share = 1 / min(self.rounds, int(counted["rounds"]))
        for section, own in means.items():
            new = state[section.removeprefix(PREFIX)]
            moved = _towards(own, new, share)
            means[section] = {name: moved.get(name, new[name]) for name in own}
        return {**means, COUNTED: counted}


def _towards(means: Tensors, new: Tensors, share: float) -> Tensors:
    """Those that are fractions, moved a share of the way."""
    names = [name for name, mean in means.items() if mean.is_floating_point() or mean.is_complex()]
    moved = torch._foreach_lerp([means[name] for name in names], [new[name] for name in names], share)
    return dict(zip(names, moved, strict=True))


def with_means(state: State) -> State:
    """The server's tensors as they are judged: means stand where what they are means of stood."""
    return {**state, **{key.removeprefix(PREFIX): own for key, own in state.items() if key.startswith(PREFIX)}}
