"""Copies of a model in training, in evaluation or in a mixture of both, switched as a user does it."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.slicing.complaints import one_line


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each sub-module is in training, by its name."""
    return {name: module.training for name, module in model.named_modules()}


def both_modes(model: nn.Module) -> tuple[dict[str, bool], dict[str, bool]]:
    """The modes for training (as they are, if the model trains; else as ``train()`` makes them) and for evaluation."""
    other = twin(model, {})
    return modes_of(model if model.training else other), modes_of(other.eval())


def twin(model: nn.Module, wanted: Mapping[str, bool], state: Mapping[str, Tensor] | None = None) -> nn.Module:
    """A copy of the model with its sub-modules in the modes ``wanted``, switched as a user does it.

    Sub-modules that ``wanted`` does not name are as ``train()`` leaves them. A model may keep in evaluation what it
    computed from its weights, and forget it when it is told to train: so the copy trains first, then gets its
    weights (``state``), and then goes where it is wanted.

    Raises:
        FedrolexError: the model cannot be copied.
    """
    try:
        made = copy.deepcopy(model)
    except Exception as failure:
        raise FedrolexError(f"the model cannot be copied ({one_line(failure)})") from failure
    made.train()
    own = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    with torch.no_grad():
        for name, value in (state or {}).items():
            own[name].copy_(value)
    for name, module in made.named_modules():
        if module.training and not wanted.get(name, True):
            module.eval()
        elif not module.training and wanted.get(name, False):
            module.train()
    return made
