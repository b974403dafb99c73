"""The ``forebay`` command, for operators: ``pip install "forebay[cli]"``.

A subcommand is a module of this package with a click command `command`, which `commands` lists.
"""

from __future__ import annotations

import sys

from forebay._native import native

__all__ = ["main"]


def main() -> None:
    """Run the command line. Every command exits with 2 if it can't do its work."""
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

    from forebay.cli.commands import forebay

    forebay(prog_name="forebay")
