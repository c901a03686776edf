"""The code of README.md and of docs/: its blocks, the commands in them, the files it tells one to save."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("bash", "sh", "shell", "console")


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        page: by its place in the repository.
        text: as it stands there, continued lines joined, a loop's variable put in.
    """

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell takes them, without a comment and without variables that are set for the command."""
        found = shlex.split(self.text, comments=True)
        first = next((place for place, word in enumerate(found) if not re.match(r"\w+=", word)), 0)
        return found[first:]


def blocks(page: Path, *languages: str) -> list[str]:
    """What stands in a page's fenced blocks of these languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands() -> list[Command]:
    """Every command of every page, in order; one that a page has twice counts once."""
    found: dict[Command, None] = {}
    for page in PAGES:
        for block in blocks(page, *SHELLS):
            for text in _unrolled(re.sub(r"\s*\\\n\s*", " ", block).splitlines()):
                if shlex.split(text, comments=True):
                    found[Command(str(page.relative_to(ROOT)), text)] = None
    return list(found)


def _unrolled(lines: list[str]) -> list[str]:
    """Lines without comments, those inside ``for NAME in A B; do`` and ``done`` once for every value."""
    found, name, values = [], "", [""]
    for line in lines:
        text = re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if loop := re.fullmatch(r"for (\w+) in (.*); do", text):
            name, values = loop[1], loop[2].split()
        elif text == "done":
            name, values = "", [""]
        else:
            found += [text.replace(f"${name}", value) if name else text for value in values]
    return found


def saved_files() -> dict[str, str]:
    """What pages tell one to save, by the file's name: the Python block after "save this as `name.py`"."""
    found = {}
    for page in PAGES:
        for name, text in re.findall(
            r"[Ss]ave (?:this )?as `(\w+\.py)`.*?```python\n(.*?)```", page.read_text(), re.DOTALL
        ):
            found[name] = text
    return found
