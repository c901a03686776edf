"""Word numbers in one NumPy archive, as ``numpy.savez`` and ``numpy.savez_compressed`` write it.

Sentence i is ``tokens[sent_ptr[i]:sent_ptr[i + 1]]``, user u owns the sentences ``user_ptr[u]`` to
``user_ptr[u + 1]``. Tokens are 1 to V by falling frequency and V + 1 for every other word, without padding
and marks. An archive that is not compressed is mapped and costs no memory; one that is has to be inflated,
two bytes a word.
"""

import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedrolex.core import FedrolexError
from fedrolex.data.users import NoSentencesError, Users, check_user
from fedrolex.data.vocabulary import Vocabulary

DAMAGE = (zipfile.BadZipFile, zlib.error, struct.error, SyntaxError, tokenize.TokenError)
KINDS = {"tokens": "ui", "sent_ptr": "ui", "user_ptr": "ui", "users": "U", "vocab": "U"}


class NpzUsers(Users):
    """Users of a NumPy archive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        arrays = _read(path)
        self._tokens, self._sentences, self._users = (arrays[name] for name in ("tokens", "sent_ptr", "user_ptr"))
        self._names = arrays["users"]
        self._words = tuple(str(word) for word in arrays["vocab"])
        bounds = self._users.astype(np.int64)
        fits = (
            len(bounds) == len(self._names) + 1 > 1
            and bounds[0] == 0
            and bool((np.diff(bounds) >= 0).all())
            and bounds[-1] == len(self._sentences) - 1
            and self._sentences[0] == 0
            and self._sentences[-1] == len(self._tokens)
        )
        if not fits:
            raise self._wrong("user_ptr, sent_ptr and tokens do not fit together")
        if not len(self._tokens):
            raise self._wrong("tokens is empty, so no sentence has a word")

    def examples(self, user: int) -> int:
        """How many sentences a user has."""
        check_user(user, len(self))
        return int(self._users[user + 1]) - int(self._users[user])

    def vocabulary(self, size: int) -> Vocabulary:
        """The first ``size`` words of the file's own vocabulary."""
        if not 1 <= size <= len(self._words):
            raise FedrolexError(f"a vocabulary of {size} words of {self.path}: give 1 to {len(self._words)}")
        return Vocabulary(self._words[:size])

    def sentences(self, user: int, vocabulary: Vocabulary) -> list[NDArray[np.int64]]:
        """A user's sentences as word numbers; words beyond ``vocabulary`` get its number for unknown words."""
        if vocabulary.words != self._words[: len(vocabulary.words)]:
            raise FedrolexError(f"{self.path} holds numbers of its own words: use its own vocabulary, users.vocabulary")
        if self.examples(user) == 0:
            raise NoSentencesError(self.name(user))
        first, last = int(self._users[user]), int(self._users[user + 1])
        bounds = self._sentences[first : last + 1].astype(np.int64)
        if bounds[0] < 0 or bounds[-1] > len(self._tokens) or (np.diff(bounds) < 0).any():
            raise self._wrong(f"sent_ptr of user {self.name(user)} does not fit tokens")
        words = self._tokens[bounds[0] : bounds[-1]].astype(np.int64)
        if len(words) and not 1 <= words.min() <= words.max() <= len(self._words) + 1:
            raise self._wrong(f"tokens of user {self.name(user)} are outside 1 to {len(self._words) + 1}")
        return np.split(np.minimum(words, vocabulary.unknown), bounds[1:-1] - bounds[0])

    def _wrong(self, what: str) -> FedrolexError:
        return FedrolexError(f"{self.path}: {what}: make the file anew")


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            missing = [name for name in KINDS if f"{name}.npy" not in archive.namelist()]
            if missing:
                raise FedrolexError(f"{path} has no array {missing[0]}: it must have {', '.join(KINDS)}")
            arrays = {name: _array(path, archive, f"{name}.npy") for name in KINDS}
    except FedrolexError:
        raise
    except (ArithmeticError, MemoryError, OSError, EOFError, ValueError, RuntimeError, *DAMAGE) as error:
        raise FedrolexError(f"{path} cannot be read as a NumPy archive: {error}") from None
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in KINDS[name]:
            wanted = "words" if KINDS[name] == "U" else "whole numbers"
            raise FedrolexError(f"{path}: {name} is {array.dtype} {array.shape}: it must be one row of {wanted}")
    return arrays


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array of the archive: mapped where it lies if it is not compressed, else in memory."""
    info = archive.getinfo(name)
    with archive.open(info) as member:
        if info.compress_type == zipfile.ZIP_STORED and npy.read_magic(member) == (1, 0):
            shape, _, dtype = npy.read_array_header_1_0(member)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            if not dtype.hasobject and len(shape) == 1 and 0 < size == info.file_size - member.tell():
                with path.open("rb") as file:
                    file.seek(info.header_offset + 26)
                    start = info.header_offset + 30 + sum(struct.unpack("<HH", file.read(4))) + member.tell()
                return np.memmap(path, dtype, "r", start, shape)
    with archive.open(info) as member:
        array: NDArray[Any] = npy.read_array(member, allow_pickle=False)
        return array
