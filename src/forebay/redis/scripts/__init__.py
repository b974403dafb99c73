"""The Lua scripts: each is the shared functions, the algorithms that a call needs, and a main part."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple

__all__ = ["Script", "script"]


class Script(NamedTuple):
    text: str
    sha: str
    """Its SHA-1 digest, by which EVALSHA names it."""


@cache
def script(main: str, *algorithms: str) -> Script:
    text = "\n".join(source(name) for name in ("clock", "common", *algorithms, main))
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


def source(name: str) -> str:
    return files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
