"""What everything stands on: errors, random streams, finding things by name."""

from fedrolex.core.errors import (
    FedrolexError,
    check_numbers,
    check_paths,
    check_words,
    did_you_mean,
    in_one_line,
    one_of,
)
from fedrolex.core.registry import CALLBACKS, DATASETS, ENGINES, METHODS, METRICS, MODELS, SCHEMES, TASKS
from fedrolex.core.streams import deck, random_words, sample, shuffle, uniform

__all__ = [
    "CALLBACKS", "DATASETS", "ENGINES", "METHODS", "METRICS", "MODELS", "SCHEMES", "TASKS", "FedrolexError",
    "check_numbers", "check_paths", "check_words", "deck", "did_you_mean", "in_one_line", "one_of",
    "random_words", "sample", "shuffle", "uniform",
]  # fmt: skip
