"""The names of the limiters that live in one process: a warning where one name means several states of a store."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Hashable
from typing import Any, Final, NamedTuple

from forebay.errors import LimiterNameWarning

__all__ = ["LimiterNames"]

_REMEDY: Final = "give each a name of its own, or let go of the old one first; docs/using.md, 'Names and state'"


class _Meaning(NamedTuple):
    """A state that a name of a store stands for."""

    kind: str
    """The class of its limiters."""
    state: Hashable
    """The text that distinguishes it from other states of that name and class."""
    is_common: bool
    """Whether limiters of other classes have it, too."""


class LimiterNames:
    """The live limiters of one store in one process, by their names. It keeps none of them alive.

    Limiters of one class and name may have several states, because some parameters identify a state: they then count
    apart, silently. Limiters of several classes may have one state: a request that both charge is charged twice. Making
    such a limiter warns, once for a name, as long as the other limiter lives. Limiters that share a state as they
    should, such as token buckets of several rates, are no reason for a warning.

    *Threads*: safe; two that make limiters at the same moment may both warn, or neither.
    """

    def __init__(self) -> None:
        self._live: dict[str, dict[_Meaning, weakref.WeakSet[Any]]] = {}
        self._warned: set[str] = set()

    def expect_several(self, name: str) -> None:
        """Never warn of this name: its limiters are made for the limits of another store."""
        self._warned.add(name)

    def note(self, limiter: Any, kind: str, state: Hashable, *, is_common: bool) -> None:
        """A limiter was made. With `is_common`, limiters of other classes may have the same state."""
        name = limiter.name
        if name in self._warned:
            return
        made = _Meaning(kind, state, is_common)
        of_name = self._live.setdefault(name, {})
        complaint = ""
        for meaning, live in of_name.copy().items():
            if len(live):
                complaint = complaint or _complaint(name, meaning, made)
            elif meaning != made:
                of_name.pop(meaning, None)
        of_name.setdefault(made, weakref.WeakSet()).add(limiter)
        if complaint:
            self._warned.add(name)
            _warn(complaint)


def _complaint(name: str, before: _Meaning, made: _Meaning) -> str:
    """The warning of two limiters of one name, or nothing."""
    if before.kind == made.kind and before.state != made.state:
        return (
            f"this process has two limiters {made.kind} {name!r} whose parameters make them count apart: use one, or "
            f"{_REMEDY}"
        )
    if before.kind != made.kind and before.is_common and made.is_common and before.state == made.state:
        return (
            f"this process has a {before.kind} and a {made.kind} that are both named {name!r}: they share one state, "
            f"so each charges what the other counts; {_REMEDY}"
        )
    return ""


def _warn(message: str) -> None:
    """Warn where the program calls into this package."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith("forebay."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, LimiterNameWarning, stacklevel=level)
