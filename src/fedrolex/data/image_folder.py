"""A folder of one's own images: a folder for every class, the images inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedrolex.core import DATASETS, FedrolexError, did_you_mean, shuffle

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
Labelled = tuple[Path, int]


def read_folder(
    name: str, seed: int, size: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[str, ...]]:
    """Images and labels to learn from, images and labels to test on, and the names of the classes.

    Where images differ in mode, or have palettes, all become RGB.

    Args:
        name: path of a folder with ``train/<class>/`` and ``test/<class>/``, or with ``<class>/`` alone.
        seed: key of what is held out where there is no ``test/``.
        size: height and width that images are brought to: the largest square in the middle, resized. None: all
            have one size already.
    """
    root = Path(name).expanduser()
    if not root.is_dir():
        known = f"or use {', '.join(DATASETS.names())}, or package.module:loader"
        wanted = f"give the path of a folder with one folder of images a class{did_you_mean(name, DATASETS.names())}"
        raise FedrolexError(f"task.data is {name!r}, and there is no such folder: {wanted}, {known}")
    classes, train, test = _listed(root, seed)
    found, mode = _alike([path for path, _ in (*train, *test)], size)
    train_x, test_x = (_pixels([path for path, _ in part], found, mode) for part in (train, test))
    train_y, test_y = (torch.tensor([label for _, label in part]) for part in (train, test))
    return train_x, train_y, test_x, test_y, classes


def _listed(root: Path, seed: int) -> tuple[tuple[str, ...], list[Labelled], list[Labelled]]:
    """The classes, and the files to learn from and to test on with their labels."""
    split = [(root / part).is_dir() for part in ("train", "test")]
    if split[0] != split[1]:
        here, lacking = ("train", "test") if split[0] else ("test", "train")
        raise FedrolexError(f"{root} has {here}/ but no {lacking}/: give both, or only <class>/ folders")
    top = root / "train" if split[0] else root
    classes = tuple(folder.name for folder in _folders(top))
    if not classes:
        raise FedrolexError(f"{top} has no folders: give one a class, with its images inside")
    train = _files(top, classes)
    empty = next((name for i, name in enumerate(classes) if all(label != i for _, label in train)), None)
    if empty is not None:
        raise FedrolexError(f"{top / empty} has no images ({', '.join(SUFFIXES)}): add some or delete the folder")
    if not split[0]:
        if len(train) < 2:
            raise FedrolexError(f"{root} has one image: at least two are needed, one of them to test on")
        order, held = shuffle(len(train), seed, "held out"), max(1, len(train) // 10)
        return classes, [train[i] for i in order[held:]], [train[i] for i in order[:held]]
    extra = next((folder.name for folder in _folders(root / "test") if folder.name not in classes), None)
    if extra is not None:
        raise FedrolexError(f"{root / 'test' / extra}: there is no train/{extra}: the classes are those of train/")
    test = _files(root / "test", classes)
    if not test:
        raise FedrolexError(f"{root / 'test'} has no images ({', '.join(SUFFIXES)}) in <class>/ folders")
    return classes, train, test


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, hidden things left out, in the same order on every platform."""
    return sorted((p for p in folder.iterdir() if not p.name.startswith(".")), key=lambda p: p.name)


def _folders(top: Path) -> list[Path]:
    return [path for path in _visible(top) if path.is_dir()]


def _files(top: Path, classes: Sequence[str]) -> list[Labelled]:
    return [
        (path, label)
        for label, name in enumerate(classes)
        if (top / name).is_dir()
        for path in _visible(top / name)
        if path.suffix.lower() in SUFFIXES and path.is_file()
    ]


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image whose header has been read; damage found while it is open is one line."""
    try:
        from PIL import Image
    except ImportError:
        raise FedrolexError("reading image files needs Pillow: pip install pillow") from None
    try:
        with Image.open(path, formats=("PNG", "JPEG", "WEBP", "BMP")) as image:
            yield image
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedrolexError(f"{path} cannot be read as an image ({error}): repair or delete it") from None


def _kind(path: Path) -> tuple[tuple[int, int], str]:
    """Size (width, height) and mode."""
    with _opened(path) as image:
        return image.size, image.mode


def _alike(paths: Sequence[Path], size: int | None) -> tuple[tuple[int, int], str]:
    """The size (width, height) and mode that all images have, or are brought to."""
    kinds = [_kind(path) for path in paths]
    deep = next((path for path, (_, mode) in zip(paths, kinds, strict=True) if mode[0] in "IF"), None)
    if deep is not None:
        raise FedrolexError(f"{deep} has more than 8 bits a channel: save it with 8, images are read as 0 to 255")
    modes = {mode for _, mode in kinds}
    mode = modes.pop() if len(modes) == 1 else "RGB"
    mode = mode if mode in CHANNELS else "RGB"
    if size is not None:
        return (size, size), mode
    sizes = [size for size, _ in kinds]
    (most, _), *others = Counter(sizes).most_common()
    if others:
        odd = next(place for place, each in enumerate(sizes) if each != most)
        found = f"{paths[odd]} is {sizes[odd][0]}×{sizes[odd][1]}, most others are {most[0]}×{most[1]}"
        raise FedrolexError(f"{found}: resize them first, or say to which size: task.size=64")
    return most, mode


def _pixels(paths: Sequence[Path], size: tuple[int, int], mode: str) -> Tensor:
    """uint8 ``(n, channels, h, w)``."""
    width, height = size
    images = torch.empty(len(paths), CHANNELS[mode], height, width, dtype=torch.uint8)
    for place, path in zip(images.numpy(), paths, strict=True):
        with _opened(path) as image:
            place[:] = np.asarray(_brought_to(image, size, mode)).reshape(height, width, -1).transpose(2, 0, 1)
    return images


def _brought_to(image: Image.Image, size: tuple[int, int], mode: str) -> Image.Image:
    """The image, or the square in its middle, upright as the camera says, at a size and in a mode."""
    from PIL import ImageOps

    if image.size != size:
        image.draft(None, size)  # a JPEG is read at a fraction of its size where that is enough
        image = ImageOps.fit(ImageOps.exif_transpose(image).convert(mode), size)
    return image.convert(mode)
