"""What a run says before it begins, where its settings go together but do harm."""

from fedrolex.runs.training import Training
from fedrolex.tasks import Classification


def unmasked_rows(training: Training) -> str | None:
    """Of ``method.rows`` without a mask, where clients lack classes; None where there is nothing to say.

    A client then lowers the scores of classes that it lacks, and its rows for them are not averaged: those that hold a
    class are alone with it, and raise its scores above all others.
    """
    task = training.server.task
    if training.label_axis is None or training.work.mask != "none" or not isinstance(task, Classification):
        return None
    held = [len(classes) for classes in task.classes_of_clients() if classes]
    lacking = sum(count < task.classes for count in held)
    if not lacking:
        return None
    said = f"{lacking} of {len(held)} clients lack some of the {task.classes} classes"
    return f"{said}, where method.rows wants a mask: client.mask=zero or neg_inf"
