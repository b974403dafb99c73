"""The ``forebay`` command, for operators: ``pip install "forebay[cli]"``.

A subcommand is a module of this package with a click command `command`, which `commands` lists.
"""

from __future__ import annotations

import io
import os
import signal
import sys

from forebay._native import native

__all__ = ["main"]


def main() -> None:
    """Run the command line. Every command exits with 2 if it can't do its work."""
    # Until a command runs, an interrupt ends the process without a traceback. A shell may have it ignored.
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not native:
        print(
            "the forebay command reads shared memory and runs the compiled core, and this forebay has neither: run it "
            "on Linux",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print('the forebay command needs more packages: pip install "forebay[cli]"', file=sys.stderr)
        sys.exit(2)

    if sys.stdout is None:
        print("standard output is closed", file=sys.stderr)
        sys.exit(2)
    if sys.stdin is None:
        # A question finds the end of the input, as with /dev/null.
        sys.stdin = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        # A name may have characters that the terminal's encoding has not. They are escaped.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    for size in ("COLUMNS", "LINES"):
        # As shutil.get_terminal_size takes it, but not rich: 0 is no size. With a large one ncurses ends the process.
        if not 1 <= len(os.environ.get(size, "").lstrip("0")) <= 4:
            os.environ.pop(size, None)

    from forebay.cli.commands import forebay

    signal.signal(signal.SIGINT, handler)
    forebay(prog_name="forebay")
