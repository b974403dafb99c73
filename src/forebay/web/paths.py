"""The readings of a path: every path that some router may route it as. docs/web.md names the routers and what they do.

One router merges slashes, another decodes twice, a third removes a prefix. The rules are outside the router and don't
know which one it is: so a path has several readings, and a rule matches a request if its pattern matches one of them.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["LONGEST_READ", "odd_readings", "with_slash"]

LONGEST_READ: Final = 1024
"""Characters of a path. It bounds the cost of a request, which docs/web.md states."""

_SLASHES: Final = re.compile("//+")
_PARAMETERS: Final = re.compile(";[^/]*")
_ANYWHERE: Final = re.compile(r"/\.\.?(?:[;/]|$)|\n(?:[;/]|\Z)")
"""A segment of dots, or one that ends with a line feed.

A router may resolve dots anywhere beneath a mount or a route, which it doesn't leave, and another takes them for a
placeholder's value: beneath ``/v1``, ``/v1/../login`` is ``/v1/login``. The ``$`` of a regular expression also matches
before a last line feed: Starlette's at the end of a path, whose mount then leaves its own name in the path, and
Falcon's at the end of a segment.
"""


def odd_readings(path: str) -> tuple[str, ...]:
    """The readings of a path that isn't plain, each once.

    None if it has a segment of dots or one that ends with a line feed, or is too long: it may then be any path.
    Browsers and most HTTP libraries resolve dots before they send a request.

    Each takes time linear in the length of the path.
    """
    if len(path) > LONGEST_READ:
        return ()
    texts = [path]
    if "\ufffd" in path:
        # Bytes that aren't UTF-8: some routers omit them.
        texts.append(path.replace("\ufffd", ""))
    known = [start for text in texts for start in with_slash(text)]
    if "%" in path:
        # Decoded before or after a slash is put in front.
        decoded = [start for text in texts for start in with_slash(unquote(text))]
        known = [*known, *map(unquote, known), *decoded]
    if any(map(_ANYWHERE.search, known)):
        return ()
    found: dict[str, None] = {}
    for reading in dict.fromkeys(known):
        found |= dict.fromkeys(
            (
                reading,
                "/" + reading.lstrip("/"),
                _SLASHES.sub("/", reading),
                _traversed(reading),
                _traversed(_PARAMETERS.sub("", reading)),
            )
        )
    return tuple(found)


def with_slash(path: str) -> list[str]:
    """The readings by routers of a path that begins without a slash, such as ``x/login``.

    Most put a slash in front. werkzeug's ``DispatcherMiddleware`` passes on what comes after the first segment. Quart
    reads the path of a whole URL, which some servers report as the path.
    """
    if path.startswith("/"):
        return [path]
    return ["/" + path, "/" + path.partition("/")[2], _path_of_url(path)]


def _path_of_url(text: str) -> str:
    try:
        return "/" + urlsplit(text).path
    except ValueError:
        return "/"


def _traversed(path: str) -> str:
    """As Pyramid's traversal reads it: without empty segments, and without ``@@`` before a view's name."""
    return "/" + "/".join([segment.removeprefix("@@") for segment in path.split("/") if segment])
