"""What ``import fedrolex`` offers: the stable names, each from the package that it belongs to."""

from fedrolex.clients import Failure, Job, LocalTraining, RoundPlan, Upload, Visit, elementwise
from fedrolex.core import CALLBACKS, DATASETS, ENGINES, METHODS, METRICS, MODELS, SCHEMES, TASKS, FedrolexError
from fedrolex.data.images import ImageSet
from fedrolex.methods import (
    DSFL,
    Averaging,
    Columns,
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
from fedrolex.models import ImageModel
from fedrolex.recipes import ClientRecipe, FleetRecipe, ImagesRecipe, PartitionRecipe, Recipe, TaskRecipe, WordsRecipe
from fedrolex.rounds import Engine, Fleet, Round, Server
from fedrolex.runs import Callback, Exported, Run, Trained, Training, export, load, prepare, train
from fedrolex.slicing import (
    Arc,
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
from fedrolex.tasks import Classification, Examples, Measure, NextWord, Regression, Task
from fedrolex.theory.coverage import Coverage, coverage

__all__ = [
    "CALLBACKS", "DATASETS", "DSFL", "ENGINES", "METHODS", "METRICS", "MODELS", "SCHEMES", "TASKS", "Arc", "Averaging",
    "Axes", "Axis", "Blocks", "Callback", "Classification", "ClientRecipe", "Columns", "Coverage", "Engine", "Examples",
    "Exported", "Failure", "FedAvg", "FedBE", "FedDF", "FedDropout", "FedET", "FedGKT", "FedProx", "FedRolex",
    "FedSelect", "FedrolexError", "Fjord", "Fleet", "FleetRecipe", "Fold", "HeteroFL", "Hints", "ImageModel",
    "ImageSet", "ImagesRecipe", "Job", "LocalTraining", "Measure", "Method", "Needs", "NextWord", "OneSize", "Ordered",
    "PartitionRecipe", "Random", "RandomMiswired", "Recipe", "Regression", "Rolling", "Round", "RoundPlan",
    "Run", "Scaffold", "Scheme", "Select", "Server", "ServerOptimizer", "Setup", "Static", "SubModels", "Task",
    "TaskRecipe", "Trained", "Training", "Upload", "Visit", "Window", "WordsRecipe", "coverage", "elementwise",
    "exact", "export", "load", "pick", "prepare", "spread", "trace", "train",
]  # fmt: skip
