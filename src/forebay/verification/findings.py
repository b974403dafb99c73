"""Findings, and how they are confirmed: a problem seen once may be a change in progress, so only lasting ones count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from forebay.segment.reading import LOOKS, PAUSE_S

__all__ = ["Finding", "Findings", "damage", "note"]

MOST_FINDINGS: Final = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """One deviation: damage, or a note about something that is sound."""

    severity: Literal["damage", "note"]
    """Whether the segment is damaged."""
    where: str
    """The part of the segment, in words."""
    found: str
    """The value that the segment holds, in words."""
    expected: str
    """The values that would be sound, in words."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: found {self.found}, expected {self.expected}"


def damage(where: str, found: str, expected: str) -> Finding:
    return Finding("damage", where, found, expected)


def note(where: str, found: str, expected: str) -> Finding:
    return Finding("note", where, found, expected)


class Findings:
    """The findings of one segment, up to a maximum that a person can read."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self.unshown = 0

    def lasting(self, look: Callable[[], list[Finding]]) -> None:
        """Add the findings that every repetition of `look` returns."""
        found = look()
        for _ in range(LOOKS):
            if not found:
                return
            time.sleep(PAUSE_S)
            again = look()
            found = [finding for finding in found if finding in again]
        self.add(found)

    def add(self, findings: list[Finding]) -> None:
        room = MOST_FINDINGS - len(self._findings)
        self._findings += findings[:room]
        self.unshown += len(findings[room:])

    def note(self, where: str, found: str, expected: str) -> None:
        self._findings.append(note(where, found, expected))

    def all(self) -> tuple[Finding, ...]:
        if not self.unshown:
            return tuple(self._findings)
        return (*self._findings, damage("the rest", f"{self.unshown} more that look like damage", "none"))
