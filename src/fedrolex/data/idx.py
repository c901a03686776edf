"""Fashion-MNIST in the IDX layout of MNIST, plain or compressed with gzip.

An IDX file is two zero bytes, a byte for the type of a value (8 is uint8), a byte for the number of dimensions, one
big-endian 32-bit length for each, and then the values.
"""

import gzip
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fedrolex.core import FedrolexError

FOLDER = "fashion-mnist"
SHAPES = {
    "train-images-idx3-ubyte": (60_000, 28, 28),
    "train-labels-idx1-ubyte": (60_000,),
    "t10k-images-idx3-ubyte": (10_000, 28, 28),
    "t10k-labels-idx1-ubyte": (10_000,),
}
CLASSES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def check_fashion(folder: Path) -> None:
    """Raise FileNotFoundError for the first file missing below the data folder, FedrolexError for a wrong length.

    Quick: of a compressed file only the length it gives at its end is looked at.
    """
    for name, shape in SHAPES.items():
        path = _find(folder / FOLDER / name)
        expected = 4 + 4 * len(shape) + prod(shape)
        if path.suffix == ".gz":
            with open(path, "rb") as file:
                file.seek(-min(4, path.stat().st_size), 2)
                found = int.from_bytes(file.read(4), "little")
        else:
            found = path.stat().st_size
        if found != expected:
            raise FedrolexError(f"{path} holds {found:,} bytes, expected {expected:,}: it is damaged; get it again")


def read_fashion(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels of Fashion-MNIST.

    Images are uint8 ``(n, 1, 28, 28)``, labels int64 ``(n,)``. Raises FileNotFoundError for a missing file.
    """
    train_x, train_y, test_x, test_y = (read_idx(_find(folder / FOLDER / name), SHAPES[name]) for name in SHAPES)
    for name, labels in (("train-labels-idx1-ubyte", train_y), ("t10k-labels-idx1-ubyte", test_y)):
        if (largest := int(labels.max())) >= len(CLASSES):
            raise FedrolexError(f"{folder / FOLDER / name}: label {largest}, expected 0 to 9: get it again")
    return train_x[:, None], train_y.long(), test_x[:, None], test_y.long()


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """The uint8 values of an IDX file that must have this shape; ``.gz`` files are decompressed on the way."""
    header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            start = file.read(len(header))
            if start[:4] != header[:4]:
                raise FedrolexError(
                    f"{path} begins with {start[:4].hex() or 'nothing'}, expected {header[:4].hex()}: "
                    f"it is not an IDX file of bytes in {len(shape)} dimensions; get it again"
                )
            if start != header:
                dims = [int.from_bytes(start[i : i + 4], "big") for i in range(4, len(start), 4)]
                raise FedrolexError(f"{path} has dimensions {dims}, expected {list(shape)}: get it again")
            values = bytearray(file.read(prod(shape) + 1))
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FedrolexError(f"{path} is a damaged gzip file ({error}): get it again") from None
    if len(values) != prod(shape):
        found = "more" if len(values) > prod(shape) else f"{len(values):,}"
        raise FedrolexError(f"{path} has {found} values, expected {prod(shape):,}: it is damaged; get it again")
    return torch.frombuffer(values, dtype=torch.uint8).view(shape)


def _find(path: Path) -> Path:
    """The file, or the same with ``.gz``."""
    packed = path.with_name(path.name + ".gz")
    if not path.exists() and packed.exists():
        return packed
    path.stat()  # FileNotFoundError with the name that was looked for
    return path
