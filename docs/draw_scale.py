"""Draw what limits cost a fleet, for scale.md: figures from the tables in that page, which scale_simulation.py prints.

Run without arguments to write the pictures; with ``--check`` to fail when one of them differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from drawing import BLUE, DOCS, GREY, INK, VERMILION, WIDTH, Drawing, update

PAGE = DOCS / "scale.md"
COLOURS = {"strict": INK, "leased": BLUE, "synced": VERMILION}
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
LEFT, GAP, PANEL_HEIGHT, TOP = 60, 60, 200, 78

Row = dict[str, str]


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis with a label at each of `marks`."""

    low: float
    high: float
    marks: dict[float, str]

    def part(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        return math.log(value / self.low) / math.log(self.high / self.low)


class Share(Axis):
    """A linear axis of percentages."""

    def part(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    points: list[tuple[float, float]]
    colour: str
    more: str = ""


def rows_of(page: str, heading: str) -> list[Row]:
    """The rows of the table that has a column of this heading."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    (start,) = [number for number, cells in enumerate(lines) if heading in cells]
    rows = itertools.takewhile(lambda cells: len(cells) == len(lines[start]), lines[start + 2 :])
    return [dict(zip(lines[start], cells, strict=True)) for cells in rows]


def number(text: str) -> float:
    digits, _, unit = text.partition(" ")
    return float(digits.rstrip("%").replace(",", "")) * UNITS.get(unit, 1)


def panels(
    title: str,
    across: Axis,
    up: Axis,
    what: str,
    hosts: list[str],
    lines_of: Callable[[str], list[Line]],
    more: str = "",
) -> str:
    """A panel for each number of hosts."""
    width = (WIDTH - 28 - LEFT - GAP * (len(hosts) - 1)) / len(hosts)
    height = TOP + PANEL_HEIGHT + 48
    drawing = Drawing(height, LEFT, title, "draw_scale.py")
    drawing.text(16, 26, title, more='font-weight="600"')
    at = WIDTH - 28.0
    for mode in reversed(COLOURS):
        drawing.text(at, 26, mode, anchor="end", colour=COLOURS[mode])
        at -= 58
    drawing.text(16, 48, more, more='font-size="12"')
    floor = TOP + PANEL_HEIGHT
    for place, count in enumerate(hosts):
        left = LEFT + place * (width + GAP)
        drawing.text(left, TOP - 8, f"{count} hosts", more='font-size="12"')
        for mark, label in across.marks.items():
            x = left + width * across.part(mark)
            drawing.parts.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="{GREY}"/>')
            drawing.text(round(x, 1), floor + 16, label, anchor="middle", more='font-size="12"')
        for mark, label in up.marks.items():
            y = floor - PANEL_HEIGHT * up.part(mark)
            drawing.parts.append(f'<path d="M{left} {y:.1f}h{width}" stroke="{GREY}"/>')
            drawing.text(left - 6, round(y + 4, 1), label, anchor="end", more='font-size="12"')
        for line in lines_of(count):
            path = "L".join(
                f"{left + width * across.part(x):.1f} {floor - PANEL_HEIGHT * up.part(y):.1f}" for x, y in line.points
            )
            look = f'stroke="{line.colour}" stroke-width="2" {line.more}'.rstrip()
            drawing.parts.append(f'<path d="M{path}" fill="none" {look}/>')
    drawing.text(WIDTH / 2, floor + 36, what, anchor="middle", more='font-size="12"')
    return drawing.finish()


PERCENTAGES = Share(0, 100, {mark: f"{mark} %" for mark in (0, 25, 50, 75, 100)})
RATES = Axis(0.01, 1e7, {0.01: "0.01", 1: "1", 100: "100", 10_000: "10 k", 1e6: "1 M"})


def pictures(page: str) -> dict[str, str]:
    """Each picture's text, by its path in docs/pictures."""
    by_key, by_fleet = rows_of(page, "requests/s of one key"), rows_of(page, "decisions/s")
    all_hosts = list(dict.fromkeys(row["hosts"] for row in by_key))

    def of_key(heading: str) -> Callable[[str], list[Line]]:
        def lines(hosts: str) -> list[Line]:
            rows = [row for row in by_key if row["hosts"] == hosts]
            rates = [number(row["requests/s of one key"]) for row in rows]
            if heading in ("wait", "lost in the outage"):
                # Each strict decision is a round trip, and no synced one.
                strict, synced = [100.0] * len(rates), [0.0] * len(rates)
            else:
                strict = [1.0] * len(rates) if heading == "admitted" else rates
                synced = [number(row[f"{heading}, synced"]) for row in rows]
            values = {"strict": strict, "leased": [number(row[f"{heading}, leased"]) for row in rows], "synced": synced}
            return [Line(list(zip(rates, values[mode], strict=True)), COLOURS[mode]) for mode in values]

        return lines

    def of_fleet(heading: str) -> Callable[[str], list[Line]]:
        def lines(hosts: str) -> list[Line]:
            found = []
            for mode, (keys, more) in itertools.product(COLOURS, (("100 k", ""), ("100 M", 'stroke-dasharray="5 4"'))):
                rows = [row for row in by_fleet if (row["hosts"], row["keys"]) == (hosts, keys)]
                points = [(number(row["decisions/s"]), number(row[f"{heading}, {mode}"])) for row in rows]
                found.append(Line(points, COLOURS[mode], more))
            return found

        return lines

    decisions = Axis(1e6, 1e8, {1e6: "1 M", 1e7: "10 M", 1e8: "100 M"})
    key_counts = "100,000 keys; dashed: 100 million keys"
    return {
        "scale/operations.svg": panels(
            "Operations of Redis a second for one key",
            RATES,
            RATES,
            "requests a second for that key",
            all_hosts,
            of_key("operations/s"),
        ),
        "scale/admitted.svg": panels(
            "Admitted, as a multiple of what one limiter would admit",
            RATES,
            Axis(0.1, 1000, {0.1: "0.1", 1: "1", 10: "10", 100: "100", 1000: "1000"}),
            "requests a second for that key",
            all_hosts,
            of_key("admitted"),
        ),
        "scale/shards.svg": panels(
            "Shards of Redis for a fleet",
            decisions,
            Axis(1, 1e4, {1: "1", 10: "10", 100: "100", 1000: "1000", 10_000: "10 k"}),
            "decisions a second of the fleet",
            all_hosts,
            of_fleet("shards"),
            key_counts,
        ),
        "scale/bytes.svg": panels(
            "Megabytes a second to and from Redis, of a fleet",
            decisions,
            Axis(10, 1e5, {10: "10", 100: "100", 1000: "1000", 10_000: "10 k", 1e5: "100 k"}),
            "decisions a second of the fleet",
            all_hosts,
            of_fleet("MB/s"),
            key_counts,
        ),
        "scale/waits.svg": panels(
            "Requests that wait for Redis",
            RATES,
            PERCENTAGES,
            "requests a second for that key",
            all_hosts,
            of_key("wait"),
        ),
        "scale/outage.svg": panels(
            "Requests that are lost while Redis is away for 10 s",
            RATES,
            PERCENTAGES,
            "requests a second for that key",
            all_hosts,
            of_key("lost in the outage"),
        ),
    }


def main() -> None:
    update(pictures(PAGE.read_text()), "the tables in docs/scale.md", "draw_scale.py")


if __name__ == "__main__":
    main()
