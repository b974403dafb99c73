"""``forebay hot``: which keys of a store are denied and allowed most of late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.keys import key_of
from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, counted, plain_table, print_json, printable, refusals
from forebay.cli.states import Addressed, addressed, live_rules, read_rules
from forebay.cli.survey import path_of_store
from forebay.core.table.keys import Key
from forebay.segment.limiter_list import encode_limiter_name
from forebay.stats import HotKey
from forebay.store import Store

__all__ = ["command"]


@click.command("hot", short_help="Show the keys that are denied and allowed most.")
@store_argument()
@click.option(
    "--among",
    type=click.File(errors="replace"),
    metavar="FILE",
    help="Keys to look for, one on each line; - for stdin.",
)
@click.option("--address", "kind", flag_value="address", help="Each line of FILE is a client's address.")
@click.option("--bytes", "kind", flag_value="bytes", help="Each line of FILE is bytes, in hexadecimal.")
@click.option("--int", "kind", flag_value="int", help="Each line of FILE is a whole number; else it is text.")
@click.option("--rules", "file", type=click.Path(path_type=Path), help="A rule file that has the limits by name.")
@click.option("--limiter", "names", metavar="NAME", multiple=True, help="Only this one; repeatable.")
@click.option("--most", type=click.IntRange(min=1), default=20, show_default=True, help="Show at most so many.")
@directory_option
@as_json_option
def command(
    name: str,
    among: TextIO | None,
    kind: str | None,
    file: Path | None,
    names: tuple[str, ...],
    most: int,
    directory: str | None,
    as_json: bool,
) -> None:
    """Show the keys of the store NAME that were denied most in the latest minutes, and those that were allowed most.

    Only for a store whose processes record that: Store(..., hot_keys=64). All counts are halved every 69 seconds.
    Allowed requests are estimated from every 61st.

    The record has a hash of each key, and no key. With --among, each hash is replaced by the key of FILE that has it,
    for example of an access log: cut -d' ' -f1 access.log | sort -u | forebay hot NAME --among - --address. As in
    forebay show, keys of a window are found only by its limit: give --rules, unless the store has live rules.

    Charges and counts nothing. A NAME with a slash is a file's path. Exits with 0, or with 2 if the store can't be
    read or has no record.
    """
    with refusals(), Store.attach(path=path_of_store(name, directory)) as store:
        live = live_rules(store)
        rules = read_rules(file) if file else live
        limiters = addressed(store, rules, live, names)
        wanted = {encode_limiter_name(one).decode() for one in names}
        found = [one for one in store.hot_keys() if not wanted or one.limiter in wanted][:most]
        keys: dict[tuple[str, str, str], Key] = {}
        if among is not None:
            lines = (line.rstrip("\r\n") for line in among)
            given = [key_of(line, kind, (), rules and rules.client) for line in lines if line]
            keys = _known_keys(found, limiters, given)
        notes = [f"{one.name} ({one.algorithm}): {one.reason}" for one in limiters if among and one.limiter is None]
        if as_json:
            shown = [{**dataclasses.asdict(one), "key": _shown(keys, one)} for one in found]
            print_json(store=name, hot_keys=shown, notes=notes)
            return
        console, _ = consoles()
        table = plain_table("limiter", "key", "denied", "last denied", "allowed, about")
        for one in found:
            ago = "" if one.denied_ago is None else f"{counted(round(one.denied_ago), 'second')} ago"
            key = printable(_shown(keys, one) or one.digest)
            table.add_row(
                printable(f"{one.limiter} ({one.algorithm})"), key, f"{one.denied:,}", ago, f"{one.allowed:,}"
            )
        console.print(table if found else "no key was noted yet")
        for note in notes:
            console.print(printable(note), soft_wrap=True)


def _known_keys(
    found: Iterable[HotKey], limiters: Iterable[Addressed], given: Iterable[Key]
) -> dict[tuple[str, str, str], Key]:
    """Those of the given keys that were found: by limiter, algorithm and digest."""
    wanted = {(one.limiter, one.algorithm, one.digest) for one in found}
    known = {}
    for limiter in limiters:
        if any(one[:2] == (limiter.name, limiter.algorithm) for one in wanted):
            for key in given:
                for digest in limiter.record_digests(key):
                    one = (limiter.name, limiter.algorithm, digest)
                    if one in wanted:
                        known[one] = key
    return known


def _shown(keys: dict[tuple[str, str, str], Key], one: HotKey) -> str | None:
    key = keys.get((one.limiter, one.algorithm, one.digest))
    return None if key is None else key if isinstance(key, str) else repr(key)
