"""W24 of the worked examples and its consequences: hosts that count by themselves and exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis_server import RedisServer
from scripts_clock import ServerClock
from synced_hosts import Host, admitted, hosts, sum_of_all

from forebay import FixedWindow, SlidingWindow, TokenBucket
from forebay.testing import ManualClock

START = 1_000_000_020.0
"""A whole minute of the clock on the wall."""

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", "10/minute"),
    "sliding": lambda store: SlidingWindow(store, "api", "10/minute"),
}
EVERY_KIND = {**WINDOWS, "bucket": lambda store: TokenBucket(store, "api", "10/minute")}


class Time:
    """The time of all hosts and of the server."""

    def __init__(self, server_clock: ServerClock) -> None:
        self.host, self.server = ManualClock(START), server_clock
        self.server.set(START)

    def set(self, seconds: float) -> None:
        self.host.set(START + seconds)
        self.server.set(START + seconds)


@pytest.fixture
def time(server_clock: ServerClock) -> Time:
    return Time(server_clock)


@pytest.fixture
def two(request: pytest.FixtureRequest, server: RedisServer, time: Time) -> Iterator[list[Host]]:
    with hosts(2, server.url, EVERY_KIND[request.param], clock=time.host) as made:
        yield made


@pytest.mark.parametrize("two", EVERY_KIND, indirect=True)
def test_w24_hosts_count_their_own_at_once_and_the_others_after_the_exchange(two: list[Host]) -> None:
    one, other = two
    assert admitted(one.limiter, 6) == 6
    # Its own at once, the other's not yet.
    assert one.limiter.peek("k").remaining == 4
    assert other.limiter.peek("k").remaining == 10
    one.exchange()
    # It learns when it has something to report or to request.
    assert admitted(other.limiter, 1) == 1
    other.exchange()
    assert other.limiter.peek("k").remaining == 3
    assert admitted(other.limiter, 10) == 3
    assert not other.limiter.hit("k").allowed
    other.exchange()
    one.exchange()
    assert one.limiter.peek("k").remaining == 0
    assert admitted(one.limiter, 1) == 0


@pytest.mark.parametrize("two", EVERY_KIND, indirect=True)
def test_w24_pending_counts_are_reported_once_and_none_is_lost(two: list[Host], client: redis.Redis) -> None:
    one, other = two
    assert admitted(one.limiter, 4) == 4
    assert admitted(other.limiter, 3) == 3
    assert (one.synced.status().pending_keys, other.synced.status().pending_keys) == (1, 1)
    for _ in range(3):
        one.exchange()
        other.exchange()
    assert (one.synced.status().pending_keys, other.synced.status().pending_keys) == (0, 0)
    assert [host.limiter.peek("k").remaining for host in two] == [3, 3]
    if hasattr(one.limiter, "slides"):
        assert sum_of_all(client) == 7


@pytest.mark.parametrize("two", WINDOWS, indirect=True)
def test_a_window_that_is_over_leaves_nothing_to_the_next(two: list[Host], time: Time, client: redis.Redis) -> None:
    one, other = two
    assert admitted(one.limiter, 6) == 6
    assert admitted(other.limiter, 2) == 2
    one.exchange()
    time.set(60)
    other.exchange()
    one.exchange()
    slides = one.limiter.slides
    # At the beginning of a sliding window, all permits of the one before count; in a fixed window none.
    assert admitted(one.limiter, 20) == (2 if slides else 10)
    assert admitted(other.limiter, 20) == (2 if slides else 10)
    time.set(90)
    other.exchange()
    one.exchange()
    # Half of the eight, and the four of now.
    assert [host.limiter.peek("k").remaining for host in two] == ([2, 4] if slides else [0, 0])
    other.exchange()
    assert other.limiter.peek("k").remaining == (2 if slides else 0)


@pytest.mark.parametrize("two", EVERY_KIND, indirect=True)
def test_a_refund_lowers_the_count_on_all_hosts(two: list[Host]) -> None:
    one, other = two
    assert admitted(one.limiter, 6) == 6
    assert admitted(other.limiter, 4) == 4
    one.exchange()
    other.exchange()
    one.exchange()
    assert one.limiter.peek("k").remaining == 0
    one.limiter.refund("k", 5)
    one.exchange()
    other.exchange()
    if hasattr(one.limiter, "slides"):
        assert other.limiter.peek("k").remaining == 5
    assert one.limiter.peek("k").remaining == 5
    one.limiter.refund("k", 5)
    # No more than it had counted itself.
    assert one.limiter.peek("k").remaining == 6


@pytest.mark.parametrize("two", EVERY_KIND, indirect=True)
def test_reset_forgets_this_hosts_count_on_all_hosts(two: list[Host]) -> None:
    one, other = two
    assert admitted(one.limiter, 6) == 6
    assert admitted(other.limiter, 3) == 3
    one.exchange()
    other.exchange()
    one.limiter.reset("k")
    one.exchange()
    other.exchange()
    one.exchange()
    assert one.limiter.peek("k").remaining == 7
    if hasattr(one.limiter, "slides"):
        assert other.limiter.peek("k").remaining == 7
