"""What clients keep between rounds, for methods that need it: tensors by client number.

The newest are in memory, all others are files; a fleet of a million costs what its cohorts touched. Every
version says in which round it was written. A checkpoint keeps what was current in its round, and going
back to it drops what came later, so that a resumed run finds the states it had, or is refused.
"""

import os
import re
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedrolex.clients import copied
from fedrolex.core import FedrolexError

BUCKETS = 1000
NAME = re.compile("([0-9]{1,18})-([0-9]{1,18})")  # of a file: client and round
ClientState = dict[str, Tensor]


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
        self._near: OrderedDict[int, tuple[int, ClientState]] = OrderedDict()
        self._unsaved: set[int] = set()
        self._newest: dict[int, tuple[int, str]] = {}  # by client, of its newest file: the round, and a hash
        self._latest = -1

    def get(self, client: int) -> ClientState | None:
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
        self._latest = round
        self._keep(client, round, {name: tensor.detach().cpu().clone() for name, tensor in state.items()})
        self._unsaved.add(client)

    def has(self, client: int) -> bool:
        """Whether a client has a state."""
        return client in self._near or bool(self._versions(client))

    def newer(self, round: int) -> bool:
        """Whether a state was written in this round or later."""
        return self._latest >= round

    def save(self, round: int) -> str:
        """Write what is only in memory: all that is current now belongs to the checkpoint of ``round``.

        Returns a hash of it all, for :meth:`restore`.
        """
        for client in sorted(self._unsaved):
            self._write(client)
        self._unsaved.clear()
        _replace(self.folder / "round", str(round).encode())
        return self._hash()

    def restore(self, round: int, hash: str | None = None) -> None:
        """Go back to the checkpoint of ``round``: forget what was written in it and later.

        Refused where the states are not those of this hash, or of an earlier round. Version 0.1.0 stored no hash.
        """
        kept = {client: version for client, version in self._on_disk() if version < round}  # of each, the last
        try:
            self._newest = {c: (version, _hash(self._path(c, version).read_bytes())) for c, version in kept.items()}
            whole = self._saved_round() >= round and hash in (None, self._hash())
        except OSError:
            whole = False
        if not whole:
            what = f"{self.folder} does not hold what the clients of this run kept until round {round}"
            raise FedrolexError(f"{what}: put it back as it was, or start a new run")
        self._near.clear()
        self._unsaved.clear()
        self._latest = round - 1
        for client, version in self._on_disk():
            if version >= round:
                self._path(client, version).unlink()
        _replace(self.folder / "round", str(round).encode())

    def _hash(self) -> str:
        """A hash of all that is on disk and current."""
        return _hash("".join(f"{client} {version}\n" for client, version in sorted(self._newest.items())).encode())

    def _keep(self, client: int, round: int, state: ClientState) -> None:
        self._near[client] = (round, state)
        self._near.move_to_end(client)
        while len(self._near) > self.in_memory:
            oldest = next(iter(self._near))
            if oldest in self._unsaved:
                self._write(oldest)
                self._unsaved.discard(oldest)
            del self._near[oldest]

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"{client % BUCKETS:03d}" / f"{client}-{round}.safetensors"

    def _on_disk(self, files: str = "*/*") -> list[tuple[int, int]]:
        """Client and round of the states on disk, in order; other files are nobody's."""
        found = [NAME.fullmatch(path.stem) for path in self.folder.glob(f"{files}.safetensors")]
        return sorted((int(name[1]), int(name[2])) for name in found if name is not None)

    def _versions(self, client: int) -> list[int]:
        """The rounds a client's states on disk were written in."""
        return [version for _, version in self._on_disk(f"{client % BUCKETS:03d}/{client}-*")]

    def _read(self, client: int, round: int) -> ClientState:
        path = self._path(client, round)
        try:
            return load(path.read_bytes())
        except (SafetensorError, OSError, KeyError) as error:
            raise FedrolexError(f"the state of client {client} is damaged ({path}): {error}") from error

    def _write(self, client: int) -> None:
        """Write a client's state; of older versions the one the last checkpoint needs stays."""
        round, state = self._near[client]
        data = save({name: tensor.contiguous() for name, tensor in state.items()})
        _replace(self._path(client, round), data)
        self._newest[client] = round, _hash(data)
        before = [version for version in self._versions(client) if version < self._saved_round()]
        for version in before[:-1]:
            self._path(client, version).unlink()

    def _saved_round(self) -> int:
        path = self.folder / "round"
        text = path.read_text(errors="replace") if path.is_file() else ""
        return int(text) if NAME.fullmatch(f"0-{text}") else 0


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(data)
        os.replace(new, path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise FedrolexError(f"cannot write {path}: {error.strerror}; the last checkpoint is untouched") from error
