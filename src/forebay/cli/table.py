"""The text of a live view: its first lines, and a row for each limiter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final

from forebay.extras import Needs

with Needs("cli", __name__):
    from rich.cells import cell_len, set_cell_size

from forebay.cli.printing import counted
from forebay.cli.rates import Frame, Row
from forebay.errors import printable
from forebay.stats import HotKey

__all__ = [
    "CELL",
    "NAME",
    "ORDERS",
    "heading",
    "hot_panel",
    "line_of",
    "ordered",
    "sparkline",
    "summary",
    "width_of_names",
]

MIB: Final = 2**20
NAME: Final = 34
CELL: Final = 11
"""Widths of the first column and of the others."""
BARS: Final = " ▁▂▃▄▅▆▇█"
PLAIN_BARS: Final = " .:-=+*%#"

ORDERS: Final = {
    "decided": "decided/s",
    "denied": "denied/s",
    "share": "denied",
    "evicted": "evicted/s",
    "full": "full/s",
    "retries": "lost CAS/s",
    "occupancy": "own keys",
    "held": "held",
}
"""The columns after the name, by the word that sorts by them."""

HOT_HEADING: Final = f"{'hot keys':{NAME}}{'hash':>16}{'denied':>{CELL}}{'ago':>{CELL}}{'~allowed':>{CELL}}"

_KEYS: Final[dict[str, Callable[[Row], Any]]] = {
    "decided": lambda row: row.decided,
    "denied": lambda row: row.per_second["denied"],
    "share": lambda row: row.denied_share,
    "evicted": lambda row: row.per_second["evicted"],
    "full": lambda row: row.per_second["full"],
    "retries": lambda row: row.per_second["cas_retries"],
    "occupancy": lambda row: row.memory.live_keys / row.memory.keys if row.memory else -1.0,
    "held": lambda row: row.memory.held if row.memory else -1,
}


def ordered(rows: Iterable[Row], order: str, part: str, *, is_reversed: bool = False) -> list[Row]:
    """The rows with `part` in their name, the greatest first; equal ones by name."""
    found = sorted((row for row in rows if part.lower() in row.name.lower()), key=lambda row: (row.name, row.algorithm))
    return sorted(found, key=_KEYS[order], reverse=not is_reversed)


def heading(order: str, width: int = NAME) -> str:
    """The line over the rows, with a star at the column that sorts them."""
    texts = (f"*{text}" if one == order else text for one, text in ORDERS.items())
    return f"{'limiter':{width}}{''.join(f'{text:>{CELL}}' for text in texts)}"


def line_of(row: Row, width: int = NAME) -> str:
    """The row's texts, one for each of `ORDERS`, behind its name and algorithm."""
    memory = row.memory
    cells = (
        _rate(row.decided),
        _rate(row.per_second["denied"]),
        f"{row.denied_share:.1%}" if row.decided else "",
        *(_rate(row.per_second[count]) for count in ("evicted", "full", "cas_retries")),
        "" if memory is None else f"{memory.live_keys / memory.keys:.0%}",
        "" if memory is None or row.algorithm != "Concurrency" else f"{memory.held:,}",
    )
    return f"{_fitted(row.name, row.algorithm, width)}{''.join(f'{cell:>{CELL}}' for cell in cells)}"


def hot_panel(found: Iterable[HotKey] | None, part: str, most: int | None = None) -> list[str]:
    """The heading and a line for each of the first `most` hot keys of limiters with `part` in their name, if any."""
    shown = [one for one in found or () if part.lower() in one.limiter.lower()][:most]
    return [HOT_HEADING, *map(_hot_line_of, shown)] if shown else []


def _hot_line_of(one: HotKey) -> str:
    ago = "" if one.denied_ago is None else f"{one.denied_ago:,.0f} s"
    cells = (f"{one.denied:,}" if one.denied else "", ago, f"{one.allowed:,}" if one.allowed else "")
    return f"{_fitted(one.limiter, one.algorithm, NAME)}{one.digest:>16}{''.join(f'{cell:>{CELL}}' for cell in cells)}"


def width_of_names(rows: Iterable[Row]) -> int:
    """The width of a first column that cuts no name."""
    return max((cell_len(_named(row.name, row.algorithm)) + 1 for row in rows), default=NAME)


def _named(name: str, algorithm: str) -> str:
    return printable(f"{name} ({algorithm})")


@lru_cache(1024)
def _fitted(name: str, algorithm: str, width: int) -> str:
    """The first column: text that others have made, as wide as the column."""
    return set_cell_size(_named(name, algorithm), width - 1) + " "


def summary(name: str, frame: Frame) -> tuple[str, str]:
    """The first lines: the store, and the sums of its limiters."""
    threads = "" if frame.threads is None else f", {counted(frame.threads, 'thread')}"
    parts = [
        f"{name}: {frame.live_keys:,} of {frame.keys:,} keys live ({frame.live_keys / frame.keys:.0%})",
        f"{frame.bytes / MIB:,.1f} MiB",
        f"{counted(frame.processes, 'process', 'processes')}{threads}",
    ]
    if frame.rules_version:
        parts.append(f"live rules {frame.rules_version}")
    if frame.removed:
        parts.append("REMOVED")
    allowed, denied = (sum(row.per_second[count] for row in frame.limiters) for count in ("allowed", "denied"))
    sums = [f"{_rate(allowed) or 0}/s allowed", f"{_rate(denied) or 0}/s denied"]
    if denied:
        sums.append(f"{denied / (allowed + denied):.1%} denied")
    if frame.policy_per_second:
        sums.append(f"{_rate(frame.policy_per_second)}/s decided without Redis")
    return ", ".join(parts), ", ".join(sums)


def sparkline(values: list[float], *, is_plain: bool) -> str:
    """A bar for each value, as high as its part of the greatest."""
    bars = PLAIN_BARS if is_plain else BARS
    most = max(values, default=0.0)
    # Any decision at all is a visible bar.
    return "".join(bars[0 if value <= 0 else max(1, round(value / most * (len(bars) - 1)))] for value in values)


def _rate(value: float) -> str:
    if not value:
        return ""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
