"""Text with its users in every layout, the numbers of its words, and what a broken file is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sqlite3
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_writer import example
from told import told

from fedrolex import Recipe, prepare
from fedrolex.data.jsonl import _line_bounds
from fedrolex.data.sqlite import SqliteUsers
from fedrolex.data.users import TextUsers, open_users
from fedrolex.data.vocabulary import Vocabulary, encode, split_tokens, tokenize

WORDS = ("the", "cat", "sat", ".")
ABC = Vocabulary(WORDS)
TEXT = {"ann": ["the cat sat .", "a dog"], "bob": ["cat cat"], "zoë": ["the end ."]}
NUMBERS = {"ann": [[1, 2, 3, 4], [5, 5]], "bob": [[2, 2]], "zoë": [[1, 5, 4]]}


# --- writers ---


def write_jsonl(path: Path, users: dict[str, list[str]]) -> Path:
    path.write_text("".join(json.dumps({"user": name, "sentences": s}) + "\n" for name, s in users.items()))
    return path


def write_npz(path: Path, save: Callable[..., None] = np.savez, **changed: Any) -> Path:
    sentences = [numbers for those in NUMBERS.values() for numbers in those]
    arrays: dict[str, Any] = {
        "tokens": np.array([n for numbers in sentences for n in numbers], dtype=np.uint16),
        "sent_ptr": np.cumsum([0, *map(len, sentences)]).astype(np.uint32),
        "user_ptr": np.cumsum([0, *map(len, NUMBERS.values())]).astype(np.uint32),
        "users": np.array(list(NUMBERS)),
        "vocab": np.array(WORDS),
        "vocab_counts": np.arange(len(WORDS), 0, -1),
    }
    save(path, **{name: array for name, array in (arrays | changed).items() if array is not None})
    return path


def write_hdf5(path: Path, users: dict[str, list[str]], fixed: bool = False) -> Path:
    h5py = pytest.importorskip("h5py", reason="HDF5 files need h5py")
    with h5py.File(path, "w") as file:
        for name, sentences in users.items():
            group = file.create_group(f"examples/{name}")
            strings = np.array([s.encode() for s in sentences], dtype="S32") if fixed else sentences
            group.create_dataset("tokens", data=strings, dtype=None if fixed else h5py.string_dtype())
            group.create_dataset("score", data=np.zeros(len(sentences)))
    return path


def write_sqlite(path: Path, users: dict[str, list[str]], *statements: str) -> Path:
    with sqlite3.connect(path) as base:
        base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for name, sentences in users.items():
            rows = [("train", name, example(sentence)) for sentence in sentences]
            base.executemany("INSERT INTO examples VALUES (?, ?, ?)", [*rows, ("test", name, example("sat"))])
            base.execute("INSERT INTO client_metadata VALUES (?, 'train', ?)", (name, len(sentences)))
        base.execute("INSERT INTO client_metadata VALUES ('bob', 'test', 1)")
        for statement in statements:
            base.execute(statement)
    base.close()
    return path


def write(layout: str, folder: Path) -> Path:
    match layout:
        case "jsonl":
            return write_jsonl(folder / "users.jsonl", TEXT)
        case "npz":
            return write_npz(folder / "users.npz")
        case "packed npz":
            return write_npz(folder / "users.npz", np.savez_compressed)
        case "hdf5":
            return write_hdf5(folder / "stackoverflow_train.h5", TEXT)
        case "fixed hdf5":
            return write_hdf5(folder / "users.hdf5", TEXT, fixed=True)
    return write_sqlite(folder / "stackoverflow.sqlite", TEXT)


LAYOUTS = ["jsonl", "npz", "packed npz", "hdf5", "fixed hdf5", "sqlite"]


# --- words and rows ---


def test_numbers_of_words() -> None:
    assert (ABC.unknown, ABC.begin, ABC.end, ABC.size) == (5, 6, 7, 8)
    assert ABC.numbers(["sat", "The", "the", ""]).tolist() == [3, 5, 1, 5]
    assert ABC.numbers([]).dtype == np.int64


def test_counting_puts_frequent_words_first_and_ties_in_alphabetical_order() -> None:
    sentences = [["b", "a", "c"], ["c", "d"], [], ["a", "e"]]
    assert Vocabulary.count(sentences, 3).words == ("a", "c", "b")
    assert Vocabulary.count(sentences, 99).words == ("a", "c", "b", "d", "e")


def test_a_list_of_words_may_have_counts(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes("the\t9\nb\u00a0b 4\n.   4\nrest 1\n".encode())
    assert Vocabulary.read(path, 3).words == ("the", "b\u00a0b", ".")
    path.write_text("the\r\ncat\r\n")
    assert Vocabulary.read(path, 2).words == ("the", "cat")
    assert "has 2 words, 3 are asked for" in told(lambda: Vocabulary.read(path, 3))
    for text, says in [
        ("the 3\ncat 4\n", "line 2: the counts rise"),
        ("the\n\ncat\n", "line 2: '\\n' is not a word"),
        ("the cat sat\n", "is not a word, or a word and its count"),
        ("the x\n", "is not a word, or a word and its count"),
        ("the\nthe\n", "the word 'the' is in the vocabulary twice"),
    ]:
        path.write_text(text)
        assert says in told(lambda: Vocabulary.read(path, 2))
    path.write_bytes(b"\xff\xfe")
    assert "cannot be read" in told(lambda: Vocabulary.read(path, 2))
    assert "cannot be read" in told(lambda: Vocabulary.read(tmp_path / "none", 2))
    assert "a vocabulary of 0 words" in told(lambda: Vocabulary.read(path, 0))
    assert "at least one word" in told(lambda: Vocabulary.count([], 5))


def test_raw_text_is_lowered_and_its_punctuation_split_off() -> None:
    text = "It's an IPA, isn’t it?  (3.5 %)"
    assert tokenize(text) == ["it's", "an", "ipa", ",", "isn’t", "it", "?", "(", "3", ".", "5", "%", ")"]
    assert tokenize(" \n") == []
    assert split_tokens("Don't  split , this\u00a0! ".encode()) == ["Don't", "split", ",", "this\u00a0!"]


def test_encoding_by_hand() -> None:
    """V = 4, so begin is 6 and end is 7; rows of four places."""
    sentences = [ABC.numbers(words.split()) for words in ["the dog", "", "the cat sat", "the cat sat .", "a . b . c"]]
    x, y = encode(sentences, ABC, length=4)
    assert x.tolist() == [[6, 1, 5, 7], [6, 7, 0, 0], [6, 1, 2, 3], [6, 1, 2, 3], [6, 5, 4, 5]]
    assert y.tolist() == [[1, 5, 7, 0], [7, 0, 0, 0], [1, 2, 3, 7], [1, 2, 3, 4], [5, 4, 5, 4]]
    assert x.dtype == y.dtype == torch.int64


@pytest.mark.parametrize(("words", "ends"), [(1, True), (19, True), (20, False), (21, False), (60, False)])
def test_a_sentence_ends_only_where_there_is_room(words: int, ends: bool) -> None:
    numbers = np.arange(words) % 5 + 1
    x, y = (rows[0].tolist() for rows in encode([numbers], ABC))
    kept = numbers[:20].tolist()
    assert x == ([6, *kept, 7] + [0] * 20)[:20] if ends else x == [6, *kept[:19]]
    assert y == ([*kept, 7] + [0] * 20)[:20] if ends else y == kept
    assert (ABC.end in y) == ends
    assert ABC.begin not in y


def test_encoding_nothing_and_wrongly() -> None:
    x, y = encode([], ABC)
    assert x.shape == y.shape == (0, 20)
    assert "sentences of 0 words" in told(lambda: encode([], ABC, length=0))
    for length in (2**60, 10**30):
        assert "do not fit into memory" in told(lambda length=length: encode([ABC.numbers(["a"])], ABC, length))  # type: ignore[misc]


# --- every layout ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same(layout: str, tmp_path: Path) -> None:
    users = open_users(write(layout, tmp_path))
    assert len(users) == 3
    assert [users.name(user) for user in range(3)] == list(TEXT)
    for user, (name, numbers) in enumerate(NUMBERS.items()):
        found = users.sentences(user, ABC)
        assert [sentence.tolist() for sentence in found] == numbers, name
        assert all(sentence.dtype == np.int64 for sentence in found)
        assert users.examples(user) == (None if "hdf5" in layout else len(numbers))
    assert [s.tolist() for s in users.sentences(0, Vocabulary(WORDS[:2]))] == [[1, 2, 3, 3], [3, 3]], "fewer words"
    if isinstance(users, TextUsers):
        assert users.vocabulary(3).words == ("cat", ".", "the")
    else:
        assert users.vocabulary(3).words == WORDS[:3], "its own list"
    for user in (-1, 3):
        assert f"user {user} is asked for: there are 0 to 2" in told(lambda user=user: users.name(user))  # type: ignore[misc]
        assert "there are 0 to 2" in told(lambda user=user: users.sentences(user, ABC))  # type: ignore[misc]


def _bob(users: Any) -> Any:
    return users.sentences(1, ABC)[0].tolist()


@pytest.mark.parametrize("layout", ["jsonl", "npz", "hdf5", "sqlite"])
def test_a_source_works_in_other_threads_and_processes(layout: str, tmp_path: Path) -> None:
    users = open_users(write(layout, tmp_path))
    assert _bob(users) == [2, 2]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(_bob, [users] * 20)) == [[2, 2]] * 20
    assert _bob(pickle.loads(pickle.dumps(users))) == [2, 2]
    if hasattr(os, "fork"):
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.starmap(users.sentences, [(1, ABC)] * 4)[3][0].tolist() == [2, 2]


def test_an_sqlite_file_has_splits(tmp_path: Path) -> None:
    path = write("sqlite", tmp_path)
    users = open_users(path, "test")
    assert [users.name(user) for user in range(len(users))] == ["bob"]
    assert _bob_of(users) == [[3]]
    assert "has no split 'heldout': it has test, train" in told(lambda: open_users(path, "heldout"))


def _bob_of(users: Any) -> Any:
    return [sentence.tolist() for sentence in users.sentences(0, ABC)]


@pytest.mark.parametrize("suffix", ["jsonl", "npz", "h5"])
def test_other_files_are_one_split(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"users_test.{suffix}"
    path.write_bytes(b"x")
    assert "has no split 'train': it is test and nothing else" in told(lambda: open_users(path))
    path = path.rename(tmp_path / f"users.{suffix}")
    assert "has no split 'test': it is train and nothing else" in told(lambda: open_users(path, "test"))
    assert "has no split 'dev'" in told(lambda: open_users(path, "dev"))
    if suffix == "jsonl":
        assert len(open_users(path)) == 1, "lines are counted, not parsed"


def test_lines_are_found_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    for text, bounds in [("ab\n\ncd", [0, 3, 4, 6]), ("ab\ncd\n", [0, 3, 5]), ("a\n \n\n", [0, 1]), ("a", [0, 1])]:
        path.write_text(text)
        for chunk in (1, 2, 3, 100):
            monkeypatch.setattr("fedrolex.data.jsonl.CHUNK", chunk)
            assert _line_bounds(path).tolist() == bounds


def test_a_file_of_blank_lines_has_no_users(tmp_path: Path) -> None:
    path = tmp_path / "users.jsonl"
    path.write_text("\n \n")
    assert "has no users" in told(lambda: open_users(path))


def test_a_large_sqlite_file_must_have_an_index(tmp_path: Path) -> None:
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {}) "
    many += "INSERT INTO client_metadata SELECT 'user' || i, 'train', 1 FROM n"
    assert len(open_users(write_sqlite(tmp_path / "a.db", TEXT, many.format(9_997)))) == 10_000
    wrong = "CREATE INDEX w ON examples (split_name)"
    for name, statements in {"b": [], "c": [wrong]}.items():
        path = write_sqlite(tmp_path / f"{name}.db", TEXT, many.format(9_998), *statements)
        says = told(lambda path=path: open_users(path))  # type: ignore[misc]
        assert "has 10001 users and no index" in says
    index = says[says.index("CREATE INDEX") :]
    for name, statement in {"d": index, "e": "CREATE INDEX i ON examples (client_id)"}.items():
        users = open_users(write_sqlite(tmp_path / f"{name}.db", TEXT, many.format(9_998), statement))
        assert [s.tolist() for s in users.sentences(0, ABC)] == NUMBERS["ann"]


# --- broken files ---


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


# --- real data ---


def real(name: str) -> Path:
    path = Path(os.environ.get("FEDROLEX_DATA", "")) / name
    if "FEDROLEX_DATA" not in os.environ or not path.is_file():
        pytest.skip(f"{name} is not in $FEDROLEX_DATA")
    return path


def test_stackexchange() -> None:
    users = open_users(real("stackexchange/users.jsonl"))
    assert isinstance(users, TextUsers)
    assert len(users) == 5387
    assert users.name(0) == "beer:2"
    assert users.text(0)[0] == [
        "what",
        "are",
        "the",
        "differences",
        "between",
        "an",
        "ipa",
        "and",
        "its",
        "variants",
        "?",
    ]
    assert sum(len(users.text(user)) >= 20 for user in range(len(users))) == 1468


def test_blogs() -> None:
    users = open_users(real("blogs/blogs.npz"))
    assert len(users) == 18_872
    assert users.name(0) == "5114"
    vocabulary = users.vocabulary(10_000)
    assert vocabulary.words[:3] == (".", ",", "i")
    assert sum(users.examples(user) or 0 for user in range(len(users))) == 1_861_515
    first = users.sentences(0, vocabulary)
    assert len(first) == 128
    assert first[0][:5].tolist() == [775, 156, 132, 3, 54]
    assert users.sentences(0, users.vocabulary(200))[0][:5].tolist() == [201, 156, 132, 3, 54]
    x, y = encode(first, vocabulary)
    assert x.shape == (128, 20)
    assert int(y.max()) <= vocabulary.end
