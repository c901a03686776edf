"""Getting data: a real server on this machine, real archives, and every way they can be wrong."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from told import told
from typer.testing import CliRunner

from fedrolex import FedrolexError
from fedrolex.cli.data import data_app
from fedrolex.data import get as getting
from fedrolex.data.get import CATALOGUE, Published, Source, get, lacking
from fedrolex.data.where import data_folder

# --- a server ---


class Server(ThreadingHTTPServer):
    """Serves ``files`` by name.

    Attributes:
        ranges: whether it honours Range requests.
        cut: bytes after which the next answer ends too early.
        asked: the Range header of every request.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.cut: int | None = None
        self.asked: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Server)
        wanted = self.headers.get("Range")
        server.asked.append(wanted)
        body = server.files.get(self.path[1:])
        if body is None:
            self.send_error(404)
            return
        first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and server.ranges else None
        if first is not None and first >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            self.end_headers()
            return
        self.send_response(200 if first is None else 206)
        if first is not None:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - (first or 0)))
        self.end_headers()
        cut, server.cut = server.cut, None
        self.wfile.write(body[first or 0 :][:cut])

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield one
        one.shutdown()
        thread.join()


DATA = np.random.Philox(key=1).random_raw(40_000).tobytes()  # 320,000 bytes gzip cannot shorten


def packed(*members: tuple[tarfile.TarInfo | str, bytes]) -> bytes:
    """A .tar.gz; a name alone is a regular file."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for info, data in members:
            info = tarfile.TarInfo(info) if isinstance(info, str) else info
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


GOOD = packed(("small/a.bin", DATA), ("small/deep/readme.html", b"hello"))


def small(folder: Path) -> None:
    if (folder / "small" / "a.bin").stat().st_size != len(DATA):
        raise FedrolexError("a.bin is short")


def offer(monkeypatch: pytest.MonkeyPatch, server: Server, body: bytes = GOOD) -> None:
    """A catalogue entry ``small`` whose archive the server has."""
    server.files["small.tar.gz"] = body
    published = Published(server.url + "small.tar.gz", len(body), hashlib.md5(body).hexdigest())
    monkeypatch.setitem(CATALOGUE, "small", Source("small", small, (published,)))


@pytest.fixture
def shop(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    offer(monkeypatch, server)
    monkeypatch.setattr(getting, "CHUNK", 10_000)
    return server


def complete(folder: Path) -> bool:
    """The set is there, and nothing else."""
    assert (folder / "small" / "a.bin").read_bytes() == DATA
    assert (folder / "small" / "deep" / "readme.html").read_text() == "hello"
    return [p.name for p in folder.iterdir()] == ["small"]


# --- download ---


def test_a_download_is_checked_unpacked_and_done_once(shop: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    folder = tmp_path / "made" / "on the way"
    assert get("small", folder, lambda *now: seen.append(now)) is True
    assert complete(folder)
    assert seen[-1] == ("small.tar.gz", len(GOOD), len(GOOD))
    assert [there for _, there, _ in seen] == sorted({there for _, there, _ in seen})
    assert get("small", folder) is False
    assert shop.asked == [None], "the second call asks for nothing"


def test_a_part_is_resumed(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small.tar.gz.part").write_bytes(GOOD[:12_345])
    seen: list[int] = []
    get("small", tmp_path, lambda _name, there, _all: seen.append(there))
    assert shop.asked == ["bytes=12345-"]
    assert seen[0] == 22_345
    assert complete(tmp_path)


def test_a_whole_part_needs_no_server(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small.tar.gz.part").write_bytes(GOOD)
    get("small", tmp_path)
    assert shop.asked == []
    assert complete(tmp_path)


def test_an_archive_the_user_brought_is_used_and_kept(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small.tar.gz").write_bytes(GOOD)
    get("small", tmp_path)
    assert shop.asked == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small", "small.tar.gz"]


def test_a_server_without_ranges_starts_again(shop: Server, tmp_path: Path) -> None:
    shop.ranges = False
    (tmp_path / "small.tar.gz.part").write_bytes(b"x" * 12_345)
    get("small", tmp_path)
    assert shop.asked == ["bytes=12345-"]
    assert complete(tmp_path)


def test_a_part_that_is_too_long_starts_again(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small.tar.gz.part").write_bytes(GOOD + b"x")
    get("small", tmp_path)
    assert shop.asked == [None]
    assert complete(tmp_path)


def test_a_range_the_server_does_not_have_starts_again(shop: Server, tmp_path: Path) -> None:
    """416: the server's file is shorter than the part; it is asked for the whole, and that is the wrong length."""
    shop.files["small.tar.gz"] = GOOD[:100]
    (tmp_path / "small.tar.gz.part").write_bytes(GOOD[:12_345])
    said = told(lambda: get("small", tmp_path))
    assert shop.asked == ["bytes=12345-", None]
    assert f"has 100 bytes, expected {len(GOOD):,}" in said
    shop.files["small.tar.gz"] = GOOD
    get("small", tmp_path)
    assert shop.asked[2:] == ["bytes=12345-"], "a wrong page did not cost the part"
    assert complete(tmp_path)


def test_a_cut_connection_is_one_line_and_goes_on_from_there(shop: Server, tmp_path: Path) -> None:
    shop.cut = 100_000
    said = told(lambda: get("small", tmp_path))
    assert f"the connection ended after 100,000 of {len(GOOD):,} bytes" in said
    assert shop.url in said
    assert [p.name for p in tmp_path.iterdir()] == ["small.tar.gz.part"]
    get("small", tmp_path)
    assert shop.asked == [None, "bytes=100000-"]
    assert complete(tmp_path)


def test_a_wrong_sum_deletes_the_part(shop: Server, tmp_path: Path) -> None:
    bad = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
    shop.files["small.tar.gz"] = bad
    said = told(lambda: get("small", tmp_path))
    assert hashlib.md5(GOOD).hexdigest() in said
    assert hashlib.md5(bad).hexdigest() in said
    assert list(tmp_path.iterdir()) == []
    shop.files["small.tar.gz"] = GOOD
    get("small", tmp_path)
    assert complete(tmp_path)


def test_network_errors_are_one_line_with_the_address(shop: Server, tmp_path: Path) -> None:
    shop.files.clear()
    said = told(lambda: get("small", tmp_path))
    assert f"{shop.url}small.tar.gz: the server says 404" in said
    assert f"bring the file to {tmp_path / 'small.tar.gz'} by" in said


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    offer(monkeypatch, server)
    server.server_close()
    server.shutdown()
    assert "small.tar.gz cannot be reached (" in told(lambda: get("small", tmp_path))


def test_single_files_are_got_one_by_one(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = {"a.gz": b"aaaa", "b.gz": b"bb"}
    server.files.update(bodies)
    files = tuple(Published(server.url + n, len(b), hashlib.md5(b).hexdigest()) for n, b in bodies.items())

    def check(folder: Path) -> None:
        for name in bodies:
            (folder / "two" / name).stat()

    monkeypatch.setitem(CATALOGUE, "two", Source("two", check, files))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "a.gz").write_bytes(b"aaaa")
    assert get("two", tmp_path) is True
    assert server.asked == [None], "the file that is right is not asked for"
    assert {p.name: p.read_bytes() for p in (tmp_path / "two").iterdir()} == bodies


def test_what_is_there_and_wrong_is_left_alone(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "a.bin").write_bytes(b"mine")
    said = told(lambda: get("small", tmp_path))
    assert "small is there but not complete (a.bin is short): move it away" in said
    assert (tmp_path / "small" / "a.bin").read_bytes() == b"mine"
    assert shop.asked == []


# --- unpack ---


def info(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


EVIL: list[tuple[tarfile.TarInfo | str, str]] = [
    ("../x", "'../x' is not below small/"),
    ("small/../../x", "'small/../../x' is not below small/"),
    ("/fedrolex-evil", "'/fedrolex-evil' is not below small/"),
    ("elsewhere/x", "'elsewhere/x' is not below small/"),
    ("small/..\\x", "is not below small/"),
    (info("small/link", tarfile.SYMTYPE, "../.."), "'small/link' is a link or a device"),
    (info("small/hard", tarfile.LNKTYPE, "small/a.bin"), "'small/hard' is a link or a device"),
    (info("small/null", tarfile.CHRTYPE), "'small/null' is a link or a device"),
    (info("small/pipe", tarfile.FIFOTYPE), "'small/pipe' is a link or a device"),
]


@pytest.mark.parametrize(("member", "says"), EVIL)
def test_evil_members_are_refused_by_name(
    member: tarfile.TarInfo | str, says: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(monkeypatch, server, packed(("small/a.bin", DATA), (member, b"evil")))
    folder = tmp_path / "data"
    said = told(lambda: get("small", folder))
    assert says in said
    assert said.endswith("refused")
    assert [p.name for p in folder.iterdir()] == ["small.tar.gz.part"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not Path("/fedrolex-evil").exists()


def test_archives_are_bounded(shop: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getting, "UNPACKED", len(DATA) + 4)
    assert "more than 1,000 files or 320,004 bytes at 'small/deep/readme.html'" in told(lambda: get("small", tmp_path))
    assert not (tmp_path / "small").exists()


def test_an_archive_without_the_set(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server, packed(("small/b.bin", b"b")))
    said = told(lambda: get("small", tmp_path))
    assert "does not hold the data set" in said
    assert said.endswith("a.bin is missing")
    offer(monkeypatch, server, GOOD[:50_000])
    (tmp_path / "small.tar.gz.part").unlink()
    assert "is a damaged archive" in told(lambda: get("small", tmp_path))
    assert not (tmp_path / "small").exists()


KILLED = """
import os, sys, tarfile
from pathlib import Path
from fedrolex.data.get import Source, unpack

whole = tarfile.TarFile.extract
def extract(self, member, *args, **named):
    whole(self, member, *args, **named)
    os._exit(9)
tarfile.TarFile.extract = extract
folder = Path(sys.argv[1])
unpack(folder / "small.tar.gz.part", Source("small", lambda folder: None), folder)
"""


def test_a_killed_unpacking_leaves_nothing_half_done(shop: Server, tmp_path: Path) -> None:
    (tmp_path / "small.tar.gz.part").write_bytes(GOOD)
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False).returncode == 9
    assert (tmp_path / ".small.unpacking" / "small" / "a.bin").exists(), "it was killed in the middle"
    assert not (tmp_path / "small").exists()
    assert lacking(CATALOGUE["small"], tmp_path) is not None
    get("small", tmp_path)
    assert shop.asked == []
    assert complete(tmp_path)


# --- the catalogue and the commands ---


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "stackoverflow",
            "put stackoverflow.sqlite as TensorFlow Federated distributes it, or stackoverflow_train.h5 and",
        ),
        ("stackexchange", "put users.jsonl into"),
        ("blogs", "put blogs.npz into"),
        ("digits", "digits comes with scikit-learn"),
        ("cifar", "data set 'cifar' is unknown: use one of cifar10, cifar100, fashion-mnist"),
    ],
)
def test_what_cannot_be_downloaded_says_what_to_do(name: str, says: str, tmp_path: Path) -> None:
    assert says in told(lambda: get(name, tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_sets_brought_by_hand_are_seen(tmp_path: Path) -> None:
    (tmp_path / "stackoverflow").mkdir()
    for part in ("train", "heldout"):
        (tmp_path / "stackoverflow" / f"stackoverflow_{part}.h5").touch()
    assert lacking(CATALOGUE["stackoverflow"], tmp_path) == f"{tmp_path}/stackoverflow/stackoverflow.sqlite is missing"
    (tmp_path / "stackoverflow" / "stackoverflow_test.h5").touch()
    assert get("stackoverflow", tmp_path) is False


def test_the_commands(shop: Server, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        result = CliRunner().invoke(data_app, [*words, "--data", str(tmp_path)])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert re.search(r"small .* absent .* fedrolex data get small", run("list"))
    assert run("get", "small") == f"small is in {tmp_path / 'small'}\n"
    assert run("get", "small") == f"small is already in {tmp_path / 'small'}\n"
    found = json.loads(run("get", "small", "--json"))
    assert found == {"name": "small", "folder": str(tmp_path / "small"), "downloaded": False}
    states = {row["name"]: row["state"] for row in json.loads(run("list", "--json"))["sets"]}
    assert states == {
        **dict.fromkeys(["cifar10", "cifar100", "fashion-mnist", "stackoverflow", "stackexchange", "blogs"], "absent"),
        "small": "there",
        "digits": "there",
    }


def test_where_data_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDROLEX_DATA", "/from/env")
    assert data_folder("/given") == Path("/given")
    assert data_folder(None) == Path("/from/env")
    monkeypatch.delenv("FEDROLEX_DATA")
    assert data_folder(None) == Path.home() / ".cache" / "fedrolex"
