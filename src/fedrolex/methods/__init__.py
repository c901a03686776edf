"""Methods, one file each; each reads like its paper's algorithm."""

from fedrolex.methods.fed_dropout import fed_dropout
from fedrolex.methods.fedavg import fedavg
from fedrolex.methods.fedrolex import fedrolex
from fedrolex.methods.heterofl import heterofl
from fedrolex.methods.method import Method

__all__ = ["Method", "fed_dropout", "fedavg", "fedrolex", "heterofl"]
