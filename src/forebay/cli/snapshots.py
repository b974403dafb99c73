"""``forebay snapshot``, ``restore`` and ``resize``: keys that outlive a reboot, and stores of another size."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, counted, print_json, printable, progress_on, refusals
from forebay.cli.survey import path_of_store
from forebay.snapshots import Summary, resize, restore, snapshot

__all__ = ["resize_command", "restore_command", "snapshot_command"]

keys_option = click.option("--keys", type=int, metavar="N", help="Live keys of the new store.")


@click.command("snapshot", short_help="Copy a store into a file.")
@store_argument()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@directory_option
@as_json_option
def snapshot_command(name: str, file: Path, directory: str | None, as_json: bool) -> None:
    """Copy the live keys of the store NAME into FILE, from which `forebay restore` makes a store again.

    Only reads the store, which may be in use. Replaces FILE, if it is a snapshot, once the new one is whole. Exits with
    0, with 2 if it can't do that.
    """
    with refusals(), progress_on(consoles()[1]) as begin:
        summary = snapshot(Path(path_of_store(name, directory)), file, progress=begin)
        _print(summary, as_json, f"{file}: {_keys(summary)} of {summary.path}", file=str(file))


@click.command("restore", short_help="Make a store of a snapshot.")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@store_argument(required=False)
@directory_option
@keys_option
@click.option("--replace", is_flag=True, help="Replace the store of that name, if no process has it attached.")
@as_json_option
def restore_command(
    file: Path, name: str | None, directory: str | None, keys: int | None, replace: bool, as_json: bool
) -> None:
    """Make a store of the snapshot FILE, before the processes start that use it: the store NAME, or the same as before.

    Its time goes on by what has passed since the snapshot, after a reboot by the wall clock. A store that is there
    already is kept, unless you give --replace. Exits with 0, with 2 if no store was made.
    """
    with refusals(), progress_on(consoles()[1]) as begin:
        if name is None and directory is not None:
            raise ValueError("--directory is that of a NAME: give both, or neither")
        target = None if name is None else Path(path_of_store(name, directory))
        summary = restore(file, target, keys=keys, replace=replace, progress=begin)
        _print(
            summary, as_json, f"{summary.path}: {_keys(summary)} of {file}, made for {summary.keys:,}", file=str(file)
        )


@click.command("resize", short_help="Make a store for another number of keys.")
@store_argument()
@click.option("--keys", type=int, metavar="N", required=True, help="Live keys that the store is to hold.")
@directory_option
@as_json_option
def resize_command(name: str, keys: int, directory: str | None, as_json: bool) -> None:
    """Make the store NAME one for N live keys, with all live keys that it has.

    Processes may use it: their decisions wait meanwhile, about half a second per million live keys. Exits with 0, with
    2 if the store was not resized; then it is as before.
    """
    with refusals(), progress_on(consoles()[1]) as begin:
        summary = resize(Path(path_of_store(name, directory)), keys, progress=begin)
        _print(summary, as_json, f"{summary.path}: {_keys(summary)}, made for {summary.keys:,}")


def _keys(summary: Summary) -> str:
    return counted(summary.carried_keys, "live key")


def _print(summary: Summary, as_json: bool, text: str, **more: str) -> None:
    if as_json:
        print_json(**dataclasses.asdict(summary), **more)
        return
    console, _ = consoles()
    console.print(printable(text), soft_wrap=True)
    if summary.started_anew:
        console.print(printable(f"without the state of {', '.join(summary.started_anew)}"), soft_wrap=True)
