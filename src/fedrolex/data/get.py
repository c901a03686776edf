"""Getting data sets from their publishers: download, check, unpack, each so that it can be interrupted."""

import gzip
import hashlib
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedrolex.core import FedrolexError
from fedrolex.data.cifar import CIFAR10, CIFAR100, Layout, check_cifar
from fedrolex.data.idx import FOLDER, check_fashion

CHUNK = 2**18  # bytes read at once
TIMEOUT = 60  # seconds without a byte
MEMBERS = 1000  # the most an archive may hold
UNPACKED = 2**29  # the most bytes it may hold
CIFAR = "https://www.cs.toronto.edu/~kriz/"
FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # the publisher has no https there

Progress = Callable[[str, int, int], None]  # file, bytes there, bytes in all


@dataclass(frozen=True)
class Published:
    """A file as its publisher offers it: address, exact length and MD5 sum (against damage, not against malice)."""

    url: str
    bytes: int
    md5: str

    @property
    def name(self) -> str:
        """Of the file, without folders."""
        return self.url.rsplit("/", 1)[-1]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it lies on disk.

    Attributes:
        folder: its folder below the data folder.
        check: given the data folder, raises FileNotFoundError or FedrolexError unless the set is complete.
        files: what to download: one ``.tar.gz`` that holds ``folder``, or the files of ``folder``; none for a
            set that cannot be downloaded here.
        about: for those, what must be there and who has it.
    """

    folder: str
    check: Callable[[Path], None]
    files: tuple[Published, ...] = ()
    about: str = ""


def _one_of(*choices: tuple[str, ...]) -> Callable[[Path], None]:
    """A check that all files of at least one of the choices are there."""

    def check(folder: Path) -> None:
        if not any(all((folder / file).is_file() for file in files) for files in choices):
            raise FileNotFoundError(2, "not there, or not a file", str(folder / choices[0][0]))

    return check


def _cifar(layout: Layout, file: str, size: int, md5: str) -> Source:
    return Source(layout.folder, partial(check_cifar, layout), (Published(CIFAR + file, size, md5),))


STACKOVERFLOW_H5 = tuple(f"stackoverflow/stackoverflow_{part}.h5" for part in ("train", "test"))
CATALOGUE = {
    "cifar10": _cifar(CIFAR10, "cifar-10-binary.tar.gz", 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530"),
    "cifar100": _cifar(CIFAR100, "cifar-100-binary.tar.gz", 168_513_733, "03b5dce01913d631647c71ecec9e9cb8"),
    "fashion-mnist": Source(
        FOLDER,
        check_fashion,
        (
            Published(FASHION + "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            Published(FASHION + "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            Published(FASHION + "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            Published(FASHION + "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
    ),
    "stackoverflow": Source(
        "stackoverflow",
        _one_of(("stackoverflow/stackoverflow.sqlite",), STACKOVERFLOW_H5),
        about="stackoverflow.sqlite as TensorFlow Federated distributes it, or "
        "stackoverflow_train.h5 and stackoverflow_test.h5",
    ),
    "stackexchange": Source("stackexchange", _one_of(("stackexchange/users.jsonl",)), about="users.jsonl"),
    "blogs": Source("blogs", _one_of(("blogs/blogs.npz",)), about="blogs.npz"),
}


def find_source(name: str) -> Source:
    """The entry of the catalogue."""
    if name == "digits":
        raise FedrolexError("digits comes with scikit-learn: there is nothing to get")
    if name not in CATALOGUE:
        raise FedrolexError(f"data set {name!r} is unknown: use one of {', '.join(CATALOGUE)}")
    return CATALOGUE[name]


def lacking(source: Source, folder: Path) -> str | None:
    """What is missing or wrong with a data set below the data folder, None when it is complete. Reads no data."""
    try:
        source.check(folder)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except FedrolexError as error:
        return str(error)
    return None


def get(name: str, folder: Path, progress: Progress | None = None) -> bool:
    """Download a data set into its folder below the data folder, unless it is complete; whether that was needed.

    An interrupted download goes on where it ended when asked for again; an interrupted unpacking leaves nothing.
    """
    source = find_source(name)
    lack = lacking(source, folder)
    if lack is None:
        return False
    target = folder / source.folder
    if not source.files:
        raise FedrolexError(f"{name} cannot be downloaded from here: put {source.about} into {target}")
    packed = source.files[0].name.endswith(".tar.gz")
    if packed and target.exists():
        raise FedrolexError(f"{target} is there but not complete ({lack}): move it away, then get {name} again")
    into = folder if packed else target
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedrolexError(f"cannot make the folder {into} ({error.strerror}): give another with --data") from None
    for file in source.files:
        final = into / file.name
        there = final.is_file() and _md5(final) == file.md5
        part = final if there else download(file, into, progress or (lambda _name, _there, _all: None))
        if packed:
            unpack(part, source, folder)
            if part != final:
                part.unlink()
        else:
            part.replace(final)
    lack = lacking(source, folder)
    if lack is not None:
        raise FedrolexError(f"{name} was got, yet {lack}: move that away, then get {name} again")
    return True


# --- download ---


def download(file: Published, folder: Path, progress: Progress) -> Path:
    """Bring a file, or the rest of it, into ``<folder>/<name>.part``, and check it; returns that path."""
    part = folder / f"{file.name}.part"
    there = part.stat().st_size if part.exists() else 0
    if there != file.bytes:
        _receive(file, part, there if there < file.bytes else 0, progress)
    found = _md5(part)
    if found != file.md5:
        part.unlink()
        why = "damaged on the way or changed by its publisher"
        remedy = f"get it again, or bring the right file to {folder / file.name}"
        raise FedrolexError(f"{file.url} has MD5 {found}, expected {file.md5}: {why}; {remedy}")
    return part


def _receive(file: Published, part: Path, there: int, progress: Progress) -> None:
    """Fill ``part`` from byte ``there`` on; from the beginning when the server cannot do that."""
    headers = {"User-Agent": "fedrolex", **({"Range": f"bytes={there}-"} if there else {})}
    request = Request(file.url, headers=headers)  # noqa: S310 -- addresses of the catalogue only
    try:
        answer = cast(HTTPResponse, urlopen(request, timeout=TIMEOUT))  # noqa: S310
    except HTTPError as error:
        error.close()
        if error.code == 416 and there:
            _receive(file, part, 0, progress)
            return
        raise FedrolexError(f"{file.url}: the server says {error.code} {error.reason}: {_otherwise(part)}") from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise FedrolexError(f"{file.url} cannot be reached ({reason}): {_otherwise(part)}") from None
    with answer:
        start, total = _place(answer)
        if there and start not in (0, there):
            answer.close()
            _receive(file, part, 0, progress)
            return
        if total not in (None, file.bytes):
            why = f"not the published file, perhaps a page of a proxy: {_otherwise(part)}"
            raise FedrolexError(f"{file.url} has {total:,} bytes, expected {file.bytes:,}: {why}")
        there = start if there else 0
        with open(part, "ab" if there else "wb") as out:
            while there < file.bytes:
                try:
                    chunk = answer.read(CHUNK)
                except (OSError, HTTPException):
                    chunk = b""
                if not chunk:
                    ended = f"the connection ended after {there:,} of {file.bytes:,} bytes"
                    raise FedrolexError(f"{file.url}: {ended}: get it again, it goes on from there")
                out.write(chunk)
                there += len(chunk)
                progress(file.name, there, file.bytes)


def _place(answer: HTTPResponse) -> tuple[int, int | None]:
    """The first byte an answer brings, and the length of the whole file if the server says it."""
    if answer.status == 206:
        told = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "").strip())
        if told is None:
            return -1, None
        return int(told[1]), None if told[2] == "*" else int(told[2])
    length = answer.headers.get("Content-Length", "")
    return 0, int(length) if length.isdecimal() else None


def _otherwise(part: Path) -> str:
    return f"try again, or bring the file to {part.with_suffix('')} by other means"


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


# --- unpack ---


def unpack(archive: Path, source: Source, folder: Path) -> None:
    """Unpack ``source.folder`` of a ``.tar.gz`` into the data folder: all of it, or nothing.

    Only regular files below ``source.folder`` are taken; anything else in the archive is refused by name.
    """
    beside = folder / f".{source.folder}.unpacking"  # on the same disk, so that the rename at the end is one step
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        _extract(archive, source.folder, beside)
        lack = lacking(source, beside)
        if lack is not None:
            raise FedrolexError(f"{archive} does not hold the data set: {lack}")
        (beside / source.folder).rename(folder / source.folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _extract(archive: Path, top: str, into: Path) -> None:
    count = size = 0
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                _refuse(member, top, archive)
                count, size = count + 1, size + member.size
                if count > MEMBERS or size > UNPACKED:
                    most = f"more than {MEMBERS:,} files or {UNPACKED:,} bytes"
                    raise FedrolexError(f"{archive} holds {most} at {member.name!r}: refused")
                if member.isreg():
                    tar.extract(member, into, filter="data")
    except tarfile.FilterError as error:
        raise FedrolexError(f"{archive}: {error}: refused") from None
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FedrolexError(f"{archive} is a damaged archive ({error}): delete it and get it again") from None


def _refuse(member: tarfile.TarInfo, top: str, archive: Path) -> None:
    """Raise for a member that is not a plain file or folder below ``top``."""
    path = PurePosixPath(member.name)
    if not (member.isreg() or member.isdir()):
        raise FedrolexError(f"{archive}: member {member.name!r} is a link or a device: refused")
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (top,) or set(member.name) & set("\\:"):
        raise FedrolexError(f"{archive}: member {member.name!r} is not below {top}/: refused")
