"""Check a built site: ``python ci/site/check.py build/site``.

It fails if a link leads to no file or anchor of the site, if a page or a style would load anything from another host,
or if a public name has no entry in the reference, or a private name has one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urldefrag, urlsplit

from public_names import public_names

# Attributes whose address a browser fetches by itself. `link` does so for these relations.
FETCHED: Final = frozenset({"src", "srcset", "data", "poster", "background"})
RELATIONS: Final = frozenset({"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"})
IN_STYLE: Final = re.compile(r"""(?:url\(\s*|@import\s+)["']?([^"')\s]+)""")
# Elements for which Material's script makes requests to other hosts.
FETCHING: Final = ('data-md-component="source"', 'class="mermaid"')


class Html(HTMLParser):
    """A page's anchors, the addresses that it links to, and those that it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        self.loads += [given[name] for name in FETCHED & given.keys()]
        self.loads += IN_STYLE.findall(given.get("style", ""))
        if "href" in given:
            fetches = tag == "link" and not RELATIONS.isdisjoint(given.get("rel", "").split())
            (self.loads if fetches else self.links).append(given["href"])


def is_elsewhere(address: str) -> bool:
    return address.startswith("//") or urlsplit(address).scheme in ("http", "https")


def problems_of(site: Path) -> Iterator[str]:
    texts = {path: path.read_text() for path in sorted(site.rglob("*.html"))}
    pages = {path: Html(text) for path, text in texts.items()}
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name}: loads {address}" for address in page.loads if is_elsewhere(address))
        yield from (f"{name}: Material's script makes requests for {part}" for part in FETCHING if part in texts[path])
        for address in [*page.links, *page.loads]:
            # The page of a missing address is shown at any address, so its own links begin at the site's.
            if urlsplit(address).scheme or is_elsewhere(address) or path.name == "404.html":
                continue
            file, anchor = urldefrag(unquote(address))
            target = (path.parent / file.partition("?")[0]).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{name}: {address} leads to no file"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{name}: {address} leads to no anchor"
    for path in site.rglob("*.css"):
        found = IN_STYLE.findall(path.read_text())
        yield from (f"{path.relative_to(site)}: loads {address}" for address in found if is_elsewhere(address))
    anchors = set().union(*(page.anchors for page in pages.values()))
    public = set(public_names())
    yield from (f"{name} has no entry in the reference" for name in sorted(public - anchors))
    entries = {anchor for anchor in anchors if anchor.startswith("forebay.") and "._" in anchor}
    yield from (f"{name} has an entry in the reference, but is private" for name in sorted(entries - public))


def main() -> int:
    problems = list(problems_of(Path(sys.argv[1]).resolve()))
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
