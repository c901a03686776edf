"""Dataclasses from plain data, checked against their annotations; every mistake is one line."""

from __future__ import annotations

import difflib
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from fedrolex.core.errors import FedrolexError
from fedrolex.slicing.capture import one_line


def read_yaml(text: str, what: str) -> Any:
    """YAML as plain data."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FedrolexError(f"{what} is not YAML: {one_line(error)}") from error


def one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise unless ``value`` is one of the allowed words."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise FedrolexError(f"{key} is {value!r}{hint}: use one of {', '.join(allowed)}")


def from_plain(cls: Any, data: Any, path: str = "") -> Any:
    """A dataclass from plain data; a bare word stands for its ``name``."""
    if isinstance(data, str) and any(f.name == "name" for f in fields(cls)):
        data = {"name": data}
    if not isinstance(data, Mapping):
        raise FedrolexError(f"recipe {path or 'file'} is {reprlib.repr(data)}: expected keys and values")
    hints = typing.get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    values = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise FedrolexError(f"recipe has an unknown key {where!r}: {hint}")
        values[key] = _value(hints[key], value, where)
    return cls(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [option for option in options if is_dataclass(option)]
    if kinds:
        return from_plain(_kind(kinds, value, where), value, where)
    for option in options:
        found = _convert(option, value)
        if found is not _NO:
            return found
    wanted = " or ".join(_in_words(option) for option in options)
    raise FedrolexError(f"recipe key {where} is {reprlib.repr(value)} ({type(value).__name__}): expected {wanted}")


def _kind(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """Which of several dataclasses is meant: the one of that ``name``, the first if none is given."""
    names = {str(kind.name): kind for kind in kinds if len(kinds) > 1}
    name = value.get("name") if isinstance(value, Mapping) else value
    if name is None or not names:
        return kinds[0]
    one_of(f"{where}.name", name, list(names))
    return names[name]


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is dict:
        return "{key: value, ...}, with a space after the colon"
    return (str(hint) if typing.get_origin(hint) else str(hint.__name__)).replace("NoneType", "null")


_NO = object()


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as ``hint``, or _NO; numbers may stand for strings (a capacity of 1), integers for floats."""
    if typing.get_origin(hint) is typing.Literal:
        return value if isinstance(value, str) else _NO  # the dataclass says which words it takes
    if hint is type(None):
        return None if value is None else _NO
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        items = [_convert(inner, item) for item in value] if isinstance(value, list) else [_NO]
        return _NO if any(item is _NO for item in items) else items
    if typing.get_origin(hint) is dict:
        key, inner = typing.get_args(hint)
        if not isinstance(value, dict):
            return _NO
        found = {_convert(key, name): _convert(inner, item) for name, item in value.items()}
        return _NO if _NO in (*found, *found.values()) else found
    if isinstance(value, bool) and hint is not bool:
        return _NO
    if hint is float and isinstance(value, int | str):
        try:
            return float(value)  # YAML reads 1e-3 as text
        except (ValueError, OverflowError):
            return _NO
    if hint is str and isinstance(value, int | float):
        return str(value)
    if isinstance(value, str) and "\0" in value:
        return _NO
    return value if isinstance(value, hint) else _NO
