"""What a server checks of a device's answer before it counts; a bad answer costs the device its round, not the run."""

from collections import deque
from collections.abc import Mapping
from math import inf, sqrt
from statistics import median

import torch

from fedrolex.clients import Job, RoundPlan, Tensors, Upload
from fedrolex.core import FedrolexError
from fedrolex.flower.messages import NEW, AnsweredJob
from fedrolex.flower.transport import Transport, unpacked, unpacked_freely
from fedrolex.methods.method import size
from fedrolex.rounds.finite import not_finite

MOST_EXAMPLES = 10**9
MOST_COUNT = 2**40  # of a whole number in a tensor, such as a count of batches
MOST_LOSS = 1e30  # whose mean is still finite
ROOM = 2**20  # bytes that an answer may have beside its tensors
REMEMBERED = 64


def most_bytes(plan: RoundPlan, jobs: list[Job]) -> int:
    """The largest answer that is looked at: what was sent four times over, and a little more."""
    return ROOM + 4 * sum(size(plan.received(job)) for job in jobs)


def upload_of(plan: RoundPlan, job: Job, said: AnsweredJob, transport: Transport, *, keeps: bool) -> Upload:
    """A device's answer to a job as an engine gives it; raises, in one line, where it cannot be one.

    What the device keeps, where the method ``keeps`` something, stays on the device: the server keeps the number of the
    round.
    """
    if said.keeps and not keeps:
        raise FedrolexError("says it keeps something for its next round: clients of this method keep nothing")
    if not abs(said.loss) <= MOST_LOSS:
        raise FedrolexError(f"says its loss is {said.loss}: finite numbers to {MOST_LOSS:g} are believed")
    if not 1 <= said.examples <= MOST_EXAMPLES:
        raise FedrolexError(f"says it has {said.examples} examples: 1 to {MOST_EXAMPLES:,} are believed")
    if not 1 <= said.steps <= plan.work.steps(said.examples):
        raise FedrolexError(f"says it took {said.steps} steps: {plan.work.steps(said.examples)} were asked")
    labels = None
    if plan.tell_labels:
        labels = sorted(set(said.labels or ()))
        if not labels or not 0 <= labels[0] <= labels[-1] < plan.task.classes:
            raise FedrolexError(f"says which classes it holds in a wrong way: 0 to {plan.task.classes - 1} are there")
    received = plan.received(job)
    tensors = unpacked(said.tensors, received, transport)
    if transport != "fp32":
        tensors = {n: received[n] + t if t.is_floating_point() else t for n, t in tensors.items()}
    sent = unpacked_freely(said.sent)
    broken = not_finite({**tensors, **sent})
    if broken is not None:
        raise FedrolexError(f"sent a value that is not finite ({broken})")
    counted = {n: t for n, t in tensors.items() if not t.is_floating_point() and t.numel()}
    odd = next((n for n, t in counted.items() if not -MOST_COUNT <= int(t.min()) <= int(t.max()) <= MOST_COUNT), None)
    if odd is not None:
        raise FedrolexError(f"sent a whole number beyond ±{MOST_COUNT:,} ({odd})")
    negative = next((n for n, t in tensors.items() if n.endswith("running_var") and bool((t < 0).any())), None)
    if negative is not None:
        raise FedrolexError(f"sent a variance below 0 ({negative})")
    kept = {"round": torch.tensor(plan.round)} if said.keeps else None
    return Upload(job, tensors, said.examples, said.loss, said.steps, labels, None, sent, kept)


class Norms:
    """How far clients move what they were given: whoever moves it much farther than others of its size is refused.

    A client is compared with its capacity's earlier changes and with others of its capacity in the round; with all, as
    long as there are fewer than two. Compared are norms over the square root of the number of values.

    Args:
        factor: how many times the median is too far.
        most: largest norm of a change.
    """

    def __init__(self, factor: float = 10.0, most: float = inf) -> None:
        self.factor, self.most = factor, most
        self._before: dict[object, deque[float]] = {}

    def refused(self, changes: Mapping[tuple[int, str], tuple[Job, float, int]]) -> dict[tuple[int, str], str]:
        """Why changes of a round are not taken, by job; given are every job's norm and number of values."""
        scaled = {key: norm / sqrt(max(1, count)) for key, (_, norm, count) in changes.items()}
        found = {}
        for key, (job, norm, _) in changes.items():
            group = (job.network, job.capacity)
            peers = [*self._before.get(group, ())]
            peers += [scaled[k] for k, (j, _, _) in changes.items() if k != key and (j.network, j.capacity) == group]
            others = [value for each in self._before.values() for value in each]
            others += [value for k, value in scaled.items() if k != key]
            usual = median(peers) if len(peers) >= 2 else median(others) if others else None
            far = usual is not None and usual > 0 and scaled[key] > self.factor * usual
            if far or not norm <= self.most:
                limit = self.most if not far or usual is None else self.factor * usual * norm / scaled[key]
                found[key] = f"sent a change of norm {norm:.3g}; {limit:.3g} is the most that is believed"
        for key, (job, _, _) in changes.items():
            if key not in found:
                self._before.setdefault((job.network, job.capacity), deque(maxlen=REMEMBERED)).append(scaled[key])
        return found


def change(received: Tensors, tensors: Tensors) -> tuple[float, int]:
    """The norm of a change, and of how many values."""
    pairs = [(received[n], t) for n, t in tensors.items() if t.is_floating_point()]
    square = sum(float((new.double() - old.double()).square().sum()) for old, new in pairs)
    return sqrt(square), sum(t.numel() for _, t in pairs)


def ticket_of(kept: Tensors | None) -> int:
    """The round in which a client kept what it goes on with, from what the server keeps of it."""
    return NEW if kept is None else int(kept["round"])
