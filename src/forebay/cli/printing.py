"""Printing: text that others have made, from segments and logs, and the progress of long commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from forebay.extras import MissingExtra, Needs

with Needs("cli", __name__):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Table

from forebay.errors import ForebayError, InvalidRuleFile, printable

__all__ = [
    "VERSION",
    "consoles",
    "counted",
    "plain_table",
    "print_error",
    "print_json",
    "printable",
    "progress_on",
    "refusals",
]

VERSION: Final = 1
UNBOUNDED: Final = 10_000


class _Plain(Console):
    """Prints text as it is: no markup, no emoji, no colours."""

    def __init__(self, **more: Any) -> None:
        stream = sys.stderr if more.get("stderr") else sys.stdout
        # By itself a console also takes variables such as FORCE_COLOR for a terminal.
        is_terminal = stream is not None and stream.isatty()
        super().__init__(markup=False, emoji=False, highlight=False, force_terminal=is_terminal, **more)

    def on_broken_pipe(self) -> None:
        """Let the command end as it does where it prints JSON. By itself a console exits with 1."""
        raise BrokenPipeError


def consoles() -> tuple[Console, Console]:
    """Standard output, and standard error."""
    output = _Plain()
    if not output.is_terminal:
        # A program reads it, so no column is cut. COLUMNS, which a shell may export, is about a terminal.
        output.width = UNBOUNDED
    return output, _Plain(stderr=True, soft_wrap=True)


def plain_table(first: str, *headings: str) -> Table:
    """A table without lines, whose first column is text and whose others are numbers or short words."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def print_json(**document: Any) -> None:
    """Print a document of this version of the format."""
    print(json.dumps({"version": VERSION, **document}, indent=1))


@contextmanager
def refusals() -> Iterator[None]:
    """Exit with 2 and print the reason if a command can't do its work."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        raise  # the group of all commands ends quietly
    except (ForebayError, ImportError, OSError, ValueError) as error:
        # An OSError, too: a directory that can't be read, or an output that takes nothing.
        print_error(error)
        sys.exit(2)


def print_error(error: Exception) -> None:
    """Print an error to standard error, of a rule file a line for each problem."""
    if isinstance(error, MissingExtra):
        # Not with the module that found it out.
        error = ImportError(f"this command needs the package {error.name}: {error.remedy}")
    for line in str(error).split("\n") if isinstance(error, InvalidRuleFile) else [str(error)]:
        consoles()[1].print(printable(line))


def counted(number: int, what: str, plural: str = "") -> str:
    """The number of things of a kind, for a sentence."""
    return f"{number:,} {what if number == 1 else plural or f'{what}s'}"


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
