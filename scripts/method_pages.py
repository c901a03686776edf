"""Write the settings and needs of every method into its page, docs/methods/NAME.md: `python scripts/method_pages.py`.

They stand between two marks; everything else on a page is written by hand. tests/test_site.py compares.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from fedrolex.cli.listing import COLUMNS
from fedrolex.core import METHODS

PAGES = Path(__file__).parent.parent / "docs" / "methods"
MARKED = re.compile(r"(<!-- settings, by scripts/method_pages.py -->\n).*?(<!-- end of settings -->)", re.DOTALL)


def told(kind: type) -> dict[str, str]:
    """What docstrings say of a class's settings, by setting."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, attributes = (inspect.cleandoc(vars(each).get("__doc__") or "")).partition("Attributes:\n")
        for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), re.sub(r"\s+", " ", text))
    return found


def plain(text: str) -> str:
    """A docstring's text as Markdown in a table."""
    text = re.sub(r"; see :class:`[^`]*`|:\w+:`~?(?:[\w.]*\.)?(\w+)`", lambda m: f"`{m[1]}`" if m[1] else "", text)
    return text.replace("``", "`").replace("|", "\\|")


def default(field: Field[Any]) -> str:
    """A setting's default as a recipe has it."""
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    value = list(value) if isinstance(value, tuple) else value
    written = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return written.removesuffix("\n").removesuffix("\n...")


def section(name: str) -> str:
    """The settings and needs of a method, as Markdown."""
    kind = METHODS.find(name)
    own, said = list(fields(kind)), told(kind)
    rows = [f"| `{each.name}` | `{default(each)}` | {plain(said[each.name])} |" for each in own]
    table = ["| setting | default | is |", "|---|---|---|", *rows] if rows else ["It has no settings."]
    holds = [f"| {what} | {'yes' if has(kind.needs) else 'no'} |" for what, has in COLUMNS.items()]
    return "\n".join([*table, "", "| in the paper's Table 1 | |", "|---|---|", *holds]) + "\n"


def written(name: str, text: str) -> str:
    """A page with the settings and needs of its method."""
    found, count = MARKED.subn(lambda marks: marks[1] + "\n" + section(name) + "\n" + marks[2], text)
    assert count == 1, f"{name}.md has {count} places for settings, not one"
    return found


def main() -> None:
    """Renew all pages."""
    for name in METHODS.own():
        page = PAGES / f"{name}.md"
        page.write_text(written(name, page.read_text()))


if __name__ == "__main__":
    main()
