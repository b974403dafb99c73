"""The model of ``scale_model.py`` beside reality: ``python benchmarks/scale_reality.py``.

Three hosts are real processes, each with a store of its own, and share a real Redis. The model gets the same traffic,
and the round trip that was measured. Requests of a host that come too late for their time follow at once. The figures
are those of the third window.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import redis
from redis_server import redis_on_a_free_port
from rich.console import Console
from rich.progress import Progress
from scale_model import Fleet, scaled_cost, simulate, strict_cost, zipf
from scale_simulation import new_table

from forebay import FixedWindow, Store
from forebay.redis import LeasedStore, RedisStore, SyncedStore

FLEET = Fleet(3, limit=60, period_s=10)
KEYS, DECISIONS = 200, 300
RATES = tuple(10 ** (exponent / 4) for exponent in range(-4, 11))
MODES = ("strict", "leased", "synced")


def limiter_of(mode: str, port: int, stack: ExitStack) -> Any:
    redis_store = stack.enter_context(RedisStore(f"redis://127.0.0.1:{port}"))
    store: Any = redis_store
    if mode != "strict":
        host = stack.enter_context(Store.private(keys=8 * KEYS))
        if mode == "leased":
            store = stack.enter_context(LeasedStore(redis_store, host, lease=FLEET.lease_s, share=FLEET.share))
        else:
            store = stack.enter_context(SyncedStore(redis_store, host, FLEET.interval_s, keys=2 * KEYS))
    return FixedWindow(store, "api", FLEET.rate_text)


def work(mode: str, port: int, number: int, begin_s: float, counts: Any) -> None:
    """One host, for three windows. Puts what it has counted in the third into `counts`."""
    draw = random.Random(number)
    edges = list(itertools.accumulate(rate for _, rate in zipf(KEYS, DECISIONS / FLEET.hosts)))
    requested: Counter[int] = Counter()
    allowed: Counter[int] = Counter()
    waited, busy_s = 0, 0.0
    usual_s, end_s = begin_s + 2 * FLEET.period_s, begin_s + 3 * FLEET.period_s
    with ExitStack() as stack:
        limiter = limiter_of(mode, port, stack)
        at_s = begin_s
        while (at_s := at_s + draw.expovariate(DECISIONS / FLEET.hosts)) < end_s:
            key = bisect.bisect(edges, draw.uniform(0, edges[-1]))
            time.sleep(max(at_s - time.time(), 0))
            is_allowed = limiter.allow_now(f"{key}") if mode == "leased" else None
            waits = is_allowed is None and mode != "synced"
            if is_allowed is None:
                is_allowed = limiter.allow(f"{key}")
            if usual_s <= at_s:
                requested[key] += 1
                allowed[key] += is_allowed
                waited += waits
        busy_s = time.time() - end_s
    counts.put((requested, allowed, waited, busy_s))


def seen_by(client: redis.Redis) -> tuple[float, float, float]:
    """Scripts, bytes of the network, and seconds of the processor, until now."""
    stats, network, processor = client.info("commandstats"), client.info("stats"), client.info("cpu")
    return (
        stats.get("cmdstat_evalsha", {"calls": 0})["calls"],
        network["total_net_input_bytes"] + network["total_net_output_bytes"],
        processor["used_cpu_user"] + processor["used_cpu_sys"],
    )


def measured(mode: str, port: int) -> Iterator[str]:
    """The cells of a row."""
    with redis.Redis(port=port) as client:
        client.flushall()
        begin_s = (time.time() // FLEET.period_s + 1) * FLEET.period_s
        if begin_s - time.time() < 2:
            begin_s += FLEET.period_s
        spawn = multiprocessing.get_context("spawn")
        counts: Any = spawn.Queue()
        workers = [
            spawn.Process(target=work, args=(mode, port, number, begin_s, counts)) for number in range(FLEET.hosts)
        ]
        for worker in workers:
            worker.start()
        time.sleep(begin_s + 2 * FLEET.period_s - time.time())
        before = seen_by(client)
        time.sleep(begin_s + 3 * FLEET.period_s - time.time())
        after = seen_by(client)
        results = [counts.get() for _ in workers]
        for worker in workers:
            worker.join()
    requested = sum((result[0] for result in results), Counter[int]())
    allowed = sum((result[1] for result in results), Counter[int]())
    entitled = sum(min(count, FLEET.limit) for count in requested.values())
    operations, sent, processor_s = (now - then for now, then in zip(after, before, strict=True))
    yield f"{operations / FLEET.period_s:,.0f}"
    yield f"{sent / FLEET.period_s / 1000:,.0f}"
    yield f"{sum(result[2] for result in results) / requested.total():.2%}"
    yield f"{allowed.total() / entitled:.4f}"
    yield f"{1e6 * processor_s / operations:.1f}"
    yield f"{max(result[3] for result in results):.2f} s"


def round_trip_s(port: int) -> float:
    with redis.Redis(port=port) as client:
        trips_s = []
        for _ in range(501):
            before_s = time.perf_counter()
            client.ping()
            trips_s.append(time.perf_counter() - before_s)
    return sorted(trips_s)[250]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    table = new_table(
        "mode", "", "operations/s", "kB/s", "wait", "admitted", "us of Redis for an operation", "late at the end"
    )
    with redis_on_a_free_port() as port, Progress(console=Console(stderr=True), transient=True) as progress:
        trip_s = round_trip_s(port)
        task = progress.add_task("three processes", total=len(MODES))
        rows = {}
        for mode in MODES:
            rows[mode] = list(measured(mode, port))
            progress.advance(task)
        task = progress.add_task("model", total=(len(RATES) + 2) * 3 * FLEET.period_s)
        curves = simulate(FLEET, RATES, partial(progress.advance, task), seed=1, rtt_median_s=trip_s)
    for mode in MODES:
        if mode == "strict":
            cost = strict_cost(curves[mode].points[0], KEYS, DECISIONS)
        else:
            cost = scaled_cost(FLEET, curves[mode], mode, KEYS, DECISIONS)
        table.add_row(mode, "measured", *rows[mode])
        figures = (
            f"{cost.operations:,.0f}",
            f"{1000 * cost.megabytes:,.0f}",
            f"{cost.waited:.2%}",
            f"{cost.admitted:.4f}",
        )
        table.add_row("", "model", *figures, "", "")
    console = Console(width=160)
    console.print(f"Median round trip of a PING: {1000 * trip_s:.3f} ms")
    console.print(table)


if __name__ == "__main__":
    main()
