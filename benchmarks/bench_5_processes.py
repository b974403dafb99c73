"""Concurrent processes: the decisions per second of all, against the sum of what each decides alone on its core."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import pytest
from baselines import LockedBucket
from pytest_benchmark.fixture import BenchmarkFixture
from workers import Workload, undisturbed_rates

from forebay import Store
from forebay.benchmarking.workers import started

KINDS = {
    "control": ("control: a dict in each process, nothing shared", None),
    "own": ("`allow`, each process on 100 keys of its own", 0.9),
    "denied": ("`allow`, all on one denied key", 0.9),
    "allowed": ("`allow`, all on one allowed key", None),
    "locked": ("`multiprocessing` lock and value, all on one allowed key", None),
}


@pytest.mark.parametrize("kind", KINDS)
def bench_processes(
    benchmark: BenchmarkFixture,
    quick: bool,
    all_cores: list[int],
    store_name: str,
    say: Callable[[str], None],
    kind: str,
) -> None:
    title, bar = KINDS[kind]
    rounds, duration_ns = (3, 30_000_000) if quick else (15, 40_000_000)
    os.sched_setaffinity(0, all_cores)
    counts = range(2, len(all_cores) + 1)
    # By number of processes, for each round: the total in decisions per second, and as a share of linear.
    totals: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    locked = LockedBucket(1000, 2_000_000_000) if kind == "locked" else None
    with (
        Store(store_name, keys=100_000) as store,
        started(Workload(kind, store_name, locked), all_cores, "spawn") as workers,
    ):

        def one_round() -> None:
            alone = [undisturbed_rates(workers, kind, [number], duration_ns) for number in range(len(all_cores))]
            for count in counts:
                together = undisturbed_rates(workers, kind, range(count), duration_ns)
                if together and all(alone[:count]):
                    totals[count].append((sum(together), sum(together) / sum(rate for (rate,) in alone[:count])))

        benchmark.pedantic(one_round, rounds=rounds)
        check(kind, store)
    benchmark.extra_info.update(
        title=title, section="Many processes", workers="processes", bar=bar, rounds=rounds, totals=totals
    )
    shares = ", ".join(
        f"{count}: {statistics.median(share for _, share in pairs):.2f}" if pairs else f"{count}: ?"
        for count, pairs in totals.items()
    )
    say(f"             x linear, {shares}")


def check(kind: str, store: Store) -> None:
    """Check that the workload did what its name says."""
    if kind in ("control", "locked"):
        return
    total = store.stats().total
    right = {
        "own": total.denied == 0 and store.stats().live_keys == 100 * len(os.sched_getaffinity(0)),
        "denied": total.allowed == 1,
        "allowed": total.denied == 0 and store.stats().live_keys == 1,
    }[kind]
    if not right:
        raise AssertionError(f"not the intended workload: {store.stats()}")
