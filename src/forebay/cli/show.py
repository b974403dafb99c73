"""``forebay show`` and ``forebay reset``: a key's state in every limiter of a store, and forgetting the key."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.keys import key_of, key_options
from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, plain_table, print_json, printable, refusals
from forebay.cli.states import Addressed, addressed, live_rules, read_rules, state_of
from forebay.cli.survey import path_of_store
from forebay.core.table.keys import Key
from forebay.store import Store

__all__ = ["reset_command", "show_command"]

Work: TypeAlias = Callable[[str, Key, list[Addressed], bool], None]
"""The work of a command. It gets the store's name, the key, the limiters, and whether to print JSON."""


def _about_a_key(work: Work) -> Callable[..., None]:
    """The arguments and options of a command about a key in a store's limiters, which attaches to the store."""

    @store_argument()
    @key_options
    @click.option("--rules", "file", type=click.Path(path_type=Path), help="A rule file that has the limits by name.")
    @click.option("--limiter", "names", metavar="NAME", multiple=True, help="Only this one; repeatable.")
    @directory_option
    @as_json_option
    @functools.wraps(work)
    def command(
        name: str,
        key: str | None,
        kind: str | None,
        parts: tuple[tuple[str, str], ...],
        file: Path | None,
        names: tuple[str, ...],
        directory: str | None,
        as_json: bool,
    ) -> None:
        with refusals(), Store.attach(path=path_of_store(name, directory)) as store:
            live = live_rules(store)
            rules = read_rules(file) if file else live
            wanted = key_of(key, kind, parts, rules and rules.client)
            work(name, wanted, addressed(store, rules, live, names), as_json)

    return command


@click.command("show", short_help="Show a key's state in every limiter.")
@_about_a_key
def show_command(name: str, key: Key, limiters: list[Addressed], as_json: bool) -> None:
    """Show the state of KEY in every limiter of the store NAME. Charges and counts nothing.

    A store has its limiters' names, but not their limits. With --rules the limits are those of a rule file, else those
    of the store's live rules, and each limiter that these have is shown with its remaining permits. Without, a
    TokenBucket, a LeakyBucket and a MinInterval are shown by the time after which the key is as if it had never been
    seen.

    A NAME with a slash is a file's path. Exits with 0, or with 2 if the store can't be read.
    """
    states = [state_of(one, key) for one in limiters]
    if as_json:
        print_json(store=name, key=repr(key), limiters=[dataclasses.asdict(one) for one in states])
        return
    console, _ = consoles()
    table = plain_table("limiter", "limit", "remaining", "retry", "fresh again in")
    for one in states:
        table.add_row(printable(f"{one.limiter} ({one.algorithm})"), *one.texts())
    console.print(table if states else "no limiter yet")
    for one in states:
        if one.note:
            console.print(printable(f"{one.limiter} ({one.algorithm}): {one.note}"), soft_wrap=True)


@click.command("reset", short_help="Forget a key.")
@_about_a_key
def reset_command(name: str, key: Key, limiters: list[Addressed], as_json: bool) -> None:
    """Forget KEY in the limiters of the store NAME: its next request finds a fresh key.

    A limiter whose limit the command doesn't know is left out. Live rules have limits, and so has a rule file: give it
    by --rules. A TokenBucket, a LeakyBucket and a MinInterval need none. Credits are left out, as they were paid for.

    A NAME with a slash is a file's path. Exits with 0 if every limiter has forgotten the key, with 1 if one of them was
    left out, with 2 if the store can't be changed.
    """
    # Before the reset: a state that isn't found has a note.
    notes = [one.reason if one.is_exact or one.limiter is None else state_of(one, key).note for one in limiters]
    for one in limiters:
        if one.can_be_reset:
            one.reset(key)
    if as_json:
        shown = [
            {"limiter": one.name, "algorithm": one.algorithm, "reset": one.can_be_reset, "note": note}
            for one, note in zip(limiters, notes, strict=True)
        ]
        print_json(store=name, key=repr(key), limiters=shown)
    else:
        console, _ = consoles()
        for one, note in zip(limiters, notes, strict=True):
            what = "reset" if one.can_be_reset else "left out"
            text = f"{one.name} ({one.algorithm}): {what}" + (f": {note}" if note else "")
            console.print(printable(text), soft_wrap=True)
    sys.exit(0 if all(one.can_be_reset for one in limiters) else 1)
