"""The cost of an exchange of synced hosts, and the excess that it prevents: ``python benchmarks/synced_fleet.py``.

Five hosts share one Redis and count the requests of 100,000 keys, whose frequencies are Zipf's. Each key is a client
that goes to the next host after each exchange. The hosts' clocks are set by hand, so an interval takes as long as its
work, and the figures are per exchange of one host. They are the server's own: the time of its processor and the bytes
of its network. The hot lists and the reports of an exchange are measured apart, and the fleet runs once more without
hot lists.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import redis
from redis_server import redis_on_a_free_port
from rich import box
from rich.console import Console
from rich.table import Table

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.redis import RedisStore, SyncedStore
from forebay.redis.synced.exchange import FILTER_BYTES, SHARDS, Exchange
from forebay.testing import ManualClock

HOSTS = 5
NAME = "user:"
KINDS: dict[str, Callable[[Any, int], Any]] = {
    "fixed window": lambda store, limit: FixedWindow(store, "api", f"{limit}/hour"),
    "sliding window": lambda store, limit: SlidingWindow(store, "api", f"{limit}/hour"),
    "token bucket": lambda store, limit: TokenBucket(store, "api", f"{limit}/hour"),
}


@dataclass
class Cost:
    """The server's work for one part of the exchanges."""

    exchanges: int = 0
    scripts: int = 0
    us: float = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @contextmanager
    def measured(self, client: redis.Redis) -> Iterator[None]:
        scripts, us, bytes_in, bytes_out = seen_by(client)
        yield
        later_scripts, later_us, later_in, later_out = seen_by(client)
        self.exchanges += 1
        self.scripts += later_scripts - scripts
        self.us += later_us - us
        self.bytes_in += later_in - bytes_in
        self.bytes_out += later_out - bytes_out

    def row(self) -> list[str]:
        each = max(self.exchanges, 1)
        return [f"{number / each:,.0f}" for number in (self.scripts, self.us, self.bytes_in, self.bytes_out)]


@dataclass
class Run:
    lists: Cost = field(default_factory=Cost)
    reports: Cost = field(default_factory=Cost)
    hot: int = 0
    limited: int = 0
    """The keys of which more than the limit was requested."""
    excess: float = 0
    """The permits that the hosts admitted, divided by the limit."""
    most: float = 0


def seen_by(client: redis.Redis) -> tuple[int, float, int, int]:
    """Scripts, microseconds of the server's processor, which does nothing else, and bytes of its network."""
    commands, processor, stats = client.info("commandstats"), client.info("cpu"), client.info("stats")
    scripts = commands.get("cmdstat_evalsha", {"calls": 0})["calls"]
    us = 1e6 * (processor["used_cpu_user"] + processor["used_cpu_sys"])
    return scripts, us, stats["total_net_input_bytes"], stats["total_net_output_bytes"]


def run_fleet(port: int, make: Callable[[Any, int], Any], arguments: argparse.Namespace, *, has_lists: bool) -> Run:
    run, clock, draw = Run(), ManualClock(1_000_000_020), random.Random(arguments.seed)
    frequencies = list(accumulate(1 / (rank + 1) ** arguments.exponent for rank in range(arguments.keys)))
    names = [f"{NAME}{number}" for number in range(arguments.keys)]
    requested: dict[str, int] = {}
    admitted: dict[str, int] = {}
    with ExitStack() as stack:
        client = stack.enter_context(redis.Redis(port=port))
        client.flushall()
        # The server's clock moves on by itself. The windows of both must be the same, so the hosts' clock begins there.
        clock.set(client.time()[0] // 3600 * 3600)
        made: list[tuple[Any, Exchange]] = []
        for _ in range(HOSTS):
            redis_store = stack.enter_context(RedisStore(f"redis://127.0.0.1:{port}", timeout=60))
            store = stack.enter_context(Store.private(keys=arguments.keys, clock=clock))
            synced = stack.enter_context(SyncedStore(redis_store, store, "1 hour", keys=arguments.keys))
            limiter = make(synced, arguments.limit)
            made.append((limiter, synced._exchanger.exchanges[0]))
        for number in range(1, arguments.exchanges + 1):
            for key in draw.choices(names, cum_weights=frequencies, k=arguments.requests):
                limiter, _ = made[(int(key[len(NAME) :]) + number) % HOSTS]
                requested[key] = requested.get(key, 0) + 1
                admitted[key] = admitted.get(key, 0) + limiter.allow(key)
            for _, exchange in made:
                learned = bytearray(FILTER_BYTES)
                versions: dict[bytes, int] = {}
                if has_lists:
                    with run.lists.measured(client):
                        exchange.exchange(exchange.lists(range(SHARDS), exchange.versions, learned, versions))
                with run.reports.measured(client):
                    exchange.exchange(exchange.messages(number, learned))
                exchange.versions = versions
        run.hot = sum(client.zcard(key) - 1 for key in client.scan_iter("forebay:*:hot-*", count=10_000))
    limited = [admitted[key] / arguments.limit for key, count in requested.items() if count > arguments.limit]
    run.limited, run.excess, run.most = len(limited), sum(limited) / max(len(limited), 1), max(limited, default=0)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--limit", type=int, default=10, help="permits per hour")
    parser.add_argument("--requests", type=int, default=10_000, help="of all hosts together, in an interval")
    parser.add_argument("--exchanges", type=int, default=20, help="of each host")
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    table = Table(box=box.MARKDOWN)
    for heading in ("kind", "part of an exchange"):
        table.add_column(heading)
    for heading in (
        "scripts",
        "us of Redis",
        "bytes to Redis",
        "bytes from it",
        "hot keys",
        "limited keys",
        "admitted",
        "at most",
    ):
        table.add_column(heading, justify="right")
    with redis_on_a_free_port() as port:
        for kind, make in KINDS.items():
            for has_lists in (True, False):
                run = run_fleet(port, make, arguments, has_lists=has_lists)
                admitted_of = [f"{run.limited:,}", f"{run.excess:.2f} x limit", f"{run.most:.1f} x limit"]
                if has_lists:
                    table.add_row(kind, "hot lists", *run.lists.row(), f"{run.hot:,}", "", "", "")
                    table.add_row("", "reports", *run.reports.row(), "", *admitted_of)
                else:
                    table.add_row("", "reports without hot lists", *run.reports.row(), "", *admitted_of)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
