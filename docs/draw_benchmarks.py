"""Draw what one decision costs, for README.md: figures of the run in benchmarks.json, by what a limit counts for.

Run without arguments to write the picture; with ``--check`` to fail when it differs.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from drawing import BLUE, DOCS, GREY, INK, PALE_BLUE, Drawing, update

FIGURES = DOCS / "benchmarks.json"

# The axis is logarithmic, in ns.
LOW, HIGH = 10, 1_000_000
MARKS = {10: "10 ns", 100: "100 ns", 1_000: "1 µs", 10_000: "10 µs", 100_000: "100 µs"}


@dataclass(frozen=True)
class Bar:
    """A row of the run: its section, and its name without the parentheses at its end."""

    label: str
    section: str
    row: str

    @property
    def ours(self) -> bool:
        return self.label.startswith("forebay")


CACHED, BEYOND, PEERS = "One process, in cache", "One process, beyond the cache", "Others, allowed"
GROUPS = {
    "The limit counts for one process": [
        Bar("a dict, no lock", "Floors", "token bucket in a dict: no lock, not shared"),
        Bar("rust-py-rate-limit", PEERS, "`rust-py-rate-limit`, fixed window"),
        Bar("token_bucket", PEERS, "`token_bucket`"),
        Bar("limits, in memory", PEERS, "`limits` in memory, fixed window"),
        Bar("throttled-py, in memory", PEERS, "`throttled-py` in memory, GCRA"),
        Bar("pyrate-limiter", PEERS, "`pyrate-limiter`, token bucket, one for all keys"),
    ],
    "The limit counts for the host": [
        Bar("forebay, allow", CACHED, "`allow`, one hot key, allowed"),
        Bar("forebay, hit with a Decision", CACHED, "`hit` with a full `Decision`, allowed"),
        Bar("forebay, 10 million live keys", BEYOND, "`allow`, random among 10,000,000 live keys"),
        Bar("multiprocessing, lock and value", PEERS, "`multiprocessing` lock and value, one key, one process"),
        Bar("multiprocessing, manager", PEERS, "`multiprocessing` manager: dict and lock"),
    ],
    "The limit counts for the cluster: all hosts that reach one Redis": [
        Bar("forebay, leased in batches", "Over Redis", "leased `TokenBucket.allow`, with all it borrows"),
        Bar("forebay, synced at intervals", "Synced over Redis", "`allow`, token bucket"),
        Bar("forebay, every decision in Redis", "Over Redis", "`TokenBucket.allow`"),
        Bar("limits, in Redis", "Over Redis", "`limits`, fixed window: a bool"),
        Bar("throttled-py, in Redis", "Over Redis", "`throttled-py`, GCRA"),
    ],
}


class Chart(Drawing):
    def at(self, cost: float) -> float:
        return self.left + (self.right - self.left) * math.log(cost / LOW) / math.log(HIGH / LOW)


def costs_of(figures: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The median costs in ns, by section and row; of equal rows the last."""
    return {
        (section, re.sub(r" \([^)]*\)$", "", row["what"])): row["cost"]
        for section, rows in figures["sections"].items()
        for row in rows
    }


def draw(figures: dict[str, Any]) -> str:
    costs = costs_of(figures)
    groups = {
        title: sorted(((costs[bar.section, bar.row], bar) for bar in bars), key=lambda pair: pair[0])
        for title, bars in GROUPS.items()
    }
    step, gap, top = 22, 38, 66
    floor = top + step * sum(map(len, groups.values())) + gap * (len(groups) - 1) + 4
    drawing = Chart(floor + 28, 260, "What one decision costs, and what the limit counts for", "draw_benchmarks.py")
    drawing.text(drawing.right, 26, "median cost of one decision, logarithmic", anchor="end", more='font-size="12"')
    for mark, label in MARKS.items():
        drawing.text(drawing.at(mark), floor + 16, label, anchor="middle")
    base = top
    for title, bars in groups.items():
        drawing.text(16, base - 14, title, more='font-weight="600"')
        lines = "".join(f"M{drawing.at(mark):g} {base}v{step * len(bars)}" for mark in MARKS)
        drawing.parts.append(f'<path d="{lines}" stroke="{GREY}"/>')
        for cost, bar in bars:
            drawing.label(base + 15, bar.label)
            drawing.blocks([(LOW, cost, base + 18, base + 3)], BLUE if bar.ours else PALE_BLUE)
            text = f"{cost:,.1f} ns" if cost < 100 else f"{cost:,.0f} ns"
            drawing.text(drawing.at(cost) + 6, base + 15, text, colour=BLUE if bar.ours else INK)
            base += step
        base += gap
    return drawing.finish()


def main() -> None:
    wanted = {"benchmarks/decisions.svg": draw(json.loads(FIGURES.read_text()))}
    update(wanted, "the figures in docs/benchmarks.json", "draw_benchmarks.py")


if __name__ == "__main__":
    main()
