"""The group of all subcommands, from which the page of the command is made, too."""

from __future__ import annotations

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli import bans, bench, completion, doctor, rules, show, stores, tune, verify

__all__ = ["forebay"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
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
    rules.command,
    show.reset_command,
    show.show_command,
    stores.ls_command,
    stores.rm_command,
    stores.stat_command,
    tune.command,
    verify.command,
):
    forebay.add_command(command)
