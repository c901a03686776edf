"""Why an answer is not taken, whoever looks at it: the server, or a worker that adds answers up."""

from collections.abc import Mapping

from torch import Tensor

from fedrolex.clients import RoundPlan, Upload
from fedrolex.rounds.finite import not_finite


def refusal(plan: RoundPlan, upload: Upload) -> str | None:
    """Why an answer is not taken, in one line; None where it is."""
    odd = _odd(upload)
    if odd is not None:
        return odd
    broken = None if upload.finite else not_finite({**upload.tensors, **upload.sent, **(upload.kept or {})})
    if broken is None:
        return None
    named = plan.tensors[upload.job.sections[0]]
    lonely = upload.examples % plan.work.batch == 1 and any("running_var" in name for name in named)
    why = "; its last batch is one example, which batch norm cannot train on" if lonely else ""
    return f"sent a value that is not finite ({broken}){why}"


def _odd(upload: Upload) -> str | None:
    """What a client's work left of a wrong kind, as it is called in a visit; None where there is nothing such."""
    kept = {} if upload.kept is None else upload.kept
    for what, given in {"trained": upload.tensors, "sent": upload.sent, "kept": kept}.items():
        if not isinstance(given, Mapping):
            return f"visit.{what} is a {type(given).__name__}: give tensors by name"
        odd = next((name for name, tensor in given.items() if not isinstance(tensor, Tensor)), None)
        if odd is not None:
            return f"visit.{what} has {odd!r}, a {type(given[odd]).__name__} and not a tensor: give one"
    return None if isinstance(upload.loss, int | float) else f"visit.loss is {upload.loss!r}: give a number"
