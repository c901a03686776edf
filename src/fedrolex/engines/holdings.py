"""What the clients of a cohort hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fedrolex.clients.messages import Failure, Job, RoundPlan, out_of_memory
from fedrolex.engines.cpu.loop import why_failed
from fedrolex.tasks.task import Examples


def holdings(
    plan: RoundPlan, jobs: Sequence[Job], known: Mapping[int, Examples] = MappingProxyType({})
) -> tuple[dict[int, Examples], dict[int, Failure]]:
    """The examples of every client, or why it has none, by client; those ``known`` are not read again.

    A lack of memory is no client's failure, and is raised.
    """
    data: dict[int, Examples] = {}
    failures: dict[int, Failure] = {}
    for job in jobs:
        try:
            found = known[job.client] if job.client in known else plan.task.client(job.client)
            if not len(found):
                raise ValueError("has no examples")
            data[job.client] = found
        except Exception as failure:
            if out_of_memory(failure):
                raise
            failures[job.client] = Failure(job, why_failed(failure))
    return data, failures
