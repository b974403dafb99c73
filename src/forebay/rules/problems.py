"""The problems of a rule file: each with its place, and all of them in one error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Final

from forebay.errors import InvalidRuleFile, RuleFileProblem
from forebay.rules.places import Place

__all__ = ["Problems", "allowed", "did_you_mean", "near_match"]

SHOWN: Final = 30
"""The most names that a message lists."""
MOST: Final = 1000


class Problems:
    """Collects the problems of one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: list[RuleFileProblem] = []

    @property
    def count(self) -> int:
        return len(self._found)

    def add(self, place: Place, message: str) -> None:
        """Raises ``InvalidRuleFile`` if there are so many that nobody reads them all."""
        problem = RuleFileProblem(place.line, place.column, message)
        if problem not in self._found:
            self._found.append(problem)
        if len(self._found) == MOST:
            self.raise_if_any()

    def raise_if_any(self) -> None:
        """Raises ``InvalidRuleFile`` with all problems so far, in their order in the file."""
        if self._found:
            raise InvalidRuleFile(self._file, tuple(sorted(self._found)))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest match of a word, and what is allowed."""
    names = list(known)
    near = near_match(word, names)
    return f"{near and near.removeprefix(': ') + ' '}allowed: {allowed(names)}"


def near_match(word: object, known: Iterable[object]) -> str:
    """The nearest match as the end of a message, if there is one."""
    near = difflib.get_close_matches(str(word), map(str, known), 1)
    return f": did you mean {near[0]!r}?" if near else ""


def allowed(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return (", ".join(listed[:SHOWN]) or "none") + more
