"""Other libraries on their allow path: one key, with a limit that is never reached."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from timeit import Timer

import limits
import limits.storage
import limits.strategies
import pyrate_limiter
import pytest
import redis
import rust_py_rate_limit
import throttled
import token_bucket
from baselines import LockedBucket, ManagedBucket
from conftest import GENEROUS, Measure, statement

KEY = "user:42:abcdefg"
PER_SECOND, BURST = 1000, GENEROUS["burst"]

# Where each library's limit counts.
HERE, HOST, NETWORK = "one process", "all of the host", "all that reach the server"

Peer = Iterator[tuple[str, str, Timer | Callable[[], Timer], int]]


def checked(allow: Callable[[str], object], allowed: Callable[[object], bool] = bool) -> Timer:
    """Calls `allow(KEY)`, which must allow."""
    if not allowed(allow(KEY)):
        raise AssertionError(f"{allow} denies: this would measure the wrong path")
    return statement("f(k)", f=allow, k=KEY)


@contextlib.contextmanager
def rust_py_rate_limit_fixed_window(_: int) -> Peer:
    limiter = rust_py_rate_limit.RateLimiter(limit=10**9, window_seconds=3600)
    yield "`rust-py-rate-limit`, fixed window", HERE, checked(limiter.allow), 20_000


@contextlib.contextmanager
def token_bucket_memory(_: int) -> Peer:
    limiter = token_bucket.Limiter(PER_SECOND, BURST, token_bucket.MemoryStorage())
    yield "`token_bucket`", HERE, checked(limiter.consume), 10_000


@contextlib.contextmanager
def limits_memory_fixed_window(_: int) -> Peer:
    limiter = limits.strategies.FixedWindowRateLimiter(limits.storage.MemoryStorage())
    item = limits.RateLimitItemPerHour(10**9)
    if not limiter.hit(item, KEY):
        raise AssertionError("denied")
    yield "`limits` in memory, fixed window", HERE, statement("f(i, k)", f=limiter.hit, i=item, k=KEY), 5_000


@contextlib.contextmanager
def limits_memory_moving_window(_: int) -> Peer:
    # Its log grows with every hit, and each hit costs more the longer it is: here it has at most 1,000 entries.
    storage = limits.storage.MemoryStorage()
    limiter = limits.strategies.MovingWindowRateLimiter(storage)
    item = limits.RateLimitItemPerHour(10**6)

    def on_an_empty_log() -> Timer:
        storage.reset()
        return statement("f(i, k)", f=limiter.hit, i=item, k=KEY)

    yield "`limits` in memory, moving window, log of up to 1,000", HERE, on_an_empty_log, 1_000


@contextlib.contextmanager
def throttled_memory_token_bucket(_: int) -> Peer:
    limiter = throttled.Throttled(
        using="token_bucket", quota=throttled.per_sec(PER_SECOND, burst=BURST), store=throttled.MemoryStore()
    )
    yield "`throttled-py` in memory, token bucket", HERE, checked(limiter.limit, lambda r: not r.limited), 3_000


@contextlib.contextmanager
def throttled_memory_gcra(_: int) -> Peer:
    limiter = throttled.Throttled(
        using="gcra", quota=throttled.per_sec(PER_SECOND, burst=BURST), store=throttled.MemoryStore()
    )
    yield "`throttled-py` in memory, GCRA", HERE, checked(limiter.limit, lambda r: not r.limited), 3_000


@contextlib.contextmanager
def pyrate_limiter_token_bucket(_: int) -> Peer:
    rate = pyrate_limiter.Rate(PER_SECOND, pyrate_limiter.Duration.SECOND, burst=BURST)
    bucket = pyrate_limiter.StateBucket([rate], algorithm=pyrate_limiter.TokenBucket())
    with pyrate_limiter.Limiter(bucket) as limiter:
        yield "`pyrate-limiter`, token bucket, one for all keys", HERE, checked(limiter.try_acquire), 3_000


@contextlib.contextmanager
def lock_over_multiprocessing(_: int) -> Peer:
    bucket = LockedBucket(PER_SECOND, BURST)
    yield "`multiprocessing` lock and value, one key, one process", HOST, checked(bucket.allow), 10_000


@contextlib.contextmanager
def manager_of_multiprocessing(_: int) -> Peer:
    with multiprocessing.get_context("spawn").Manager() as manager:
        bucket = ManagedBucket(PER_SECOND, BURST, manager.dict(), manager.Lock())
        yield "`multiprocessing` manager: dict and lock", HOST, checked(bucket.allow), 50


@contextlib.contextmanager
def redis_round_trip(port: int) -> Peer:
    with redis.Redis(host="127.0.0.1", port=port) as client:
        yield "Redis, one `INCR` by redis-py with hiredis: no limit yet", NETWORK, checked(client.incr), 200


@contextlib.contextmanager
def limits_redis_fixed_window(port: int) -> Peer:
    storage = limits.storage.RedisStorage(f"redis://127.0.0.1:{port}/1")
    limiter = limits.strategies.FixedWindowRateLimiter(storage)
    item = limits.RateLimitItemPerHour(10**9)
    if not limiter.hit(item, KEY):
        raise AssertionError("denied")
    yield "`limits` on Redis, fixed window", NETWORK, statement("f(i, k)", f=limiter.hit, i=item, k=KEY), 200


@contextlib.contextmanager
def throttled_redis_token_bucket(port: int) -> Peer:
    limiter = throttled.Throttled(
        using="token_bucket",
        quota=throttled.per_sec(PER_SECOND, burst=BURST),
        store=throttled.RedisStore(server=f"redis://127.0.0.1:{port}/2"),
    )
    yield "`throttled-py` on Redis, token bucket", NETWORK, checked(limiter.limit, lambda r: not r.limited), 200


PEERS = [
    rust_py_rate_limit_fixed_window,
    token_bucket_memory,
    limits_memory_fixed_window,
    limits_memory_moving_window,
    throttled_memory_token_bucket,
    throttled_memory_gcra,
    pyrate_limiter_token_bucket,
    lock_over_multiprocessing,
    manager_of_multiprocessing,
    redis_round_trip,
    limits_redis_fixed_window,
    throttled_redis_token_bucket,
]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.__name__)
def bench_peer(measure: Measure, redis_port: int, peer: Callable[[int], contextlib.AbstractContextManager]) -> None:
    with peer(redis_port) as (title, scope, timer, calls):
        measure(title, timer, calls=calls, rounds=31, section="Others, allowed", scope=scope)
