"""What clients keep between rounds, for methods that need it: tensors by client number.

The newest are in memory, all others are files; a fleet of a million costs what its cohorts touched. Every
version says in which round it was written. A checkpoint keeps what was current in its round, and going
back to it drops what came later, so that a resumed run finds the states it had.
"""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedrolex.clients import copied
from fedrolex.core import FedrolexError

BUCKETS = 1000
State = dict[str, Tensor]


class ClientStates:
    """States of clients, a few in memory and the rest on disk.

    Args:
        folder: for the files; a temporary one, deleted with this object, if None.
        in_memory: states to keep at hand.
    """

    def __init__(self, folder: Path | None = None, in_memory: int = 256) -> None:
        if in_memory < 1:
            raise FedrolexError(f"{in_memory} states in memory: give at least 1")
        if folder is None:
            self._scratch = tempfile.TemporaryDirectory()
            folder = Path(self._scratch.name)
        self.folder, self.in_memory = folder, in_memory
        self._near: OrderedDict[int, tuple[int, State]] = OrderedDict()
        self._unsaved: set[int] = set()
        self._latest = -1

    def get(self, client: int) -> State | None:
        """A copy of a client's newest state, or None if it has none yet."""
        if client not in self._near:
            versions = self._versions(client)
            if not versions:
                return None
            self._keep(client, versions[-1], self._read(client, versions[-1]))
        self._near.move_to_end(client)
        return copied(self._near[client][1])

    def put(self, client: int, round: int, state: Mapping[str, Tensor]) -> None:
        """A client's state after a round; the tensors are copied."""
        self._keep(client, round, {name: tensor.detach().cpu().clone() for name, tensor in state.items()})
        self._unsaved.add(client)
        self._latest = round

    def has(self, client: int) -> bool:
        """Whether a client has a state."""
        return client in self._near or bool(self._versions(client))

    def newer(self, round: int) -> bool:
        """Whether a state was written in this round or later."""
        return self._latest >= round

    def save(self, round: int) -> None:
        """Write what is only in memory: all that is current now belongs to the checkpoint of ``round``."""
        for client in sorted(self._unsaved):
            self._write(client)
        self._unsaved.clear()
        _replace_text(self.folder / "round", str(round))

    def restore(self, round: int) -> None:
        """Go back to the checkpoint of ``round``: forget what was written in it and later."""
        self._near.clear()
        self._unsaved.clear()
        self._latest = round - 1
        for path in self.folder.glob("*/*.safetensors"):
            if int(path.stem.split("-")[1]) >= round:
                path.unlink()
        _replace_text(self.folder / "round", str(round))

    def _keep(self, client: int, round: int, state: State) -> None:
        self._near[client] = (round, state)
        self._near.move_to_end(client)
        while len(self._near) > self.in_memory:
            oldest = next(iter(self._near))
            if oldest in self._unsaved:
                self._write(oldest)
                self._unsaved.discard(oldest)
            del self._near[oldest]

    def _path(self, client: int, round: int | str) -> Path:
        return self.folder / f"{client % BUCKETS:03d}" / f"{client}-{round}.safetensors"

    def _versions(self, client: int) -> list[int]:
        """The rounds a client's states on disk were written in."""
        every = self._path(client, "*")
        return sorted(int(path.stem.split("-")[1]) for path in every.parent.glob(every.name))

    def _read(self, client: int, round: int) -> State:
        path = self._path(client, round)
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise FedrolexError(f"the state of client {client} is damaged ({path}): {error}") from error

    def _write(self, client: int) -> None:
        """Write a client's state; of older versions the one the last checkpoint needs stays."""
        round, state = self._near[client]
        path = self._path(client, round)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, new)
            os.replace(new, path)
            before = [version for version in self._versions(client) if version < self._saved_round()]
            for version in before[:-1]:
                self._path(client, version).unlink()
        except OSError as error:
            raise FedrolexError(f"cannot write the state of client {client} to {path}: {error.strerror}") from error

    def _saved_round(self) -> int:
        path = self.folder / "round"
        return int(path.read_text()) if path.is_file() else 0


def _replace_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)
