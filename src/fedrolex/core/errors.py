"""The one exception a user's mistake raises: its text is the whole message."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from typing import Any, Literal, get_args, get_origin, get_type_hints


class FedrolexError(ValueError):
    """Something the user gave cannot be used: one line says what was given, what is allowed, what to do.

    The command line prints the line and exits with status 2; it never shows a traceback for one of these.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


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
    """Raise, in one line, unless every setting whose type is a ``Literal`` is one of its words."""
    for name, kind in _types(type(settings)).items():
        if get_origin(kind) is Literal:
            one_of(f"{section}.{name}".lstrip("."), getattr(settings, name), get_args(kind))


def _types(settings: type) -> dict[str, Any]:
    """Annotations of a class; of one made inside a function, those of its bases where its own cannot be found."""
    for kind in settings.__mro__:
        with suppress(NameError):
            return get_type_hints(kind)
    return {}


def check_numbers(section: str, settings: object, *, least: Mapping[str, float], positive: Sequence[str] = ()) -> None:
    """Raise, in one line, unless numbers of a section are finite and at least ``least``, or above 0 if ``positive``."""
    for name in (*least, *positive):
        value, low = getattr(settings, name), least.get(name)
        fits = isinstance(value, int | float) and (value > 0 if low is None else value >= low) and isfinite(value)
        if not fits:
            wanted = "above 0" if low is None else f"of at least {low:g}"
            raise FedrolexError(f"{section}.{name} is {value!r}: give a number {wanted}")
