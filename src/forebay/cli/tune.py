"""``forebay tune``: compare limits by the requests of an access log."""

from __future__ import annotations

import functools
import json
import mmap
import re
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO, Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from rich.console import Console
    from rich.table import Table

from forebay.cli.printing import consoles, print_error, printable, progress_on
from forebay.errors import ForebayError, InvalidRate, short_repr
from forebay.rate import Rate, as_rate
from forebay.tuning.candidates import ALGORITHMS
from forebay.tuning.comparison import Comparison, compare
from forebay.tuning.document import Source, document, time_text
from forebay.tuning.readers import FORMATS, read
from forebay.tuning.report import page
from forebay.tuning.requests import Columns
from forebay.tuning.traffic import KINDS, Generated, generate

__all__ = ["command"]

UNITS: Final = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def _rate(text: str) -> Rate:
    try:
        return as_rate(text)
    except InvalidRate as error:
        raise click.BadParameter(str(error)) from None


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?)(%?)", text, re.ASCII)
    share = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= share < 1:
        raise click.BadParameter(f"{short_repr(text)} is no share of the users such as 1% or 0.01, below all of them")
    return share


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,15}) ?(|KB|MB|GB)", text, re.ASCII | re.IGNORECASE)
    if match is None:
        raise click.BadParameter(f"{short_repr(text)} is no number of bytes such as 500MB or 2GB")
    return int(match[1]) * UNITS[match[2].upper()]


@click.command("tune", short_help="Compare limits by the requests of a log.")
@click.argument("log", required=False)
@click.option("--limit", "rates", type=_rate, metavar="RATE", multiple=True, required=True, help="Repeatable.")
@click.option("--algorithm", "algorithms", type=click.Choice(ALGORITHMS), multiple=True, help="Repeatable; else all.")
@click.option(
    "--burst", "bursts", type=click.IntRange(1), multiple=True, help="Of buckets; repeatable; else the rate's."
)
@click.option("--deny-at-most", type=_share, metavar="SHARE", help="Find a limit that hits at most so many users.")
@click.option("--format", "format_", type=click.Choice(FORMATS), help="Of LOG; else recognized by its first line.")
@click.option("--key", help="The field of JSON or CSV that identifies a user; else the client's address.")
@click.option("--time", help="The field of JSON or CSV that has the time.")
@click.option("--traffic", type=click.Choice(list(KINDS)), help="Generate requests instead of reading a LOG.")
@click.option("--requests", type=click.IntRange(1), default=1_000_000, show_default=True, help="To generate.")
@click.option("--users", type=click.IntRange(1, 10**8), default=1000, show_default=True, help="To generate.")
@click.option("--rate", type=_rate, metavar="RATE", default="60/minute", show_default=True, help="Of a generated user.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of generated traffic.")
@click.option("--memory", type=_size, metavar="BYTES", default="1GB", show_default=True, help="At most for a limiter.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report with plots to this file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    log: str | None,
    rates: tuple[Rate, ...],
    algorithms: tuple[str, ...],
    bursts: tuple[int, ...],
    deny_at_most: float | None,
    format_: str | None,
    key: str | None,
    time: str | None,
    traffic: str | None,
    requests: int,
    users: int,
    rate: Rate,
    seed: int,
    memory: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Replay the access log LOG, or generated traffic, through real limiters, and compare their decisions.

    LOG is in the combined (or common) log format, JSON lines, or CSV with names in its first row, plain or gzipped; -
    is standard input. A RATE is such as "100/minute", a SHARE such as 1%, BYTES such as 500MB. Exits with 2 if the
    requests can't be replayed.
    """
    if (log is None) == (traffic is None):
        raise click.UsageError("give a LOG or --traffic KIND")
    console, errors = consoles()
    try:
        with tempfile.TemporaryFile(buffering=0) as file, progress_on(errors) as progress:
            columns = Columns(file)
            if traffic is not None:
                generated = Generated(traffic, requests, users, rate, seed)
                generate(generated, columns, progress("generating"))
                source = Source(str(generated), None, columns.reordered, columns.late)
            else:
                assert log is not None
                reading = read(log, columns, format=format_, key=key, time=time, progress=progress("reading"))
                source = Source(reading.name, reading, columns.reordered, columns.late)
            comparison = compare(
                _mapped(file),
                columns.keys,
                rates,
                algorithms or ALGORITHMS,
                bursts,
                deny_at_most=deny_at_most,
                memory_bytes=memory,
                progress=progress("replaying"),
            )
        if html is not None:
            html.write_text(page(source, comparison), encoding="utf-8")
        if as_json:
            print(json.dumps(document(source, comparison), indent=1), flush=True)
        else:
            _print(source, comparison, console)
    except (ForebayError, ImportError, OSError) as error:
        # An OSError, too: a file that can't be read or written, or a full disk.
        print_error(error)
        sys.exit(2)


def _mapped(file: BinaryIO) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _print(source: Source, comparison: Comparison, console: Console) -> None:
    say = functools.partial(console.print, soft_wrap=True)
    say(f"{printable(source.name)}: {comparison.requests:,} requests of {comparison.users:,} users")
    say(f"from {time_text(comparison.first_ns)} to {time_text(comparison.last_ns)}")
    if source.reading is not None and source.reading.unreadable.count:
        unreadable = source.reading.unreadable
        share = unreadable.count / source.reading.lines
        say(f"{unreadable.count:,} lines ({share:.2%}) are unreadable and left out: {printable(str(unreadable))}")
    if source.reading is not None and source.reading.warning is not None:
        say(f"warning: {printable(source.reading.warning)}")
    if source.late:
        say(f"{source.late:,} requests came too late to be sorted: they got the time of the line before")
    for rate in dict.fromkeys(result.candidate.rate for result in comparison.results):
        table = Table(title=str(rate), title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("algorithm")
        for heading in ("denied", "users hit", "largest window", "differ", "memory", "ns"):
            table.add_column(heading, justify="right")
        for result in comparison.results:
            if result.candidate.rate == rate:
                table.add_row(
                    result.candidate.label,
                    f"{result.denied / comparison.requests:.3%}",
                    f"{result.users_hit / comparison.users:.3%}",
                    f"{result.largest / rate.limit:.0%}",
                    f"{result.differing / comparison.requests:.4%}",
                    f"{result.memory_bytes / 1e6:,.1f} MB",
                    f"{result.decision_ns:.0f}",
                )
        console.print()
        console.print(table)
    console.print()
    for one in comparison.left_out:
        say(f"left out: {one.candidate}: {printable(one.reason)}")
    for suggestion in comparison.suggestions:
        say(
            f"to deny requests to at most {suggestion.deny_at_most * 100:.4g}% of the users: {suggestion.rate} "
            f"(an exact log hits {suggestion.users_hit:,} of {comparison.users:,})"
        )
