"""A comparison as one HTML page, with plots, that loads nothing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from forebay.rate import NS, Rate
from forebay.reporting.charts import COLOURS, Axis, Line, bars, count_axis, lines, log_axis
from forebay.reporting.page import page_of, table_of
from forebay.tuning.comparison import Comparison, Demand, Result
from forebay.tuning.document import Source, time_text

__all__ = ["page"]

TIME_MARKS: Final = 4

COLUMNS: Final = (
    ("denied", "Share of all requests that were denied."),
    ("users hit", "Keys of which at least one request was denied."),
    ("largest window", "The most requests of one key that were admitted in any period, and its share of the limit."),
    ("differ", "Decisions that differ from those of an exact log."),
    ("wrongly allowed", "Admitted although the limiter had admitted the whole limit in the period up to then."),
    (
        "wrongly denied",
        "Denied although the limiter had admitted less than the limit in the period up to then.",
    ),
    ("memory", "Of a store for the most keys that were live at a time."),
    ("ns per decision", "CPU time on the machine that made this report."),
)


def page(source: Source, comparison: Comparison) -> str:
    """The report. All text in it is escaped, and it refers to no other file."""
    body = [
        *_facts(source, comparison),
        *_suggestions(comparison),
        "<h2>Candidates</h2>",
        _table(comparison),
        *(f"<p>Left out: {escape(str(one.candidate))}: {escape(one.reason)}</p>" for one in comparison.left_out),
        *_bars(comparison),
        "<h2>Over time</h2>",
        *_over_time(comparison),
        "<h2>What a limit would deny</h2>",
        "<p>The share of users that send more than a limit in some period: so many would be denied a request by an "
        "exact log.</p>",
        *(_demand(comparison, demand) for demand in comparison.demands),
        "<h2>Users with the most denied requests</h2>",
        *_most_denied(comparison),
    ]
    return page_of("forebay tune", body)


def _facts(source: Source, comparison: Comparison) -> Iterable[str]:
    yield (
        f"<p>{escape(source.name)}: {comparison.requests:,} requests of {comparison.users:,} users, from "
        f"{time_text(comparison.first_ns)} to {time_text(comparison.last_ns)}.</p>"
    )
    reading = source.reading
    if reading is not None and reading.unreadable.count:
        share = reading.unreadable.count / reading.lines
        yield (
            f"<p>{reading.unreadable.count:,} of {reading.lines:,} lines ({share:.2%}) are unreadable and left out: "
            f"{escape(str(reading.unreadable))}.</p>"
        )
    if reading is not None and reading.warning is not None:
        yield f"<p><strong>Warning:</strong> {escape(reading.warning)}.</p>"
    if source.reordered:
        yield (
            f"<p>{source.reordered:,} requests are dated before the line before them, and were sorted; {source.late:,} "
            "came too late for that and got the time of the line before.</p>"
        )


def _suggestions(comparison: Comparison) -> Iterable[str]:
    for one in comparison.suggestions:
        yield (
            f"<p><strong>{escape(str(one.rate))}</strong> is the least limit under which an exact log denies requests "
            f"to at most {one.deny_at_most:.4%} of these users: to {one.users_hit:,}.</p>"
        )


def _table(comparison: Comparison) -> str:
    rows = []
    for result in comparison.results:
        cells = (
            str(result.candidate),
            f"{result.denied / comparison.requests:.3%}",
            f"{result.users_hit:,} ({result.users_hit / comparison.users:.2%})",
            f"{result.largest:,} ({result.largest / result.candidate.rate.limit:.0%})",
            f"{result.differing:,} ({result.differing / comparison.requests:.4%})",
            f"{result.wrongly_allowed:,}",
            f"{result.wrongly_denied:,}",
            f"{result.memory_bytes / 1e6:,.1f} MB",
            f"{result.decision_ns:.0f}",
        )
        rows.append(cells)
    legend = "".join(f"<li><b>{name}</b>: {escape(what)}</li>" for name, what in COLUMNS)
    return f"{table_of((('candidate', ''), *COLUMNS), rows)}<ul>{legend}</ul>"


def _colours(comparison: Comparison) -> dict[str, str]:
    """A colour for each algorithm."""
    algorithms = dict.fromkeys(result.candidate.algorithm for result in comparison.results)
    return dict(zip(algorithms, COLOURS, strict=False))


def _bars(comparison: Comparison) -> Iterable[str]:
    colours = _colours(comparison)

    def rows(values: Iterable[tuple[Result, float]]) -> list[tuple[str, float, str, str]]:
        return [
            (str(result.candidate), share, f"{share:.3%}", colours[result.candidate.algorithm])
            for result, share in values
        ]

    results = comparison.results
    yield bars("Requests denied", rows((one, one.denied / comparison.requests) for one in results))
    yield bars("Users hit", rows((one, one.users_hit / comparison.users) for one in results))
    yield bars(
        "Decisions that differ from an exact log", rows((one, one.differing / comparison.requests) for one in results)
    )
    yield bars(
        "Largest window, in parts of the limit", rows((one, one.largest / one.candidate.rate.limit) for one in results)
    )


def _over_time(comparison: Comparison) -> Iterable[str]:
    bin_s = comparison.bin_ns / NS
    end_s = bin_s * len(comparison.requests_by_bin)
    marks = tuple(
        (
            end_s * number / TIME_MARKS,
            time_text(comparison.first_ns + round(end_s * NS * number / TIME_MARKS))[5:19].replace("T", " "),
        )
        for number in range(TIME_MARKS + 1)
    )
    across = Axis("", 0, end_s, marks)

    def per_second(counts: list[int]) -> list[tuple[float, float]]:
        return [((number + 0.5) * bin_s, count / bin_s) for number, count in enumerate(counts)]

    requests = per_second(comparison.requests_by_bin)
    yield lines(
        across, count_axis("requests per second", max(y for _, y in requests)), [Line("requests", COLOURS[0], requests)]
    )
    colours = _colours(comparison)
    for rate in dict.fromkeys(result.candidate.rate for result in comparison.results):
        series = [
            Line(str(result.candidate), colours[result.candidate.algorithm], per_second(result.denied_by_bin))
            for result in comparison.results
            if result.candidate.rate == rate
        ]
        most = max(y for line in series for _, y in line.points)
        yield f"<h3>{escape(str(rate))}</h3>"
        yield lines(across, count_axis("denied per second", most), series)


def _demand(comparison: Comparison, demand: Demand) -> str:
    rates = dict.fromkeys(result.candidate.rate for result in comparison.results)
    upright = [(rate.limit, str(rate)) for rate in rates if rate.period_ns == demand.period_ns]
    high = max(demand.points[-1][0], *(limit for limit, _ in upright), 1)
    period = str(Rate.per_ns(1, demand.period_ns)).removeprefix("1 per ")
    points = [(limit, 100 * users / comparison.users) for limit, users in demand.points]
    return lines(
        log_axis(f"limit per {period}", high),
        count_axis("users above the limit", points[0][1], " %"),
        [Line(f"users above a limit per {period}", COLOURS[0], points)],
        upright,
    )


def _most_denied(comparison: Comparison) -> Iterable[str]:
    for result in comparison.results:
        if result.most_denied:
            users = ", ".join(f"{key} ({denied:,})" for key, denied in result.most_denied)
            yield f"<p>{escape(str(result.candidate))}: {escape(users)}</p>"
