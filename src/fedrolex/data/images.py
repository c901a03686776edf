"""Sets of labelled images, from the publishers' files or from a folder of one's own."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from math import sqrt
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedrolex.core import DATASETS, FedrolexError, in_one_line, shuffle
from fedrolex.data import cifar, idx
from fedrolex.data.get import CATALOGUE
from fedrolex.data.image_folder import read_folder

DIGITS_HELD_OUT = 450


@dataclass(frozen=True)
class ImageSet:
    """Images with labels, a part to learn from and a part to test on.

    Attributes:
        train_x, test_x: uint8 ``(n, channels, height, width)``, 0 to 255.
        train_y, test_y: int64 ``(n,)``, places in ``classes``.
        classes: their names.
        mean: of each channel, with 255 counted as 1; counted where it is not given.
        std: standard deviation of each channel in the same unit; 1 for a channel that never varies.
    """

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for part, x, y in (("train", self.train_x, self.train_y), ("test", self.test_x, self.test_y)):
            if x.dtype != torch.uint8 or x.ndim != 4 or y.dtype != torch.int64 or y.shape != x.shape[:1]:
                given = f"{part}_x of an ImageSet is {x.dtype} {tuple(x.shape)}, {part}_y {y.dtype} {tuple(y.shape)}"
                raise FedrolexError(f"{given}: give uint8 (n, channels, height, width) and int64 (n,)")
        if not (self.mean and self.std):
            for name, value in zip(("mean", "std"), moments(self.train_x), strict=True):
                object.__setattr__(self, name, value)


def load_images(name: str, folder: Path, seed: int = 0, size: int | None = None) -> ImageSet:
    """Read a set of images.

    Args:
        name: of a registered data set, ``package.module:loader``, or the path of a folder of one's own with
            ``train/<class>/*.png`` and ``test/<class>/*.png`` (also jpg, webp, bmp), or only ``<class>/*.png``: then
            a tenth is held out for testing.
        folder: where data sets lie, see ``data_folder``; not used for digits and for a folder of one's own.
        seed: key of what is held out, where that is not the publisher's choice.
        size: height and width that images of a folder of one's own are brought to; None: they have one size already.
    """
    if name not in DATASETS.names() and (":" not in name or Path(name).expanduser().is_dir()):
        return ImageSet(*read_folder(name, seed, size))
    load = DATASETS.find(name)
    with in_one_line(f"task.data {name}"):
        try:
            found = load(folder, seed)
        except (FileNotFoundError, NotADirectoryError) as error:
            get = f"run `fedrolex data get {name}`, or say" if name in CATALOGUE else "say"
            remedy = f"{get} where it is with --data or FEDROLEX_DATA"
            raise FedrolexError(f"{name} is not in {folder}: looked for {error.filename}: {remedy}") from None
    if not isinstance(found, ImageSet):
        raise FedrolexError(f"task.data {name} gave a {type(found).__name__}: give {DATASETS.expected}")
    return found


def cifar10(folder: Path, seed: int) -> ImageSet:  # noqa: ARG001 - one signature for all sets
    """60,000 colour images of 32 × 32 pixels in ten classes."""
    return _cifar(cifar.CIFAR10, folder)


def cifar100(folder: Path, seed: int) -> ImageSet:  # noqa: ARG001
    """60,000 colour images of 32 × 32 pixels in a hundred classes."""
    return _cifar(cifar.CIFAR100, folder)


def fashion_mnist(folder: Path, seed: int) -> ImageSet:  # noqa: ARG001
    """70,000 grey images of 28 × 28 pixels in ten classes."""
    return ImageSet(*idx.read_fashion(folder), idx.CLASSES)


def digits(folder: Path, seed: int) -> ImageSet:  # noqa: ARG001
    """Scikit-learn's bundled digits: 1,797 of 8 × 8 pixels, values 0 to 16 stored as 0 to 240.

    Read from its file: to import scikit-learn takes a second, which a device would spend in every round.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise FedrolexError("the digits need scikit-learn: pip install scikit-learn")
    with gzip.open(Path(found.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    x, y = rows[:, None, :-1].reshape(-1, 1, 8, 8) * 15, rows[:, -1].long()
    order = torch.from_numpy(shuffle(len(y), seed, "held out"))
    test, train = order[:DIGITS_HELD_OUT], order[DIGITS_HELD_OUT:]
    return ImageSet(x[train], y[train], x[test], y[test], tuple("0123456789"))


def moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images ``(n, channels, h, w)``, in [0, 1] units.

    Counted in whole numbers, so they are the same on every platform.
    """
    mean, std = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for part in images[:, channel].split(1000):
            counts += np.bincount(part.numpy().ravel(), minlength=256)
        count, total, squares = (sum(int(c) * v**power for v, c in enumerate(counts)) for power in (0, 1, 2))
        mean.append(total / count / 255)
        std.append(sqrt((squares * count - total**2) / count**2) / 255 or 1.0)
    return tuple(mean), tuple(std)


def _cifar(layout: cifar.Layout, folder: Path) -> ImageSet:
    parts = cifar.read_cifar(layout, folder)
    return ImageSet(*parts, cifar.read_class_names(layout, folder), cifar.MEAN, cifar.STD)
