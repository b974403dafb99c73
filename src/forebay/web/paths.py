"""What a router may take a path for. docs/web.md names the routers and what they do.

One router merges slashes, another resolves dots, a third takes a prefix off. The rules stand outside and don't know
which one is inside: so a path has several readings, and a rule is for a request if its pattern matches one of them.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["odd_readings", "path_of_url"]

LONGEST_READ: Final = 2048
"""Characters of a path. It bounds what a request can cost: to read so many takes milliseconds."""

_SLASHES: Final = re.compile("//+")
_PARAMETERS: Final = re.compile(";[^/]*")


def odd_readings(path: str) -> tuple[str, ...]:
    """The readings of a path that isn't plain, each once; none if it is too long, and may be any path.

    At most 36, each in time linear in the length of the path.
    """
    if len(path) > LONGEST_READ:
        return ()
    known = [path if path.startswith("/") else path_of_url(path)]
    if not path.startswith("/"):
        known.append(f"/{path}")
    if "\ufffd" in path:
        # Bytes that aren't UTF-8: some leave them out.
        known.append(path.replace("\ufffd", ""))
    if "%" in path:
        known += [unquote(reading) for reading in known]
    found: dict[str, None] = {}
    for reading in known:
        found |= dict.fromkeys(
            (
                reading,
                "/" + reading.lstrip("/"),
                _SLASHES.sub("/", reading),
                _without_dots(reading),
                _resolved(reading),
                _resolved(_PARAMETERS.sub("", reading)),
            )
        )
    return tuple(found)


def path_of_url(text: str) -> str:
    """Of a request whose target is a whole URL, which a server may leave in the path's place."""
    try:
        return "/" + urlsplit(text).path
    except ValueError:
        return "/"


def _without_dots(path: str) -> str:
    """As RFC 3986 has it: an empty segment is one."""
    kept: list[str] = []
    for segment in path.split("/")[1:]:
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept)


def _resolved(path: str) -> str:
    """As Pyramid's traversal has it: empty segments are none, and ``@@`` only says that a name is a view's."""
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(segment.removeprefix("@@"))
    return "/" + "/".join(kept)
