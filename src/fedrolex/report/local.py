"""How good a run's model is for single clients."""

from typing import Any

from fedrolex.core import FedrolexError, in_one_line
from fedrolex.core.threads import spread_over, threads_for
from fedrolex.models import by_batch
from fedrolex.runs import Run, Training
from fedrolex.runs.load import placed


def local_accuracies(run: Run, training: Training) -> dict[str, list[Any]]:
    """Accuracy of the run's model on every client's own test examples, plain and masked, in one order of clients.

    Clients are those whose local accuracy a run measures, at most 1000; those without test examples are left out.
    """
    model, task = placed(run, training).model(), training.server.task
    threads = threads_for(sum(parameter.numel() for parameter in model.parameters()))
    failed = "the run's model does not answer single clients' examples"  # FedGKT's takes feature maps
    with in_one_line(failed), spread_over(threads):
        apart = any(by_batch(model, task.example()))
        found = task.by_client(model, batch=training.measure.batch, apart=apart)
    if found is None:
        raise FedrolexError(f"{task.name} measures no accuracy of single clients")
    fleet, own = training.server.fleet, {client: each for client, each in found.items() if each.examples}
    return {
        "clients": list(own),
        "capacities": [] if fleet.redrawn else [str(fleet.capacity(client)) for client in own],
        "plain": [round(each.right / each.examples, 4) for each in own.values()],
        "masked": [round(each.right_masked / each.examples, 4) for each in own.values()],
    }
