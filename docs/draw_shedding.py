"""Draw goodput and latency under overload, with and without load shedding, for shedding.md: figures of shedding.json.

benchmarks/shedding_simulation.py and benchmarks/shedding_gunicorn.py write that file. Run without arguments to write
the pictures; with ``--check`` to fail when one of them differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

from drawing import BLUE, DOCS, GREY, INK, PALE_BLUE, PURPLE, VERMILION, WIDTH, Drawing, update

FIGURES = DOCS / "shedding.json"
COLOURS = {
    "nothing": VERMILION,
    "Gradient2": BLUE,
    "Gradient2, reserved": PALE_BLUE,
    "AIMD": INK,
    "BusyWorkers": PURPLE,
}
LEFT, GAP, PANEL_HEIGHT, TOP = 60, 70, 180, 66
LATENCIES = {0.03: "30 ms", 0.1: "100 ms", 0.3: "300 ms", 1.0: "1 s", 3.0: "3 s", 10.0: "10 s", 100.0: "100 s"}

Figures = dict[str, dict[str, list[float]]]


def panel(
    drawing: Drawing,
    left: float,
    width: float,
    title: str,
    lines: dict[str, list[float]],
    marks: dict[float, str],
    height_of: Callable[[float], float],
) -> None:
    floor = TOP + PANEL_HEIGHT
    drawing.text(round(left), TOP - 8, title, more='font-size="12"')
    seconds = max(map(len, lines.values()))
    for second in range(0, seconds + 1, seconds // 4):
        x = left + width * second / seconds
        drawing.parts.append(f'<path d="M{x:.1f} {TOP}V{floor}" stroke="{GREY}"/>')
        drawing.text(round(x, 1), floor + 16, f"{second} s", anchor="middle", more='font-size="12"')
    for value, label in marks.items():
        y = floor - PANEL_HEIGHT * height_of(value)
        drawing.parts.append(f'<path d="M{left:.1f} {y:.1f}h{width:.1f}" stroke="{GREY}"/>')
        drawing.text(round(left - 6, 1), round(y + 4, 1), label, anchor="end", more='font-size="12"')
    for name, values in lines.items():
        path = "L".join(
            f"{left + width * (second + 0.5) / seconds:.1f} "
            f"{floor - PANEL_HEIGHT * min(max(height_of(value), 0), 1):.1f}"
            for second, value in enumerate(values)
        )
        drawing.parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')


def logarithmic(marks: Sequence[float]) -> Callable[[float], float]:
    low, high = marks[0], marks[-1]
    return lambda value: math.log(max(value, low) / low) / math.log(high / low)


def picture(title: str, figures: Figures, longest_s: float) -> str:
    drawing = Drawing(TOP + PANEL_HEIGHT + 30, LEFT, title, "draw_shedding.py")
    drawing.text(16, 26, title, more='font-weight="600"')
    at = WIDTH - 28.0
    for name in reversed(figures):
        drawing.text(at, 26, name, anchor="end", colour=COLOURS[name])
        at -= 8 * len(name) + 16
    width = (WIDTH - 28 - LEFT - GAP) / 2
    goodput = {name: one["goodput"] for name, one in figures.items()}
    latency = {name: one["p99_s"] for name, one in figures.items()}
    parts = {part / 4: f"{25 * part}%" for part in range(6)}
    panel(drawing, LEFT, width, "answered within 1 s, of the capacity", goodput, parts, lambda part: part / 1.25)
    marks = {mark: label for mark, label in LATENCIES.items() if mark <= longest_s}
    panel(drawing, LEFT + width + GAP, width, "99th percentile of latency", latency, marks, logarithmic([*marks]))
    return drawing.finish()


def pictures() -> dict[str, str]:
    """Each picture's text, by its path in docs/pictures."""
    known = json.loads(FIGURES.read_text())
    return {
        "shedding/simulation.svg": picture("Three times the capacity: simulated", known["simulation"], 100.0),
        "shedding/gunicorn.svg": picture("Three times the capacity: under gunicorn", known["gunicorn"], 1.0),
    }


def main() -> None:
    update(pictures(), "docs/shedding.json", "draw_shedding.py")


if __name__ == "__main__":
    main()
