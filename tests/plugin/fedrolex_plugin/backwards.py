"""An engine that trains the last client first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fedrolex import Engine, Failure, RoundPlan, Upload
from fedrolex.engines.cpu.loop import Loop


class Backwards(Engine):
    """The same results as ``loop``: a client's result does not depend on the others."""

    def supports(self, plan: RoundPlan) -> str | None:
        """Anything but deadlines."""
        return None if plan.deadline is None else "backwards does not look at the clock"

    def run(self, plan: RoundPlan) -> Iterator[Upload | Failure]:
        """Train from the last to the first, then answer in order."""
        loop = Loop(precision=self.precision, device=self.device)
        answers = []
        for answer in loop.run(replace(plan, jobs=list(reversed(plan.jobs)))):
            if isinstance(answer, Upload):
                copied = {name: tensor.clone() for name, tensor in answer.tensors.items()}
                answer = replace(answer, tensors=copied)
            answers.append(answer)
        yield from reversed(answers)
