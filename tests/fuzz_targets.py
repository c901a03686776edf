"""What is given bytes from files: a target reads any bytes, and only a FedrolexError may come out.

Used by test_fuzz.py, which changes whole examples at random, and by ``benchmarks/fuzz.py``, which goes on for minutes
and lets the coverage of the code guide the changes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from example_writer import example
from methods_shared import SMALL
from safetensors.torch import save
from torch import nn

from fedrolex import Axes, Examples, FedrolexError, FleetRecipe, Recipe, Run, Task, Training, Window, prepare, trace
from fedrolex.cli.paper.details import read_details, submodel_lines, submodels_over_seeds, with_offsets
from fedrolex.data.cifar import Layout, read_cifar, read_class_names
from fedrolex.data.example_proto import bytes_features
from fedrolex.data.idx import read_idx
from fedrolex.data.images import load_images
from fedrolex.data.users import NoSentencesError, open_users
from fedrolex.data.vocabulary import Vocabulary, encode
from fedrolex.recipes.decode import read_yaml
from fedrolex.recipes.recipe import OWN
from fedrolex.report.told import told
from fedrolex.runs import checkpoint
from fedrolex.runs.exports.folder import read_about
from fedrolex.runs.load import placed


@dataclass(frozen=True)
class Target:
    """Something that reads bytes.

    Attributes:
        read: reads them.
        whole: examples that can be read.
    """

    read: Callable[[bytes], object]
    whole: Callable[[], Sequence[bytes]]

    def __call__(self, data: bytes) -> None:
        """Read bytes; a mistake in them is one line."""
        try:
            self.read(data)
        except FedrolexError as error:
            assert str(error).strip(), "a message without words"
            assert "\n" not in str(error)


@cache
def scratch() -> Path:
    """A folder of this process."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix="fedrolex-fuzz-", dir=memory))


def filed(name: str, data: bytes) -> Path:
    """A file of these bytes."""
    path = scratch() / name
    path.write_bytes(data)
    return path


# --- recipes ---


def read_recipe(data: bytes) -> None:
    recipe = Recipe.decode(read_yaml(data.decode(errors="replace"), "recipe"))
    assert Recipe.decode(recipe.encode()) == recipe


def read_settings(data: bytes) -> None:
    recipe = Recipe().with_settings(data.decode(errors="replace").split("\n"))
    assert Recipe.decode(recipe.encode()) == recipe


def whole_recipes() -> list[bytes]:
    return [path.read_bytes() for path in sorted(OWN.glob("*.yaml"))]


def whole_settings() -> list[bytes]:
    return [
        b"method=heterofl\ntask.partition=labels\nrounds=3",
        b'fleet.capacities=["1", "1/2"]\nfleet.shares=[0.5, 0.5]\nclient.lr=1e-3',
        b'method=dsfl\ntask.models={1: "vgg11:4", 1/2: "resnet8:8"}',
        b"task=words\ntask.data=blogs\nmethod=submodels\nmethod.scheme=random\nquorum=2\ndeadline=1.5",
        b"method=scaffold\nmethod.option=I\nfleet.server_scale=2\nevaluation.metrics=[top5]",
    ]


# --- data files ---

TINY = Layout("tiny", {"train.bin": 2}, {"test.bin": 1}, (2, 3), "names.txt")


def read_tiny_cifar(data: bytes) -> None:
    folder = scratch() / TINY.folder
    folder.mkdir(exist_ok=True)
    end = TINY.record
    parts = {"test.bin": data[:end], "train.bin": data[end : 3 * end], "names.txt": data[3 * end :]}
    for name, part in parts.items():
        (folder / name).write_bytes(part)
    images, labels, *_ = read_cifar(TINY, scratch())
    assert images.shape == (2, 3, 32, 32)
    assert int(labels.max()) < 3
    assert len(read_class_names(TINY, scratch())) == 3


def read_tiny_idx(data: bytes) -> None:
    packed = data[:1] == b"z"
    found = read_idx(filed("values.gz" if packed else "values", data[1:]), (2, 3))
    assert found.shape == (2, 3)


def read_users(suffix: str) -> Callable[[bytes], None]:
    def read(data: bytes) -> None:
        users = open_users(filed(f"users{suffix}", data))
        assert len(users) > 0
        words = users.vocabulary(1)
        for user in range(min(3, len(users))):
            users.name(user), users.examples(user)
            try:
                sentences = users.sentences(user, words)
            except NoSentencesError:
                continue
            inputs, targets = encode(sentences, words, 4)
            assert inputs.shape == targets.shape == (len(sentences), 4)
            assert 0 <= int(inputs.min()) <= int(inputs.max()) < words.size

    return read


def read_vocabulary(data: bytes) -> None:
    words = Vocabulary.read(filed("words.txt", data[1:]), data[0] if data else 1)
    assert words.numbers(words.words).tolist() == list(range(1, len(words.words) + 1))


def read_image_folder(data: bytes) -> None:
    folder = scratch() / "images"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "a" / "one.png").write_bytes(data)
    (folder / "b" / "two.png").write_bytes(whole_images()[0])
    found = load_images(str(folder), scratch())
    assert found.train_x.dtype == torch.uint8


USERS = {"ann": ["a b a", "c"], "bob": ["a"]}


def whole_cifar() -> list[bytes]:
    record = bytes([1, 2]) + bytes(range(256)) * 12
    return [record * 3 + b"cat dog cow"]


def whole_idx() -> list[bytes]:
    data = bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(6))
    return [b"p" + data, b"z" + gzip.compress(data)]


def whole_jsonl() -> list[bytes]:
    return ["".join(json.dumps({"user": n, "sentences": s}) + "\n" for n, s in USERS.items()).encode()]


def whole_npz() -> list[bytes]:
    found = []
    for write in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        arrays: dict[str, Any] = {
            "tokens": np.array([1, 2, 1, 3, 1], np.uint16), "sent_ptr": np.array([0, 3, 4, 5]),
            "user_ptr": np.array([0, 2, 3]), "users": np.array(["ann", "bob"]), "vocab": np.array(["a", "b"]),
        }  # fmt: skip
        write(file, **arrays)
        found.append(file.getvalue())
    return found


def whole_hdf5() -> list[bytes]:
    """Strings of one length: on damaged strings of any length the HDF5 library itself may never return."""
    import h5py

    file = io.BytesIO()
    with h5py.File(file, "w", libver="latest") as written:
        for name, sentences in USERS.items():
            written.create_dataset(f"examples/{name}/tokens", data=np.array(sentences, "S5"))
    return [file.getvalue()]


def whole_sqlite() -> list[bytes]:
    path = scratch() / "new.sqlite"
    path.unlink(missing_ok=True)
    base = sqlite3.connect(path)
    base.execute("PRAGMA page_size = 512")
    base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
    base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
    for name, sentences in USERS.items():
        base.execute("INSERT INTO client_metadata VALUES (?, 'train', ?)", (name, len(sentences)))
        for sentence in sentences:
            base.execute("INSERT INTO examples VALUES ('train', ?, ?)", (name, example(sentence)))
    base.commit()
    base.close()
    return [path.read_bytes()]


def whole_images() -> list[bytes]:
    from PIL import Image

    found = []
    for kind in ("PNG", "JPEG", "BMP", "WEBP"):
        file = io.BytesIO()
        Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(file, kind)
        found.append(file.getvalue())
    return found


# --- run folders ---

FILES = ("metrics.jsonl", "recipe.yaml", "summary.json", "environment.json", "checkpoint.safetensors")


@cache
def small_run() -> tuple[Path, Training]:
    """A finished run of a task given in Python, and its training."""
    task = Task.split(
        build=lambda scale: nn.Sequential(nn.Linear(3, 4 * scale), nn.ReLU(), nn.Linear(4 * scale, 2)),
        train=Examples(torch.randn(20, 3), torch.arange(20) % 2),
        test=Examples(torch.randn(6, 3), torch.arange(6) % 2),
        clients=4,
    )
    recipe = Recipe(
        rounds=2, device="cpu", engine="loop", callbacks=[], fleet=FleetRecipe(clients=4, cohort=2, capacities=["1"])
    )
    folder = scratch() / "run"
    run, training = Run.create(folder, recipe, own_task=True), prepare(recipe, task)
    run.go(training)
    return folder, training


def read_run(data: bytes) -> None:
    """The first byte says which file of the folder is changed."""
    whole, training = small_run()
    folder = scratch() / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    changed = FILES[data[0] % len(FILES)] if data else FILES[0]
    for name in FILES:
        (folder / name).write_bytes(data[1:] if name == changed else (whole / name).read_bytes())
    run = Run.open(folder)
    if changed == "checkpoint.safetensors":
        placed(run, training)
    else:
        json.dumps(told(run), allow_nan=False)


def read_run_details(data: bytes) -> None:
    found = read_details(Run(filed("details.json", data).parent))
    row = {"row": "a", "submodels": submodels_over_seeds([found]), "offsets": with_offsets([found])}
    json.dumps([found, row, submodel_lines([row])], allow_nan=False)


def whole_details() -> list[bytes]:
    local = {"clients": [0, 3], "capacities": ["1", "1/2"], "plain": [0.5, 1], "masked": [0.25, 1.0]}
    offsets = {"global_accuracy": 0.5, "rare_accuracy": 0.25, "submodels": {"1": 0.5, "1/2": 0.25}}
    whole = {"submodels": {"1": 0.5, "1/2": 0.25}, "local": local, "offsets": offsets}
    return [json.dumps(whole).encode(), b'{"submodels": {}}']


def read_checkpoint(data: bytes) -> None:
    """A checkpoint whose checksum is right, whatever is in it."""
    whole, training = small_run()
    path = filed("checkpoint.safetensors", data)
    tensors, about = checkpoint.read_any(path)
    if isinstance(about, dict) and all(isinstance(value, str) for value in about.values()):
        about.pop(checkpoint.CHECKSUM, None)
        about[checkpoint.CHECKSUM] = checkpoint.checksum(tensors, about)
        path.write_bytes(save(tensors, {checkpoint.ABOUT: json.dumps(about)}))
    (scratch() / "recipe.yaml").write_bytes((whole / "recipe.yaml").read_bytes())
    placed(Run.open(scratch()), training)


def whole_runs() -> list[bytes]:
    folder, _ = small_run()
    return [bytes([place]) + (folder / name).read_bytes() for place, name in enumerate(FILES)]


def whole_checkpoints() -> list[bytes]:
    return [(small_run()[0] / "checkpoint.safetensors").read_bytes()]


def read_layouts(data: bytes) -> None:
    """Axes and a window of them, as JSON, one a line."""
    text, _, window = data.decode(errors="replace").partition("\n")
    axes = Axes.from_json(text)
    assert Axes.from_json(axes.to_json()).to_json() == axes.to_json()
    try:
        chosen = Window.decode(json.loads(window))
    except (ValueError, RecursionError) as error:
        raise FedrolexError(str(error) or "no window") from None
    axes.parameters(chosen)


def whole_layouts() -> list[bytes]:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    axes = trace(model, torch.randn(2, 3))
    name = axes.cut_axes[0].name
    return [f"{axes.to_json()}\n{json.dumps(window)}".encode() for window in ({name: [1, 2, 4]}, {})]


def read_export_json(data: bytes) -> None:
    folder = scratch() / "export"
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_bytes(data)
    about = read_about(folder)
    Recipe.decode(about.get("recipe"))


def whole_exports() -> list[bytes]:
    recipe = Recipe().with_settings(SMALL)
    return [json.dumps({"kind": "fedrolex export", "format": 1, "recipe": recipe.encode()}).encode()]


TARGETS = {
    "recipe": Target(read_recipe, whole_recipes),
    "settings": Target(read_settings, whole_settings),
    "cifar": Target(read_tiny_cifar, whole_cifar),
    "idx": Target(read_tiny_idx, whole_idx),
    "jsonl": Target(read_users(".jsonl"), whole_jsonl),
    "npz": Target(read_users(".npz"), whole_npz),
    "hdf5": Target(read_users(".h5"), whole_hdf5),
    "sqlite": Target(read_users(".sqlite"), whole_sqlite),
    "example": Target(bytes_features, lambda: [example("a b c")]),
    "vocabulary": Target(read_vocabulary, lambda: [b"\x03the 9\nof 7\nand 7\n", b"\x02a\nb\n"]),
    "images": Target(read_image_folder, whole_images),
    "run": Target(read_run, whole_runs),
    "details": Target(read_run_details, whole_details),
    "checkpoint": Target(read_checkpoint, whole_checkpoints),
    "layouts": Target(read_layouts, whole_layouts),
    "export": Target(read_export_json, whole_exports),
}
