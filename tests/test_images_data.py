"""Image files and getting them: a real server on this machine, real archives, and every way they can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from fedrolex import FedrolexError
from fedrolex.cli.data import data_app
from fedrolex.data import get as getting
from fedrolex.data.cifar import CIFAR10, CIFAR100, Layout, read_cifar, read_class_names
from fedrolex.data.get import CATALOGUE, Published, Source, get, lacking
from fedrolex.data.idx import SHAPES, read_idx
from fedrolex.data.images import load_images, moments
from fedrolex.data.where import data_folder
from fedrolex.streams import shuffle


def line(mistake: Callable[[], object]) -> str:
    """The one line a mistake gets."""
    with pytest.raises(FedrolexError) as caught:
        mistake()
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    said = line(lambda: get("small", tmp_path))
    assert shop.asked == ["bytes=12345-", None]
    assert f"has 100 bytes, expected {len(GOOD):,}" in said
    shop.files["small.tar.gz"] = GOOD
    get("small", tmp_path)
    assert shop.asked[2:] == ["bytes=12345-"], "a wrong page did not cost the part"
    assert complete(tmp_path)


def test_a_cut_connection_is_one_line_and_goes_on_from_there(shop: Server, tmp_path: Path) -> None:
    shop.cut = 100_000
    said = line(lambda: get("small", tmp_path))
    assert f"the connection ended after 100,000 of {len(GOOD):,} bytes" in said
    assert shop.url in said
    assert [p.name for p in tmp_path.iterdir()] == ["small.tar.gz.part"]
    get("small", tmp_path)
    assert shop.asked == [None, "bytes=100000-"]
    assert complete(tmp_path)


def test_a_wrong_sum_deletes_the_part(shop: Server, tmp_path: Path) -> None:
    bad = GOOD[:-1] + bytes([GOOD[-1] ^ 1])
    shop.files["small.tar.gz"] = bad
    said = line(lambda: get("small", tmp_path))
    assert hashlib.md5(GOOD).hexdigest() in said
    assert hashlib.md5(bad).hexdigest() in said
    assert list(tmp_path.iterdir()) == []
    shop.files["small.tar.gz"] = GOOD
    get("small", tmp_path)
    assert complete(tmp_path)


def test_network_errors_are_one_line_with_the_address(shop: Server, tmp_path: Path) -> None:
    shop.files.clear()
    said = line(lambda: get("small", tmp_path))
    assert f"{shop.url}small.tar.gz: the server says 404" in said
    assert f"bring the file to {tmp_path / 'small.tar.gz'} by" in said


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    offer(monkeypatch, server)
    server.server_close()
    server.shutdown()
    assert "small.tar.gz cannot be reached (" in line(lambda: get("small", tmp_path))


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
    said = line(lambda: get("small", tmp_path))
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
    said = line(lambda: get("small", folder))
    assert says in said
    assert said.endswith("refused")
    assert [p.name for p in folder.iterdir()] == ["small.tar.gz.part"]
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    assert not Path("/fedrolex-evil").exists()


def test_archives_are_bounded(shop: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getting, "UNPACKED", len(DATA) + 4)
    assert "more than 1,000 files or 320,004 bytes at 'small/deep/readme.html'" in line(lambda: get("small", tmp_path))
    assert not (tmp_path / "small").exists()


def test_an_archive_without_the_set(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, server, packed(("small/b.bin", b"b")))
    said = line(lambda: get("small", tmp_path))
    assert "does not hold the data set" in said
    assert said.endswith("a.bin is missing")
    offer(monkeypatch, server, GOOD[:50_000])
    (tmp_path / "small.tar.gz.part").unlink()
    assert "is a damaged archive" in line(lambda: get("small", tmp_path))
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
    assert says in line(lambda: get(name, tmp_path))
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


# --- CIFAR ---


def write_cifar(folder: Path, layout: Layout) -> Path:
    """Files of the right lengths, all zero (and so on disk almost empty)."""
    place = folder / layout.folder
    place.mkdir()
    for name, records in {**layout.train, **layout.test}.items():
        with open(place / name, "wb") as file:
            file.truncate(records * layout.record)
    (place / layout.names).write_text("\n".join(f"name{i}" for i in range(layout.labels[-1])) + "\n\n")
    return place


def poke(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_cifar10_records_land_where_they_belong(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, CIFAR10)
    record = bytes([7]) + bytes([1]) * 1024 + bytes([2]) * 1024 + bytes(range(256)) * 4
    poke(place / "data_batch_3.bin", 5 * 3073, record)
    found = load_images("cifar10", tmp_path)
    assert found.train_x.shape == (50_000, 3, 32, 32)
    assert found.train_x.dtype == torch.uint8
    assert found.train_y.dtype == torch.int64
    assert int(found.train_y[20_005]) == 7
    assert int(found.train_y.sum()) == 7
    assert found.train_x[20_005, :2].flatten(1).unique(dim=1).tolist() == [[1], [2]]
    assert found.train_x[20_005, 2, 7, 3:5].tolist() == [227, 228], "rows of 32 from the top"
    assert int(found.train_x[20_004].sum() + found.train_x[20_006].sum()) == 0
    assert found.classes[7] == "name7"
    assert (found.mean, found.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


def test_cifar100_learns_the_fine_label(tmp_path: Path) -> None:
    place = write_cifar(tmp_path, CIFAR100)
    poke(place / "test.bin", 9_999 * 3074, bytes([19, 99, 5]))
    _, train_y, test_x, test_y = read_cifar(CIFAR100, tmp_path)
    assert (len(train_y), len(test_y)) == (50_000, 10_000)
    assert int(test_y[9_999]) == 99
    assert test_x[9_999].flatten()[:2].tolist() == [5, 0]
    poke(place / "test.bin", 9_999 * 3074, bytes([20]))
    assert "test.bin, record 9,999: label 20, expected 0 to 19" in line(lambda: read_cifar(CIFAR100, tmp_path))


@pytest.mark.parametrize("size", [30_729_999, 30_730_001, 0])
def test_a_cifar_file_of_the_wrong_length(size: int, tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "data_batch_2.bin"
    os.truncate(path, size)
    assert f"{path} has {size:,} bytes, expected 30,730,000" in line(lambda: load_images("cifar10", tmp_path))
    assert f"{path} has {size:,} bytes" in line(lambda: get("cifar10", tmp_path)), "nor is it overwritten"


def test_a_cifar_label_outside_the_classes(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "data_batch_1.bin"
    poke(path, 3 * 3073, bytes([10]))
    assert f"{path}, record 3: label 10, expected 0 to 9" in line(lambda: load_images("cifar10", tmp_path))


def test_cifar_names_are_counted(tmp_path: Path) -> None:
    path = write_cifar(tmp_path, CIFAR10) / "batches.meta.txt"
    path.write_text("cat\ndog\n")
    assert "batches.meta.txt has 2 names, expected 10" in line(lambda: read_class_names(CIFAR10, tmp_path))


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_a_set_that_is_not_there_says_where_it_was_looked_for(name: str, tmp_path: Path) -> None:
    said = line(lambda: load_images(name, tmp_path / "none"))
    assert f"{name} is not in {tmp_path / 'none'}: looked for {tmp_path / 'none' / CATALOGUE[name].folder}" in said
    assert f"`fedrolex data get {name}`, or say where it is with --data or FEDROLEX_DATA" in said


def real(layout: Layout) -> Path:
    given = os.environ.get("FEDROLEX_DATA")
    if not given or not (Path(given) / layout.folder).is_dir():
        pytest.skip(f"no {layout.folder} in FEDROLEX_DATA")
    return Path(given)


CLASSES10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def test_real_cifar10() -> None:
    found = load_images("cifar10", real(CIFAR10))
    assert (found.train_x.shape, found.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert found.train_y.bincount().tolist() == [5_000] * 10
    assert found.test_y.bincount().tolist() == [1_000] * 10
    assert [round(m, 4) for m in moments(found.train_x)[0]] == [0.4914, 0.4822, 0.4465]
    assert found.classes == CLASSES10


def test_real_cifar100() -> None:
    found = load_images("cifar100", real(CIFAR100))
    assert (found.train_x.shape, found.test_x.shape) == ((50_000, 3, 32, 32), (10_000, 3, 32, 32))
    assert found.train_y.bincount().tolist() == [500] * 100
    assert found.test_y.bincount().tolist() == [100] * 100
    assert [round(m, 4) for m in moments(found.train_x)[0]] == [0.5071, 0.4865, 0.4409]
    assert (found.classes[0], found.classes[99]) == ("apple", "worm")


# --- IDX ---

IDX = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(12))


@pytest.mark.parametrize("name", ["x-idx3-ubyte", "x-idx3-ubyte.gz"])
def test_idx_plain_and_compressed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(IDX, mtime=0) if name.endswith(".gz") else IDX)
    assert read_idx(path, (2, 2, 3)).tolist() == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"\0\0\x08\x01" + IDX[4:], "begins with 00000801, expected 00000803"),
        (b"\0\0\x0d\x03" + IDX[4:], "begins with 00000d03, expected 00000803"),
        (b"", "begins with nothing"),
        (IDX[:7] + b"\x03" + IDX[8:], "has dimensions [3, 2, 3], expected [2, 2, 3]"),
        (IDX[:-1], "has 11 values, expected 12"),
        (IDX + b"x", "has more values, expected 12"),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_wrong_idx_file(raw: bytes, says: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(gzip.compress(raw, mtime=0) if suffix else raw)
    assert f"{path} {says}" in line(lambda: read_idx(path, (2, 2, 3)))


PACKED = gzip.compress(IDX, mtime=0)


@pytest.mark.parametrize("raw", [PACKED[:-9], b"not gzip", PACKED[:-8] + bytes(8)], ids=["cut", "not", "sum"])
def test_a_damaged_gzip(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(raw)
    assert "x.gz is a damaged gzip file (" in line(lambda: read_idx(tmp_path / "x.gz", (2, 2, 3)))


def test_fashion_mnist(tmp_path: Path) -> None:
    place = tmp_path / "fashion-mnist"
    place.mkdir()
    for name, shape in SHAPES.items():
        header = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
        values = (
            bytes([0, 255]) * (int(np.prod(shape)) // 2) if len(shape) == 3 else bytes(range(10)) * (shape[0] // 10)
        )
        if name.startswith("train-images"):
            (place / name).write_bytes(header + values)
        else:
            (place / f"{name}.gz").write_bytes(gzip.compress(header + values, 1, mtime=0))
    found = load_images("fashion-mnist", tmp_path)
    assert (found.train_x.shape, found.test_x.shape) == ((60_000, 1, 28, 28), (10_000, 1, 28, 28))
    assert found.train_y[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert (found.mean, found.std) == ((0.5,), (0.5,))
    assert found.classes[9] == "Ankle boot"
    assert get("fashion-mnist", tmp_path) is False
    os.truncate(place / "train-images-idx3-ubyte", 47_040_015)
    lack = lacking(CATALOGUE["fashion-mnist"], tmp_path)
    assert lack is not None
    assert "train-images-idx3-ubyte holds 47,040,015 bytes, expected 47,040,016" in lack
    header = bytes([0, 0, 8, 1]) + (60_000).to_bytes(4, "big")
    (place / "train-labels-idx1-ubyte").write_bytes(header + bytes([10]) * 60_000)
    poke(place / "train-images-idx3-ubyte", 47_040_015, b"x")
    assert "label 10, expected 0 to 9" in line(lambda: load_images("fashion-mnist", tmp_path))


# --- digits and folders of one's own ---


def test_digits_are_exact_and_held_out_by_the_seed(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    for seed in (0, 3):
        order = shuffle(1797, seed, "held out")
        found = load_images("digits", tmp_path, seed=seed)
        assert (found.train_x.shape, found.test_x.shape) == ((1347, 1, 8, 8), (450, 1, 8, 8))
        assert torch.equal(found.test_x[:, 0].double() / 15, torch.from_numpy(data.images[order[:450]]))
        assert torch.equal(found.train_x[:, 0].double() / 15, torch.from_numpy(data.images[order[450:]]))
        assert found.test_y.tolist() == data.target[order[:450]].tolist()
        assert found.train_y.tolist() == data.target[order[450:]].tolist()


def picture(path: Path, colour: Any = (10, 20, 30), size: tuple[int, int] = (3, 2), mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    picture(tmp_path / "train" / "dog" / "1.png", (0, 0, 51))
    picture(tmp_path / "train" / "cat" / "1.BMP", (255, 0, 51))
    picture(tmp_path / "test" / "dog" / "9.png", (7, 8, 9)).with_name(".hidden.png").write_text("no image")
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image either")
    with Image.open(tmp_path / "test" / "dog" / "9.png") as image:
        image.putpixel((2, 0), (1, 2, 3))
        image.save(tmp_path / "test" / "dog" / "9.png")
    found = load_images(str(tmp_path), Path("unused"))
    assert found.classes == ("cat", "dog")
    assert (found.train_y.tolist(), found.test_y.tolist()) == ([0, 1], [1])
    assert found.train_x.shape == (2, 3, 2, 3)
    assert found.train_x.dtype == torch.uint8
    assert found.test_x[0, :, 0].tolist() == [[7, 7, 1], [8, 8, 2], [9, 9, 3]]
    assert found.mean == (0.5, 0.0, 0.2)
    assert found.std == (0.5, 1.0, 1.0), "1 where nothing varies, so that dividing by it is safe"


def test_a_folder_without_a_split_holds_out_a_tenth(tmp_path: Path) -> None:
    for i in range(25):
        picture(tmp_path / f"class{i // 20}" / f"{i:02}.png", i, mode="L")
    found = load_images(str(tmp_path), Path("unused"), seed=4)
    order = shuffle(25, 4, "held out").tolist()
    assert found.test_x[:, 0, 0, 0].tolist() == order[:2]
    assert found.train_x[:, 0, 0, 0].tolist() == order[2:]
    assert found.train_y.tolist() == [i // 20 for i in order[2:]]
    assert found.train_x.shape == (23, 1, 2, 3)


@pytest.mark.parametrize("suffix", ["png", "jpg", "jpeg", "webp", "bmp"])
def test_every_format_is_read(suffix: str, tmp_path: Path) -> None:
    for i in range(2):
        picture(tmp_path / "one" / f"{i}.{suffix}", (128, 128, 128))
    found = load_images(str(tmp_path), Path("unused"))
    assert (found.train_x.int() - 128).abs().max() <= 2


def test_odd_images_are_named(tmp_path: Path) -> None:
    odd = picture(tmp_path / "a" / "0.png", size=(4, 2))
    for i in range(1, 4):
        picture(tmp_path / "a" / f"{i}.png")
    said = line(lambda: load_images(str(tmp_path), tmp_path))
    assert f"{odd} is 4×2 RGB, most others are 3×2 RGB" in said
    assert "resize them first" in said
    picture(odd, 1, mode="L")
    assert f"{odd} is 3×2 L, most others are 3×2 RGB" in line(lambda: load_images(str(tmp_path), tmp_path))
    odd.write_bytes(odd.read_bytes()[:40])
    assert f"{odd} cannot be read as an image" in line(lambda: load_images(str(tmp_path), tmp_path))
    odd.write_text("words")
    assert f"{odd} cannot be read as an image" in line(lambda: load_images(str(tmp_path), tmp_path))


def test_mistakes_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> str:
        return line(lambda: load_images(str(tmp_path), tmp_path))

    assert "data set 'cifar' is unknown: use cifar10," in line(lambda: load_images("cifar", tmp_path))
    assert "has no folders: give one a class" in said()
    (tmp_path / "train" / "a").mkdir(parents=True)
    assert "has train/ but no test/" in said()
    (tmp_path / "test").mkdir()
    assert f"{tmp_path / 'train' / 'a'} has no images" in said()
    picture(tmp_path / "train" / "a" / "1.png")
    assert f"{tmp_path / 'test'} has no images" in said()
    extra = picture(tmp_path / "test" / "b" / "1.png")
    assert "there is no train/b" in said()
    extra.rename(tmp_path / "test" / "1.png")
    extra.parent.rmdir()
    for part in ("train", "test"):
        picture(tmp_path / part / "a" / "1.png", 0, mode="P")
    assert "has mode P: convert the images to one of L, RGB, RGBA first" in said()
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in said()
