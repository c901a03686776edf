"""A model, a data set, a metric and a callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedrolex import Callback, Training
from fedrolex.data.images import ImageSet
from fedrolex.models.image_models import ImageModel


def perceptron(spec: ImageModel) -> nn.Module:
    """Two layers, the inner one ``spec.wide(24)`` wide."""
    inner = spec.wide(24)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(spec.channels * spec.size**2, inner), nn.ReLU(), nn.Linear(inner, spec.classes)
    )


def stripes(folder: Path, seed: int) -> ImageSet:
    """Images of 8 × 8 pixels, each with one bright line whose place is the class; noise all over."""
    draw = torch.Generator().manual_seed(seed)

    def images(count: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 100, (count, 1, 8, 8), generator=draw, dtype=torch.uint8)
        y = torch.randint(0, 4, (count,), generator=draw)
        x[torch.arange(count), 0, 2 * y] = 255
        return x, y

    return ImageSet(*images(240), *images(80), ("a", "b", "c", "d"), (0.3,), (0.3,))


def confidence(outputs: Tensor, targets: Tensor) -> float:
    """The mean probability of the right class."""
    return float(outputs.softmax(-1).gather(-1, targets[:, None]).mean())


class Diary(Callback):
    """Counts the rounds, in the metrics and in a file of the run's folder."""

    def begin(self, training: Training, folder: Path | None) -> None:
        """Remember where to write."""
        self.folder = folder

    def row(self, training: Training, row: dict[str, Any]) -> None:
        """Write how many rounds there were."""
        if self.folder is not None:
            (self.folder / "diary.txt").write_text(f"{row['round'] + 1} rounds\n")
