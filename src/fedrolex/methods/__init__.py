"""Methods, one a file; :class:`Method` is what a method of one's own is made from."""

from fedrolex.methods.averaging import Averaging
from fedrolex.methods.columns import Columns
from fedrolex.methods.dsfl import DSFL
from fedrolex.methods.fed_dropout import FedDropout
from fedrolex.methods.fedavg import FedAvg
from fedrolex.methods.fedbe import FedBE
from fedrolex.methods.feddf import FedDF
from fedrolex.methods.fedet import FedET
from fedrolex.methods.fedgkt import FedGKT
from fedrolex.methods.fedprox import FedProx
from fedrolex.methods.fedrolex import FedRolex
from fedrolex.methods.fedselect import FedSelect
from fedrolex.methods.fjord import Fjord
from fedrolex.methods.heterofl import HeteroFL
from fedrolex.methods.method import Method, adding
from fedrolex.methods.needs import Needs
from fedrolex.methods.one_size import OneSize
from fedrolex.methods.private import Private
from fedrolex.methods.scaffold import Scaffold
from fedrolex.methods.server_optimizer import ServerOptimizer
from fedrolex.methods.setup import Setup
from fedrolex.methods.submodels import SubModels

__all__ = [
    "DSFL", "Averaging", "Columns", "FedAvg", "FedBE", "FedDF", "FedDropout", "FedET", "FedGKT", "FedProx", "FedRolex",
    "FedSelect", "Fjord", "HeteroFL", "Method", "Needs", "OneSize", "Private", "Scaffold", "ServerOptimizer", "Setup",
    "SubModels", "adding",
]  # fmt: skip
