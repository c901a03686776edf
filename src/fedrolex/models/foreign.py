"""Models of other libraries by name: whatever makes one from ``num_classes``, as torchvision's and timm's do."""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedrolex.core import FedrolexError
from fedrolex.models.image_models import ImageModel


def takes_classes(build: Callable[..., Any]) -> bool:
    """Whether a builder is called with ``num_classes``, by that name or among any others."""
    try:
        parameters = signature(build).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return "num_classes" in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def foreign(build: Callable[..., Any], asked: ImageModel) -> Any:
    """The model for so many classes; with the norm ``static`` its batch norms keep no running statistics."""
    for name, plain, now in (("task.width", None, asked.width), ("fleet.server_scale", 1, asked.scale)):
        if now != plain:
            remedy = "write a function of a fedrolex.ImageModel that makes it as wide as is asked, and name that"
            raise FedrolexError(f"{name} is {now}, but this model is made from num_classes alone: {remedy}")
    if asked.norm not in ("static", "batch"):
        raise FedrolexError(f"task.norm is {asked.norm}: this model's batch norms can be static, or stay as they are")
    made = build(num_classes=asked.classes)
    if asked.norm == "static" and isinstance(made, nn.Module):
        make_static(made)
    return made


def make_static(model: nn.Module) -> None:
    """Let all batch norms of a model forget their running statistics, and keep none."""
    for norm in model.modules():
        if isinstance(norm, _BatchNorm):
            norm.track_running_stats = False
            norm.running_mean = norm.running_var = norm.num_batches_tracked = None
