"""The group of all subcommands, from which the page of the command is made, too."""

from __future__ import annotations

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli import bench, rules, tune, verify

__all__ = ["forebay"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay")
def forebay() -> None:
    """Inspect the rate limits of this host from outside the processes that use them, compare limits, and measure."""


forebay.add_command(bench.command)
forebay.add_command(rules.command)
forebay.add_command(tune.command)
forebay.add_command(verify.command)
