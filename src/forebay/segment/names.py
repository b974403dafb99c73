"""The names of the files that stand beside a segment's own one, and that are removed with it."""

from __future__ import annotations

import glob
import os
import re
from typing import Final

from forebay.errors import SegmentError

__all__ = ["RULES_SECRET", "check_name", "is_of_rules", "rules_files", "rules_prefix", "successor_of"]

LONGEST_NAME: Final = 200
"""Bytes. Those of the file systems have up to 255."""
RULES_SECRET: Final = b"live rules' files"
"""The purpose of the segment's secret that is the identity of its live rules' files."""
_RULES: Final = ".rules-"
"""In the names of the files of a segment's live rules, behind that of its own file. Their identity follows."""
_OF_RULES: Final = re.compile(rf"{re.escape(_RULES)}[0-9a-f]{{8}}\.(?:[0-9]+|loader(?:\.new)?)\Z")
_OF_SUCCESSOR: Final = re.compile(r"\..+\.new", re.DOTALL)


def is_of_rules(name: str) -> bool:
    """Whether a file of this name has live rules, or a note of their loader."""
    return _OF_RULES.search(name) is not None


def rules_prefix(path: str, secret: bytes) -> str:
    """How the paths of a segment's files of live rules begin. A version's number follows."""
    return f"{path}{_RULES}{secret.hex()[:8]}."


def rules_files(path: str) -> list[str]:
    """The files of live rules of the segments that are, or were, at the path.

    No other file whose name begins like theirs: a store may be named ``shop.rules-2``.
    """
    files = glob.iglob(f"{glob.escape(path)}{_RULES}*")
    return [file for file in files if _OF_RULES.match(file.removeprefix(path))]


def successor_of(path: str) -> str:
    """The path at which a segment stands for a moment that is to replace the one at `path`."""
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.new")


def check_name(path: str) -> None:
    """Raises ``SegmentError`` if a new segment of that path would be removed with another one, or if the names of files
    beside it would be too long.
    """
    name = os.path.basename(path)
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise SegmentError(
            path,
            f"a name of {len(os.fsencode(name))} bytes",
            f"one of up to {LONGEST_NAME}",
            "choose a shorter one: files beside a store have longer names",
        )
    if is_of_rules(name) or _OF_SUCCESSOR.fullmatch(name):
        raise SegmentError(
            path,
            "a name that forebay gives to files beside a store, and removes with that store",
            "another name",
            "choose one that neither ends as in .rules-0123abcd.1 nor is such as .shop.new",
        )
