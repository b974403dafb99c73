"""Several processes of a host exchange at once: none takes back what another has reported or merged since."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from redis_server import RedisServer
from scripts_clock import ServerClock
from synced_hosts import admitted, before_the_answer, hosts, sum_of_all, sums, two_of_one_host

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.testing import ManualClock

START = 1_000_000_020
UNREPORTED_ONLY = -2
ALL_KEYS = -1
READ_US = 2
"""Among a message's arguments."""

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", "100/year"),
    "sliding": lambda store: SlidingWindow(store, "api", "100/year"),
}
KINDS = {**WINDOWS, "bucket": lambda store: TokenBucket(store, "api", "1/minute", burst=100)}


@pytest.fixture
def clock(server_clock: ServerClock) -> ManualClock:
    """The clock of hosts, set to the server's time."""
    server_clock.set(START)
    return ManualClock(START)


def known_of(client: redis.Redis, host: bytes) -> int:
    """The permits that Redis knows of a host."""
    (entry,) = (client.hget(key, host) or b"0:0:0:0" for key in sums(client))
    reported = int(entry.split(b":")[2])
    return reported // 60_000_000 if reported >= 1_000_000 else reported


@pytest.mark.parametrize("exchanges", [1, 20])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_reply_that_is_merged_late_takes_nothing_back(server: RedisServer, kind: str, exchanges: int) -> None:
    """One of two processes of a host is stopped between the reply and its merge; the other goes on."""
    with (
        Store.private(keys=100) as store,
        two_of_one_host(store, server.url, WINDOWS[kind]) as (stopped, going_on),
        hosts(1, server.url, WINDOWS[kind]) as (other,),
    ):
        assert stopped.limiter.allow("k")

        def meanwhile() -> None:
            assert admitted(other.limiter, 99) == 99
            other.exchange()
            for _ in range(exchanges):
                going_on.exchange()

        with before_the_answer(stopped, meanwhile):
            stopped.exchange()
        assert not going_on.limiter.allow("k")


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_reply_does_not_hide_a_refund(
    server: RedisServer, client: redis.Redis, clock: ManualClock, kind: str
) -> None:
    """It has what Redis knew before the latest report: as much as this host has counted in the end."""
    with (
        Store.private(keys=100, clock=clock) as store,
        two_of_one_host(store, server.url, KINDS[kind]) as (stopped, going_on),
    ):
        assert stopped.limiter.hit("k", 5)

        def meanwhile() -> None:
            assert going_on.limiter.hit("k", 4)
            going_on.exchange()
            going_on.limiter.refund("k", 4)

        with before_the_answer(stopped, meanwhile):
            stopped.exchange()
        assert known_of(client, going_on.field) == 9
        assert going_on.synced.status().pending_keys == 1
        assert going_on.synced._exchanger.exchange(UNREPORTED_ONLY, elected=False) is None
        assert known_of(client, going_on.field) == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sent", [order for count in (2, 3) for order in itertools.permutations(range(3), count)])
def test_reports_and_replies_arrive_in_any_order(
    server: RedisServer, client: redis.Redis, clock: ManualClock, kind: str, sent: tuple[int, ...]
) -> None:
    """Three readings, the last equal to the first. One may not be sent, and replies may be lost."""
    with hosts(1, server.url, KINDS[kind], clock=clock) as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        learned = [order for count in range(len(sent) + 1) for order in itertools.permutations(sent, count)]
        for number, answered in enumerate(learned):
            key = f"user:{number}"
            messages = []
            for change in (5, 4, -4):
                if change > 0:
                    assert host.limiter.hit(key, change)
                else:
                    host.limiter.refund(key, -change)
                messages += list(exchange.messages(UNREPORTED_ONLY))
            assert len(messages) == 3
            replies = {which: exchange.send([messages[which]])[0] for which in sent}
            for which in answered:
                messages[which].result(replies[which])
            # Whatever Redis doesn't know is pending.
            assert exchange.run(UNREPORTED_ONLY) is None
            assert host.synced.status().pending_keys == 0
            assert known_of(client, host.field) == 5
            client.delete(*sums(client))


@pytest.mark.parametrize("kind", KINDS)
def test_no_report_of_one_microsecond_is_forgotten(
    server: RedisServer, client: redis.Redis, clock: ManualClock, kind: str
) -> None:
    with hosts(1, server.url, KINDS[kind], clock=clock) as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        for key, order in (("one", (0, 1)), ("two", (1, 0))):
            messages = []
            for _ in range(2):
                assert host.limiter.hit(key, 5)
                messages += list(exchange.messages(UNREPORTED_ONLY))
            messages[0].arguments[READ_US] = messages[1].arguments[READ_US]
            replies = {which: exchange.send([messages[which]])[0] for which in order}
            for which in range(2):
                messages[which].result(replies[which])
            assert exchange.run(UNREPORTED_ONLY) is None
            assert known_of(client, host.field) == 10
            client.delete(*sums(client))


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_later_reading_counts(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Another process reads the cell and reports it, after this one has begun its scan and before it reads the cell."""
    now = time.time()
    late: list[Any] = []

    def time_and_more() -> float:
        monkeypatch.setattr(time, "time", lambda: now)
        late.extend(exchange.messages(ALL_KEYS))
        assert host.limiter.hit("k", 4)
        return now

    def send_late() -> None:
        for message, reply in zip(late, exchange.send(late), strict=True):
            message.result(reply)

    monkeypatch.setattr(time, "time", lambda: now)
    with Store.private(keys=100, clock="time") as store, hosts(1, server.url, WINDOWS[kind], store=store) as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        assert host.limiter.hit("k", 5)
        monkeypatch.setattr(time, "time", time_and_more)
        with before_the_answer(host, send_late):
            assert exchange.exchange(exchange.messages(ALL_KEYS)) is None
        assert late
        assert host.synced.status().pending_keys == 0
        assert sum_of_all(client) == 9


def test_a_bucket_is_not_reported_over_a_time_that_was_reported_before(
    server: RedisServer, clock: ManualClock, server_clock: ServerClock
) -> None:
    """One of two processes of a host is stopped before its merge; the other goes on for longer than filling takes."""

    def make(store: Any) -> TokenBucket:
        return TokenBucket(store, "api", "1/second", burst=50)

    with (
        Store.private(keys=100, clock=clock) as store,
        two_of_one_host(store, server.url, make) as (stopped, going_on),
        hosts(1, server.url, make, clock=clock) as (other,),
    ):
        assert stopped.limiter.allow("k")
        assert other.limiter.allow("k")

        def meanwhile() -> None:
            for seconds in range(1, 101):
                clock.set(START + seconds)
                server_clock.set(START + seconds)
                going_on.exchange()

        with before_the_answer(stopped, meanwhile):
            stopped.exchange()
        assert going_on.limiter.hit("k", 50)
        going_on.exchange()
        assert other.limiter.allow("k")
        other.exchange()
        assert other.limiter.peek("k").remaining == 0


def test_a_bucket_whose_sequence_has_wrapped_stays_pending(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    make = KINDS["bucket"]
    with (
        Store.private(keys=100, clock=clock) as store,
        two_of_one_host(store, server.url, make) as (stopped, going_on),
    ):
        assert stopped.limiter.hit("k", 10)

        def meanwhile() -> None:
            assert going_on.limiter.hit("k", 30)
            for _ in range(2**10 - 1):
                going_on.exchange()
                clock.advance(0.001)
            going_on.limiter.refund("k", 30)
            # A question that isn't sent.
            going_on.limiter.reports(0, 100, UNREPORTED_ONLY)

        with before_the_answer(stopped, meanwhile):
            stopped.exchange()
        assert going_on.synced.status().pending_keys == 1
