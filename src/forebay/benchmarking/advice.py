"""Advice on keys=, the algorithm and the mode, from the figures of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Final

from forebay.benchmarking.crowds import ALLOWED, OWN
from forebay.benchmarking.limiters import ALLOWING
from forebay.benchmarking.loops import CLOCK, crowded_name, in_batches_name, live_name
from forebay.benchmarking.run import Figure, Run
from forebay.benchmarking.subjects import FLOORS, KEYS, LEASED, LIMITERS, PROCESSES, REDIS, STRICT, SYNCED

__all__ = ["advice", "cost_text", "rate_text"]

HOT: Final = "token bucket: allow"
ALLOW: Final = frozenset(f"{name}: allow" for name in ALLOWING)
MUCH: Final = 2.0
MUCH_WAITING: Final = 0.03
MUCH_NOISE: Final = 0.1


def advice(run: Run) -> list[str]:
    """One sentence or two for each thing that was found, with its figures."""
    return [
        *_about_noise(run),
        *_about_clock(run),
        *_about_keys(run),
        *_about_algorithms(run),
        *_about_workers(run),
        *_about_redis(run),
    ]


def cost_text(ns: float) -> str:
    return f"{ns:,.1f} ns" if ns < 100 else f"{ns:,.0f} ns" if ns < 10_000 else f"{ns / 1000:,.0f} µs"


def rate_text(cost_ns: float) -> str:
    """Decisions per second at such a cost each."""
    per_second = 1e9 / cost_ns
    return f"{per_second / 1e6:,.1f} million/s" if per_second >= 1e5 else f"{per_second:,.0f}/s"


def _about_noise(run: Run) -> Iterator[str]:
    if run.waited_share > MUCH_WAITING:
        yield (
            f"Noise: other processes took {run.waited_share:.0%} of the workers' time. The figures of several "
            "processes are too high by about that much: measure again on an idle machine."
        )
    typical = statistics.median([one.range_ns / one.median_ns for one in run.figures] or [0.0])
    if typical > MUCH_NOISE:
        yield (
            f"Noise: half of the figures differ by more than {typical:.0%} from pass to pass. Smaller differences mean "
            "nothing in this run."
        )


def _about_clock(run: Run) -> Iterator[str]:
    clock, hot = run.figure(FLOORS, CLOCK), run.figure(LIMITERS, HOT)
    if clock and hot and clock.median_ns > hot.median_ns / 2 and run.machine.get("clock source") not in ("tsc", ""):
        yield (
            f"Clock: reading it takes {cost_text(clock.median_ns)} of the {cost_text(hot.median_ns)} of a decision, by "
            f"the clock source {run.machine['clock source']}. Where the machine allows tsc, decisions are cheaper."
        )


def _about_keys(run: Run) -> Iterator[str]:
    hot, live = run.figure(LIMITERS, HOT), run.figure(KEYS, live_name(run.keys))
    batch, crowded = run.figure(KEYS, in_batches_name(run.keys)), run.figure(KEYS, crowded_name(run.keys))
    if crowded and run.crowded_evictions > 0:
        yield (
            f"keys=: in a store for half of the live keys, {run.crowded_evictions:.2%} of the decisions forgot "
            "the state of another key. Give keys= at least the number of keys that are live at a time."
        )
    if hot and live and _differs(hot, live):
        text = (
            f"keys=: a decision on a random key of {run.keys:,} takes {cost_text(live.median_ns)}, "
            f"{live.median_ns / hot.median_ns:.1f} times as much as one on a hot key."
        )
        if batch and _differs(batch, live):
            text += f" If you have many keys at once, allow_many takes {cost_text(batch.median_ns)} for each."
        yield text
    share = run.machine.get("stores in huge pages")
    if live and share == "0%":
        setting = run.machine.get("huge pages in shared memory, setting") or "unknown"
        yield (
            "Huge pages: the kernel granted none to the stores, so the figures of many keys are those of small pages. "
            f"It grants them from Linux 6.1 on, unless shmem_enabled is deny: here it is {setting}."
        )


def _about_algorithms(run: Run) -> Iterator[str]:
    figures = [one for one in run.figures if one.group == LIMITERS and one.name in ALLOW]
    if not figures:
        return
    least = min(figures, key=lambda one: one.median_ns)
    same = [one for one in figures if not _differs(least, one)]
    others = sorted((one for one in figures if one not in same), key=lambda one: one.median_ns)
    text = f"Algorithm: within this run's noise, allow costs the same for {_names(same)}. Choose by their bounds."
    if others:
        most = others[-1]
        text += (
            f" {_name(most).capitalize()} costs most: {cost_text(most.median_ns)}, "
            f"{most.median_ns / least.median_ns:.1f} times as much as {_name(least)}."
        )
    yield text


def _about_workers(run: Run) -> Iterator[str]:
    most = max((one.workers for one in run.figures if one.group == PROCESSES), default=1)
    if most == 1:
        return
    for task, remark in (
        (
            ALLOWED,
            "All requests to one key change one cache line, so a limit for everybody has this ceiling on a host.",
        ),
        (OWN, ""),
    ):
        alone, together = run.figure(PROCESSES, f"{task}: 1"), run.figure(PROCESSES, f"{task}: {most}")
        if alone and together:
            times = f"{alone.median_ns / together.median_ns:.1f} times as many as one"
            if not _differs(alone, together):
                times = "as many as one within this run's noise"
            rate = rate_text(together.median_ns)
            yield f"Processes: {most} of them decide {rate} on {task}, {times}. {remark}".rstrip()


def _about_redis(run: Run) -> Iterator[str]:
    strict = run.figure(REDIS, STRICT)
    if strict is None:
        return
    for name, price in (
        (LEASED, "the hosts together never exceed the limit, and admit less by what is on loan"),
        (SYNCED, "the hosts together may exceed the limit by a bounded amount"),
    ):
        other = run.figure(REDIS, name)
        if other and strict.median_ns > MUCH * other.median_ns and _differs(strict, other):
            yield (
                f"Mode: a decision in Redis takes {cost_text(strict.median_ns)}, one of a "
                f"{name.partition(':')[0]} {cost_text(other.median_ns)}; there {price}."
            )


def _differs(one: Figure, other: Figure) -> bool:
    """Whether two figures of one run differ by more than their noise."""
    return abs(one.median_ns - other.median_ns) > one.range_ns + other.range_ns


def _name(figure: Figure) -> str:
    return figure.name.removesuffix(": allow")


def _names(figures: list[Figure]) -> str:
    return "; ".join(_name(one) for one in figures)
