"""Checkpoints: safetensors, written so that there is always a whole one on disk."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedrolex.core import FedrolexError

FORMAT = "2"
KIND = "fedrolex checkpoint"
ABOUT = "fedrolex"


def write(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    """Write a checkpoint, all or nothing."""
    told = json.dumps({"kind": KIND, "format": FORMAT, **about}, sort_keys=True)  # several keys would come in any order
    data = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, {ABOUT: told})
    write_whole(path, data)


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
    """The tensors of a checkpoint and what it says about itself; a foreign file or a newer format is refused."""
    tensors, about = read_any(path)
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise FedrolexError(f"{path} is not a checkpoint of a fedrolex run")
    if about.get("format") not in ("1", FORMAT):
        told = f"checkpoint {path} has format {about.get('format')}"
        raise FedrolexError(f"{told}; this version reads 1 and {FORMAT}: update fedrolex")
    return tensors, about


def read_any(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors of any safetensors file, a checkpoint's or another's, and what this package wrote about them."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return tensors, json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except FileNotFoundError:
        raise FedrolexError(f"there is no file {path}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise FedrolexError(f"{path} is damaged or not a safetensors file: {error}") from error
