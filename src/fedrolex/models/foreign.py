"""Models of other libraries by name: whatever makes one from ``num_classes``, as torchvision's and timm's do."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex.core import FedrolexError
from fedrolex.models.image_models import ImageModel
from fedrolex.models.norms import make_static


def takes_classes(build: Callable[..., Any]) -> bool:
    """Whether a builder is called with ``num_classes``, by that name or among any others."""
    try:
        parameters = signature(build).parameters
    except (TypeError, ValueError):  # built in, without a signature
        return False
    return "num_classes" in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values())


def foreign(build: Callable[..., Any], asked: ImageModel) -> Any:
    """The model that ``build`` makes for the classes asked for, with an example of its images and norms as asked."""
    for name, plain, now in (("task.width", None, asked.width), ("fleet.server_scale", 1, asked.scale)):
        if now != plain:
            remedy = "write a function of a fedrolex.ImageModel that makes it as wide as is asked, and name that"
            raise FedrolexError(f"{name} is {now}, but this model is made from num_classes alone: {remedy}")
    if asked.norm not in ("static", "batch"):
        raise FedrolexError(f"task.norm is {asked.norm}: this model's batch norms can be static, or stay as they are")
    made = build(num_classes=asked.classes)
    if isinstance(made, nn.Module):
        if asked.norm == "static":
            make_static(made)
        vars(made)["slicing_example"] = partial(_example, asked)
    return made


def _example(asked: ImageModel) -> Tensor:
    """Two images of the size the model is made for."""
    shape = (2, asked.channels, asked.size, asked.size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))
