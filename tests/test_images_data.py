"""Image files in every layout, and what a broken one is told."""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from told import told

from fedrolex.core.streams import shuffle
from fedrolex.data.cifar import CIFAR10, CIFAR100, Layout, read_cifar, read_class_names
from fedrolex.data.get import CATALOGUE, get, lacking
from fedrolex.data.idx import SHAPES, read_idx
from fedrolex.data.images import load_images, moments

# --- CIFAR ---


def write_cifar(folder: Path, layout: Layout) -> Path:
    """Files of the right lengths, all zero (and so on disk almost empty)."""
    place = folder / layout.folder
    place.mkdir()
    for name, records in {**layout.train, **layout.test}.items():
        with open(place / name, "wb") as file:
            file.truncate(records * layout.record)
    (place / layout.names).write_text("\n".join(f"name{i}" for i in range(layout.labels[-1])) + "\n\n")
    return place


def poke(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_cifar10_records_land_where_they_belong(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, CIFAR10)
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    poke(place / "data_batch_3.bin", 5 * 3073, record)
    found = load_images("cifar10", tmp_path)
    assert found.train_x.shape == (50_000, 3, 32, 32)
    assert found.train_x.dtype == torch.uint8
    assert found.train_y.dtype == torch.int64
    assert int(found.train_y[20_005]) == 7
    assert int(found.train_y.sum()) == 7
    assert found.train_x[20_005, :2].flatten(1).unique(dim=1).tolist() == [[1], [2]]
    assert found.train_x[20_005, 2, 7, 3:5].tolist() == [227, 228], "rows of 32 from the top"
    assert int(found.train_x[20_004].sum() + found.train_x[20_006].sum()) == 0
    assert found.classes[7] == "name7"
    assert (found.mean, found.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def test_cifar100_learns_the_fine_label(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, CIFAR100)
    poke(place / "test.bin", 9_999 * 3074, bytes([19, 99, 5]))
    _, train_y, test_x, test_y = read_cifar(CIFAR100, tmp_path)
    assert (len(train_y), len(test_y)) == (50_000, 10_000)
    assert int(test_y[9_999]) == 99
    assert test_x[9_999].flatten()[:2].tolist() == [5, 0]
    poke(place / "test.bin", 9_999 * 3074, bytes([20]))
    assert "test.bin, record 9,999: label 20, expected 0 to 19" in told(lambda: read_cifar(CIFAR100, tmp_path))


@pytest.mark.parametrize("size", [30_729_999, 30_730_001, 0])
def test_a_cifar_file_of_the_wrong_length(size: int, tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "data_batch_2.bin"
    os.truncate(path, size)
    assert f"{path} has {size:,} bytes, expected 30,730,000" in told(lambda: load_images("cifar10", tmp_path))
    assert f"{path} has {size:,} bytes" in told(lambda: get("cifar10", tmp_path)), "nor is it overwritten"


def test_a_cifar_label_outside_the_classes(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "data_batch_1.bin"
    poke(path, 3 * 3073, bytes([10]))
    assert f"{path}, record 3: label 10, expected 0 to 9" in told(lambda: load_images("cifar10", tmp_path))


def test_cifar_names_are_counted(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "batches.meta.txt"
    path.write_text("cat\ndog\n")
    assert "batches.meta.txt has 2 names, expected 10" in told(lambda: read_class_names(CIFAR10, tmp_path))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_a_set_that_is_not_there_says_where_it_was_looked_for(name: str, tmp_path: Path) -> None:
    said = told(lambda: load_images(name, tmp_path / "none"))
    assert f"{name} is not in {tmp_path / 'none'}: looked for {tmp_path / 'none' / CATALOGUE[name].folder}" in said
    assert f"`fedrolex data get {name}`, or say where it is with --data or FEDROLEX_DATA" in said


def real(layout: Layout) -> Path:
    given = os.environ.get("FEDROLEX_DATA")
    if not given or not (Path(given) / layout.folder).is_dir():
        pytest.skip(f"no {layout.folder} in FEDROLEX_DATA")
    return Path(given)


CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_real_cifar10() -> None:
    found = load_images("cifar10", real(CIFAR10))
    assert (found.train_x.shape, found.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert found.train_y.bincount().tolist() == [5_000] * 10
    assert found.test_y.bincount().tolist() == [1_000] * 10
    assert [round(m, 4) for m in moments(found.train_x)[0]] == [0.4914, 0.4822, 0.4465]
    assert found.classes == CLASSES10


def test_real_cifar100() -> None:
    found = load_images("cifar100", real(CIFAR100))
    assert (found.train_x.shape, found.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert found.train_y.bincount().tolist() == [500] * 100
    assert found.test_y.bincount().tolist() == [100] * 100
    assert [round(m, 4) for m in moments(found.train_x)[0]] == [0.5071, 0.4865, 0.4409]
    assert (found.classes[0], found.classes[99]) == ("apple", "worm")


# --- IDX ---

IDX = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(12))


@pytest.mark.parametrize("name", ["x-idx3-ubyte", "x-idx3-ubyte.gz"])
def test_idx_plain_and_compressed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(IDX, mtime=0) if name.endswith(".gz") else IDX)
    assert read_idx(path, (2, 2, 3)).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\0\0\x08\x01" + IDX[4:], "begins with 00000801, expected 00000803"),
        (b"\0\0\x0d\x03" + IDX[4:], "begins with 00000d03, expected 00000803"),
        (b"", "begins with nothing"),
        (IDX[:7] + b"\x03" + IDX[8:], "has dimensions [3, 2, 3], expected [2, 2, 3]"),
        (IDX[:-1], "has 11 values, expected 12"),
        (IDX + b"x", "has more values, expected 12"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_wrong_idx_file(raw: bytes, says: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(raw, mtime=0) if suffix else raw)
    assert f"{path} {says}" in told(lambda: read_idx(path, (2, 2, 3)))


PACKED = gzip.compress(IDX, mtime=0)


@pytest.mark.parametrize("raw", [PACKED[:-9], b"not gzip", PACKED[:-8] + bytes(8)], ids=["cut", "not", "sum"])
def test_a_damaged_gzip(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(raw)
    assert "x.gz is a damaged gzip file (" in told(lambda: read_idx(tmp_path / "x.gz", (2, 2, 3)))


def test_fashion_mnist(tmp_path: Path) -> None:
    place = tmp_path / "fashion-mnist"
    place.mkdir()
    for name, shape in SHAPES.items():
        header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        values = (
            bytes([0, 255]) * (int(np.prod(shape)) // 2) if len(shape) == 3 else bytes(range(10)) * (shape[0] // 10)
        )
        if name.startswith("train-images"):
            (place / name).write_bytes(header + values)
        else:
            (place / f"{name}.gz").write_bytes(gzip.compress(header + values, 1, mtime=0))
    found = load_images("fashion-mnist", tmp_path)
    assert (found.train_x.shape, found.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert found.train_y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (found.mean, found.std) == ((0.5,), (0.5,))
    assert found.classes[9] == "Ankle boot"
    assert get("fashion-mnist", tmp_path) is False
    os.truncate(place / "train-images-idx3-ubyte", 47_040_015)
    lack = lacking(CATALOGUE["fashion-mnist"], tmp_path)
    assert lack is not None
    assert "train-images-idx3-ubyte holds 47,040,015 bytes, expected 47,040,016" in lack
    header = bytes([0, 0, 8, 1]) + (60_000).to_bytes(4, "big")
    (place / "train-labels-idx1-ubyte").write_bytes(header + bytes([10]) * 60_000)
    poke(place / "train-images-idx3-ubyte", 47_040_015, b"x")
    assert "label 10, expected 0 to 9" in told(lambda: load_images("fashion-mnist", tmp_path))


# --- digits and folders of one's own ---


def test_digits_are_exact_and_held_out_by_the_seed(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    for seed in (0, 3):
        order = shuffle(1797, seed, "held out")
        found = load_images("digits", tmp_path, seed=seed)
        assert (found.train_x.shape, found.test_x.shape) == ((1347, 1, 8, 8), (450, 1, 8, 8))
        assert torch.equal(found.test_x[:, 0].double() / 15, torch.from_numpy(data.images[order[:450]]))
        assert torch.equal(found.train_x[:, 0].double() / 15, torch.from_numpy(data.images[order[450:]]))
        assert found.test_y.tolist() == data.target[order[:450]].tolist()
        assert found.train_y.tolist() == data.target[order[450:]].tolist()


def picture(path: Path, colour: Any = (10, 20, 30), size: tuple[int, int] = (3, 2), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "dog" / "1.png", (0, 0, 51))
    picture(tmp_path / "train" / "cat" / "1.BMP", (255, 0, 51))
    picture(tmp_path / "test" / "dog" / "9.png", (7, 8, 9)).with_name(".hidden.png").write_text("no image")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image either")
    with Image.open(tmp_path / "test" / "dog" / "9.png") as image:
        image.putpixel((2, 0), (1, 2, 3))
        image.save(tmp_path / "test" / "dog" / "9.png")
    found = load_images(str(tmp_path), Path("unused"))
    assert found.classes == ("cat", "dog")
    assert (found.train_y.tolist(), found.test_y.tolist()) == ([0, 1], [1])
    assert found.train_x.shape == (2, 3, 2, 3)
    assert found.train_x.dtype == torch.uint8
    assert found.test_x[0, :, 0].tolist() == [[7, 7, 1], [8, 8, 2], [9, 9, 3]]
    assert found.mean == (0.5, 0.0, 0.2)
    assert found.std == (0.5, 1.0, 1.0), "1 where nothing varies, so that dividing by it is safe"


def test_a_folder_without_a_split_holds_out_a_tenth(tmp_path: Path) -> None:
    for i in range(25):
        picture(tmp_path / f"class{i // 20}" / f"{i:02}.png", i, mode="L")
    found = load_images(str(tmp_path), Path("unused"), seed=4)
    order = shuffle(25, 4, "held out").tolist()
    assert found.test_x[:, 0, 0, 0].tolist() == order[:2]
    assert found.train_x[:, 0, 0, 0].tolist() == order[2:]
    assert found.train_y.tolist() == [i // 20 for i in order[2:]]
    assert found.train_x.shape == (23, 1, 2, 3)


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "webp", "bmp"])
def test_every_format_is_read(suffix: str, tmp_path: Path) -> None:
    for i in range(2):
        picture(tmp_path / "one" / f"{i}.{suffix}", (128, 128, 128))
    found = load_images(str(tmp_path), Path("unused"))
    assert (found.train_x.int() - 128).abs().max() <= 2


def test_images_of_any_size_are_brought_to_one(tmp_path: Path) -> None:
    """The square in the middle, resized; a photo that the camera turned stands upright."""
    wide = Image.new("RGB", (12, 4), (255, 0, 0))
    wide.paste((0, 0, 255), (4, 0, 8, 4))
    (tmp_path / "a").mkdir()
    wide.save(tmp_path / "a" / "wide.png")
    turned = Image.new("RGB", (8, 8), (0, 0, 0))
    turned.paste((255, 255, 255), (0, 0, 8, 4))  # white above, which the camera says is on the right
    how = Image.Exif()
    how[0x0112] = 6
    turned.save(tmp_path / "a" / "turned.png", exif=how)
    picture(tmp_path / "a" / "whole.png", (1, 2, 3), (4, 4))
    found = load_images(str(tmp_path), tmp_path, size=4)
    every = torch.cat([found.train_x, found.test_x])
    assert every.shape == (3, 3, 4, 4)
    assert any(torch.equal(x.flatten(1).unique(dim=1), torch.tensor([[0], [0], [255]])) for x in every), "the middle"
    assert any(x[0, :, 0].tolist() == [0] * 4 and x[0, :, 3].tolist() == [255] * 4 for x in every), "upright"
    assert any(torch.equal(x[:, 0, 0], torch.tensor([1, 2, 3])) for x in every), "as it is where it fits"


def test_images_of_different_modes_become_rgb(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "0.png", 7, mode="L")
    picture(tmp_path / "a" / "1.png", (7, 7, 7, 255), mode="RGBA")
    palette = Image.new("P", (3, 2), 0)
    palette.putpalette([7, 7, 7])
    palette.save(tmp_path / "a" / "2.png")
    found = load_images(str(tmp_path), tmp_path)
    assert found.train_x.shape[1:] == (3, 2, 3)
    assert found.train_x.unique().tolist() == found.test_x.unique().tolist() == [7]


def test_odd_images_are_named(tmp_path: Path) -> None:
    odd = picture(tmp_path / "a" / "0.png", size=(4, 2))
    for i in range(1, 4):
        picture(tmp_path / "a" / f"{i}.png")
    said = told(lambda: load_images(str(tmp_path), tmp_path))
    assert f"{odd} is 4×2, most others are 3×2: resize them first, or say to which size: task.size=64" in said
    odd.write_bytes(odd.read_bytes()[:40])
    assert f"{odd} cannot be read as an image" in told(lambda: load_images(str(tmp_path), tmp_path))
    odd.write_text("words")
    assert f"{odd} cannot be read as an image" in told(lambda: load_images(str(tmp_path), tmp_path))


def test_images_of_sixteen_bits_are_refused(tmp_path: Path) -> None:
    """PIL would clip them to white."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((4, 4), 20_000, np.uint16)).save(tmp_path / name / "deep.png")
    assert "deep.png has more than 8 bits a channel: save it" in told(lambda: load_images(str(tmp_path), tmp_path))


def test_mistakes_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_folder() -> str:
        return told(lambda: load_images(str(tmp_path), tmp_path))

    assert "task.data is 'cifar', and there is no such folder: give the path of a folder with one folder" in told(
        lambda: load_images("cifar", tmp_path)
    )
    assert "has no folders: give one a class" in of_folder()
    (tmp_path / "train" / "a").mkdir(parents=True)
    assert "has train/ but no test/" in of_folder()
    (tmp_path / "test").mkdir()
    assert f"{tmp_path / 'train' / 'a'} has no images" in of_folder()
    picture(tmp_path / "train" / "a" / "1.png")
    assert f"{tmp_path / 'test'} has no images" in of_folder()
    extra = picture(tmp_path / "test" / "b" / "1.png")
    assert "there is no train/b" in of_folder()
    extra.rename(tmp_path / "test" / "1.png")
    extra.parent.rmdir()
    picture(tmp_path / "test" / "a" / "1.png")
    assert load_images(str(tmp_path), tmp_path).classes == ("a",)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in of_folder()
