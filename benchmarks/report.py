"""Turns pytest-benchmark's JSON into one table: ``python benchmarks/report.py RESULTS.json ...``.

With ``--write`` the table is stored, too: as docs/benchmarks.json, from which docs/benchmarks.md is written and
docs/draw_benchmarks.py draws. The first file has the machine's state. Without files the table is the stored one.
``--check`` fails if the page differs from it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

from forebay.benchmarking.machine import machine

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
STORED = PAGE.with_suffix(".json")

CLOCK = "time.monotonic_ns()"
CAS = "a CAS that misses, independent"
CAS_WAITING = "a CAS that misses, each waiting for the last"
CAS_PREFETCHED = "a CAS that misses, prefetched"
HOT = "`allow`, hot, in the same kind of loop"

# The figure of concurrent processes needs this many rounds in which nothing else ran on their cores.
LEAST_ROUNDS = 3

SECTIONS = [
    "Floors",
    "One process, in cache",
    "Native code, in cache",
    "Every algorithm, one hot key",
    "One process, beyond the cache",
    "Many processes",
    "Others, allowed",
    "In the web stack: what a request costs more",
    "Over Redis",
    "Synced over Redis",
]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    cost: float | str
    """Nanoseconds, or a text if it is no time."""
    ratio: str
    bar: str = ""
    reached: bool | Literal["?"] | None = None

    def cells(self) -> list[str]:
        verdict = {None: "", True: "yes", False: "**no**", "?": "?"}[self.reached]
        cost = self.cost if isinstance(self.cost, str) else ns_text(self.cost)
        return [self.what, cost, self.ratio, self.bar, verdict]


class Result:
    """One benchmark's rounds."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.info = raw["extra_info"]
        self.ns = [seconds * 1e9 / self.info["operations"] for seconds in raw["stats"]["data"]]

    def beside(self, name: str) -> list[float]:
        return self.info["beside"][name]

    def ratio(self, name: str = CLOCK) -> float:
        return median(own / other for own, other in zip(self.ns, self.beside(name), strict=True))

    def spread(self) -> str:
        """The middle half of the rounds' ratios."""
        low, _, high = quantiles((own / other for own, other in zip(self.ns, self.beside(CLOCK), strict=True)), n=4)
        return f"{_ratio(low)} to {_ratio(high)}"


def ns_text(value: float) -> str:
    return f"{value:,.1f} ns" if value < 100 else f"{value:,.0f} ns"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 2 else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _server_rows(info: dict[str, Any]) -> Iterator[Row]:
    kinds = {
        "1": "1 limit and headers",
        "silent": "1 limit, no headers",
        "3": "3 limits and headers",
        "fields": "no limit, such headers by the application",
    }
    for kind, answer in kinds.items():
        shares = [rates[kind] / rates["0"] for rates in info["requests"]]
        kept = f"{median(shares):.1%} kept ({min(shares):.1%} to {max(shares):.1%})"
        rate = f"{median(rates[kind] for rates in info['requests']):,.0f} requests/s"
        is_ours = kind != "fields"
        bar, reached = f"{info['bar']:.0%} kept", median(shares) >= info["bar"]
        yield Row(f"{info['title']}: {answer}", rate, kept, bar if is_ours else "", reached if is_ours else None)


def rows_of(raw: dict[str, Any]) -> Iterator[Row]:
    info = raw["extra_info"]
    if "totals" in info:
        yield from _process_rows(info)
        return
    if "requests" in info:
        yield from _server_rows(info)
        return
    result = Result(raw)
    if info.get("added"):
        yield _added_row(result)
        return
    if "bar_to" in info:
        name, bar = info["bar_to"]
        share = result.ratio(name)
        yield Row(
            info["title"],
            median(result.ns),
            f"{share:.{2 if share >= 0.1 else 4}f} of {name}",
            f"{bar} of it" if bar else "",
            share <= bar if bar else None,
        )
        return
    title = info["title"] + (f" ({info['scope']})" if "scope" in info else "")
    bar = info.get("bar")
    yield Row(
        title,
        median(result.ns),
        f"{_ratio(result.ratio())} ({result.spread()})",
        f"{bar} x clock" if bar else "",
        result.ratio() <= bar if bar else None,
    )
    if "bar_beside" in info:
        name, bar = info["bar_beside"]
        share = result.ratio(name)
        loop = median(result.beside(name))
        clock_ratio = median(a / b for a, b in zip(result.beside(name), result.beside(CLOCK), strict=True))
        yield Row(f"{name}, per key", loop, _ratio(clock_ratio))
        yield Row("the batch as a share of that loop", "", f"{share:.3f} of it", f"{bar} of it", share <= bar)
    if info.get("cold"):
        yield from _cold_rows(result)


def _added_row(result: Result) -> Row:
    """The additional time of a request with the limit, against the same request without it."""
    added_us = median(own - other for own, other in zip(result.ns, result.beside("without"), strict=True)) / 1000
    bar_us = result.info.get("bar_us")
    return Row(
        result.info["title"],
        f"{added_us:,.1f} µs more than {median(result.beside('without')) / 1000:,.1f} µs",
        "",
        f"{bar_us} µs more" if bar_us else "",
        added_us <= bar_us if bar_us else None,
    )


def _cold_rows(result: Result) -> Iterator[Row]:
    """The bar consists of two other measurements of the same rounds."""
    for name in (CAS, CAS_WAITING, CAS_PREFETCHED, HOT):
        clock_ratio = median(a / b for a, b in zip(result.beside(name), result.beside(CLOCK), strict=True))
        yield Row(name, median(result.beside(name)), _ratio(clock_ratio))
    for name in (CAS, CAS_WAITING):
        bars = [1.5 * cas + hot for cas, hot in zip(result.beside(name), result.beside(HOT), strict=True)]
        share = median(own / bar for own, bar in zip(result.ns, bars, strict=True))
        what = f"random `allow` against 1.5 x {name.removeprefix('a CAS that misses, ')} CAS + hot `allow`"
        # Only the first is a bar; the second shows how much of the rest is memory latency.
        is_bar = name == CAS
        yield Row(
            what.replace("each waiting for the last CAS", "waiting CAS"),
            f"{ns_text(median(bars))} allowed" if is_bar else median(bars),
            f"{share:.2f} of it",
            "1 of it" if is_bar else "",
            share <= 1 if is_bar else None,
        )


def _process_rows(info: dict[str, Any]) -> Iterator[Row]:
    for count, pairs in info["totals"].items():
        what = f"{info['title']}: {count} {info['workers']}"
        bar_text = f"{info['bar']} x linear" if info["bar"] else ""
        if len(pairs) < LEAST_ROUNDS:
            undisturbed = f"{len(pairs)} of {info['rounds']} rounds undisturbed: not measured"
            yield Row(what, "", undisturbed, bar_text, "?" if info["bar"] else None)
            continue
        shares = [share for _, share in pairs]
        yield Row(
            what,
            f"{median(total for total, _ in pairs) / 1e6:,.1f} million/s",
            f"{median(shares):.2f} x linear ({min(shares):.2f} to {max(shares):.2f}, {len(shares)} rounds)",
            bar_text,
            median(shares) >= info["bar"] if info["bar"] else None,
        )


def stored_form(results: dict[str, Any]) -> dict[str, Any]:
    """The stored form of a run: its date, its machine, and the rows of each section."""
    busy = results["machine_info"]["busy_cores"]
    return {
        "command": "ci/bench",
        "date": results["datetime"][:10],
        "machine": {**machine(), "cores busy with other things at the start": f"{busy:.1f}"},
        "sections": {
            section: [
                asdict(row)
                for raw in results["benchmarks"]
                if raw["extra_info"].get("section") == section
                for row in rows_of(raw)
            ]
            for section in SECTIONS
        },
    }


def table(stored: dict[str, Any]) -> list[list[str]]:
    lines = [["what", "median cost", "ratio to the clock (middle half of the rounds)", "bar", "reached"]]
    for section, rows in stored["sections"].items():
        lines.append([f"**{section}**", "", "", "", ""])
        lines += [Row(**row).cells() for row in rows]
    return lines


def markdown(lines: list[list[str]]) -> str:
    head, *rest = lines
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---", "---:", "---:", "---:", "---"], *rest])


def plain(lines: list[list[str]]) -> str:
    cells = [[cell.replace("**", "").replace("`", "") for cell in line] for line in lines]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    text = []
    for line in cells:
        first, *others = (cell.ljust(width) for cell, width in zip(line[:1], widths[:1], strict=True))
        others = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        text.append("  ".join([first, *others]).rstrip())
    return "\n".join(text)


def document(stored: dict[str, Any]) -> str:
    facts = "\n".join(f"| {name} | {value} |" for name, value in stored["machine"].items())
    return f"""# Benchmarks

<!-- generated by ci/bench from benchmarks.json; edit benchmarks/report.py instead -->

Command: `{stored["command"]}`, {stored["date"]}.
`benchmarks/README.md` explains each figure, and where forebay loses. [JSON](benchmarks.json) has
the same table.

The clock is `{CLOCK}`, timed before and after every round of every benchmark. A ratio
is the median of the rounds' ratios. Costs include the loop around the operation.

| machine | |
| --- | --- |
{facts}

{markdown(table(stored))}
"""


def main() -> str | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results, *others = [json.loads(path.read_text()) for path in arguments.results or [STORED]]
    for other in others:
        results["benchmarks"] += other["benchmarks"]
    stored = stored_form(results) if arguments.results else results
    if arguments.check:
        differs = PAGE.read_text() != document(stored)
        return "docs/benchmarks.md differs: run python benchmarks/report.py --write" if differs else None
    print(plain(table(stored)))
    if arguments.write:
        STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")
        PAGE.write_text(document(stored))
        print("\nwritten to docs/benchmarks.json and docs/benchmarks.md")
    return None


if __name__ == "__main__":
    sys.exit(main())
