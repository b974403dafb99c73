"""Printing: text that others have made, from segments and logs, and the progress of long commands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forebay.extras import Needs

with Needs("cli", __name__):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

__all__ = ["consoles", "printable", "progress_on"]


def consoles() -> tuple[Console, Console]:
    """Standard output, and standard error. They print text as it is: no markup, no emoji, no colours."""
    plain = functools.partial(Console, markup=False, emoji=False, highlight=False)
    return plain(), plain(stderr=True, soft_wrap=True)


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor or change its colours, as ``repr`` does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


@contextmanager
def progress_on(console: Console) -> Iterator[Callable[[str], Callable[[int, int | None], None]]]:
    """On a terminal, a bar for each stage: the function begins a stage, and returns what gets the steps done and their
    total.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:

        def begin(what: str) -> Callable[[int, int | None], None]:
            task = bar.add_task(what, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield begin
