"""Images of classes, as a recipe says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Self

from torch import nn

from fedrolex.core import DATASETS, MODELS, FedrolexError, check_paths, check_words, in_one_line
from fedrolex.data.images import ImageSet, load_images
from fedrolex.methods import Method
from fedrolex.models import ImageModel, Norm, Represented
from fedrolex.models.foreign import foreign, takes_classes
from fedrolex.recipes.fleet import FleetRecipe
from fedrolex.recipes.partition import PartitionRecipe
from fedrolex.recipes.task import TaskRecipe, whole_path
from fedrolex.rounds import Fleet
from fedrolex.slicing import exact
from fedrolex.tasks import Classification, Examples, Mask, Task
from fedrolex.tasks.partition import hold_out
from fedrolex.tasks.pixels import Padding, Pixels

SHAPES = {"digits": (10, 1, 8), "cifar10": (10, 3, 32), "cifar100": (100, 3, 32), "fashion-mnist": (10, 1, 28)}
Shape = tuple[int, int, int]
"""Classes, channels, height and width."""


@dataclass(frozen=True, kw_only=True)
class ImagesRecipe(TaskRecipe):
    """Images of classes.

    Attributes:
        data: ``digits``, ``cifar10``, ``cifar100``, ``fashion-mnist``, another registered data set,
            ``package.module:loader``, or the path of a folder of images.
        size: height and width that the images of a folder are brought to; null: they have one size already.
        model: ``convnet``, ``lenet``, ``resnet8`` to ``resnet32``, ``vgg11``, ``preresnet18``, ``preresnet34``, another
            registered model, ``package.module:builder``, or what takes ``num_classes``, as
            ``torchvision.models:resnet18``; ``auto`` is convnet for digits, else preresnet18.
        models: by capacity, what its clients train instead of a part of ``model``, for methods that bring models
            together by what they say: ``vgg11``, or ``vgg11:16`` with a width.
        width: of the largest client's ``model``; null is its own (32 for convnet, 6 for lenet, 16 for ResNets, 64 for
            VGG and PreResNets).
        norm: of ResNets, VGG and PreResNets: ``static``, ``batch``, ``group``, ``none``. Batch norms of a model that
            takes ``num_classes`` become static, or stay as they are (``batch``).
        scaler: HeteroFL's scaler, in a PreResNet.
        representation: size of a layer before the last that is the same at every width; null is none, or what the
            method needs.
        augment: shift by up to four pixels and mirror while training; null is yes for CIFAR.
        padding: the colour that an image is shifted into: ``black``, as the published code has it, or ``mean``.
        standardise: shift and scale every channel to mean 0 and standard deviation 1; otherwise pixels are from 0 to
            1. Null is yes for all but digits.
        partition: how the images are spread.
        validation, public: shares of the training images put aside first, for methods that distil; ``public`` may also
            be another set's name or a folder of images, whose labels nobody looks at. Null is a tenth for methods
            that need it, else none.
        limit: use only so many training images (a random choice), or null; and as many test images at most.
    """

    data: str = "digits"
    size: int | None = None
    model: str = "auto"
    models: dict[str, str] = field(default_factory=dict)
    width: int | None = None
    norm: Norm = "static"
    scaler: bool = False
    representation: int | None = None
    augment: bool | None = None
    padding: Padding = "black"
    standardise: bool | None = None
    partition: PartitionRecipe = field(default_factory=PartitionRecipe)
    validation: float | None = None
    public: float | str | None = None
    limit: int | None = None

    def __post_init__(self) -> None:
        check_words("task", self)
        check_paths("task", self, "data")
        if self.model != "auto":
            MODELS.check(self.model)
        for capacity, name in self.models.items():
            self._of(capacity, name)
        if len({exact(capacity) for capacity in self.models}) < len(self.models):
            raise FedrolexError(f"task.models has two models for one capacity: {', '.join(self.models)}")
        for name in ("size", "width", "limit", "representation"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FedrolexError(f"task.{name} is {value}: give 1 or more, or null")
        if self.size is not None and self.data in DATASETS.names():
            raise FedrolexError(f"task.size is {self.size}, but only images of a folder are resized, not {self.data}")
        if self.public == self.data:
            raise FedrolexError(f"task.public is {self.public!r}, which is what is learned: give a share, e.g. 0.1")
        shares = [share for share in (self.validation, self.public) if isinstance(share, int | float)]
        if not (all(share >= 0 for share in shares) and sum(shares) < 1):
            given = f"task.validation is {self.validation}, task.public is {self.public}"
            raise FedrolexError(f"{given}: give parts of the data, at least 0 and together below 1")

    def check(self, fleet: FleetRecipe, method: Method) -> None:
        """Images have no users; rare classes are tied to capacities, models of one's own to those of the fleet."""
        if fleet.clients is None:
            raise FedrolexError("fleet.clients is null: say how many, only text data has users of its own")
        if self.partition.rare and fleet.redrawn:
            raise FedrolexError("task.partition.rare ties data to capacities: it needs fleet.redrawn=false")
        method.check_kind(self.data, classes=True, models=bool(self.models))
        levels = [exact(capacity) for capacity in fleet.capacities]
        nobody = next((capacity for capacity in self.models if exact(capacity) not in levels), None)
        if nobody is not None:
            raise FedrolexError(f"task.models has a model for capacity {nobody}, which nobody in the fleet has")

    # --- the section as others need it ---

    def plain(self, wants: Mapping[str, Any]) -> Self:
        """The same images put aside, and one network for everyone."""
        aside = {key: value for key, value in wants.items() if key in ("public", "validation")}
        return replace(self.completed(aside), models={})

    def with_whole_paths(self) -> Self:
        """Folders of images named in full."""
        known = DATASETS.names()
        public = whole_path(self.public) if isinstance(self.public, str) and self.public not in known else self.public
        return replace(self, data=self.data if self.data in known else whole_path(self.data), public=public)

    # --- models ---

    def make_model(self, scale: int = 1) -> nn.Module:
        """The server's model; needs no data for the bundled sets."""
        shape = SHAPES.get(self.data)
        return self._made(_shape(load_images(self.data, Path(), size=self.size)) if shape is None else shape, scale)

    def make_models(self) -> dict[Fraction, nn.Module]:
        """The models that clients of some capacities have instead."""
        return {exact(capacity): self._of(capacity, name).make_model() for capacity, name in self.models.items()}

    def _made(self, shape: Shape, scale: int = 1) -> nn.Module:
        """The model for images of a shape, ``scale`` times as wide."""
        classes, channels, size = shape
        if self.representation is not None:
            trunk = replace(self, representation=None)._made((self.representation, channels, size), scale)
            return Represented(trunk, self.representation, classes)
        name = ("convnet" if self.data == "digits" else "preresnet18") if self.model == "auto" else self.model
        build = MODELS.find(name)
        with in_one_line(f"task.model {name}: the model cannot be made"):
            asked = ImageModel(classes, channels, size, self.width, scale, self.norm, self.scaler)
            made = foreign(build, asked) if takes_classes(build) else build(asked)
        if not isinstance(made, nn.Module):
            raise FedrolexError(f"task.model {name} made a {type(made).__name__}, not a torch.nn.Module")
        return made

    def _of(self, capacity: str, text: str) -> ImagesRecipe:
        """The recipe of a model that clients of one capacity train: ``name``, or ``name:width``."""
        name, colon, width = text.rpartition(":")
        wide = bool(colon) and width.isascii() and width.isdigit()
        if colon and not (int(width) if wide else name not in MODELS.names()):
            raise FedrolexError(f"task.models[{capacity}] is {text!r}: give a model, or one and its width: {name}:16")
        name = name if wide else text
        MODELS.check(name, f"task.models[{capacity}]")
        return replace(self, model=name, models={}, width=int(width) if wide else None)

    # --- data ---

    def open(self, fleet: FleetRecipe, *, seed: int, folder: Path, mask: Mask) -> tuple[Task, Fleet]:
        """The task, its images spread over the fleet."""
        made = fleet.build(seed)
        images = load_images(self.data, folder, seed, self.size)
        shape = _shape(images)
        classes = shape[0]
        aside = 0.0 if isinstance(self.public, str) else self.public or 0.0
        held = hold_out(len(images.train_y), {"validation": self.validation or 0.0, "public": aside}, seed)
        whole, test = Examples(images.train_x, images.train_y), Examples(images.test_x, images.test_y)
        train = whole.rows(held["rest"]) if self.validation or aside else whole
        if not len(train):
            raise FedrolexError("task.validation and task.public leave no image to train on: put fewer aside")
        if self.limit is not None:
            train, test = _some(train, self.limit, seed), _some(test, self.limit, seed)
        parts, test_parts = self.partition.split(train.y, test.y, classes, made, fleet.server_scale, seed)
        task = Classification(
            name=self.data,
            build=partial(self._made, shape),
            build_for=lambda channels, scale: self._made((classes, channels, shape[2]), scale),
            models={capacity: partial(self._of(capacity, name)._made, shape) for capacity, name in self.models.items()},
            train=train,
            test=test,
            parts=parts,
            test_parts=test_parts,
            pixels=self._pixels(images),
            validation=whole.rows(held["validation"]) if self.validation else None,
            public=whole.rows(held["public"]) if aside else self._others(images, folder, seed),
            rare=self.partition.rare,
            mask="neg_inf" if mask == "none" else mask,
            classes=classes,
            class_names=images.classes,
        )
        return task, made

    def _pixels(self, images: ImageSet) -> Pixels:
        """How stored images become inputs."""
        crops = self.data in ("cifar10", "cifar100") if self.augment is None else self.augment
        digits = self.data == "digits"
        standard = not digits if self.standardise is None else self.standardise
        mean, std = (images.mean, images.std) if standard else ((0.0,), (240 / 255 if digits else 1.0,))
        return Pixels.of(mean, std, 4 if crops else 0, crops, self.padding)

    def _others(self, images: ImageSet, folder: Path, seed: int) -> Examples | None:
        """Images of another set, for distillation; of this one, nobody may look at the test images."""
        if not isinstance(self.public, str):
            return None
        others = load_images(self.public, folder, seed, self.size)
        if others.train_x.shape[1:] != images.train_x.shape[1:]:
            shapes = [tuple(each.train_x.shape[1:]) for each in (others, images)]
            raise FedrolexError(f"task.public {self.public!r} has images of shape {shapes[0]}, the task {shapes[1]}")
        return Examples(others.train_x, others.train_y)


def _shape(images: ImageSet) -> Shape:
    _, channels, height, width = images.train_x.shape
    if height != width:
        raise FedrolexError(f"the images are {height} high and {width} wide: the bundled models take square ones")
    return len(images.classes), channels, height


def _some(examples: Examples, count: int, seed: int) -> Examples:
    return examples.rows(hold_out(len(examples), {"kept": min(count / len(examples), 1 - 1e-9)}, seed)["kept"])
