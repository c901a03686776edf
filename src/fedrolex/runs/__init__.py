"""Runs: training, callbacks, folders, checkpoints."""

from fedrolex.runs.callbacks import Callback
from fedrolex.runs.load import load
from fedrolex.runs.prepare import Trained, prepare, train
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training

__all__ = ["Callback", "Run", "Trained", "Training", "load", "prepare", "train"]
