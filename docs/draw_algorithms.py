"""Draw what each limiter allows of the same arrivals, for algorithms.md: the real limiters, with a clock set by hand.

Run without arguments to write the pictures; with ``--check`` to fail when one of them differs, or when an example in
algorithms.md gives something else than it says.
"""

from __future__ import annotations

import doctest
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drawing import BLUE, DOCS, END, INK, PALE_BLUE, PERIOD, PURPLE, VERMILION, Drawing, update

import forebay
from forebay.testing import ManualClock

# In ms.
WORK = 2_500

# A steady rate of 1.25 per second, a pause, a burst across the edge of a window at 20 s, a second burst.
ARRIVALS = [
    *range(500, 9_000, 800),
    *range(18_500, 21_500, 125),
    *range(22_300, 31_000, 800),
    *range(33_000, 34_500, 100),
    *range(35_300, END, 800),
]


@dataclass(frozen=True)
class Traffic:
    """The results of one limiter for the arrivals."""

    allowed: list[bool]
    # When allowed arrivals depart, and (time, number that counts) at each change.
    went: list[int]
    counts: list[tuple[int, int]]

    @property
    def most(self) -> int:
        return max(count for _, count in self.counts)

    def of(self, allowed: bool) -> list[int]:
        return [arrival for arrival, outcome in zip(ARRIVALS, self.allowed, strict=True) if outcome == allowed]


def counts_of(times: list[int], span: int) -> list[tuple[int, int]]:
    """(time, number of `times` in the last `span`) at each change."""
    count = 0
    counts = {0: 0}
    for time, change in sorted([(time, 1) for time in times] + [(time + span, -1) for time in times]):
        count += change
        counts[time] = count
    return list(counts.items())


def asked(limiter: Any, clock: ManualClock) -> Traffic:
    allowed = []
    for arrival in ARRIVALS:
        clock.set(arrival / 1000)
        allowed.append(limiter.allow("ada"))
    went = [arrival for arrival, outcome in zip(ARRIVALS, allowed, strict=True) if outcome]
    return Traffic(allowed, went, counts_of(went, PERIOD))


def queued(limiter: Any, clock: ManualClock) -> Traffic:
    places = []
    for arrival in ARRIVALS:
        clock.set(arrival / 1000)
        places.append(limiter.reserve("ada"))
    went = [place.due_ns // 1_000_000 for place in places if place]
    return Traffic([place.allowed for place in places], went, counts_of(went, PERIOD))


def held(limiter: Any, clock: ManualClock) -> Traffic:
    allowed = []
    leases: list[tuple[int, Any]] = []
    for arrival in ARRIVALS:
        while leases and leases[0][0] <= arrival:
            end, lease = leases.pop(0)
            clock.set(end / 1000)
            lease.release()
        clock.set(arrival / 1000)
        lease = limiter.acquire("ada")
        allowed.append(lease.allowed)
        if lease:
            leases.append((arrival + WORK, lease))
    went = [arrival for arrival, outcome in zip(ARRIVALS, allowed, strict=True) if outcome]
    return Traffic(allowed, went, counts_of(went, WORK))


@dataclass(frozen=True)
class Subject:
    """One limiter; its code is shown and run."""

    title: str
    code: str
    run: Callable[[Any, ManualClock], Traffic] = asked
    counted: str = f"in any {PERIOD // 1000} s"
    axis: tuple[int, ...] = (0, 10, 20)  # the second is the limit

    @property
    def queues(self) -> bool:
        return self.run is queued


SUBJECTS = [
    Subject("token bucket", 'TokenBucket(store, "api", "10 per 10 seconds")'),
    Subject(
        "token bucket, intervals",
        'TokenBucket(store, "api", "5 per 5 seconds", burst=10, refill="interval")',
    ),
    Subject("leaky bucket", 'LeakyBucket(store, "api", "10 per 10 seconds", capacity=5)', queued),
    Subject("minimum interval", 'MinInterval(store, "api", "1s")'),
    Subject("fixed window", 'FixedWindow(store, "api", "10 per 10 seconds")'),
    Subject("sliding window", 'SlidingWindow(store, "api", "10 per 10 seconds")'),
    Subject("bucketed window", 'BucketedWindow(store, "api", "10 per 10 seconds", buckets=5)'),
    Subject("sliding log", 'SlidingLog(store, "api", "10 per 10 seconds", keys=100)'),
    Subject("concurrency", 'Concurrency(store, "api", 4)', held, "in flight", axis=(0, 4, 8)),
    Subject(
        "all of", 'AllOf(MinInterval(store, "gap", "0.5s"), SlidingLog(store, "api", "10 per 10 seconds", keys=100))'
    ),
]


def picture(subject: Subject, traffic: Traffic) -> str:
    """The arrivals as ticks, allowed ones above a line and denied ones below; under them the number that counts."""
    floor = 290 if subject.queues else 250
    unit = 120 / subject.axis[-1]
    drawing = Drawing(floor + 28, 92, f"{subject.title}: what it allows of the same arrivals", "draw_algorithms.py")
    drawing.text(16, 26, subject.code, more='font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13"')
    drawing.axis(44, floor)
    drawing.label(62, "allowed", BLUE)
    drawing.label(86, "denied", VERMILION)
    drawing.ticks(traffic.of(True), 46, 69, BLUE)
    drawing.line(70)
    drawing.ticks(traffic.of(False), 71, 88, VERMILION)
    if subject.queues:
        drawing.label(122, "may go", BLUE)
        drawing.ticks(traffic.went, 106, 129, BLUE)
        drawing.line(130)
    blocks = [(start, min(end, END), count) for (start, count), (end, _) in pairwise(traffic.counts) if start < END]
    limit = subject.axis[1]
    drawing.blocks([(a, b, floor, floor - unit * min(n, limit)) for a, b, n in blocks if n], PALE_BLUE)
    drawing.blocks([(a, b, floor - unit * limit, floor - unit * n) for a, b, n in blocks if n > limit], PURPLE)
    for value in subject.axis:
        drawing.label(floor - unit * value + 5, str(value))
    drawing.line(floor)
    drawing.line(floor - unit * limit, 'stroke-dasharray="5 4"')
    # No count is this high before the first burst.
    drawing.text(drawing.left + 8, floor - 109, f"{subject.counted}: at most {traffic.most}")
    return drawing.finish()


def overview(drawn: list[tuple[Subject, Traffic]]) -> str:
    """The departures of each limiter, a line for each."""
    step, top = 34, 70
    floor = top + step * len(drawn) + 22
    drawing = Drawing(floor + 28, 340, "What each algorithm lets go of the same arrivals", "draw_algorithms.py")
    drawing.axis(28, floor)
    for x, heading in ((226, "allowed"), (318, f"most in {PERIOD // 1000} s")):
        drawing.text(x, 24, heading, anchor="end", more='font-size="12"')
    drawing.text(16, top - 8, "arrivals")
    drawing.text(226, top - 8, str(len(ARRIVALS)), anchor="end")
    drawing.text(318, top - 8, str(max(count for _, count in counts_of(ARRIVALS, PERIOD))), anchor="end")
    drawing.ticks(ARRIVALS, top - 22, top - 1, INK)
    drawing.line(top)
    for row, (subject, traffic) in enumerate(drawn, start=1):
        base = top + step * row + 14
        drawing.text(16, base - 8, subject.title)
        drawing.text(226, base - 8, str(len(traffic.went)), anchor="end")
        drawing.text(318, base - 8, str(max(count for _, count in counts_of(traffic.went, PERIOD))), anchor="end")
        drawing.ticks(traffic.went, base - 22, base - 1, BLUE)
        drawing.line(base)
    return drawing.finish()


def pictures() -> dict[str, str]:
    """Each picture's text, by its path in docs/pictures."""
    drawn = []
    for subject in SUBJECTS:
        clock = ManualClock()
        with forebay.Store.private(keys=100, clock=clock) as store:
            limiter = eval(subject.code, {**vars(forebay), "store": store})
            drawn.append((subject, subject.run(limiter, clock)))
    return {
        "overview.svg": overview(drawn),
        **{f"{re.sub('[ ,]+', '-', subject.title)}.svg": picture(subject, traffic) for subject, traffic in drawn},
    }


class Fences(doctest.DocTestParser):
    """Ends an example's expected output at the end of the code block."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        return super().parse(string.replace("```", ""), name)


def main() -> None:
    update(pictures(), "what the limiters allow", "draw_algorithms.py")
    if "--check" in sys.argv[1:]:
        failed, _ = doctest.testfile(str(DOCS / "algorithms.md"), module_relative=False, parser=Fences())
        sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
