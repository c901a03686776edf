"""What a device keeps between rounds: tensors by name and round, in Flower's state of the node or in a folder."""

import re
from pathlib import Path

from flwr.app import ArrayRecord, RecordDict
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedrolex.clients import Tensors
from fedrolex.core import FedrolexError
from fedrolex.flower.transport import packed, unpacked_freely
from fedrolex.runs.checkpoint import write_whole

FILE = re.compile(r"(.*) ([0-9]{1,18})")


class TensorVersions:
    """Versions of tensors by name.

    Flower's state lasts for one ``flwr run``; a folder outlives it, so that a run can be resumed by another one.

    Args:
        state: Flower's, of the node's context.
        folder: for files instead; None keeps them in ``state``.
    """

    def __init__(self, state: RecordDict, folder: Path | None = None) -> None:
        self.state, self.folder = state, folder

    def versions(self, name: str) -> list[int]:
        """The rounds in which something was kept under a name, in order."""
        if self.folder is None:
            known = [key for key, record in self.state.items() if isinstance(record, ArrayRecord)]
        else:
            known = [path.stem for path in self.folder.glob("*.safetensors")]
        found = [FILE.fullmatch(key) for key in known]
        return sorted(int(each[2]) for each in found if each is not None and each[1] == _plain(name))

    def keep(self, name: str, round: int, tensors: Tensors, *, since: int) -> None:
        """Keep tensors; of versions before the round ``since``, only the last stays."""
        key = f"{_plain(name)} {round}"
        if self.folder is None:
            self.state[key] = packed(tensors)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            data = save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})
            write_whole(self.folder / f"{key}.safetensors", data)
        for old in [version for version in self.versions(name) if version < since][:-1]:
            self._drop(f"{_plain(name)} {old}")

    def get(self, name: str, round: int) -> dict[str, Tensor]:
        """What was kept in a round; raises, in one line, where it is gone."""
        key = f"{_plain(name)} {round}"
        try:
            if self.folder is not None:
                return load((self.folder / f"{key}.safetensors").read_bytes())
            record = self.state[key]
            assert isinstance(record, ArrayRecord)
            return unpacked_freely(record)
        except (OSError, KeyError, SafetensorError) as error:
            remedy = "give the node --node-config 'folder=\"...\"' to keep it from run to run"
            raise FedrolexError(f"has lost what it kept in round {round}: {remedy}") from error

    def _drop(self, key: str) -> None:
        if self.folder is None:
            del self.state[key]
        else:
            (self.folder / f"{key}.safetensors").unlink(missing_ok=True)


def _plain(name: str) -> str:
    """A name that can be a file's."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name) or "_"
