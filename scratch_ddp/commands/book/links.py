"""Whether a folder of HTML pages holds together: every link leads somewhere, and nothing is loaded from elsewhere."""

import functools
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif (tag, name) == ("a", "href"):
                self.links.append(value or "")
            elif (tag, name) in LOADS:
                self.loads.append(value or "")


@functools.cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def complaints(site: Path) -> list[str]:
    """A line for every link that leads nowhere, and for everything that a page loads from another place."""
    _read.cache_clear()
    wrong = []
    for path in sorted(site.rglob("*.html")):
        page, name = _read(path), path.relative_to(site)
        wrong += [f"{name}: {link} leads nowhere" for link in page.links + page.loads if not _is_there(link, path)]
        wrong += [f"{name}: loads {link} from elsewhere" for link in page.loads if _is_elsewhere(link)]
    return wrong


def _is_elsewhere(link: str) -> bool:
    parts = urlsplit(link)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _is_there(link: str, page: Path) -> bool:
    """Whether the file is there, and the anchor in it; a link to elsewhere is not followed."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = page.parent / unquote(parts.path) if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    anchor = unquote(parts.fragment)
    return not anchor or target.suffix != ".html" or anchor in _read(target.resolve()).anchors
