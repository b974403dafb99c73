"""Where the words and values of a rule file are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

__all__ = ["Document", "InvalidSyntax", "Path", "Place", "at", "path_text"]

Path: TypeAlias = tuple[str | int, ...]
"""The names of tables and the numbers in lists that lead to a value."""


class Place(NamedTuple):
    """A line and a column of the file, both from 1."""

    line: int
    column: int


class InvalidSyntax(Exception):
    """The file is no TOML or no YAML, or uses a part of it that rule files don't have."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(place, message)
        self.place, self.message = place, message


@dataclass(frozen=True, slots=True)
class Document:
    """The data of a file: dicts with text as keys, lists, text, numbers, booleans and times."""

    data: Any
    words: Mapping[Path, Place] = field(default_factory=dict)
    """The places of words, by the path of the value that each has."""
    values: Mapping[Path, Place] = field(default_factory=dict)

    def word(self, path: Path) -> Place:
        """The place of the word that leads to a value; of an item in a list, the place of the value."""
        return self.words.get(path) or self.value(path)

    def value(self, path: Path) -> Place:
        """The place of a value, or of the nearest one around it."""
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, Place(1, 1))


def at(text: str, offset: int) -> Place:
    """The place of a character of a text."""
    return Place(text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset))


def path_text(path: Path) -> str:
    """As in ``rules[0].limits``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
