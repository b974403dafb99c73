"""Draw what three hosts admit of the same requests over each kind of Redis store, for redis.md: real limiters and a
real server, with clocks set by hand.

Run without arguments to write the picture; with ``--check`` to fail when it differs. It needs ``redis-server``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawing import BLUE, END, PALE_BLUE, PERIOD, PURPLE, VERMILION, Drawing, update

from forebay import FixedWindow, Store
from forebay.redis import LeasedStore, RedisStore, SyncedStore
from forebay.testing import ManualClock

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from redis_server import redis_server
from scripts_clock import ServerClock, moved_by_tests

# All times are in ms.
LIMIT = 100
INTERVAL = 1_000
LOOK = 250
START_S = 1_000_000_000
# One host gets requests all the time, one takes all available permits now and then, one until it
# stops, and after it has started again.
REQUESTS = [
    [*range(100, END, 200)],
    [*range(4_000, 5_000, 100), *range(11_000, 14_000, 60), *range(23_010, 26_000, 30), *range(37_000, 38_500, 50)],
    [*range(330, 15_000, 290), *range(31_050, END, 130)],
]
SIZE = sum(map(len, REQUESTS))


@dataclass(frozen=True)
class Traffic:
    """One kind of store's results: (time, host, allowed) of each request, and the number of calls to Redis."""

    outcomes: list[tuple[int, int, bool]]
    asked: int

    def of(self, host: int, allowed: bool) -> list[int]:
        return [time for time, its_host, outcome in self.outcomes if its_host == host and outcome == allowed]

    def counts(self) -> list[tuple[int, int]]:
        """(time, number allowed in the window so far) at each change."""
        counts = dict.fromkeys(range(0, END + 1, PERIOD), 0)
        went = [time for time, _, allowed in self.outcomes if allowed]
        for _, window in itertools.groupby(went, lambda time: time // PERIOD):
            counts.update((time, count) for count, time in enumerate(window, start=1))
        return sorted(counts.items())


@dataclass(frozen=True)
class Host:
    store: Any
    limiter: Any
    regularly: Callable[[], None]
    """The work of its thread."""


@contextmanager
def strict(redis_store: RedisStore, host: Store) -> Iterator[Host]:
    yield Host(redis_store, FixedWindow(redis_store, "api", f"{LIMIT} per 10 seconds"), lambda: None)


@contextmanager
def leased(redis_store: RedisStore, host: Store) -> Iterator[Host]:
    with LeasedStore(redis_store, host) as store:
        keeper = store.executor.keeper
        keeper.end()
        yield Host(
            store,
            FixedWindow(store, "api", f"{LIMIT} per 10 seconds"),
            lambda: store.executor.give_back(keeper.holdings.unused()),
        )


@contextmanager
def synced(redis_store: RedisStore, host: Store) -> Iterator[Host]:
    with SyncedStore(redis_store, host, interval="10 seconds", keys=100) as store:
        yield Host(store, FixedWindow(store, "api", f"{LIMIT} per 10 seconds"), store.exchange)


@dataclass(frozen=True)
class Kind:
    title: str
    made: Callable[[RedisStore, Store], Any]
    regularly: int
    """How often a host's thread works, in ms."""
    said: str


KINDS = [
    Kind("strict: every decision is Redis's", strict, END, "{} round trips for {} requests"),
    Kind("leased: permits are borrowed in batches", leased, LOOK, "{} round trips for {} requests"),
    Kind("synced: counts are exchanged every second", synced, INTERVAL, "{} exchanges beside {} requests"),
]


def traffic(kind: Kind, url: str, client: Any) -> Traffic:
    client.flushall()
    server_clock = ServerClock(client)
    events = [(time, 1, host) for host, times in enumerate(REQUESTS) for time in times]
    # The hosts' threads don't run in step.
    events += [
        (time + 80 * host, 0, host)
        for host in range(len(REQUESTS))
        for time in range(kind.regularly, END, kind.regularly)
    ]
    outcomes = []
    with ExitStack() as stack:
        clock = ManualClock(START_S)
        redis_store = stack.enter_context(RedisStore(url, timeout=60))
        stores = [stack.enter_context(Store.private(keys=100, clock=clock)) for _ in REQUESTS]
        server_clock.set(START_S)
        hosts = [stack.enter_context(kind.made(redis_store, store)) for store in stores]
        client.config_resetstat()
        for time, is_request, number in sorted(events):
            clock.set(START_S + time / 1000)
            server_clock.set(START_S + time / 1000)
            if is_request:
                outcomes.append((time, number, hosts[number].limiter.allow("ada")))
            else:
                hosts[number].regularly()
        stats = client.info("commandstats")
    called = [stats[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in stats]
    # Failed calls are EVALSHAs of scripts that the server didn't know yet.
    return Traffic(outcomes, sum(calls["calls"] - calls["failed_calls"] for calls in called))


def panel(drawing: Drawing, top: float, kind: Kind, seen: Traffic) -> None:
    drawing.text(16, top, kind.title, more='font-weight="600"')
    drawing.text(drawing.right, top, kind.said.format(seen.asked, SIZE), anchor="end")
    for host in range(len(REQUESTS)):
        base = top + 34 + 34 * host
        drawing.label(base + 4, f"host {host + 1}")
        drawing.ticks(seen.of(host, True), base - 15, base - 1, BLUE)
        drawing.line(base)
        drawing.ticks(seen.of(host, False), base + 1, base + 10, VERMILION)
    floor = top + 210
    unit = 75 / (1.5 * LIMIT)
    pairs = itertools.pairwise(seen.counts())
    blocks = [(start, end, count) for (start, count), (end, _) in pairs if count]
    drawing.blocks([(a, b, floor, floor - unit * min(n, LIMIT)) for a, b, n in blocks], PALE_BLUE)
    drawing.blocks([(a, b, floor - unit * LIMIT, floor - unit * n) for a, b, n in blocks if n > LIMIT], PURPLE)
    for value in (0, LIMIT):
        drawing.label(floor - unit * value + 5, str(value))
    drawing.line(floor)
    drawing.line(floor - unit * LIMIT, 'stroke-dasharray="5 4"')
    for start in range(0, END, PERIOD):
        most = max((count for time, count in seen.counts() if start <= time < start + PERIOD), default=0)
        drawing.text(drawing.at(start) + 6, floor - 58, str(most), more='font-size="12"')


def picture(drawn: list[tuple[Kind, Traffic]]) -> str:
    """For each kind: the hosts' requests as ticks, allowed above a line and denied below, and the count of all
    hosts."""
    step, top = 256, 58
    floor = top + step * (len(drawn) - 1) + 210
    drawing = Drawing(
        floor + 28, 92, "What three hosts admit of the same requests over each kind of Redis store", "draw_redis.py"
    )
    drawing.text(
        16,
        26,
        f'FixedWindow(store, "api", "{LIMIT} per 10 seconds")',
        more='font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13"',
    )
    drawing.text(drawing.right, 26, "allowed", anchor="end", colour=BLUE)
    drawing.text(drawing.right - 62, 26, "denied", anchor="end", colour=VERMILION)
    drawing.text(drawing.right - 122, 26, "above the limit", anchor="end", colour=PURPLE)
    drawing.axis(38, floor)
    for row, (kind, seen) in enumerate(drawn):
        panel(drawing, top + step * row, kind, seen)
    return drawing.finish()


def draw() -> str:
    with redis_server() as server, server.client() as client, moved_by_tests():
        return picture([(kind, traffic(kind, server.url, client)) for kind in KINDS])


def main() -> None:
    update({"redis/three-hosts.svg": draw()}, "what the stores decide", "draw_redis.py")


if __name__ == "__main__":
    main()
