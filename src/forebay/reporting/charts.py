"""Plots as SVG, for a page that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["COLOURS", "Axis", "Line", "bars", "count_axis", "lines", "log_axis"]

# Colours that colour-blind readers can distinguish (after Okabe and Ito).
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999")
WIDTH: Final = 880
LEFT, RIGHT, TOP, HEIGHT, BOTTOM = 70, 20, 16, 220, 44
BAR_LEFT, BAR_STEP, BAR_HEIGHT = 330, 24, 15
LABEL_ROOM: Final = 90


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, with a label at each of `marks`. A logarithmic one begins above 0."""

    title: str
    low: float
    high: float
    marks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def part(self, value: float) -> float:
        """Where a value lies: 0 at the axis's beginning, 1 at its end."""
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    label: str
    colour: str
    points: Sequence[tuple[float, float]]


def count_axis(title: str, high: float, suffix: str = "") -> Axis:
    """From 0 to at least `high`, with 2 to 5 labels at round values."""
    high = high or 1.0
    step = 10.0 ** math.floor(math.log10(high))
    step *= next(factor for factor in (0.2, 0.5, 1, 2) if high <= 5 * step * factor)
    marks = tuple((step * number, f"{step * number:,.10g}{suffix}") for number in range(math.ceil(high / step) + 1))
    return Axis(title, 0, marks[-1][0], marks)


def log_axis(title: str, high: float) -> Axis:
    """From 1 to a power of 10 that is at least `high`."""
    top = max(1, math.ceil(math.log10(max(high, 1))))
    return Axis(title, 1, 10.0**top, tuple((10.0**power, f"{10**power:,}") for power in range(top + 1)), is_log=True)


def lines(across: Axis, up: Axis, series: Sequence[Line], upright: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over two axes, with labelled upright lines at some values of the first."""
    width, floor = WIDTH - LEFT - RIGHT, TOP + HEIGHT
    height = floor + BOTTOM + 20 * math.ceil(len(series) / 3)
    parts = [_text(LEFT, TOP - 5, up.title), _text(LEFT + width, floor + 34, across.title, "end")]
    for value, label in up.marks:
        y = floor - HEIGHT * up.part(value)
        parts += [f'<path class="grid" d="M{LEFT} {y:.1f}h{width}"/>', _text(LEFT - 6, y + 4, label, "end")]
    for value, label in across.marks:
        x = LEFT + width * across.part(value)
        # The last label ends where the plot ends.
        anchor = "end" if value >= across.high else "middle"
        parts += [f'<path class="grid" d="M{x:.1f} {floor}v5"/>', _text(x, floor + 18, label, anchor)]
    for value, label in upright:
        x = LEFT + width * across.part(value)
        parts += [f'<path class="mark" d="M{x:.1f} {TOP}V{floor}"/>', _text(x + 4, TOP + 12, label)]
    for number, line in enumerate(series):
        path = "L".join(
            f"{LEFT + width * across.part(x):.1f} {floor - HEIGHT * up.part(y):.1f}" for x, y in line.points
        )
        parts.append(f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="1.8"/>')
        x, y = LEFT + number % 3 * width / 3, floor + BOTTOM + 12 + 20 * (number // 3)
        parts += [f'<path d="M{x:.1f} {y - 4:.1f}h18" stroke="{line.colour}" stroke-width="3"/>']
        parts.append(_text(x + 24, y, line.label))
    return _svg(height, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str, str]]) -> str:
    """A bar for each (label, value, text at its end, colour)."""
    most = max((value for _, value, _, _ in rows), default=0) or 1
    width = WIDTH - BAR_LEFT - LABEL_ROOM
    parts = []
    for number, (label, value, text, colour) in enumerate(rows):
        y = 4 + number * BAR_STEP
        length = max(width * value / most, 0.5)
        parts.append(_text(BAR_LEFT - 8, y + 12, label, "end"))
        parts.append(f'<rect x="{BAR_LEFT}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{colour}"/>')
        parts.append(_text(BAR_LEFT + length + 6, y + 12, text))
    return f"<h3>{escape(title)}</h3>{_svg(8 + BAR_STEP * len(rows), parts)}"


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
