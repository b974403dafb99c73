"""The group of all subcommands, from which the page of the command is made, too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli import (
    bans,
    bench,
    completion,
    doctor,
    hot,
    metrics,
    rules,
    serve,
    show,
    snapshots,
    stores,
    top,
    tune,
    verify,
)
from forebay.cli.printing import print_error

__all__ = ["forebay"]


class _Group(click.Group):
    """Ends every command alike where a signal or the reader of its output ends it, and --help and --version, too."""

    def main(self, *arguments: Any, **more: Any) -> Any:
        # Click prints what is wrong with the arguments here.
        with _alike():
            return super().main(*arguments, **more)

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        with _alike():
            return super().make_context(*arguments, **more)

    def invoke(self, context: click.Context) -> Any:
        with _alike():
            return super().invoke(context)


@contextmanager
def _alike() -> Iterator[None]:
    # Click exits with 1, which says that a command has found something.
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            # Standard error may be what takes nothing.
            with suppress(OSError):
                print_error(error)
        # The reader has not got all. Nothing is left to be written when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(nowhere, stream.fileno())
        sys.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay")
def forebay() -> None:
    """See and change the rate limits of this host from outside the processes that use them; compare and measure limits.

    Every command exits with 0 if all is well, with 1 if it has found something, and with 2 if it can't do its work.
    """


for command in (
    bans.ban_command,
    bans.unban_command,
    bench.command,
    completion.command,
    doctor.command,
    hot.command,
    metrics.command,
    rules.command,
    serve.command,
    show.reset_command,
    show.show_command,
    snapshots.resize_command,
    snapshots.restore_command,
    snapshots.snapshot_command,
    stores.ls_command,
    stores.rm_command,
    stores.stat_command,
    top.command,
    tune.command,
    verify.command,
):
    forebay.add_command(command)
