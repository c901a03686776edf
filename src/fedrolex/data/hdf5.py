"""Stack Overflow as published for older TensorFlow Federated and for FedML: one HDF5 file a split.

``examples/<user>/tokens`` has one string a sentence, its words separated by spaces; the other fields beside
it (creation_date, title, score, tags, type) are not read. The file is kept open: HDF5 would read the names of
all users again each time it is opened. Each process opens it for itself; h5py lets one thread in at a time.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from fedrolex.core import FedrolexError
from fedrolex.data.users import TextUsers
from fedrolex.data.vocabulary import split_tokens

MOST = 10_000_000  # sentences of a user; a few bytes can say that there are more than memory holds


class Hdf5Users(TextUsers):
    """Users of an HDF5 file, in the order of their names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: tuple[int, Any] = (0, None)  # process and file
        names: list[bytes] = []
        with _open(path) as file:
            examples = file.get("examples")
            if not hasattr(examples, "keys"):
                raise FedrolexError(f"{path} has no group 'examples': is it a file of Stack Overflow users?")
            examples.id.links.iterate(names.append)  # gives bytes; much quicker than going through the keys
        if not names:
            raise FedrolexError(f"{path} has no users in its group 'examples'")
        self._names = np.array(names)

    def text(self, user: int) -> list[list[str]]:
        """A user's sentences as words."""
        name, file = self.name(user), self._file()
        try:
            tokens = file[b"examples/" + bytes(self._names[user])].get("tokens")
            if getattr(tokens, "size", None) is not None and tokens.size > MOST:
                raise ValueError(f"{tokens.size:,} sentences, more than {MOST:,}")
            sentences = list(tokens[()]) if hasattr(tokens, "dtype") else None
        except (OSError, KeyError, AttributeError, MemoryError, TypeError, ValueError, RuntimeError) as error:
            raise FedrolexError(f"{self.path}: user {name} cannot be read: {error}") from None
        if sentences is None or not all(isinstance(sentence, bytes) for sentence in sentences):
            raise FedrolexError(f"{self.path}: user {name} has no 'tokens': it must be one string a sentence")
        return [split_tokens(sentence) for sentence in sentences]

    def _file(self) -> Any:
        """The open file of this process."""
        process, file = self._handle
        if process != os.getpid():
            file, self._handle = None, (0, None)  # lets go of what the parent of a fork had opened
            file = _open(self.path)
            self._handle = os.getpid(), file
        return file

    def __getstate__(self) -> dict[str, Any]:
        """All but the open file, to be sent to another process."""
        return {**self.__dict__, "_handle": (0, None)}


def _open(path: Path) -> Any:
    try:
        return import_module("h5py").File(path, "r")
    except ImportError:
        raise FedrolexError(f"{path} needs h5py to be read: pip install h5py") from None
    except OSError as error:
        raise FedrolexError(f"{path} cannot be read as HDF5: {error}") from None
