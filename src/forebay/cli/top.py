"""``forebay top``: what a store's limiters decide, live."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click

from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import VERSION, consoles, printable, refusals
from forebay.cli.rates import Watch
from forebay.cli.survey import path_of_store
from forebay.cli.table import ORDERS, heading, hot_panel, line_of, ordered, summary, width_of_names

__all__ = ["command"]

LEAST_S: Final = 0.02
MOST_S: Final = 86_400.0


@click.command("top", short_help="Watch what a store's limiters decide.")
@store_argument()
@directory_option
@click.option("--interval", metavar="SECONDS", type=float, default=1.0, show_default=True, help="Time between looks.")
@click.option("--sort", "order", type=click.Choice(list(ORDERS)), default="decided", show_default=True)
@click.option("--filter", "part", default="", metavar="TEXT", help="Only limiters with TEXT in their name.")
@click.option("--once", is_flag=True, help="Print one table, with the rates of one interval.")
@as_json_option
def command(
    name: str, directory: str | None, interval: float, order: str, part: str, once: bool, as_json: bool
) -> None:
    """Watch the rates of the store NAME, its denials, occupancy, processes, threads and hot keys.

    A NAME with a slash is a path.

    Keys: q ends, space pauses, s sorts by the next column, r reverses, / filters by a part of the name. With --json it
    prints an object in a line for each interval, without --once until it is interrupted. Only reads, and attaches to
    nothing. Follows a store that is made again. Exits with 0, or with 2 if the store can't be read.
    """
    with refusals():
        if not LEAST_S <= interval <= MOST_S:
            raise ValueError(f"an interval is {LEAST_S:g} s or more, up to a day, not {interval:g}")
        for what, stream in (("output", sys.stdout), ("input", sys.stdin)):
            # Without a terminal at its input, no key would end the view.
            if not (once or as_json or stream.isatty()):
                raise ValueError(f"standard {what} is no terminal: give --once or --json")
        watch = Watch(path_of_store(name, directory))
        try:
            if as_json:
                _print_lines(watch, name, interval, once)
            elif once:
                _print_once(watch, name, interval, order, part)
            else:
                from forebay.cli.screen import show

                show(watch, name, interval, order, part)
        except KeyboardInterrupt:
            pass
        finally:
            watch.close()


def _print_lines(watch: Watch, name: str, interval: float, once: bool) -> None:
    watch.look()
    while True:
        time.sleep(interval)
        document = {"version": VERSION, "store": name, "time": time.time(), **dataclasses.asdict(watch.look())}
        try:
            print(json.dumps(document), flush=True)
        except BrokenPipeError:
            if once:
                raise
            # The reader has seen enough. Nothing is left to be written when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        if once:
            return


def _print_once(watch: Watch, name: str, interval: float, order: str, part: str) -> None:
    watch.look()
    time.sleep(interval)
    frame = watch.look()
    console, _ = consoles()
    for line in summary(name, frame):
        console.print(printable(line), soft_wrap=True)
    rows = ordered(frame.limiters, order, part)
    width = width_of_names(rows)
    for line in (heading(order, width), *(line_of(row, width) for row in rows), *hot_panel(frame.hot_keys, part)):
        console.print(line, soft_wrap=True)
