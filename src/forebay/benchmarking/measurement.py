"""Measuring all subjects, in several passes."""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Final

from forebay._version import __version__
from forebay.benchmarking.crowds import Waits, has_gil, of_crowds
from forebay.benchmarking.loops import of_floors, of_keys, of_limiters
from forebay.benchmarking.machine import huge_pages, machine
from forebay.benchmarking.run import Figure, LeftOut, Run
from forebay.benchmarking.subjects import Subject

__all__ = ["Progress", "Settings", "ready"]

FILLED_STORES: Final = 3

Progress = Callable[[str], Callable[[int, int | None], None]]
"""Begins a stage of that name, and returns what gets the steps done and their total."""


@dataclass(frozen=True)
class Settings:
    keys: int
    """Live keys of the subjects with many keys. Their stores take 74 bytes for each."""
    is_quick: bool = False
    redis_url: str | None = None

    @property
    def passes(self) -> int:
        return 3 if self.is_quick else 7

    @property
    def rounds(self) -> int:
        """Rounds of each subject in each pass."""
        return 5 if self.is_quick else 25


@contextmanager
def ready(settings: Settings) -> Iterator[Callable[[Progress], Run]]:
    """A function that measures. Processes are forked before the block, so it may start threads.

    The stores have no names, so nothing remains of them, however this process ends. Raises ``SegmentSpaceError`` if
    they don't fit, and for Redis what ``of_redis`` raises.
    """
    with ExitStack() as stack:
        waits = Waits()
        crowds = list(of_crowds(stack, waits))
        yield lambda progress: _measured(settings, crowds, waits, progress)


def _measured(settings: Settings, crowds: list[Subject], waits: Waits, progress: Progress) -> Run:
    with ExitStack() as stack:
        filling = progress("filling stores")
        filled = 0

        def advance(count: int) -> None:
            nonlocal filled
            filled += count
            filling(filled, FILLED_STORES * settings.keys)

        facts = machine()
        over_redis: list[Subject] = []
        if settings.redis_url is not None:
            from forebay.benchmarking.over_redis import of_redis

            over_redis, facts["Redis"] = of_redis(stack, settings.redis_url)
        many, crowded = of_keys(stack, settings.keys, settings.passes * settings.rounds, advance)
        subjects = [*of_floors(), *of_limiters(stack), *many, *crowds, *over_redis]
        facts |= {**huge_pages(), "GIL": "on" if has_gil() else "off"}
        before = crowded.stats().total
        passes = _passes(subjects, settings, progress("measuring"))
        after = crowded.stats().total
        decisions = after.allowed + after.denied - before.allowed - before.denied
        figures, left_out = [], []
        for subject, costs in zip(subjects, passes, strict=True):
            if reason := subject.fault():
                left_out.append(LeftOut(subject.group, subject.name, reason))
            else:
                figures.append(Figure(subject.group, subject.name, costs, subject.workers))
    return Run(
        date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        forebay=__version__,
        keys=settings.keys,
        is_quick=settings.is_quick,
        machine=facts,
        crowded_evictions=(after.evicted - before.evicted) / max(decisions, 1),
        waited_share=statistics.fmean(waits) if waits else 0.0,
        figures=figures,
        left_out=left_out,
    )


def _passes(
    subjects: list[Subject], settings: Settings, progress: Callable[[int, int | None], None]
) -> list[list[float]]:
    """The costs of each subject, pass by pass."""
    costs: list[list[float]] = [[] for _ in subjects]
    total = settings.passes * len(subjects)
    for number in range(settings.passes):
        for index, subject in enumerate(subjects):
            costs[index].append(subject.measure(settings.rounds))
            progress(number * len(subjects) + index + 1, total)
    return costs
