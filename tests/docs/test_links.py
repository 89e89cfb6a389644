"""Links of README and docs lead somewhere, in the repository as they do in the built site."""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
ELSEWHERE = r"\w+:|\.\./\.\./actions/"  # of the repository's host, not of the repository
MARKDOWN = MarkdownIt("commonmark").enable("table")


def tokens(path):
    """Return a page's tokens, those inside lines included."""
    for token in MARKDOWN.parse(path.read_text()):
        yield token
        yield from token.children or ()


def links(path):
    """Return where a page's links and pictures lead, but for those to elsewhere."""
    found = [token.attrs.get("href") or token.attrs.get("src") for token in tokens(path)]
    return [unquote(link) for link in found if link and not re.match(ELSEWHERE, link)]


@cache
def anchors(path):
    """Return what headings are called in a link, as the repository's host makes them."""
    found = list(tokens(path))
    texts = [b.content for a, b in pairwise(found) if a.type == "heading_open"]
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).lower() for text in texts]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in plain}


def missing(path):
    """Return the links of a page that lead nowhere."""
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path):
    assert list(missing(path)) == []


def test_a_broken_link_and_a_broken_anchor_are_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A title\n\n[a](#a-title) [b](#b-title) ![c](c.png) [d](page.md#a-title)\n")
    assert list(missing(page)) == ["#b-title", "c.png"]


def test_no_link_of_the_docs_leaves_them():
    outside = [
        f"{page.relative_to(DOCS)}: {link}"
        for page in DOCS.rglob("*.md")
        for link in links(page)
        if not (page.parent / link).resolve().is_relative_to(DOCS)
    ]
    assert outside == []


def in_navigation(entries):
    """Yield the pages of a navigation, sections included."""
    for entry in entries:
        for value in [entry] if isinstance(entry, str) else entry.values():
            yield from [value] if isinstance(value, str) else in_navigation(value)


def test_every_page_stands_in_the_navigation_once():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = sorted(in_navigation(navigation))
    assert named == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
