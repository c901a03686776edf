"""Which engine a run was given: a record that makes the same engine again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from torch import nn

from fedrolex.clients.messages import Engine
from fedrolex.clients.work import Precision
from fedrolex.core.errors import FedrolexError
from fedrolex.engines.cpu.crew import Crew
from fedrolex.engines.cpu.loop import Loop


@dataclass(frozen=True)
class Choice:
    """An engine on a CPU, and why it.

    Attributes:
        engine: ``loop`` or ``crew``.
        workers: of ``crew``.
        stacked: capacities ``crew`` stacks.
        why: one line.
    """

    engine: str
    workers: int = 1
    stacked: tuple[str, ...] = ()
    why: str = ""

    def build(self, model: nn.Module, precision: Precision = "fp32") -> Engine:
        """The engine itself."""
        if self.engine == "loop":
            return Loop(model, precision=precision)
        stacked = frozenset(Fraction(capacity) for capacity in self.stacked)
        return Crew(model, precision=precision, workers=self.workers, stacked=stacked)

    def __str__(self) -> str:
        if self.engine == "loop":
            return "loop"
        stacks = f", stacks of {', '.join(self.stacked)}" if self.stacked else ""
        return f"crew of {self.workers}{stacks}"

    def encode(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @staticmethod
    def decode(data: Any) -> Choice:
        """Inverse of :meth:`encode`; damaged data is refused in one line."""
        try:
            if not isinstance(data, Mapping) or data["engine"] not in ("loop", "crew"):
                raise ValueError
            stacked = tuple(str(Fraction(capacity)) for capacity in data["stacked"])
            return Choice(data["engine"], int(data["workers"]), stacked, str(data["why"]))
        except (KeyError, TypeError, ValueError):
            raise FedrolexError("the record of the run's engine is damaged: start a new run") from None
