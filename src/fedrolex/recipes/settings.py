"""Changing a recipe by words: ``KEY=VALUE``, and from one method to another."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from fedrolex.core import METHODS, TASKS, FedrolexError
from fedrolex.methods import Method
from fedrolex.recipes.decode import read_yaml

COMMON = ("rounding", "weighting", "norms", "rows", "server_optimizer", "width", "able_only")
"""Settings that mean the same in every method that has them."""

CHOICES = {"method": METHODS, "task": TASKS}
New = TypeVar("New", bound=Method)


def carried(old: Method, new: type[New], **changes: Any) -> New:
    """A method with another's common settings, where they are not the other's defaults, and with ``changes``."""
    return new(**_common(old, new) | changes)


def _common(old: Method, new: type[Method]) -> dict[str, Any]:
    """The common settings of a method that another has, too, and that are not the method's defaults."""
    own, found = {each.name for each in fields(new)}, {}
    for each in fields(old):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name in COMMON and each.name in own and getattr(old, each.name) != default:
            found[each.name] = getattr(old, each.name)
    return found


def changed(data: dict[str, Any], words: Sequence[str], method: Method) -> dict[str, Any]:
    """A recipe's plain data with ``KEY=VALUE`` words applied.

    ``method=NAME`` starts that method's own section, with the common settings of ``method``; ``task=NAME`` starts
    that task's. Such words count first, wherever they stand.
    """
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise FedrolexError(f"settings is {reprlib.repr(words)}: give a list of KEY=VALUE words")
    pairs = [_pair(word) for word in words]
    for key, value in sorted(pairs, key=lambda pair: pair[0] not in CHOICES):
        *path, last = key.split(".")
        section: Any = data
        for step in path:
            section = section.get(step) if isinstance(section, dict) else None
        if not isinstance(section, dict):
            raise FedrolexError(f"--set {key}: there is no section {'.'.join(path)!r} in a recipe")
        if key == "fleet.capacities" and isinstance(value, str) and "fleet.shares" not in dict(pairs):
            section["shares"] = None  # a mix has its own
        if key in CHOICES and isinstance(value, str):
            section[last] = _started(key, value, section[last], method)
        elif isinstance(section.get(last), dict) and "name" in section[last] and isinstance(value, str):
            section[last]["name"] = value
        else:
            section[last] = value
    return data


def _pair(word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=") if isinstance(word, str) else ("", "", "")
    if not (key and equals):
        raise FedrolexError(f"--set {word!r} is not KEY=VALUE")
    value = read_yaml(text, f"--set {key}")
    section, dot, last = key.partition(".")
    return (section if dot and last == "name" and section in CHOICES else key), value


def _started(key: str, name: str, before: Mapping[str, Any], method: Method) -> dict[str, Any]:
    """The section of a method or task by name: as it was where it was of that name already."""
    if name == before.get("name"):
        return dict(before)
    found = CHOICES[key].find(name)
    common = _common(method, found) if key == "method" else {}
    return {"name": name, **{each: before[each] for each in common if each in before}}
