"""Joins the Lua files to scripts: the shared functions, the algorithms that a call needs, and a main part.

``decide.lua``, ``take_up_to.lua``, ``add.lua``, ``convert.lua``, ``concurrency_once.lua``, ``concurrency_leases.lua``,
``lease_bucket.lua``, ``lease_window.lua``, ``sync_bucket.lua``, ``sync_window.lua``, ``sync_hot.lua`` and
``sync_news.lua`` are main parts. ``clock.lua`` and ``common.lua`` are in each script.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "script"]


class Script(NamedTuple):
    text: str
    sha: str
    """The text's SHA-1 digest, by which EVALSHA names a script."""


@cache
def script(main: str, *algorithms: str) -> Script:
    text = "\n".join(source(name) for name in ("clock", "common", *algorithms, main))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def source(name: str) -> str:
    return files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
