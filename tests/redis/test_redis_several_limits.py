"""Several limits over Redis at once: one script decides all, and charges all or none."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from redis_server import RedisServer
from scripts_clock import ServerClock

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    MinInterval,
    SlidingLog,
    Store,
    TokenBucket,
)
from forebay.redis import RedisStore


def test_a_denial_writes_nothing(redis_store: RedisStore, client: redis.Redis, server_clock: ServerClock) -> None:
    window, gap = FixedWindow(redis_store, "w", "9/minute"), MinInterval(redis_store, "g", "1 minute")
    held = Concurrency(redis_store, "c", 9)
    both = AllOf(window, held, gap)
    assert both.allow("ada")
    written = client.info("persistence")["rdb_changes_since_last_save"]
    assert not both.hit("ada")
    assert not both.reserve("ada")
    assert not both.peek("ada")
    assert client.info("persistence")["rdb_changes_since_last_save"] == written
    assert held.peek("ada").remaining == 8


def test_limiters_that_cannot_be_combined_are_refused(redis_store: RedisStore, server: RedisServer) -> None:
    bucket = TokenBucket(redis_store, "b", "9/minute")
    with Store.private(keys=1) as store, RedisStore(server.url) as other:
        make: Any = AllOf
        for others in ([TokenBucket(store, "b", "1/s")], [TokenBucket(other, "b", "1/s")], ["b"], [bucket] * 16):
            with pytest.raises(InvalidLimiter):
                make(bucket, *others)
        with pytest.raises(InvalidLimiter):
            make(TokenBucket(store, "b", "1/s"), bucket)
        with pytest.raises(TypeError, match="is a store"):
            TokenBucket(bucket, "b", "1/s")  # type: ignore[call-overload]


def test_a_log_twice_reports_when_both_are_allowed(redis_store: RedisStore, server_clock: ServerClock) -> None:
    make: Any = SlidingLog
    log = make(redis_store, "l", "3/minute")
    twice = AllOf(log, log)
    assert log.allow("ada")
    server_clock.advance(5)
    assert log.allow("ada")
    server_clock.advance(5)
    denied = twice.hit("ada")
    assert (denied.allowed, denied.retry_after) == (False, 50.0)
    assert twice.reserve("ada").delay == 50.0
    server_clock.advance(49)
    assert not twice.allow("ada")
    server_clock.advance(1)
    assert twice.allow("ada")
    # Not before all that is stored has left.
    denied = twice.hit("ada", [1, 3])
    assert (denied.allowed, denied.retry_after) == (False, 60.0)
