"""``forebay verify``: check whether a segment is sound."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from forebay.extras import Needs

with Needs("cli", __name__):
    import click
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.table import Table

from forebay.cli.printing import consoles, counted, printable
from forebay.errors import ForebayError
from forebay.verification import Report, verify

__all__ = ["command"]

LARGE: Final = 64 * 2**20
SHOWN: Final = 50


@click.command("verify", short_help="Check the segment of a store.")
@click.argument("name", required=False)
@click.option("--path", type=click.Path(path_type=Path), help="The segment's file, instead of its name.")
def command(name: str | None, path: Path | None) -> None:
    """Check every invariant of the segment of the store NAME.

    Only reads; the store may be in use. Exits with 0 if the segment is sound, with 1 if it is damaged, with 2 if it
    can't be read.
    """
    if (name is None) == (path is None):
        raise click.UsageError("give a store's NAME or --path FILE")
    console, errors = consoles()
    try:
        report = _verify_with_progress(name if path is None else path.absolute(), errors)
        _print(report, console)
    except (ForebayError, ValueError, OSError) as error:
        # An OSError, too: the path is no file, or the output takes nothing.
        errors.print(printable(str(error)))
        sys.exit(2)
    sys.exit(0 if report.sound else 1)


def _verify_with_progress(name_or_path: str | Path | None, console: Console) -> Report:
    assert name_or_path is not None
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False, total=None)
        return verify(
            name_or_path,
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
