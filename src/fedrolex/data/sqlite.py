"""Stack Overflow as TensorFlow Federated has it today: one SQLite file with all splits.

The table ``examples(split_name, client_id, serialized_example_proto)`` has a tf.train.Example a row, of
which the field ``tokens`` is read: a sentence, its words separated by spaces. The users of a split are
listed in ``client_metadata(client_id, split_name, num_examples)``.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from fedrolex.core import FedrolexError
from fedrolex.data.example_proto import bytes_features
from fedrolex.data.users import NoSplitError, TextUsers, check_user
from fedrolex.data.vocabulary import split_tokens

SCANNED = 10_000  # users up to which looking through the whole table for one of them is put up with
LISTING = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ? ORDER BY client_id"
LOOK_UP = "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid"
VIEWS = "SELECT name FROM sqlite_master WHERE type = 'view' AND lower(name) IN ('examples', 'client_metadata')"
INDEX = "CREATE INDEX examples_of_user ON examples (split_name, client_id);"


class SqliteUsers(TextUsers):
    """Users of one split of an SQLite file, in the order of their names. The file is never written to."""

    def __init__(self, path: Path, split: str) -> None:
        self.path, self.split = path, split
        names: list[bytes] = []
        counts: list[int] = []
        with self._connect() as connection:
            for (view,) in connection.execute(VIEWS):
                raise FedrolexError(f"{path}: {view} is a view, which may have no end: make it a table")
            for name, count in connection.execute(LISTING, (split,)):
                if not isinstance(name, str) or not isinstance(count, int):
                    raise FedrolexError(f"{path}: client_metadata has {name!r}, {count!r}: not a name and a number")
                names.append(name.encode())
                counts.append(count)
            if not names:
                rows = connection.execute("SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name")
                found = ", ".join(str(row[0]) for row in rows)
                raise NoSplitError(f"{path} has no split {split!r}: it has {found or 'none'}")
            plan = connection.execute(f"EXPLAIN QUERY PLAN {LOOK_UP}", (split, "")).fetchall()
            if len(names) > SCANNED and not any("client_id=?" in str(step[3]) for step in plan):
                raise FedrolexError(f"{path} has {len(names)} users and no index to find one by: run once {INDEX}")
        self._names = np.array(names)
        self._counts = np.array(counts, dtype=np.int64)

    def examples(self, user: int) -> int:
        """How many sentences a user has, as the file's own listing says."""
        check_user(user, len(self))
        return int(self._counts[user])

    def text(self, user: int) -> list[list[str]]:
        """A user's sentences as words."""
        name = self.name(user)
        with self._connect() as connection:
            rows = connection.execute(LOOK_UP, (self.split, name)).fetchall()
        try:
            return [_sentence(row[0]) for row in rows]
        except FedrolexError as error:
            raise FedrolexError(f"{self.path}: user {name}: {error}") from None

    @contextmanager
    def _connect(self) -> Iterator[sqlite3.Connection]:
        """A read-only connection for one task; opening one takes a fraction of a millisecond."""
        try:
            with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                yield connection
        except (
            sqlite3.Error,
            UnicodeDecodeError,
            MemoryError,
        ) as error:  # of a damaged file, SQLite may raise all three
            why = str(error) or "it asks for more memory than there is"
            raise FedrolexError(f"{self.path} is not a file of users as TensorFlow Federated has it: {why}") from None


def _sentence(example: object) -> list[str]:
    if not isinstance(example, bytes):
        raise FedrolexError("an example is not a blob")
    tokens = bytes_features(example).get("tokens", [])
    if len(tokens) != 1:
        raise FedrolexError(f"an example has {len(tokens)} strings 'tokens': it must have one")
    return split_tokens(tokens[0])
