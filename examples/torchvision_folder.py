"""A torchvision model on a folder of your own images, across five capacities.

    python examples/torchvision_folder.py photos       # photos/cats/1.jpg, photos/dogs/7.png, ...
    python examples/torchvision_folder.py              # draws a folder of shapes first; two minutes on two cores

The model is a function of what is asked for; everything else is a recipe. A model that is taken as it is needs none:

    fedrolex train folder --set task.data=photos --set task.model=torchvision.models:resnet18
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from PIL import Image, ImageDraw
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from fedrolex import MODELS, ClientRecipe, FleetRecipe, ImageModel, ImagesRecipe, Recipe, export, train


@MODELS.register("resnet10")
def resnet10(asked: ImageModel) -> nn.Module:
    """A short ResNet for small images: no early pooling; norms without running statistics, which widths would mix."""
    norm = partial(nn.BatchNorm2d, track_running_stats=False)
    model: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=asked.classes, norm_layer=norm)
    model.conv1 = nn.Conv2d(asked.channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


def draw_shapes(folder: Path, each: int = 60) -> Path:
    """A folder for every class, with images of different sizes inside."""
    random = Random(1)
    for shape in ("circle", "square", "cross"):
        (folder / shape).mkdir(parents=True)
        for number in range(each):
            side = random.randint(24, 48)
            image = Image.new("RGB", (side, side), (random.randint(0, 90),) * 3)
            pen, a, b = ImageDraw.Draw(image), random.randint(3, 9), side - random.randint(4, 10)
            if shape == "cross":
                pen.line((a, a, b, b), "white", 3)
                pen.line((a, b, b, a), "white", 3)
            else:
                (pen.ellipse if shape == "circle" else pen.rectangle)((a, a, b, b), outline="white", width=3)
            image.save(folder / shape / f"{number}.png")
    return folder


def main(photos: Path, out: Path, rounds: int = 12, size: int = 16) -> dict[str, float]:
    """Train, export the quarter, and return the accuracy of the whole model and of every capacity's."""
    recipe = Recipe(
        task=ImagesRecipe(data=str(photos), size=size, model="resnet10"),
        fleet=FleetRecipe(clients=10, cohort=5, capacities=["1", "1/2", "1/4", "1/8", "1/16"]),
        client=ClientRecipe(lr=0.02, momentum=0.9, batch=8),
        rounds=rounds,
        evaluate_every=rounds,
    ).with_settings(["evaluation.submodels=true"])
    done = train(recipe, out=out / "run", progress=lambda row: print(row["round"], row["train_loss"]))
    print(export(out / "run", "1/4", out / "quarter").folder, "is what a device of capacity 1/4 runs")
    return {"whole": done.summary["global_accuracy"], **done.summary["submodels"]}


if __name__ == "__main__":
    place = Path(mkdtemp())
    given = Path(sys.argv[1]) if sys.argv[1:] else draw_shapes(place / "shapes")
    print(main(given, place))
