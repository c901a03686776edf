"""Text with its users in every layout, and the numbers of its words."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from text_files import ABC, LAYOUTS, NUMBERS, TEXT, WORDS, write, write_sqlite
from told import told

from fedrolex.data.jsonl import _line_bounds
from fedrolex.data.users import TextUsers, open_users
from fedrolex.data.vocabulary import Vocabulary, encode, split_tokens, tokenize

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
