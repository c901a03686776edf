"""CIFAR-10 and CIFAR-100 in the publisher's binary layout: fixed records, nothing to unpickle.

A record is one byte for each label (CIFAR-10: the class; CIFAR-100: the coarse and the fine class), then
3,072 bytes of pixels: 32×32 red, 32×32 green, 32×32 blue.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedrolex.core import FedrolexError

PIXELS = 3 * 32 * 32
DAMAGED = "it is damaged or not the publisher's binary version; get it again"
MEAN = (0.4914, 0.4822, 0.4465)  # of CIFAR-10; the published runs use these for both sets, so they are used here
STD = (0.2023, 0.1994, 0.2010)  # likewise; over all pixels of CIFAR-10 it is 0.2470, 0.2435, 0.2616


@dataclass(frozen=True)
class Layout:
    """How one of the two sets lies on disk.

    Attributes:
        folder: its folder below the data folder.
        train, test: records of each file.
        labels: how many classes each label byte of a record tells apart; the last one is the one to learn.
        names: the file with one class name a line.
    """

    folder: str
    train: Mapping[str, int]
    test: Mapping[str, int]
    labels: tuple[int, ...]
    names: str

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return len(self.labels) + PIXELS


CIFAR10 = Layout(
    folder="cifar-10-batches-bin",
    train={f"data_batch_{i}.bin": 10_000 for i in range(1, 6)},
    test={"test_batch.bin": 10_000},
    labels=(10,),
    names="batches.meta.txt",
)
CIFAR100 = Layout(
    folder="cifar-100-binary",
    train={"train.bin": 50_000},
    test={"test.bin": 10_000},
    labels=(20, 100),
    names="fine_label_names.txt",
)


def check_cifar(layout: Layout, folder: Path) -> None:
    """Raise FileNotFoundError for the first file missing below the data folder, FedrolexError for a wrong size."""
    for name, records in {**layout.train, **layout.test}.items():
        path, expected = folder / layout.folder / name, records * layout.record
        found = path.stat().st_size
        if found != expected:
            wanted = f"expected {expected:,} ({records:,} records of {layout.record:,})"
            raise FedrolexError(f"{path} has {found:,} bytes, {wanted}: {DAMAGED}")
    (folder / layout.folder / layout.names).stat()


def read_cifar(layout: Layout, folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels.

    Images are uint8 ``(n, 3, 32, 32)``, labels int64 ``(n,)``. Raises what ``check_cifar`` does.
    """
    check_cifar(layout, folder)
    train, test = (_read(layout, folder / layout.folder, files) for files in (layout.train, layout.test))
    return *train, *test


def read_class_names(layout: Layout, folder: Path) -> tuple[str, ...]:
    """The names of the classes to learn, in the order of their labels."""
    path = folder / layout.folder / layout.names
    names = tuple(path.read_text(encoding="utf-8", errors="replace").split())
    if len(names) != layout.labels[-1]:
        raise FedrolexError(f"{path} has {len(names)} names, expected {layout.labels[-1]}: get it again")
    return names


def _read(layout: Layout, folder: Path, files: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    """Images ``(n, 3, 32, 32)`` and labels ``(n,)`` of some files one after the other."""
    count = sum(files.values())
    images, labels = torch.empty(count, 3, 32, 32, dtype=torch.uint8), torch.empty(count, dtype=torch.int64)
    pixels, classes = images.view(count, PIXELS).numpy(), labels.numpy()
    at = 0
    for name, records in files.items():
        raw = np.memmap(folder / name, np.uint8, "r", shape=(records, layout.record))
        for byte, allowed in enumerate(layout.labels):
            wrong = np.flatnonzero(raw[:, byte] >= allowed)
            if len(wrong):
                label = f"{folder / name}, record {wrong[0]:,}: label {raw[wrong[0], byte]}"
                raise FedrolexError(f"{label}, expected 0 to {allowed - 1}: {DAMAGED}")
        pixels[at : at + records] = raw[:, len(layout.labels) :]
        classes[at : at + records] = raw[:, len(layout.labels) - 1]
        at += records
    return images, labels
