"""A run as one HTML page with plots."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from forebay.benchmarking.advice import cost_text, rate_text
from forebay.benchmarking.run import Figure, Run
from forebay.benchmarking.subjects import FLOORS, KEYS, LIMITERS, PROCESSES, REDIS, THREADS
from forebay.reporting.charts import COLOURS, Axis, Line, bars, count_axis, lines
from forebay.reporting.page import page_of, table_of

__all__ = ["page"]

HEADINGS = (
    ("figure", ""),
    ("median", "Per decision; of several workers, of all of them together."),
    ("range", "Of the passes: the run's own noise."),
)


def page(run: Run, advice: list[str]) -> str:
    """The report. All text in it is escaped, and it refers to no other file."""
    return page_of("forebay bench", _body(run, advice))


def _body(run: Run, advice: list[str]) -> Iterator[str]:
    facts = {"date": run.date, "forebay": run.forebay, **run.machine}
    yield table_of((("machine", ""), ("", "")), facts.items())
    yield "<h2>Advice</h2>"
    yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in advice)}</ul>"
    for group in (LIMITERS, KEYS, REDIS):
        figures = [one for one in run.figures if one.group == group]
        if figures:
            yield bars(
                group.capitalize(), [(one.name, one.median_ns, cost_text(one.median_ns), COLOURS[0]) for one in figures]
            )
    for group in (PROCESSES, THREADS):
        yield from _scaling(group, [one for one in run.figures if one.group == group])
    yield "<h2>Figures</h2>"
    for group in dict.fromkeys((FLOORS, *(one.group for one in run.figures))):
        rows = [_row(one) for one in run.figures if one.group == group]
        yield f"<h3>{escape(group.capitalize())}</h3>{table_of(HEADINGS, rows)}"
    for one in run.left_out:
        yield f"<p>Left out: {escape(f'{one.group}, {one.name}: {one.reason}')}</p>"


def _row(figure: Figure) -> tuple[str, str, str]:
    cost = cost_text(figure.median_ns)
    if figure.workers > 1:
        cost += f" ({rate_text(figure.median_ns)})"
    return figure.name, cost, f"{cost_text(min(figure.passes_ns))} to {cost_text(max(figure.passes_ns))}"


def _scaling(group: str, figures: list[Figure]) -> Iterator[str]:
    """Decisions per second by the number of workers."""
    most = max((one.workers for one in figures), default=1)
    if most == 1:
        return
    series: dict[str, list[tuple[float, float]]] = {}
    for one in figures:
        series.setdefault(one.name.rpartition(":")[0], []).append((one.workers, 1000 / one.median_ns))
    counts = sorted({one.workers for one in figures})
    across = Axis(group.partition(" ")[0], 1, most, tuple((count, str(count)) for count in counts))
    up = count_axis("million decisions per second", max(y for points in series.values() for _, y in points))
    yield f"<h3>{escape(group.capitalize())}</h3>"
    yield lines(
        across,
        up,
        [Line(name, colour, points) for (name, points), colour in zip(series.items(), COLOURS, strict=False)],
    )
