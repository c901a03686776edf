"""The one exception a user's mistake raises: its text is the whole message."""

import difflib
import reprlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from functools import lru_cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

LARGEST = sys.float_info.max
LONGEST = 600
"""Most characters of a message; what is longer, because it quotes what was given, keeps its beginning and its end."""


class FedrolexError(ValueError):
    """Something the user gave cannot be used: one line says what was given, what is allowed, what to do.

    The command line prints the line and exits with status 2; it never shows a traceback for one of these.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(message.split())
        half = LONGEST // 2
        super().__init__(line if len(line) <= LONGEST else f"{line[:half]} … {line[-half:]}")


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Inside, code that is the user's: what it raises, sys.exit() too, becomes one line that begins with ``what``."""
    try:
        yield
    except FedrolexError:
        raise
    except (Exception, SystemExit) as error:
        said = str(error).strip().partition("\n")[0]
        raise FedrolexError(f"{what}: {type(error).__name__}: {said}") from error


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """`` (did you mean 'that'?)`` where a word is nearly a known one; else nothing."""
    near = difflib.get_close_matches(str(word), known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise, in one line, unless ``value`` is one of the allowed words."""
    if value not in allowed:
        raise FedrolexError(f"{key} is {value!r}{did_you_mean(value, allowed)}: use one of {', '.join(allowed)}")


def check_words(section: str, settings: object) -> None:
    """Raise, in one line, unless every setting is what its type says: a word of a ``Literal``, a number, a list."""
    for name, kind in _types(type(settings)).items():  # type: ignore[arg-type]  # classes are hashable
        value: Any = getattr(settings, name, None)
        key = f"{section}.{name}".lstrip(".")
        if get_origin(kind) is Literal:
            one_of(key, value, get_args(kind))
        elif not _is(kind, value):
            raise FedrolexError(f"{key} is {reprlib.repr(value)}: give {_in_words(kind)}")


PLAIN = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}


def _is(kind: Any, value: object) -> bool:
    """Whether a value is a section, or of a type that plain data has; a number may stand for text. Others may be."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_is(option, value) for option in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, Sequence):
        return isinstance(value, list | tuple) and all(_is(inner[0], each) for each in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(_is(inner[0], k) and _is(inner[1], v) for k, v in value.items())
    if kind not in PLAIN:
        return isinstance(value, kind) if is_dataclass(kind) and isinstance(kind, type) else True
    wider = {float: int | float, str: str | int | float}.get(kind, kind)
    return isinstance(value, wider) and (kind is bool or not isinstance(value, bool))


def _in_words(kind: Any) -> str:
    """What a setting of a type takes."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " or ".join(_in_words(option) for option in inner)
    if origin is Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (list, Sequence):
        return f"a list, each {_in_words(inner[0])}"
    if origin in (dict, Mapping):
        return f"a mapping to {_in_words(inner[1])}"
    return PLAIN.get(kind, getattr(kind, "__name__", str(kind)))


@lru_cache(maxsize=256)
def _types(settings: type) -> dict[str, Any]:
    """Annotations of a class; of one made inside a function, those of its bases where its own cannot be found."""
    for kind in settings.__mro__:
        with suppress(NameError):
            return get_type_hints(kind)
    return {}


def check_paths(section: str, settings: object, *names: str) -> None:
    """Raise, in one line, unless settings that name a file or folder are text, or None: a number names nothing."""
    for name in names:
        value = getattr(settings, name)
        if not isinstance(value, str | None):
            key = f"{section}.{name}".lstrip(".")
            raise FedrolexError(f"{key} is {reprlib.repr(value)}: give text, the path of a file or folder")


def check_numbers(section: str, settings: object, *, least: Mapping[str, float], positive: Sequence[str] = ()) -> None:
    """Raise, in one line, unless numbers of a section are finite and at least ``least``, or above 0 if ``positive``."""
    for name in (*least, *positive):
        value, low = getattr(settings, name), least.get(name)
        fits = isinstance(value, int | float) and (value > 0 if low is None else value >= low) and value <= LARGEST
        if not fits:
            wanted = "above 0" if low is None else f"of at least {low:g}"
            raise FedrolexError(f"{section}.{name} is {value!r}: give a number {wanted}")
