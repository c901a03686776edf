"""Raw sentences, one JSON object a line and a line a user: ``{"user": "beer:2", "sentences": ["…", …]}``."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedrolex.core import FedrolexError
from fedrolex.data.users import TextUsers, check_user
from fedrolex.data.vocabulary import tokenize

CHUNK = 1 << 22  # bytes looked through at once for ends of lines


class JsonlUsers(TextUsers):
    """Users of a JSON-lines file. Opening notes where the lines begin; a line is parsed when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bounds = _line_bounds(path)
        if not len(self):
            raise FedrolexError(f"{path} has no users: it must have one a line")

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def name(self, user: int) -> str:
        """What the file calls a user."""
        return self._line(user)[0]

    def examples(self, user: int) -> int | None:
        """How many sentences a user has; parses its line."""
        return len(self._line(user)[1])

    def text(self, user: int) -> list[list[str]]:
        """A user's sentences as words: lower case, punctuation split off."""
        return [tokenize(sentence) for sentence in self._line(user)[1]]

    def _line(self, user: int) -> tuple[str, list[str]]:
        """Name and raw sentences of a user."""
        check_user(user, len(self))
        start, end = (int(bound) for bound in self._bounds[user : user + 2])
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                line = json.loads(file.read(end - start))
        except (OSError, ValueError, RecursionError) as error:
            raise FedrolexError(f"{self.path}, line {user + 1} cannot be read: {error}") from None
        match line:
            case {"user": str(name), "sentences": [*sentences]} if all(isinstance(s, str) for s in sentences):
                return name, sentences
        wanted = '{"user": "name", "sentences": ["text", …]}'
        raise FedrolexError(f"{self.path}, line {user + 1} is not a user: it must be {wanted}")


def _line_bounds(path: Path) -> NDArray[np.int64]:
    """Where every line begins and the last one ends, in bytes, shape ``(lines + 1,)``; blank ends do not count."""
    begins: list[NDArray[np.int64]] = [np.zeros(1, dtype=np.int64)]
    place = end = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            letters = np.frombuffer(chunk, dtype=np.uint8)
            begins.append(np.flatnonzero(letters == ord("\n")) + place + 1)
            written = np.flatnonzero(letters > ord(" "))
            end = place + int(written[-1]) + 1 if len(written) else end
            place += len(chunk)
    found = np.concatenate(begins)
    return np.append(found[found < end], end)
