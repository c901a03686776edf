"""Models of different families side by side: what clients of some capacities train is not a part of the server's model.

They share no weights; what they learn from each other goes through scores of public examples (FedDF, DS-FL) and, with
Fed-ET, through a last layer that all have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from fedrolex.methods.server_round import Group
from fedrolex.rounds.client_states import ClientStates
from fedrolex.rounds.intake import Intake
from fedrolex.runs.labelling import IDS, SOFT
from fedrolex.runs.training import Training
from fedrolex.slicing.axes import Axes


@dataclass
class Families(Training):
    """A run in which some capacities have models of their own; the others train parts of ``model``.

    Attributes:
        others: the training of each such capacity. ``state`` has its tensors as ``@capacity tensor``.
    """

    others: dict[Fraction, Training] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state |= {
            _named(level, name): t for level, other in self.others.items() for name, t in other.state.items()
        }

    def kinds(self) -> Sequence[Training]:
        """This training, and the others, brought to where the run stands."""
        for level, other in self.others.items():
            other.state = {name: self.state[_named(level, name)] for name in other.state}
            other.round = self.round
        return [self, *self.others.values()]

    def keep_states(self, states: ClientStates | None) -> None:
        """Where clients keep what they keep between rounds, whatever they train."""
        super().keep_states(states)
        for other in self.others.values():
            other.keep_states(states)

    def settle(self, intakes: Sequence[Intake]) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        """All models' new tensors after a round that counts; models that share no weights do not drift apart."""
        learn = self._labelled if self.method.labels is not None else self._distilled
        mine, *theirs = learn(intakes)
        for level, new in zip(self.others, theirs, strict=True):
            self._check_finite({_named(level, name): tensor for name, tensor in new.items()})
            mine |= {_named(level, name): tensor for name, tensor in new.items()}
        self._check_finite(mine)
        for each in (self, *self.others.values()):
            if each.labelling is not None:
                each.labelling.keep(self.round)
        return mine, {}

    def _labelled(self, _: Sequence[Intake]) -> list[dict[str, Tensor]]:
        """DS-FL: one set of labels from what all say."""
        assert self.labelling is not None
        books = [other.labelling for other in self.others.values()]
        self.labelling.said += [said for book in books if book is not None for said in book.said]
        mine = self.labelling.settle(self.round, self.state)
        labels = (IDS, SOFT)
        return [mine, *({**other.state, **{n: mine[n].clone() for n in labels}} for other in self.others.values())]

    def _distilled(self, intakes: Sequence[Intake]) -> list[dict[str, Tensor]]:
        """FedDF, Fed-ET: averages of each kind, then one server's part for all."""
        kinds = [self, *self.others.values()]
        news = [each.averaged(intake)[0] for each, intake in zip(kinds, intakes, strict=True)]
        groups: dict[Fraction, Group] = {}
        for each, new, intake in zip(kinds, news, intakes, strict=True):
            groups |= each.teaching.groups(new, intake)
        ordered = {level: groups[level] for level in self.fleet.levels}
        found = self.teaching.answered(ordered, self.teaching.server_group(news[0]))
        for each, new in zip(kinds, news, strict=True):
            each.teaching.take_over(new, found)
        return news

    def _evaluate(self) -> dict[str, Any]:
        """Of the leading model, and on demand of all."""
        leading = self._leading()
        found = Training._evaluate(leading)
        if self.measure.submodels:
            sizes: dict[str, float] = {}
            for each in (self, *self.others.values()):
                if each is self or self.method.labels is None:  # DS-FL's networks never leave their clients
                    sizes |= found["submodels"] if each is leading else Training._evaluate(each)["submodels"]
            found["submodels"] = {str(level): sizes[str(level)] for level in self.fleet.levels if str(level) in sizes}
        return found

    def trained(self) -> tuple[nn.Module, Axes]:
        """The leading model as it stands, with its axes."""
        return Training.trained(self._leading())

    def whole_bytes(self) -> int:
        """What a client of the leading model would receive."""
        return Training.whole_bytes(self._leading())

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin with given weights: those of the other networks, too, where they are among them."""
        super().start_from(tensors)
        for level, other in self.others.items():
            own = {name: tensors[_named(level, name)] for name in other.state if _named(level, name) in tensors}
            if own:
                other.start_from(own)

    def _leading(self) -> Training:
        """Of the server's model where it has one, else of that of the largest capacity."""
        self.kinds()
        served = self.method.server_model or self.method.labels is not None
        largest = max(self.fleet.levels)
        return self if served or largest in self.sizes else self.others[largest]


def _named(level: Fraction, name: str) -> str:
    return f"@{level} {name}"
