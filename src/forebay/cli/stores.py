"""``forebay ls``, ``stat`` and ``rm``: the stores of this host, their counts, and their removal."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.options import as_json_option, directory_option, more_option, store_argument
from forebay.cli.printing import consoles, counted, plain_table, print_json, printable, refusals
from forebay.cli.survey import Counts, Seen, count, directories, files_in, look_at, path_of_store
from forebay.errors import SegmentMissing
from forebay.segment.file_users import file_users
from forebay.segment.removal import unlink, unlink_unused

__all__ = ["ls_command", "rm_command", "stat_command"]

MIB: Final = 2**20


@click.command("ls", short_help="List the stores of this host.")
@more_option
@as_json_option
def ls_command(more: tuple[str, ...], as_json: bool) -> None:
    """List the stores in /dev/shm, in $XDG_RUNTIME_DIR and in each --directory.

    Only reads: it makes nothing, locks nothing and attaches to nothing. Exits with 0, also if there is no store; with 2
    if a --directory can't be read.
    """
    with refusals():
        users = file_users()
        found = []
        for directory in directories(more):
            for path in files_in(directory):
                try:
                    found.append(look_at(path, users))
                except SegmentMissing:
                    continue  # removed since
        if as_json:
            print_json(stores=[_document(one) for one in found], hidden_processes=users.hidden)
            return
        console, _ = consoles()
        table = plain_table("store", "MiB", "live", "keys", "limiters", "attached", "owner", "mode", "clock", "layout")
        for one in found:
            known = (f"{one.live_keys:,}", f"{one.keys:,}", str(one.limiters)) if not one.problem else ("", "", "")
            table.add_row(
                printable(one.name),
                f"{one.bytes / MIB:,.1f}",
                *known,
                str(one.attached),
                printable(one.owner),
                f"{one.mode:04o}",
                one.clock + (", earlier boot" if one.is_stale else ""),
                str(one.layout_version) if not one.problem else "",
            )
        if found:
            console.print(table)
        for one in found:
            if one.problem:
                console.print(printable(f"{one.path}: {one.problem}"), soft_wrap=True)


@click.command("stat", short_help="Show the counts of a store.")
@store_argument()
@directory_option
@as_json_option
def stat_command(name: str, directory: str | None, as_json: bool) -> None:
    """Show the counts of every limiter of the store NAME, and how full it is. A NAME with a slash is a file's path.

    The counts are those of Store.stats(), over all processes since the store was made. Only reads, as ls. Exits with 0,
    or with 2 if the store can't be read.
    """
    with refusals():
        path = path_of_store(name, directory)
        counts = count(path)
        seen = look_at(path, file_users())
        if as_json:
            print_json(
                **_document(seen),
                limiter_counts={label: dataclasses.asdict(one) for label, one in counts.limiters.items()},
                memories=[dataclasses.asdict(one) for one in counts.memories],
            )
        else:
            _print_counts(seen, counts)


def _document(seen: Seen) -> dict[str, Any]:
    document = dataclasses.asdict(seen)
    return {"name": seen.name, **document, "mode": f"{seen.mode:04o}", "owner": seen.owner, "stale": seen.is_stale}


def _print_counts(seen: Seen, counts: Counts) -> None:
    console, _ = consoles()
    console.print(
        printable(
            f"{seen.path}: {seen.live_keys:,} of {seen.keys:,} keys live, {seen.bytes:,} bytes, {seen.clock} clock, "
            f"attached: {seen.attached}"
        ),
        soft_wrap=True,
    )
    if not counts.limiters:
        console.print("no limiter yet")
        return
    headings = ("allowed", "denied", "inserted", "evicted", "full", "CAS retries")
    table = plain_table("limiter", *headings)
    for label, one in counts.limiters.items():
        numbers = (one.allowed, one.denied, one.inserted, one.evicted, one.full, one.cas_retries)
        algorithm = "" if label.endswith(f"({one.algorithm})") else f" ({one.algorithm})"
        table.add_row(printable(f"{label}{algorithm}"), *(f"{number:,}" for number in numbers))
    console.print(table)
    if counts.memories:
        table = plain_table("memory of its own", "live", "keys", "held", "MiB")
        for memory in counts.memories:
            held = f"{memory.held:,}" if memory.algorithm == "Concurrency" else ""
            size = f"{memory.bytes / MIB:,.1f}"
            name = printable(f"{memory.limiter} ({memory.algorithm})")
            table.add_row(name, f"{memory.live_keys:,}", f"{memory.keys:,}", held, size)
        console.print(table)


@click.command("rm", short_help="Remove a store.")
@store_argument()
@directory_option
@click.option("--force", is_flag=True, help="Remove it although processes are attached.")
@click.option("--yes", is_flag=True, help="Don't ask.")
@as_json_option
def rm_command(name: str, directory: str | None, force: bool, yes: bool, as_json: bool) -> None:
    """Remove the store NAME, and with it all states and counts. A NAME with a slash is a file's path.

    Refuses a store that processes have attached: they would keep the removed one, processes that start later would make
    another, and each group would admit the whole limit. With --force, restart them. Removes no file of another program.
    Exits with 0, with 1 if it was not removed because it is in use or because you answer no, with 2 if it can't be
    removed.
    """
    with refusals():
        path = path_of_store(name, directory)
        seen = look_at(path, file_users())
        is_removed = False
        if (force or not seen.attached) and (yes or _is_confirmed(seen)):
            if force:
                unlink(path)
            # A process may have attached since.
            is_removed = force or unlink_unused(path)
            attached = seen.attached if is_removed else max(seen.attached, 1)
        else:
            attached = seen.attached
        if as_json:
            print_json(path=path, removed=is_removed, attached=attached, pids=seen.pids)
        elif is_removed:
            consoles()[0].print(printable(f"removed {path}"), soft_wrap=True)
        elif attached and not force:
            pids = f" ({', '.join(map(str, seen.pids))})" if seen.pids else ""
            users = counted(attached, "process", "processes") + pids
            consoles()[1].print(printable(f"{path} is in use by {users}: stop them first, or give --force"))
        sys.exit(0 if is_removed else 1)


def _is_confirmed(seen: Seen) -> bool:
    used = f", which is in use by {counted(seen.attached, 'process', 'processes')}" if seen.attached else ""
    return click.confirm(printable(f"remove {seen.path}{used}?"), err=True)
