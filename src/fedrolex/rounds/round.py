"""One round in progress, as a method sees it."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedrolex.clients import Job, RoundPlan, Upload, copied
from fedrolex.rounds.average import Average
from fedrolex.rounds.server import Server, State


@dataclass
class Round:
    """What has come in of a round.

    Attributes:
        server: as it stands before the round; nothing of it may be changed.
        plan: what the clients were asked.
        average: of the answers so far.
        taken: the jobs whose answers have been taken so far.
        uploads: answers kept one by one with their weights, where a method calls :meth:`keep`.
        kept: what clients keep if the round counts, by client; see :meth:`remember`.
        notes: what the method notes until the round is finished.
    """

    server: Server
    plan: RoundPlan
    average: Average
    taken: list[Job] = field(default_factory=list)
    uploads: list[tuple[Upload, float]] = field(default_factory=list)
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The round's number, counted from 0."""
        return self.plan.round

    @property
    def state(self) -> State:
        """The server's tensors before the round."""
        return self.server.state

    def keep(self, upload: Upload, weight: float) -> None:
        """Keep a copy of an answer until the round is finished."""
        self.uploads.append((replace(upload, tensors=copied(upload.tensors)), weight))

    def remember(self, client: int, tensors: dict[str, Tensor]) -> None:
        """Have a client keep tensors, if the round counts, beside those it keeps already."""
        self.kept.setdefault(client, {}).update(tensors)
