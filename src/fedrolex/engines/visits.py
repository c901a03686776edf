"""What engines that train many clients at once do for each of them: before the first step and after the last."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedrolex.clients import Failure, Job, RoundPlan, Tensors, Upload, Visit, examples_of, random_draws, why_failed
from fedrolex.core import shuffle
from fedrolex.rounds import out_of_memory
from fedrolex.tasks import Examples

Key = tuple[int, str]
"""Identifies a job in its round, see :attr:`~fedrolex.clients.messages.Job.key`."""


def open_visits(
    plan: RoundPlan, jobs: Sequence[Job], spare: Callable[[Job], nn.Module], known: Mapping[int, Examples] | None = None
) -> tuple[list[Visit], dict[Key, Failure]]:
    """A visit for every job, made ready by the work's ``before``, and the jobs that failed by then, by their keys.

    A lack of memory is no client's failure, and is raised. ``spare`` gives a module of a job's widths, for hooks to try
    things with; examples of the clients in ``known`` are not read again.
    """
    visits, failures = [], {}
    for job in jobs:
        try:
            visit = Visit(plan, job, examples_of(plan, job, known), partial(spare, job))
            plan.work.before(visit)
            visit.check_constants(plan.work.constants, ())
            visits.append(visit)
        except Exception as failure:
            if out_of_memory(failure):
                raise
            failures[job.key] = Failure(job, why_failed(failure))
    return visits, failures


def close_visit(visit: Visit, finite: bool | None = None) -> Upload | Failure:
    """The answer of a client whose tensors, loss and steps are in its visit, after the work's ``after``."""
    try:
        visit.plan.work.after(visit)
        return visit.upload(finite)
    except Exception as failure:
        if out_of_memory(failure):
            raise
        return Failure(visit.job, why_failed(failure))


def starts(visits: Sequence[Visit]) -> list[Tensors]:
    """The tensors that each client begins with; those of one source are cut once, unless a hook asked for them."""
    cut: dict[object, Tensors] = {}
    for visit in visits:
        if "received" not in vars(visit) and visit.job.source not in cut:
            cut[visit.job.source] = visit.plan.received(visit.job)
    return [visit.received if "received" in vars(visit) else cut[visit.job.source] for visit in visits]


def epoch_of(visit: Visit, epoch: int, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a client's examples, augmented for one epoch and ordered by :func:`order_of`."""
    plan, data = visit.plan, visit.examples
    order, drawn = order_of(plan, len(data), plan.round, visit.job.client, epoch, rows)
    order = order.to(data.y.device, non_blocking=True)
    drawn = None if drawn is None else drawn.to(data.y.device, non_blocking=True)
    return plan.task.inputs(data.x[order], drawn), data.y[order]


def order_of(
    plan: RoundPlan, count: int, round: int, client: int, epoch: int, rows: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """The order in which a client's ``count`` examples are trained, and what is drawn for the inputs of each, if any.

    With ``rows``, as many examples as that: the client's own, again and again.
    """
    places = shuffle(count, plan.seed, "batches", round, client, epoch)
    order = torch.from_numpy(places if rows is None else np.resize(places, rows))
    return order, random_draws(count, plan.seed, round, client, epoch)[order] if plan.task.random_inputs else None


def steps_of(visit: Visit) -> int:
    """How many steps a client takes in the round."""
    work, count = visit.plan.work, len(visit.examples)
    return min(work.steps(count, visit.job.part), work.epochs * -(-count // work.batch))


def batch_sizes(visit: Visit, epoch: int) -> list[int]:
    """The sizes of a client's batches in an epoch; a straggler's end where its part of the steps ends."""
    full, rest = divmod(len(visit.examples), visit.plan.work.batch)
    sizes = [visit.plan.work.batch] * full + [rest] * (rest > 0)
    return sizes[: max(0, steps_of(visit) - epoch * len(sizes))]


def read_ahead(plan: RoundPlan) -> dict[int, Examples]:
    """What the clients of the next round hold, by client, as far as there is memory."""
    found: dict[int, Examples] = {}
    for job in plan.upcoming():
        try:
            found[job.client] = examples_of(plan, job, found)
        except Exception as failure:  # a client that fails is asked again in its round
            if out_of_memory(failure):
                return {}
    return found
