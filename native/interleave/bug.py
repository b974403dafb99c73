"""A bug that is planted in the explorer's build: see planted_bugs.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    name: str
    file: str
    text: str
    planted: str  # what takes its place; {here} is whether the bug is switched on
