"""``forebay verify``: check whether a segment is sound."""

from __future__ import annotations

import dataclasses
import sys
from typing import Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.table import Table

from forebay.cli.options import as_json_option, directory_option, store_argument
from forebay.cli.printing import consoles, counted, print_json, printable, refusals
from forebay.cli.survey import path_of_store
from forebay.verification import Report, verify

__all__ = ["command"]

LARGE: Final = 64 * 2**20
SHOWN: Final = 50


@click.command("verify", short_help="Check the segment of a store.")
@store_argument()
@directory_option
@as_json_option
def command(name: str, directory: str | None, as_json: bool) -> None:
    """Check every invariant of the segment of the store NAME. A NAME with a slash is a file's path.

    Only reads; the store may be in use. Exits with 0 if the segment is sound, with 1 if it is damaged, with 2 if it
    can't be read.
    """
    console, errors = consoles()
    with refusals():
        report = _verify_with_progress(path_of_store(name, directory), errors)
        if as_json:
            print_json(sound=report.sound, **dataclasses.asdict(report))
        else:
            _print(report, console)
    sys.exit(0 if report.sound else 1)


def _verify_with_progress(path: str, console: Console) -> Report:
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False, total=None)
        return verify(
            path,
            progress=lambda done, total: bar.update(task, completed=done, total=total, visible=total >= LARGE),
        )


def _print(report: Report, console: Console) -> None:
    title = f"{printable(report.path)}: {report.bytes:,} bytes, {report.clock} clock"
    table = Table()
    for heading in ("", "algorithm"):
        table.add_column(heading)
    for heading in ("cells", "live keys", "claims", "held"):
        table.add_column(heading, justify="right")
    for part in report.parts:
        cells = sum(part.cells.values()) - part.cells["blocked"]
        held = f"{part.held:,}" if part.algorithm == "Concurrency" else ""
        name, claims = printable(part.name), part.cells["claims"]
        table.add_row(name, part.algorithm, f"{cells:,}", f"{part.live_keys:,}", f"{claims:,}", held)
    console.print(title, soft_wrap=True)
    console.print(table)
    findings = (*report.damage, *(finding for finding in report.findings if finding.severity == "note"))
    for finding in findings[:SHOWN]:
        console.print(printable(str(finding)), soft_wrap=True)
    if len(findings) > SHOWN:
        console.print(f"... and {len(findings) - SHOWN} more")
    verdict = "sound" if report.sound else f"damaged: {counted(len(report.damage), 'finding')}"
    console.print(verdict, f"({counted(len(report.limiters), 'limiter')})")
