"""Bundled models: the two of the paper, each with a factory of its own for smaller sizes, and some others."""

from fedrolex.models.columns import ColumnModel
from fedrolex.models.convnet import ConvNet
from fedrolex.models.image_models import ImageModel
from fedrolex.models.lenet import LeNet
from fedrolex.models.norms import (
    Norm,
    by_batch,
    collect,
    evaluating,
    norm_parameters,
    static_norms,
    with_statistics,
    without_statistics,
)
from fedrolex.models.offsets import OFFSETS, OffsetSums, WithOffsets, class_offsets, find_offsets
from fedrolex.models.preresnet import PreResNet, preresnet18, preresnet34
from fedrolex.models.represented import TOP, Represented
from fedrolex.models.resnet import ResNet
from fedrolex.models.vgg import VGG
from fedrolex.models.words import WordTransformer

__all__ = [
    "OFFSETS", "TOP", "VGG", "ColumnModel", "ConvNet", "ImageModel", "LeNet", "Norm", "OffsetSums", "PreResNet",
    "Represented", "ResNet", "WithOffsets", "WordTransformer",
    "by_batch", "class_offsets", "collect", "evaluating", "find_offsets", "norm_parameters", "preresnet18",
    "preresnet34", "static_norms", "with_statistics", "without_statistics",
]  # fmt: skip
