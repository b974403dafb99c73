"""The ``forebay`` command, for operators: ``pip install "forebay[cli]"``.

A subcommand is a module of this package with a click command `command`.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Every command exits with 2 if it can't do its work."""
    try:
        import click
        import rich  # noqa: F401
    except ImportError:
        print('the forebay command needs more packages: pip install "forebay[cli]"', file=sys.stderr)
        sys.exit(2)

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    @click.version_option(package_name="forebay")
    def forebay() -> None:
        """Inspect the rate limits of this host from outside the processes that use them, and compare limits."""

    from forebay.cli import tune, verify

    forebay.add_command(tune.command, "tune")
    forebay.add_command(verify.command, "verify")
    forebay(prog_name="forebay")
