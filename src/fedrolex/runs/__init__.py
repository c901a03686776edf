"""Runs: training, callbacks, folders, checkpoints, exported models."""

from fedrolex.runs.callbacks import Callback
from fedrolex.runs.exports.export import Exported, export
from fedrolex.runs.load import load
from fedrolex.runs.prepare import Trained, prepare, train
from fedrolex.runs.run import Run
from fedrolex.runs.training import Training

__all__ = ["Callback", "Exported", "Run", "Trained", "Training", "export", "load", "prepare", "train"]
