"""Recipes of format 1, as version 0.1.0 wrote them, turned into format 2.

In format 1, the section ``method`` held the settings of all methods, those of five methods in sections of their own.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedrolex.core import METHODS, FedrolexError

COMMON = {
    "rounding": "floor", "width": None, "able_only": False, "weighting": None, "norms": "shared", "rows": False,
    "server_optimizer": {"name": "none"},
}  # fmt: skip
"""Settings of several methods, with their defaults."""

OWN = {
    "fedrolex": ("overlap", "spread"),
    "fedselect": ("keys", "overlap"),
    "fed_dropout": ("scope",),
    "fedprox": ("mu",),
    "scaffold": ("option", "denominator"),
    "fjord": ("widths", "distil", "alpha", "temperature"),
}
"""Settings of one or two methods."""

SECTIONS = {
    "fedbe": "ensemble", "fedgkt": "knowledge", "fedet": "transfer", "dsfl": "labels", "feddf": "distillation",
}  # fmt: skip
"""Sections inside ``method`` with the settings of one method."""

IGNORED = ("rounding", "width", "able_only")  # 0.1.0 did not mind them where a method has no use for them
ENGINES = {"stack": "crew"}


def upgraded(old: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe of format 1 as one of format 2; what is wrong with it is found when it is read."""
    new = {key: value for key, value in old.items() if key != "compiled"} | {"format": 2}
    engine = old.get("engine", "loop")
    new["engine"] = ENGINES.get(engine, engine) if isinstance(engine, str) else engine
    if isinstance(old.get("fleet"), Mapping):
        new["fleet"] = _renamed(old["fleet"], "server", "server_scale")
    if isinstance(old.get("method"), Mapping):
        new["method"] = _method(_renamed(old["method"], "server", "server_optimizer"))
    return new


def _renamed(section: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    if new in section:
        raise FedrolexError(f"recipe of format 1 has an unknown key {new!r}: it was {old!r} then; or say format: 2")
    return {new if key == old else key: value for key, value in section.items()}


def _method(bag: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the named method alone."""
    name = bag.get("name", "fedrolex")
    if not isinstance(name, str):
        return dict(bag)
    foreign = {*(key for keys in OWN.values() for key in keys), *SECTIONS.values()} - {*OWN.get(name, ())}
    known = {each.name for each in fields(METHODS.find(name))}
    found: dict[str, Any] = {"name": name}
    for key, value in bag.items():
        dropped = key in foreign or (key in COMMON and key not in known and (key in IGNORED or _default(key, value)))
        if not dropped and not (key in ("weighting", "denominator") and value is None):  # null was the method's own
            unnamed = key == "server_optimizer" and _default(key, value)  # its settings counted for nothing
            found[key] = COMMON[key] if unnamed else value
    own = bag.get(SECTIONS.get(name, ""), None) or {}
    if not isinstance(own, Mapping):
        raise FedrolexError(f"recipe method.{SECTIONS[name]} is {own!r}: expected keys and values")
    return found | dict(own)


def _default(key: str, value: Any) -> bool:
    """Whether a common setting says nothing."""
    if isinstance(value, Mapping):
        return bool(value.get("name", "none") == "none")
    return bool(value == COMMON[key])
