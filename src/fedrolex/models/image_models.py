"""Models for images by name: functions of what is asked for. A model of one's own is one more such function."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from fedrolex.core import FedrolexError
from fedrolex.models.convnet import ConvNet
from fedrolex.models.lenet import LeNet
from fedrolex.models.norms import Norm
from fedrolex.models.preresnet import Plan, PreResNet
from fedrolex.models.resnet import ResNet
from fedrolex.models.vgg import VGG


@dataclass(frozen=True)
class ImageModel:
    """What a recipe asks of a model for images.

    Attributes:
        classes: size of the output.
        channels: image channels.
        size: height and width of the images.
        width: of the largest client's model, in the model's own unit; None is the model's own choice.
        scale: how many times wider the server's model is.
        norm: kind of the norm layers, where a model has them; see :func:`~fedrolex.models.norms.make_norm`.
        scaler: whether HeteroFL's scaler is wanted.
    """

    classes: int
    channels: int
    size: int
    width: int | None = None
    scale: int = 1
    norm: Norm = "static"
    scaler: bool = False

    def wide(self, default: int) -> int:
        """The width of the server's model; ``default`` is the model's own choice for the largest client."""
        return (self.width or default) * self.scale


def convnet(asked: ImageModel) -> nn.Module:
    """Two convolutions and a linear layer."""
    return ConvNet(asked.classes, asked.channels, (asked.size, asked.size), asked.wide(32))


def lenet(asked: ImageModel) -> nn.Module:
    """LeNet, as wide as asked."""
    if asked.size < 16:
        raise FedrolexError(f"task.model lenet needs images of at least 16 × 16, not {asked.size} × {asked.size}")
    return LeNet(asked.classes, asked.channels, asked.size, asked.wide(6))


def _resnet(depth: int, asked: ImageModel) -> nn.Module:
    return ResNet(depth, asked.classes, asked.channels, asked.size, asked.wide(16), asked.norm)


resnet8, resnet14, resnet20, resnet32 = (partial(_resnet, depth) for depth in (8, 14, 20, 32))


def vgg11(asked: ImageModel) -> nn.Module:
    """VGG-11, as wide as asked, with the norms asked for."""
    return VGG(asked.classes, asked.channels, asked.size, asked.wide(64), asked.norm)


def _preresnet(blocks: tuple[int, ...], asked: ImageModel) -> nn.Module:
    own = {"classes": asked.classes, "channels": asked.channels, "size": asked.size, "width": asked.wide(64)}
    return PreResNet(Plan(blocks=blocks, norm=asked.norm, scaler=asked.scaler, **own))


preresnet18, preresnet34 = (partial(_preresnet, blocks) for blocks in ((2, 2, 2, 2), (3, 4, 6, 3)))
