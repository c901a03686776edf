"""Runs: training, callbacks, folders, checkpoints."""

from fedrolex.runs.api import Trained, train
from fedrolex.runs.callbacks import Callback
from fedrolex.runs.prepare import prepare
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training

__all__ = ["Callback", "Run", "Trained", "Training", "prepare", "train"]
