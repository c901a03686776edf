"""What a broken file of text is told."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from text_files import ABC, NUMBERS, TEXT, WORDS, write_hdf5, write_jsonl, write_npz, write_sqlite
from told import told

from fedrolex import Recipe, prepare
from fedrolex.data.sqlite import SqliteUsers
from fedrolex.data.users import open_users
from fedrolex.data.vocabulary import Vocabulary


@pytest.mark.parametrize("suffix", ["jsonl", "npz", "h5", "sqlite", "db"])
def test_missing_empty_and_damaged_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"users.{suffix}"
    assert "is not there" in told(lambda: open_users(path))
    path.mkdir()
    assert "is a folder" in told(lambda: open_users(path))
    path.rmdir()
    path.write_bytes(b"")
    assert "is empty" in told(lambda: open_users(path))
    if suffix == "h5":
        pytest.importorskip("h5py", reason="HDF5 files need h5py")
    path.write_bytes(b"\x00rubbish\xff" * 500)
    assert str(path) in told(lambda: open_users(path).sentences(0, ABC))


def test_a_layout_nobody_knows(tmp_path: Path) -> None:
    path = tmp_path / "users.csv"
    path.write_text("x")
    assert "files .csv cannot be read: give .jsonl, .npz, .h5 or .sqlite" in told(lambda: open_users(path))


def test_users_without_sentences(tmp_path: Path) -> None:
    nobody: dict[str, list[str]] = {"ann": ["cat"], "nobody": []}
    files = [
        write_jsonl(tmp_path / "a.jsonl", nobody),
        write_sqlite(tmp_path / "a.db", nobody, "DELETE FROM examples WHERE client_id = 'nobody'"),
        write_npz(tmp_path / "a.npz", user_ptr=np.array([0, 3, 3, 4])),
        write_hdf5(tmp_path / "a.h5", nobody),
    ]
    for path in files:
        users = open_users(path)
        assert f"user {users.name(1)} has no sentences" in told(lambda users=users: users.sentences(1, ABC))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "line 2 cannot be read"),
        (b"\n{}", "line 2 cannot be read"),
        (b"\xff", "line 2 cannot be read"),
        (b"[" * 100_000, "line 2 cannot be read"),
        (b"[]", "line 2 is not a user"),
        (b'{"user": "x"}', "line 2 is not a user"),
        (b'{"user": 7, "sentences": []}', "line 2 is not a user"),
        (b'{"user": "x", "sentences": "text"}', "line 2 is not a user"),
        (b'{"user": "x", "sentences": ["text", 1]}', "line 2 is not a user"),
    ],
)
def test_a_line_that_is_not_a_user(line: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "users.jsonl"
    path.write_bytes(b'{"user": "ann", "sentences": ["Cat!"]}\n' + line + b"\n")
    users = open_users(path)
    assert [s.tolist() for s in users.sentences(0, ABC)] == [[2, 5]]
    assert says in told(lambda: users.sentences(1, ABC))
    assert says in told(lambda: users.name(1))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": None}, "has no array tokens: it must have tokens, sent_ptr, user_ptr, users, vocab"),
        ({"users": None}, "has no array users"),
        ({"tokens": np.ones(11)}, "tokens is float64 (11,): it must be one row of whole numbers"),
        ({"tokens": np.ones((11, 1), dtype=int)}, "tokens is int64 (11, 1)"),
        ({"users": np.array([object()] * 3)}, "cannot be read as a NumPy archive"),
        ({"users": np.array([1, 2, 3])}, "users is int64 (3,): it must be one row of words"),
        ({"users": np.array(["ann"])}, "do not fit together"),
        ({"user_ptr": np.array([], dtype=int)}, "do not fit together"),
        ({"user_ptr": np.array([0, 2, 3, 5])}, "do not fit together"),
        ({"user_ptr": np.array([0, 3, 2, 4])}, "do not fit together"),
        ({"sent_ptr": np.array([], dtype=int)}, "do not fit together"),
        ({"sent_ptr": np.array([0, 4, 6, 8, 12])}, "do not fit together"),
        ({"sent_ptr": np.zeros(5, dtype=int), "tokens": np.array([], dtype=int)}, "so no sentence has a word"),
        ({"sent_ptr": np.array([0, 6, 4, 8, 11])}, "sent_ptr of user ann does not fit tokens"),
        ({"sent_ptr": np.array([0, 2**40, 6, 8, 11])}, "sent_ptr of user ann does not fit tokens"),
        ({"tokens": np.array([1, 0] + [1] * 9)}, "tokens of user ann are outside 1 to 5"),
        ({"tokens": np.array([1, 6] + [1] * 9)}, "tokens of user ann are outside 1 to 5"),
    ],
)
def test_arrays_that_do_not_fit(changed: dict[str, Any], says: str, save: Any, tmp_path: Path) -> None:
    path = write_npz(tmp_path / "users.npz", save, **changed)
    assert says in told(lambda: open_users(path).sentences(0, ABC))


def test_numbers_need_their_own_vocabulary(tmp_path: Path) -> None:
    users = open_users(write_npz(tmp_path / "users.npz"))
    for words in [("cat", "the"), (*WORDS, "more")]:
        assert "use its own vocabulary" in told(lambda words=words: users.sentences(0, Vocabulary(words)))  # type: ignore[misc]
    assert "give 1 to 4" in told(lambda: users.vocabulary(5))


def test_a_cut_archive(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "users.npz")
    path.write_bytes(path.read_bytes()[:-200])
    assert "cannot be read as a NumPy archive" in told(lambda: open_users(path))


def test_an_array_whose_header_is_no_header(tmp_path: Path) -> None:
    header = b"[" * 5000
    with zipfile.ZipFile(write_npz(tmp_path / "users.npz")) as whole, zipfile.ZipFile(tmp_path / "cut.npz", "w") as cut:
        for name in whole.namelist():
            broken = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
            cut.writestr(name, broken if name == "tokens.npy" else whole.read(name))
    assert "cannot be read as a NumPy archive" in told(lambda: open_users(tmp_path / "cut.npz"))


def test_hdf5_files_of_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    path = tmp_path / "users.h5"
    with h5py.File(path, "w") as file:
        file["other"] = 1
    assert "has no group 'examples'" in told(lambda: open_users(path))
    with h5py.File(path, "w") as file:
        file["examples"] = 1
    assert "has no group 'examples'" in told(lambda: open_users(path))
    with h5py.File(path, "w") as file:
        file.create_group("examples")
    assert "has no users" in told(lambda: open_users(path))
    with h5py.File(path, "w") as file:
        file.create_group("examples/a/tokens")
        file["examples/b/tokens"] = [1, 2]
        file["examples/c/title"] = ["x"]
        file["examples/d/tokens"] = "one string"
        file["examples/h/tokens"] = [["x"], ["y"]]
        file["examples/i/tokens"] = h5py.Empty("f")
        file["examples/e"] = 1
        file["examples/f"] = h5py.SoftLink("/nowhere")
        file.create_dataset("examples/g/tokens", (1,), h5py.vlen_dtype(np.int64))
        file.create_dataset("examples/j/tokens", (2**33,), "S1", chunks=(1000,))  # says so, and has none of them
    users = open_users(path)
    for user, name in enumerate("abcdefghij"):
        assert f"user {name}" in told(lambda user=user: users.sentences(user, ABC))  # type: ignore[misc]

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("fedrolex.data.hdf5.import_module", missing)
    assert "pip install h5py" in told(lambda: open_users(path))


ENDLESS = (
    "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) SELECT 'train' AS split_name, "
    "'ann' || n AS client_id, n AS num_examples, X'' AS serialized_example_proto FROM more"
)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DROP TABLE examples", "no such table: examples"),
        ("DROP TABLE client_metadata", "no such table: client_metadata"),
        ("ALTER TABLE examples RENAME client_id TO client", "no such column: client_id"),
        ("ALTER TABLE client_metadata RENAME num_examples TO n", "no such column: num_examples"),
        ("DELETE FROM client_metadata", "has no split 'train': it has none"),
        ("UPDATE client_metadata SET num_examples = 'many'", "not a name and a number"),
        (f"CREATE VIEW Examples AS {ENDLESS}", "Examples is a view, which may have no end: make it a table"),
        (f"CREATE VIEW client_metadata AS {ENDLESS}", "client_metadata is a view, which may have no end"),
        ("UPDATE examples SET serialized_example_proto = 'text'", "user ann: an example is not a blob"),
        ("UPDATE examples SET serialized_example_proto = X'0A'", "user ann: not a tf.train.Example"),
        ("UPDATE examples SET serialized_example_proto = X''", "user ann: an example has 0 strings 'tokens'"),
    ],
)
def test_sqlite_files_of_something_else(statement: str, says: str, tmp_path: Path) -> None:
    first = [f"DROP TABLE {statement.split()[2]}"] if "VIEW" in statement else []
    path = write_sqlite(tmp_path / "users.sqlite", TEXT, *first, statement)
    assert says in told(lambda: open_users(path).sentences(0, ABC))


def test_a_damaged_split_to_test_on_is_not_passed_over(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "users.sqlite", TEXT, "INSERT INTO client_metadata VALUES (X'FF', 'test', 1)")
    words = ["task=words", f"task.data={path}", "fleet.clients=null", "fleet.cohort=1"]
    assert "not a name and a number" in told(lambda: prepare(Recipe(device="cpu").with_settings(words)))


def test_an_sqlite_file_is_never_written(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "odd name?#%.sqlite", TEXT)
    before = path.read_bytes()
    path.chmod(0o444)
    users = open_users(path)
    assert [s.tolist() for s in users.sentences(1, ABC)] == NUMBERS["bob"]

    def vandalise() -> None:
        assert isinstance(users, SqliteUsers)
        with users._connect() as connection:
            connection.execute("DELETE FROM examples")

    assert "readonly" in told(vandalise)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
