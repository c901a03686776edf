"""The colour that images are shifted into."""

from __future__ import annotations

import pytest
import torch

from fedrolex.tasks.pixels import Padding, Pixels

WHITE = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
CORNER = torch.tensor([0])  # shifted as far as can be: the image begins two pixels down and two to the right


@pytest.mark.parametrize(("padding", "around"), [("black", -2.0), ("mean", 0.0)])
def test_what_is_around_an_image(padding: Padding, around: float) -> None:
    pixels = Pixels.of([0.4, 0.4, 0.4], [0.2, 0.2, 0.2], pad=2, padding=padding)
    found = pixels(WHITE, CORNER)
    assert found[0, :, :2].eq(found[0, 0, 0, 0]).all()
    assert found[0, :, :, :2].eq(found[0, 0, 0, 0]).all()
    assert float(found[0, 0, 0, 0]) == pytest.approx(around, abs=0.01)
    assert found[0, :, 2:, 2:].sub(3.0).abs().max() < 1e-5


def test_every_channel_has_its_own_mean() -> None:
    pixels = Pixels.of([0.2, 0.4, 0.6], [0.2, 0.2, 0.2], pad=2, padding="mean")
    assert pixels(WHITE, CORNER)[0, :, 0, 0].abs().max() < 0.01


def test_without_shifts_there_is_nothing_around() -> None:
    pixels = Pixels.of([0.4], [0.2], flip=True, padding="mean")
    assert torch.equal(pixels(WHITE[:, :1], CORNER), pixels(WHITE[:, :1]))
