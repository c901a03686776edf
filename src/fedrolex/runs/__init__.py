"""Runs: training, folders, checkpoints."""
