"""Threads of one process, with and without the GIL: the decisions per second of all, against the sum of each alone."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from typing import Final

import pytest
from conftest import GENEROUS
from pytest_benchmark.fixture import BenchmarkFixture
from workers import Workload, undisturbed_rates

from forebay import Store, TokenBucket
from forebay.benchmarking.workers import started_threads

HAS_GIL: Final = getattr(sys, "_is_gil_enabled", lambda: True)()

KINDS: Final = {
    "own": "`allow`, each thread on 100 keys of its own",
    "denied": "`allow`, all threads on one denied key",
}


@pytest.mark.parametrize("kind", KINDS)
def bench_threads(
    benchmark: BenchmarkFixture,
    quick: bool,
    all_cores: list[int],
    store_name: str,
    say: Callable[[str], None],
    kind: str,
) -> None:
    rounds, duration_ns = (3, 10_000_000) if quick else (15, 20_000_000)
    os.sched_setaffinity(0, all_cores)
    counts = range(2, len(all_cores) + 1)
    # By number of threads, for each round: the total in decisions per second, and as a share of linear.
    totals: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    with Store(store_name, keys=100_000) as store:
        bucket = TokenBucket(store, "strict", "1/day") if kind == "denied" else TokenBucket(store, "api", **GENEROUS)
        bucket.allow("user:42:abcdefg")
        with started_threads(Workload(kind, bucket=bucket), all_cores) as workers:

            def one_round() -> None:
                alone = [undisturbed_rates(workers, kind, [number], duration_ns) for number in range(len(all_cores))]
                for count in counts:
                    together = undisturbed_rates(workers, kind, range(count), duration_ns)
                    if together and all(alone[:count]):
                        totals[count].append((sum(together), sum(together) / sum(rate for (rate,) in alone[:count])))

            benchmark.pedantic(one_round, rounds=rounds)
        total = store.stats().total
        if total.denied == 0 if kind == "denied" else total.denied:
            raise AssertionError(f"not the intended workload: {store.stats()}")
    title = f"{KINDS[kind]}, with{'' if HAS_GIL else 'out'} the GIL"
    # 1.9 times one thread are 0.95 of linear with two.
    bar = None if HAS_GIL else 0.95
    benchmark.extra_info.update(
        title=title, section="Many processes", workers="threads", bar=bar, rounds=rounds, totals=totals
    )
    shares = ", ".join(
        f"{count}: {statistics.median(share for _, share in pairs):.2f}" if pairs else f"{count}: ?"
        for count, pairs in totals.items()
    )
    say(f"             x linear, {shares}")
