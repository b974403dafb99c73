"""Subjects of several processes or threads."""

from __future__ import annotations

import functools
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Final

from forebay.benchmarking.limiters import GENEROUS
from forebay.benchmarking.subjects import PROCESSES, THREADS, Subject
from forebay.benchmarking.workers import Task, Workers, started, started_threads
from forebay.core.kinds import TokenBucket
from forebay.store import Store

__all__ = ["ALLOWED", "DENIED", "OWN", "Waits", "has_gil", "of_crowds"]

MOST_WORKERS: Final = 64
DURATION_NS: Final = 10_000_000
ROUNDS_PER_ROUND: Final = 5
"""A round of workers takes as long as so many of a loop."""
OWN_KEYS: Final = 100
CHUNK: Final = 1000
OWN, DENIED, ALLOWED = f"{OWN_KEYS} own keys each", "one denied key", "one allowed key"


class Waits(list[float]):
    """The share of each worker's time, round by round, in which something else ran on its core."""


def has_gil() -> bool:
    """Whether threads of this interpreter take turns."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def of_crowds(stack: ExitStack, waits: Waits) -> Iterator[Subject]:
    """One, two, four ... workers, up to one per core, which end with `stack`. Forks: call it before threads start.

    The processes share a store without a name, so nothing remains of it, however this process ends.
    """
    cores = sorted(os.sched_getaffinity(0))[:MOST_WORKERS]
    store = stack.enter_context(Store.private(keys=100_000))
    generous = TokenBucket(store, "generous", **GENEROUS)
    strict = TokenBucket(store, "strict", "1/day")
    strict.allow("denied")

    def tasks(number: int) -> Mapping[str, Task]:
        # Strings of this worker's own: without the GIL, threads that use one object take turns at counting its
        # references.
        own = [f"worker:{number}:{index % OWN_KEYS}" for index in range(CHUNK)]
        denied, allowed = "".join(["den", "ied"]), "".join(["allow", "ed"])
        return {
            OWN: (generous.allow, own),
            DENIED: (strict.allow, [denied] * CHUNK),
            ALLOWED: (generous.allow, [allowed] * CHUNK),
        }

    def fault() -> str:
        counts = store.stats().limiters
        right = counts["generous"].denied == 0 and counts["strict"].allowed == 1
        return "" if right else f"requests were denied or allowed that must not be: {counts}"

    yield from _subjects(PROCESSES, stack.enter_context(started(tasks, cores, "fork")), len(cores), waits, fault)
    if not has_gil():
        yield from _subjects(THREADS, stack.enter_context(started_threads(tasks, cores)), len(cores), waits, fault)


def _subjects(group: str, workers: Workers, most: int, waits: Waits, fault: Callable[[], str]) -> Iterator[Subject]:
    for task in (OWN, DENIED, ALLOWED):
        for count in sorted({*(2**power for power in range(most.bit_length())), most}):
            measure = functools.partial(_measure, workers, task, count, waits)
            yield Subject(group, f"{task}: {count}", measure, fault, workers=count)


def _measure(workers: Workers, task: str, count: int, waits: Waits, rounds: int) -> float:
    """The time per decision of all workers together."""

    def one_round() -> float:
        paces = workers.run(task, range(count), DURATION_NS)
        waits.extend(pace.waited_share for pace in paces)
        return 1e9 / sum(pace.per_second for pace in paces)

    return statistics.median(one_round() for _ in range(max(1, rounds // ROUNDS_PER_ROUND)))
