"""``forebay show`` and ``forebay reset``: a key's state in every limiter of a store, and forgetting the key."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.keys import key_of, key_options
from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, plain_table, print_json, printable, refusals
from forebay.cli.states import addressed, read_rules, state_of
from forebay.cli.survey import path_of_store
from forebay.store import Store

__all__ = ["reset_command", "show_command"]

rules_option = click.option(
    "--rules", "file", type=click.Path(path_type=Path), help="A rule file that has the limits by name."
)
limiter_option = click.option("--limiter", "names", metavar="NAME", multiple=True, help="Only this one; repeatable.")


@click.command("show", short_help="Show a key's state in every limiter.")
@store_argument()
@key_options
@rules_option
@limiter_option
@directory_option
@as_json_option
def show_command(
    name: str,
    key: str | None,
    kind: str | None,
    parts: tuple[tuple[str, str], ...],
    file: Path | None,
    names: tuple[str, ...],
    directory: str | None,
    as_json: bool,
) -> None:
    """Show the state of KEY in every limiter of the store NAME. Charges and counts nothing.

    A store has its limiters' names, but not their limits. With --rules the limits are those of a rule file, and each
    limiter that the file has is shown with its remaining permits. Without, a TokenBucket, a LeakyBucket and a
    MinInterval are shown by the time after which the key is as if it had never been seen.

    A NAME with a slash is a file's path. Exits with 0, or with 2 if the store can't be read.
    """
    with refusals():
        rules = read_rules(file) if file else None
        wanted = key_of(key, kind, parts, rules and rules.client)
        with Store.attach(path=path_of_store(name, directory)) as store:
            states = [state_of(one, wanted) for one in addressed(store, rules, names)]
        if as_json:
            print_json(store=name, key=repr(wanted), limiters=[dataclasses.asdict(one) for one in states])
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
@store_argument()
@key_options
@rules_option
@limiter_option
@directory_option
@as_json_option
def reset_command(
    name: str,
    key: str | None,
    kind: str | None,
    parts: tuple[tuple[str, str], ...],
    file: Path | None,
    names: tuple[str, ...],
    directory: str | None,
    as_json: bool,
) -> None:
    """Forget KEY in every limiter of the store NAME: its next request finds a fresh key.

    Without --rules only a TokenBucket, a LeakyBucket and a MinInterval can be found, as by show. Credits are left out,
    as they were paid for: Credits.take_up_to takes them. A NAME with a slash is a file's path. Exits with 0 if every
    limiter has forgotten the key, with 1 if one of them was left out, with 2 if the store can't be changed.
    """
    with refusals():
        rules = read_rules(file) if file else None
        wanted = key_of(key, kind, parts, rules and rules.client)
        with Store.attach(path=path_of_store(name, directory)) as store:
            limiters = addressed(store, rules, names)
            # Before the reset: a state that isn't found has a note.
            notes = [state_of(one, wanted).note for one in limiters]
            for one in limiters:
                if one.can_be_reset:
                    one.limiter.reset(wanted)
        left_out = [one for one in limiters if not one.can_be_reset]
        if as_json:
            shown = [
                {"limiter": one.name, "algorithm": one.algorithm, "reset": one not in left_out, "note": note}
                for one, note in zip(limiters, notes, strict=True)
            ]
            print_json(store=name, key=repr(wanted), limiters=shown)
        else:
            console, _ = consoles()
            for one, note in zip(limiters, notes, strict=True):
                what = "left out" if one in left_out else "reset"
                text = f"{one.name} ({one.algorithm}): {what}" + (f": {note}" if note else "")
                console.print(printable(text), soft_wrap=True)
        sys.exit(1 if left_out else 0)
