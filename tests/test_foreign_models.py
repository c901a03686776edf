"""Models of other libraries by name, in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from told import told
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import resnet18

from fedrolex import ClientRecipe, FleetRecipe, ImageModel, ImagesRecipe, Recipe, load, train
from fedrolex.models.foreign import foreign, takes_classes
from fedrolex.models.image_models import convnet


class Small(nn.Sequential):
    """As torchvision's models: made from ``num_classes``."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, num_classes),
        )


def test_what_is_called_with_num_classes() -> None:
    assert takes_classes(resnet18)
    assert takes_classes(Small)
    assert not takes_classes(convnet)
    assert not takes_classes(lambda asked: nn.Linear(asked.channels, asked.classes))


def test_batch_norms_become_static_or_stay() -> None:
    model = foreign(resnet18, ImageModel(classes=7, channels=3, size=64))
    assert model.fc.out_features == 7
    norms = [norm for norm in model.modules() if isinstance(norm, _BatchNorm)]
    assert len(norms) == 20
    assert all(norm.running_mean is None and not norm.track_running_stats for norm in norms)
    assert not list(model.buffers())
    assert model.slicing_example().shape == (2, 3, 64, 64), "what fit and costs measure"
    assert len(list(foreign(resnet18, ImageModel(7, 3, 64, norm="batch")).buffers())) == 60


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"width": 8}, "task.width is 8, but this model is made from num_classes alone: write a function"),
        ({"scale": 2}, "fleet.server_scale is 2, but this model is made from num_classes alone"),
        ({"norm": "group"}, "task.norm is group: this model's batch norms can be static, or stay as they are"),
    ],
)
def test_what_such_a_model_cannot_be(changed: dict[str, Any], said: str) -> None:
    assert said in told(lambda: foreign(Small, ImageModel(**{"classes": 7, "channels": 3, "size": 8, **changed})))


def test_a_folder_of_ones_own_with_a_model_of_ones_own(tmp_path: Path) -> None:
    for number in range(40):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8 + number % 3, 8), (number, 200 * (number % 2), 9)).save(path)
    task = ImagesRecipe(data=str(tmp_path / "photos"), size=8, model=f"{__name__}:Small")
    fleet = FleetRecipe(clients=4, cohort=4, capacities=["1", "1/2"])
    recipe = Recipe(task=task, fleet=fleet, client=ClientRecipe(lr=0.1, batch=4), rounds=6, engine="loop", device="cpu")
    done = train(recipe, out=tmp_path / "run")
    assert done.summary["global_accuracy"] == 1.0
    assert done.summary["statistics"] == "recalibrated"
    assert next(load(tmp_path / "run", "1/2").parameters()).shape[0] == 4


def test_only_folders_are_resized() -> None:
    assert "task.size is 8, but only images of a folder are resized, not digits" in told(lambda: ImagesRecipe(size=8))
