"""Checkpoints: safetensors, written so that there is always a whole one on disk, and read only if it still is."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedrolex.core import FedrolexError

FORMAT = "2"
KIND = "fedrolex checkpoint"
ABOUT = "fedrolex"
CHECKSUM = "checksum"


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """Write a checkpoint, all or nothing, with a checksum of all that is in it, which is returned."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    told = {"kind": KIND, "format": FORMAT, **about}
    told[CHECKSUM] = checksum(plain, told)
    write_whole(path, save(plain, {ABOUT: json.dumps(told, sort_keys=True)}))  # several keys would come in any order
    return told[CHECKSUM]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file all or nothing: a new one beside the old one, flushed, then put in its place."""
    new = path.with_name(f".{path.name}.new")
    try:
        with open(new, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise FedrolexError(f"cannot write {path}: {error.strerror}; what was there before is untouched") from error


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a checkpoint and what it says about itself; a foreign, newer or damaged file is refused.

    Checkpoints of version 0.1.0 have no checksum.
    """
    tensors, about = read_any(path)
    if not isinstance(about, dict) or about.get("kind") != KIND or not all(isinstance(v, str) for v in about.values()):
        raise FedrolexError(f"{path} is not a checkpoint of a fedrolex run")
    if about.get("format") not in ("1", FORMAT):
        told = f"checkpoint {path} has format {about.get('format')}"
        raise FedrolexError(f"{told}; this version reads 1 and {FORMAT}: update fedrolex")
    said = about.pop(CHECKSUM, None)
    if said not in (None, checksum(tensors, about)):
        raise FedrolexError(
            f"checkpoint {path} is damaged: its checksum is another; put back a copy, or start a new run"
        )
    return tensors, about


def checksum(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> str:
    """A hash of tensors on the CPU (names, types, shapes, values) and of what is said about them."""
    found = blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_any(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of any safetensors file, a checkpoint's or another's, and what this package wrote about them."""
    if not path.is_file():
        raise FedrolexError(f"there is no file {path}")
    try:
        data = path.read_bytes()  # safetensors opens no file whose name is not UTF-8
        tensors = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return tensors, json.loads((header.get("__metadata__") or {}).get(ABOUT, "{}"))
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:  # a KeyError: no type of PyTorch
        raise FedrolexError(f"{path} is damaged or not a safetensors file: {error}") from error
