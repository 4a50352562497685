"""Check the rendered site: links and their anchors, alternative texts of pictures, headings, and the list of pages.

No page may load a script, style or picture from another server.

python tools/site_check.py build/site        (part of `make docs`; ends with 1 and a line for each fault)

Addresses of other servers are not looked up.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MIN_WORDS = 4  # of an alternative text that says what a picture shows
NO_PAGES = ("404.html",)


class Page(HTMLParser):
    """What a page links to, the ids that it has, its pictures, and its headings of the first level."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.pictures: list[tuple[str, str]] = []  # address, alternative text
        self.foreign: list[str] = []  # what is loaded from other servers
        self.headings = 0
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one element."""
        told = {name: value or "" for name, value in attrs}
        self.links += [told[name] for name in ("href", "src") if name in told]
        loaded = told.get("src", "") or (told.get("href", "") if told.get("rel") == "stylesheet" else "")
        self.foreign += [loaded] if urlsplit(loaded).netloc else []
        self.ids += [told["id"]] if "id" in told else []
        self.pictures += [(told.get("src", ""), told.get("alt", ""))] if tag == "img" else []
        self.headings += tag == "h1"


def main() -> None:
    """Print all faults, or how much was checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="folder of the rendered site")
    site = parser.parse_args().site.resolve()
    pages = {file: Page(file) for file in sorted(site.rglob("*.html")) if file.name not in NO_PAGES}
    if faults := [*site_faults(site, pages)]:
        sys.exit(
            "\n".join([*faults, f"{len(faults)} faults in the site {site}: mend the page in docs/ that each names."])
        )
    links, pictures = (sum(len(getattr(page, name)) for page in pages.values()) for name in ("links", "pictures"))
    print(f"{len(pages)} pages, {links:,} links and {pictures} pictures checked: no faults")


def site_faults(site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield a sentence for each fault of a site."""
    if site / "index.html" not in pages:
        yield f"{site} has no index.html; build the site first."
        return
    start = site / "index.html"
    listed = {start, *(target(site, start, link)[0] for link in pages[start].links)}
    for file, page in pages.items():
        name = file.relative_to(site)
        if file not in listed:
            yield f"{name}: not in the list of pages (nav in zensical.toml)."
        if page.headings != 1:
            yield f"{name}: {page.headings} headings of the first level, expected one."
        for twice in sorted({each for each in page.ids if page.ids.count(each) > 1}):
            yield f"{name}: the anchor {twice} stands twice."
        for address, said in page.pictures:
            if len(said.split()) < MIN_WORDS:
                yield f"{name}: the alternative text of {address} is {said!r}; say what the picture shows."
        yield from (f"{name}: {address} is loaded from another server." for address in page.foreign)
        for link in page.links:
            if not urlsplit(link).scheme and not urlsplit(link).netloc and (fault := dead(site, file, link, pages)):
                yield f"{name}: {link} {fault}."


def dead(site: Path, file: Path, link: str, pages: dict[Path, Page]) -> str:
    """Return what is wrong with a link within the site; empty: nothing."""
    place, anchor = target(site, file, link)
    if not place.is_file():
        return "leads to no file"
    if anchor and place in pages and anchor not in pages[place].ids:
        return "leads to no heading of that page"
    return ""


def target(site: Path, file: Path, link: str) -> tuple[Path, str]:
    """Return the file and the anchor that a link of a page leads to."""
    parts = urlsplit(link)
    path = unquote(parts.path)
    place = file if not path else (site / path.lstrip("/") if path.startswith("/") else file.parent / path).resolve()
    return (place / "index.html" if place.is_dir() else place), unquote(parts.fragment)


if __name__ == "__main__":
    main()
