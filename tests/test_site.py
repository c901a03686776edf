"""The documentation: the site builds without a warning, every link leads somewhere, pages of methods are up to date."""

from __future__ import annotations

import importlib.util
import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from doc_blocks import ROOT

from fedrolex.core import METHODS

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
FENCE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")


def module(name: str) -> ModuleType:
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


# --- on the code's host ---


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as the code's host makes them."""
    found: set[str] = set()
    for heading in re.findall(
        r"^#+ (.+)$", FENCE.sub(lambda m: m[0] if m[0][:3] != "```" else "", page.read_text()), re.M
    ):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(next(each for each in (name, *(f"{name}-{n}" for n in range(1, 99))) if each not in found))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for found in LINK.finditer(FENCE.sub("", page.read_text())):
        link = urlsplit(found[1] or found[2])
        if link.scheme:
            assert link.scheme == "https", f"{page.name}: {found[0]}"
            continue
        target = (page.parent / link.path).resolve() if link.path else page
        assert target.is_relative_to(ROOT), f"{page.name}: {found[0]} leads out of the repository"
        assert target.exists(), f"{page.name}: {found[0]} leads nowhere"
        if link.fragment:
            assert link.fragment in anchors(target), f"{page.name}: {found[0]}: there is no such heading"


# --- on the site ---


class Page(HTMLParser):
    """What a page of the site links to and loads, and what can be linked to on it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids.add(given.get("id") or "")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        for key in ("src", "href") if tag in ("img", "script", "link", "iframe") else ():
            if given.get(key):
                self.loaded.append(given[key] or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `scripts/docs` does; a warning of the builder is an error."""
    pytest.importorskip("mkdocs", reason="the site needs fedrolex[docs]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        from mkdocs.commands.build import build
        from mkdocs.config import load_config

        out = tmp_path_factory.mktemp("site")
        said: list[str] = []
        watch = logging.Handler(logging.WARNING)
        watch.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("mkdocs").addHandler(watch)
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out)))
        logging.getLogger("mkdocs").removeHandler(watch)
    assert not said
    return out


def test_the_site_has_every_page_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    names = {str(path.relative_to(site)) for path in pages}
    for written in (ROOT / "docs").rglob("*.md"):
        assert str(written.relative_to(ROOT / "docs").with_suffix(".html")) in names
    assert names >= {"index.html", "CONTRIBUTING.html", "CHANGELOG.html"}
    for path, page in pages.items():
        for each in page.links + page.loaded:
            link = urlsplit(each)
            if link.scheme or link.netloc:
                continue
            target = (path.parent / unquote(link.path)).resolve() if link.path else path
            assert target.is_file(), f"{path.relative_to(site)}: {each}"
            if link.fragment and target in pages:
                assert unquote(link.fragment) in pages[target].ids, f"{path.relative_to(site)}: {each}"


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        for each in Page(path.read_text()).loaded:
            assert not urlsplit(each).netloc, f"{path.relative_to(site)} loads {each}"
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(https?:)?//|@import", styles)


def test_a_link_to_nothing_stops_the_site() -> None:
    pytest.importorskip("mkdocs", reason="the site needs fedrolex[docs]")
    pages = module("site_pages")
    assert pages._turned("docs/tasks.md", "[a](../results/quickstart.json)") == "[a](files/results/quickstart.json)"
    assert pages._turned("README.md", "[a](docs/tasks.md#words)") == "[a](tasks.md#words)"
    assert pages._turned("docs/methods/fedavg.md", "[a](../../README.md)") == "[a](../index.md)"
    assert pages._turned("README.md", "`[a](nothing.md)`") == "`[a](nothing.md)`"
    with pytest.raises(pages.PluginError, match="which is not there"):
        pages._turned("docs/tasks.md", "[a](../results/nothing.json)")


# --- pages of methods ---


@pytest.mark.parametrize("name", METHODS.own())
def test_the_page_of_a_method_has_its_settings(name: str) -> None:
    page = ROOT / "docs" / "methods" / f"{name}.md"
    text = page.read_text()
    assert module("method_pages").written(name, text) == text, "run `python scripts/method_pages.py`"
    for part in ("## What it guarantees", "## What it costs", "## When to use it"):
        assert part in text
    assert f"(methods/{name}.md)" in (ROOT / "docs" / "methods.md").read_text(), "the index names it"
