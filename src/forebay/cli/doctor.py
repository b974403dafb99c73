"""``forebay doctor``: what may be wrong, and what to do about it."""

from __future__ import annotations

import dataclasses
import os
import sys

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.diagnosis import Finding, of_directory, of_host, of_processes, of_store
from forebay.cli.options import as_json_option, more_option, store_argument
from forebay.cli.printing import consoles, counted, print_json, printable, refusals
from forebay.cli.survey import directories, files_in, look_at, path_of_store
from forebay.errors import SegmentMissing
from forebay.segment.file_users import file_users

__all__ = ["command"]


@click.command("doctor", short_help="Find what is wrong with this host's stores.")
@store_argument(required=False)
@more_option
@as_json_option
def command(name: str | None, more: tuple[str, ...], as_json: bool) -> None:
    """Look for problems of the store NAME, or of all stores that ls lists, and of this host. Prints each remedy.

    Checks space and memory limits, permissions, who is attached, segments of another boot, processes that count alone,
    how full stores are, the clock and time namespaces. Only reads. Does not check a segment's bytes: see verify. A NAME
    with a slash is a file's path. As root it sees the processes of all users.

    Exits with 0 if there is no problem, with 1 if there is one, with 2 if it can't do its work.
    """
    with refusals():
        if name is not None and len(more) > 1:
            raise click.UsageError("a store has one --directory")
        findings = list(of_host())
        users = file_users()
        if name is None:
            places = directories(more)
            paths = [path for place in places for path in files_in(place)]
        else:
            paths = [path_of_store(name, more[0] if more else None)]
            places = [os.path.dirname(paths[0])]
        for place in places:
            findings += of_directory(place)
        for path in paths:
            try:
                findings += of_store(look_at(path, users))
            except SegmentMissing:
                if name is not None:
                    raise
        findings += of_processes(users, paths)
        problems = [one for one in findings if one.severity == "problem"]
        if as_json:
            print_json(findings=[dataclasses.asdict(one) for one in findings], problems=len(problems))
        else:
            _print(findings, len(problems))
        sys.exit(1 if problems else 0)


def _print(findings: list[Finding], problems: int) -> None:
    console, _ = consoles()
    for one in sorted(findings, key=lambda one: one.severity == "problem"):
        console.print(printable(f"{one.severity}: {one.where}: {one.found}"), soft_wrap=True)
        if one.remedy:
            console.print(printable(f"  remedy: {one.remedy}"), soft_wrap=True)
    console.print("no problem" if not problems else counted(problems, "problem"))
