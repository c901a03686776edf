"""Dataclasses from plain data, checked against their annotations, and back; every mistake is one line."""

import difflib
import re
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, asdict, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import yaml

from fedrolex.core import FedrolexError, in_one_line, one_of
from fedrolex.core.registry import Registry
from fedrolex.slicing import one_line

REGISTRY = "registry"
"""In the metadata of a dataclass's field: the registry that knows which classes the field's value may have."""

Unknown = Callable[[str, list[str]], str]
"""Says what is wrong with a key, given the key and those that are known."""


MERGE, INT, FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("merge", "int", "float"))


class _Loader(yaml.SafeLoader):
    """Plain data, without what YAML 1.1 does silently: the last of two equal keys, 1:30 as 90, 010 as 8."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Keys and values, every key once."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
                name = self.construct_object(key)
                if name in seen:
                    raise FedrolexError(
                        f"has the key {name!r} twice, again in line {key.start_mark.line + 1}: keep one"
                    )
                seen.add(name)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge ``<<``; of a key that comes in several times, the last: merges of merges would multiply."""
        super().flatten_mapping(node)
        names = ((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key) for key, _ in node.value)
        node.value = list(dict(zip(names, node.value, strict=True)).values())

    def as_people_read(self, node: yaml.ScalarNode) -> Any:
        """A number; text where YAML 1.1 would count in sixties or in eights."""
        text = str(self.construct_scalar(node))
        if ":" in text or re.fullmatch("[-+]?0[0-9_]+", text):
            return text
        return self.construct_yaml_int(node) if node.tag == INT else self.construct_yaml_float(node)


_Loader.add_constructor(INT, _Loader.as_people_read)
_Loader.add_constructor(FLOAT, _Loader.as_people_read)


def read_yaml(text: str, what: str) -> Any:
    """YAML as plain data; a key that is there twice is refused."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except FedrolexError as error:
        raise FedrolexError(f"{what} {error}") from None
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise FedrolexError(f"{what} is not YAML{line}: {error.problem or one_line(error)}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FedrolexError(f"{what} is not YAML: {one_line(error)}") from error


def to_plain(value: Any) -> Any:
    """A dataclass as plain data: every field, and the name of what a registry knows."""
    if not is_dataclass(value) or isinstance(value, type):
        return _listed(value)
    found = {}
    for each in fields(value):
        inner = getattr(value, each.name)
        known: Registry | None = each.metadata.get(REGISTRY)
        named = {} if known is None else {"name": known.name_of(type(inner))}
        found[each.name] = {**named, **_listed(asdict(inner))} if known is not None else to_plain(inner)
    return found


def _listed(value: Any) -> Any:
    """The same with lists for tuples and numbers for numpy's; what a file cannot hold is refused."""
    if isinstance(value, Mapping):
        return {key: _listed(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(inner) for inner in value]
    value = value.item() if isinstance(value, np.generic) else value
    if value is not None and not isinstance(value, str | int | float):
        what = reprlib.repr(value)
        raise FedrolexError(f"a recipe cannot hold {what}, a {type(value).__name__}: use numbers, text, lists of them")
    return value


def from_plain(cls: Any, data: Any, path: str = "", base: Any = None, unknown: Unknown | None = None) -> Any:
    """A dataclass from plain data, values by field; a bare word stands for its ``name``.

    Args:
        path: of the section, for messages.
        base: an instance whose values count where ``data`` has none; those of the class by default.
        unknown: says what is wrong with a key that the class does not have.
    """
    own = {each.name: each for each in fields(cls) if each.init}
    if isinstance(data, str) and "name" in own:
        data = {"name": data}
    if not isinstance(data, Mapping):
        raise FedrolexError(f"recipe {path or 'file'} is {reprlib.repr(data)}: expected keys and values")
    hints = _hints(cls)
    values = {}
    for key, value in data.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in own:
            hint = (unknown or _did_you_mean)(str(key), list(own))
            raise FedrolexError(f"recipe has an unknown key {where!r}: {hint}")
        values[key] = _value(own[key], hints[key], value, where)
    with in_one_line(f"recipe {path}"):
        return cls(**values) if base is None else replace(base, **values)


@lru_cache(maxsize=256)
def _hints(cls: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        raise FedrolexError(f"{cls.__name__} has an annotation that cannot be read: {error}") from error


def _did_you_mean(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1) or [name for name in known if name.startswith(key)]
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _value(field: Field[Any], hint: Any, value: Any, where: str) -> Any:
    """The value of one field."""
    if REGISTRY in field.metadata:
        return registered(field.metadata[REGISTRY], value, where, _default(field))
    options = _options(hint)
    section = next((option for option in options if is_dataclass(option)), None)
    if section is not None:
        return from_plain(section, value, where, _default(field))
    if typing.get_origin(options[0]) is typing.Literal and isinstance(value, str):
        one_of(where, value, typing.get_args(options[0]))
    found = _convert(hint, value)
    if found is not _NO:
        return found
    wanted = " or ".join(_in_words(option) for option in options)
    raise FedrolexError(f"recipe key {where} is {reprlib.repr(value)} ({type(value).__name__}): expected {wanted}")


def registered(registry: Registry, data: Any, where: str, default: Any = None) -> Any:
    """An instance of a class that a registry knows: of the class that ``name`` says, by default the default's."""
    data = {"name": data} if isinstance(data, str) else data
    if not isinstance(data, Mapping):
        raise FedrolexError(f"recipe {where} is {reprlib.repr(data)}: expected a name, or keys and values")
    name = data.get("name")
    name = registry.name_of(type(default)) if name is None else name
    if not isinstance(name, str):
        raise FedrolexError(f"recipe key {where}.name is {reprlib.repr(name)}: expected a word")
    cls = registry.find(name)

    def unknown(key: str, known: list[str]) -> str:
        others = [other for other in registry.names() if key in _fields(registry, other)]
        if not others:
            return _did_you_mean(key, known)
        has = f" ({name} has {', '.join(known)})" if known else ""
        return f"{name} has no {key}; {', '.join(others)} {'has' if len(others) == 1 else 'have'}{has}"

    return from_plain(cls, {key: value for key, value in data.items() if key != "name"}, where, unknown=unknown)


def _fields(registry: Registry, name: str) -> list[str]:
    """The keys of a class that a registry knows; none where it cannot be imported."""
    try:
        return [each.name for each in fields(registry.find(name))]
    except FedrolexError:
        return []


def _default(field: Field[Any]) -> Any:
    """A field's default, where it is a dataclass; else None."""
    made = field.default if field.default_factory is MISSING else field.default_factory()
    return made if is_dataclass(made) and not isinstance(made, type) else None


def _options(hint: Any) -> tuple[Any, ...]:
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if union else (hint,)


def _in_words(hint: Any) -> str:
    if typing.get_origin(hint) is dict:
        return "{key: value, ...}, with a space after the colon"
    words = str(hint) if typing.get_origin(hint) else str(getattr(hint, "__name__", hint))
    return words.replace("collections.abc.Sequence", "list").replace("NoneType", "null")


_NO = object()


def _convert(hint: Any, value: Any) -> Any:
    """``value`` as ``hint``, or _NO; numbers may stand for strings (a capacity of 1), integers for floats."""
    if hint is Any:
        return value
    origin = typing.get_origin(hint)
    if len(options := _options(hint)) > 1:
        exact = sorted(options, key=lambda option: option is not type(value))
        return next((found for option in exact if (found := _convert(option, value)) is not _NO), _NO)
    if origin is typing.Literal:
        return value if value in typing.get_args(hint) else _NO
    if hint is type(None):
        return None if value is None else _NO
    if origin in (list, tuple, Sequence):
        inner = typing.get_args(hint)[0]
        items = [_convert(inner, item) for item in value] if isinstance(value, list) else [_NO]
        return _NO if any(item is _NO for item in items) else items if origin is list else tuple(items)
    if origin in (dict, Mapping):
        key, inner = typing.get_args(hint)
        if not isinstance(value, dict):
            return _NO
        pairs = [(_convert(key, name), _convert(inner, item)) for name, item in value.items()]
        return _NO if any(_NO in (name, item) for name, item in pairs) else dict(pairs)
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
    return value if not isinstance(hint, type) or isinstance(value, hint) else _NO
