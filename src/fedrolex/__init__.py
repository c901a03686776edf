"""One model, every device: train a large PyTorch model on devices that each hold only a part of it."""

from importlib.metadata import PackageNotFoundError, version

from fedrolex.clients import Failure, Job, LocalTraining, RoundPlan, Upload, Visit
from fedrolex.core.errors import FedrolexError
from fedrolex.core.registry import CALLBACKS, DATASETS, ENGINES, METHODS, METRICS, MODELS, SCHEMES, TASKS
from fedrolex.data.images import ImageSet
from fedrolex.methods import (
    DSFL,
    Averaging,
    FedAvg,
    FedBE,
    FedDF,
    FedDropout,
    FedET,
    FedGKT,
    FedProx,
    FedRolex,
    FedSelect,
    Fjord,
    HeteroFL,
    Method,
    Needs,
    OneSize,
    Scaffold,
    ServerOptimizer,
    Setup,
    SubModels,
)
from fedrolex.models.image_models import ImageModel
from fedrolex.recipes.client import ClientRecipe
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.recipes.images import ImagesRecipe
from fedrolex.recipes.partition import PartitionRecipe
from fedrolex.recipes.recipe import Recipe
from fedrolex.recipes.task import TaskRecipe
from fedrolex.recipes.words import WordsRecipe
from fedrolex.rounds.engine import Engine
from fedrolex.rounds.fleet import Fleet
from fedrolex.rounds.round import Round
from fedrolex.rounds.server import Server
from fedrolex.runs.api import Trained, train
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training
from fedrolex.slicing import (
    Axes,
    Axis,
    Blocks,
    Fold,
    Hints,
    Ordered,
    Random,
    RandomMiswired,
    Rolling,
    Scheme,
    Select,
    Static,
    Window,
    exact,
    pick,
    spread,
    trace,
)
from fedrolex.tasks import Classification, Examples, NextWord, Task
from fedrolex.tasks.measure import Measure
from fedrolex.theory.coverage import Coverage, coverage

try:
    __version__ = version("fedrolex")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "CALLBACKS", "DATASETS", "DSFL", "ENGINES", "METHODS", "METRICS", "MODELS", "SCHEMES", "TASKS", "Averaging",
    "Axes", "Axis", "Blocks", "Callback", "Classification", "ClientRecipe", "Coverage", "Engine", "Examples",
    "Failure", "FedAvg", "FedBE", "FedDF", "FedDropout", "FedET", "FedGKT", "FedProx", "FedRolex", "FedSelect",
    "FedrolexError", "Fjord", "Fleet", "FleetRecipe", "Fold", "HeteroFL", "Hints", "ImageModel", "ImageSet",
    "ImagesRecipe", "Job", "LocalTraining", "Measure", "Method", "Needs", "NextWord", "OneSize", "Ordered",
    "PartitionRecipe", "Random", "RandomMiswired", "Recipe", "Rolling", "Round", "RoundPlan", "Run", "Scaffold",
    "Scheme", "Select", "Server", "ServerOptimizer", "Setup", "Static", "SubModels", "Task", "TaskRecipe",
    "Trained", "Training", "Upload", "Visit", "Window", "WordsRecipe", "coverage", "exact", "pick", "prepare",
    "spread", "trace", "train",
]  # fmt: skip
