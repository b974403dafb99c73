"""Printing text that others have made: from segments and logs."""

from __future__ import annotations

import functools

from forebay.extras import Needs

with Needs("cli", __name__):
    from rich.console import Console

__all__ = ["consoles", "printable"]


def consoles() -> tuple[Console, Console]:
    """Standard output, and standard error. They print text as it is: no markup, no emoji, no colours."""
    plain = functools.partial(Console, markup=False, emoji=False, highlight=False)
    return plain(), plain(stderr=True, soft_wrap=True)


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor or change its colours, as ``repr`` does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
