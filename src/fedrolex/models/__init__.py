"""Bundled models: the two of the paper, each with a factory of its own for smaller sizes, and two small ones."""

from fedrolex.models.convnet import ConvNet
from fedrolex.models.lenet import LeNet
from fedrolex.models.preresnet import PreResNet, preresnet18, preresnet34
from fedrolex.models.words import WordTransformer, word_transformer

__all__ = ["ConvNet", "LeNet", "PreResNet", "WordTransformer", "preresnet18", "preresnet34", "word_transformer"]
