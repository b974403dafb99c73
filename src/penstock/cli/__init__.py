"""The ``penstock`` command, for operators: ``pip install "penstock[cli]"``.

A subcommand is a module of this package with a click command `command`, named in `COMMANDS`.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

__all__ = ["main"]

COMMANDS: Final = ("verify",)


def main() -> None:
    """Run the command line. Exits with 2 for what can't be done, whichever command it was."""
    try:
        import click
        import rich  # noqa: F401
    except ImportError:
        print('the penstock command needs packages of its own: pip install "penstock[cli]"', file=sys.stderr)
        sys.exit(2)

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(package_name="penstock")
    def penstock() -> None:
        """Look at the rate limits of this host from outside of the processes that use them."""

    for name in COMMANDS:
        penstock.add_command(importlib.import_module(f"penstock.cli.{name}").command, name)
    penstock(prog_name="penstock")
