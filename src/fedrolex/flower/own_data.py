"""A task of one's own whose data lies where it was made: on each device its own, at the server what is tested on."""

from collections.abc import Callable

import torch
from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.tasks import Classification, Examples, Regression, Task


def own_data(
    build: Callable[[int], nn.Module],
    examples: Examples,
    *,
    clients: int,
    client: int | None = None,
    classes: int = 0,
    validation: Examples | None = None,
    name: str = "task",
) -> Task:
    """A task of which only one device's part is here.

    Args:
        build: ``build(scale)`` gives the model, ``scale`` times as wide.
        examples: the device's own; at the server, those that the model is tested on.
        clients: how many devices there are in all.
        client: the device's number; None at the server.
        classes: how many there are, which one device need not have; real targets have none.
        validation: examples of classes that the server holds beside those it tests on, to choose and to fit by.
        name: of the task.
    """
    if client is not None and not 0 <= client < clients:
        raise FedrolexError(f"client {client} of {clients}: give 0 to {clients - 1}")
    nothing, everything = torch.zeros(0, dtype=torch.int64), torch.arange(len(examples))
    parts = [everything if number == (client or 0) else nothing for number in range(clients)]
    if examples.y.is_floating_point():
        return Regression(name, build, examples, examples, parts)
    if not classes:
        raise FedrolexError("say classes=..., how many there are: one device may not have examples of all")
    return Classification(name, build, examples, examples, parts, classes=classes, validation=validation)
