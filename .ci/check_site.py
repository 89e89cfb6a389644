"""Every link of the built site, and of README into the docs, leads somewhere: file and anchor."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
SITE = ROOT / "build" / "site"
LEAST = 30  # pages; fewer mean that something was not built


class Page(HTMLParser):
    """What a page may be asked for, and what it asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        """Note what an element is called and where it leads."""
        given = dict(attrs)
        self.ids |= {value for key in ("id", "name") if (value := given.get(key))}
        self.links += [value for key in ("href", "src") if (value := given.get(key))]


def broken(at: Path, link: str, pages: dict[Path, Page]) -> bool:
    """Return whether a link of the file `at` leads nowhere."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (at.parent / unquote(parts.path)).resolve() if parts.path else at
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return True
    return (
        bool(parts.fragment)
        and target in pages
        and unquote(parts.fragment) not in pages[target].ids
    )


def from_readme() -> list[str]:
    """Return the links of README into the docs, as the site writes them."""
    links = re.findall(r"\]\(docs/([^)]+)\)", (ROOT / "README.md").read_text())
    return [
        re.sub(r"(README|index)\.md", "index.html", link).replace(".md", ".html") for link in links
    ]


def main() -> None:
    """Print what is broken; exit 1 if anything is."""
    site = SITE.resolve()
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) >= LEAST, f"only {len(pages)} pages in {site}"
    asked = [(path, link) for path, page in pages.items() for link in page.links]
    asked += [(site / "index.html", link) for link in from_readme()]
    wrong = [f"{at.relative_to(site)}: {link}" for at, link in asked if broken(at, link, pages)]
    print("\n".join(wrong) or f"{len(asked)} links of {len(pages)} pages lead somewhere")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
