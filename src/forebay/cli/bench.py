"""``forebay bench``: measure decisions on this machine."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from rich.console import Console
    from rich.table import Table

from forebay.benchmarking.advice import advice, cost_text, rate_text
from forebay.benchmarking.comparison import Comparison, compared
from forebay.benchmarking.measurement import Settings, ready
from forebay.benchmarking.report import page
from forebay.benchmarking.run import Figure, Run, read, written
from forebay.cli.printing import consoles, print_error, printable, progress_on
from forebay.errors import ForebayError

__all__ = ["command"]

KEYS, QUICK_KEYS = 1_000_000, 100_000


@click.command("bench", short_help="Measure decisions on this machine.")
@click.option("--quick", is_flag=True, help="Some seconds instead of half a minute: fewer rounds, so more noise.")
@click.option(
    "--keys",
    type=click.IntRange(10, 10**7),
    help=f"Live keys of the figures of many keys; else {KEYS:,}, or {QUICK_KEYS:,} with --quick.",
)
@click.option("--redis", "redis_url", metavar="URL", help="Also measure over this server, by keys of its own.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write a report with plots to this file.")
@click.option("--json", "as_json", type=click.Path(path_type=Path, dir_okay=False), help="Write the run to this file.")
@click.option(
    "--compare",
    nargs=2,
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="A B",
    help="Measure nothing: compare two files of --json.",
)
def command(
    quick: bool,
    keys: int | None,
    redis_url: str | None,
    html: Path | None,
    as_json: Path | None,
    compare: tuple[Path, Path] | None,
) -> None:
    """Measure what decisions cost on this machine, by this interpreter, and print what follows from it.

    With --compare, exits with 1 if a figure of B is slower than in A by more than the noise of both runs, else with 0.
    Exits with 2 if it can't do its work.
    """
    console, errors = consoles()
    if compare is not None and (quick, keys, redis_url, html, as_json) != (False, None, None, None, None):
        raise click.UsageError("--compare measures nothing, so it takes no other option")
    try:
        if compare is not None:
            comparison = compared(*map(read, compare))
            _print_comparison(comparison, console)
            sys.exit(1 if comparison.slower else 0)
        for file in (html, as_json):
            if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
                raise OSError(f"{file} can't be written: give the path of a file in a folder of yours")
        settings = Settings(keys or (QUICK_KEYS if quick else KEYS), quick, redis_url)
        with ready(settings) as measure, progress_on(errors) as progress:
            run = measure(progress)
        found = advice(run)
        if html is not None:
            html.write_text(page(run, found), encoding="utf-8")
        if as_json is not None:
            as_json.write_text(written(run, found), encoding="utf-8")
        _print(run, found, console)
    except (ForebayError, ImportError, OSError, ValueError) as error:
        # A ValueError, too: a URL that is none.
        print_error(error)
        sys.exit(2)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _print(run: Run, found: list[str], console: Console) -> None:
    say = functools.partial(console.print, soft_wrap=True)
    for name, value in {"forebay": run.forebay, **run.machine}.items():
        say(f"{name}: {printable(value) or 'unknown'}")
    for group in dict.fromkeys(one.group for one in run.figures):
        figures = [one for one in run.figures if one.group == group]
        has_workers = any(one.workers > 1 for one in figures)
        table = _table(group, "median", "noise", *(("together",) if has_workers else ()))
        for one in figures:
            table.add_row(*_cells(one), *((rate_text(one.median_ns),) if has_workers else ()))
        console.print()
        console.print(table)
    console.print()
    for missing in run.left_out:
        say(f"left out: {missing.group}, {missing.name}: {printable(missing.reason)}")
    for text in found:
        say(text)


def _cells(figure: Figure) -> tuple[str, str, str]:
    return figure.name, cost_text(figure.median_ns), f"{figure.range_ns / figure.median_ns:.0%}"


def _print_comparison(comparison: Comparison, console: Console) -> None:
    say = functools.partial(console.print, soft_wrap=True)
    for text in comparison.differences:
        say(f"differs: {printable(text)}")
    for group in dict.fromkeys(change.before.group for change in comparison.changes):
        table = _table(printable(group), "A", "B", "change", "noise", "")
        for change in comparison.changes:
            before = change.before.median_ns
            if change.before.group == group:
                table.add_row(
                    printable(change.before.name),
                    cost_text(before),
                    cost_text(change.after.median_ns),
                    f"{change.difference_ns / before:+.1%}",
                    f"{change.noise_ns / before:.1%}",
                    change.verdict,
                )
        console.print()
        console.print(table)
    console.print()
    for name in comparison.only_in_one:
        say(f"only in one run: {printable(name)}")
    slower, faster, count = len(comparison.slower), len(comparison.faster), len(comparison.changes)
    say(f"beyond the noise of both runs, of {count} figures: {slower} slower, {faster} faster")
