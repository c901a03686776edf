"""What the site has beside docs/: README.md as its first page, and the files of the repository that pages link to.

Pages link as they do on the code's host: README.md to ``docs/page.md``, docs/page.md to ``../results/file.json``. The
site has docs/ at its top, so such links are turned, and what they lead to is copied. A folder becomes a page that
lists its files. A link to nothing is an error.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"#:]+)(#[^)\s\"]*)?(?=[)\"])")
FENCE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's top, and everything that pages link to outside of docs/."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {name: (ROOT / name).read_text() for name in PAGES}
    linked = {found for page, text in texts.items() for found in _targets(page, text) if not found.startswith("docs/")}
    for path in sorted(linked - set(PAGES)):
        if (ROOT / path).is_dir():
            files.append(File.generated(config, f"files/{path}/index.md", content=_listing(path)))
            linked = linked | {str(each.relative_to(ROOT)) for each in _inside(path)}
    for path in sorted(linked - set(PAGES)):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"files/{path}{_text(path)}", abs_src_path=str(ROOT / path)))
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_turned(name, texts[name])))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page of docs/ with its links turned."""
    return markdown if page.file.generated_by else _turned(f"docs/{page.file.src_uri}", markdown)


def _targets(page: str, text: str) -> set[str]:
    """What a page links to, by its place in the repository."""
    return {_place(page, found.group(2)) for part in FENCE.split(text)[::2] for found in LINK.finditer(part)}


def _place(page: str, link: str) -> str:
    place = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if not (ROOT / place).exists() or place.startswith(".."):
        raise PluginError(f"{page} links to {link}, which is not there")
    return place


def _turned(page: str, text: str) -> str:
    """A page's text with links as they are on the site."""
    here = posixpath.dirname(_on_site(page))

    def turn(found: re.Match[str]) -> str:
        target = posixpath.relpath(_on_site(_place(page, found.group(2))), here or ".")
        return f"{found.group(1)}{target}{found.group(3) or ''}"

    parts = FENCE.split(text)
    return "".join(part if place % 2 else LINK.sub(turn, part) for place, part in enumerate(parts))


def _on_site(path: str) -> str:
    """Where a file of the repository lies on the site, as pages name it."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}/index.md" if (ROOT / path).is_dir() else f"files/{path}{_text(path)}"


def _text(path: str) -> str:
    """Code is shown as text, whatever a browser makes of its name."""
    return "" if path.endswith((".json", ".png", ".svg")) else ".txt"


def _inside(path: str) -> list[Path]:
    found = sorted(each for each in (ROOT / path).rglob("*") if each.is_file())
    return [each for each in found if "__pycache__" not in each.parts]


def _listing(path: str) -> str:
    names = [each.relative_to(ROOT / path).as_posix() for each in _inside(path)]
    lines = "\n".join(f"- [{name}]({name}{_text(name)})" for name in names)
    return f"# {path}\n\n{lines}\n"
