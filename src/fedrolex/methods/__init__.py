"""Methods, one file each; each reads like its paper's algorithm."""

from fedrolex.methods.dsfl import dsfl
from fedrolex.methods.fed_dropout import fed_dropout
from fedrolex.methods.fedavg import fedavg
from fedrolex.methods.fedbe import fedbe
from fedrolex.methods.feddf import feddf
from fedrolex.methods.fedet import fedet
from fedrolex.methods.fedgkt import fedgkt
from fedrolex.methods.fedprox import fedprox
from fedrolex.methods.fedrolex import fedrolex
from fedrolex.methods.fedselect import fedselect
from fedrolex.methods.fjord import fjord
from fedrolex.methods.heterofl import heterofl
from fedrolex.methods.method import Method
from fedrolex.methods.needs import Needs
from fedrolex.methods.scaffold import scaffold
from fedrolex.methods.server_optimizer import ServerOptimizer

__all__ = [
    "Method", "Needs", "ServerOptimizer", "dsfl", "fed_dropout", "fedavg", "fedbe", "feddf", "fedet", "fedgkt",
    "fedprox", "fedrolex", "fedselect", "fjord", "heterofl", "scaffold",
]  # fmt: skip
