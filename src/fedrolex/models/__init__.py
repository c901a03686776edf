"""Bundled models: the two of the paper, each with a factory of its own for smaller sizes, and some others."""

from fedrolex.models.convnet import ConvNet
from fedrolex.models.lenet import LeNet
from fedrolex.models.preresnet import PreResNet, preresnet18, preresnet34
from fedrolex.models.represented import Represented
from fedrolex.models.resnet import ResNet
from fedrolex.models.vgg import VGG
from fedrolex.models.words import WordTransformer, word_transformer

__all__ = [
    "VGG", "ConvNet", "LeNet", "PreResNet", "Represented", "ResNet", "WordTransformer", "preresnet18", "preresnet34",
    "word_transformer",
]  # fmt: skip
