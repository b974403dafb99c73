"""The Redis store: its keys, the expiry of states, and its errors."""

from __future__ import annotations

import asyncio
import enum
import functools
import multiprocessing
import pickle
import threading
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from http import HTTPStatus
from typing import Any

import pytest
import redis
import redis.asyncio
from blocking import blocking_store
from redis_server import PATIENCE_S, RedisServer, redis_server
from scripts_clock import ServerClock

import forebay
from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    ForeignState,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    LeakyBucket,
    MinInterval,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    StoreUnavailable,
    TokenBucket,
)
from forebay.redis import (
    AsyncLeasedStore,
    AsyncRedisStore,
    LeasedStore,
    RedisLimiter,
    RedisStore,
    SyncedStore,
)
from forebay.redis.concurrency import UnleasedPermits
from forebay.redis.executor_base import LOG_EVERY_S
from forebay.redis.keys import fingerprint, plain
from forebay.seldom import Seldom
from forebay.testing import ManualClock
from forebay.web import Rule

make_log: Any = SlidingLog
EVERY_KIND: dict[str, Callable[..., Any]] = {
    "token bucket": lambda store, name: TokenBucket(store, name, "5/day"),
    "interval bucket": lambda store, name: TokenBucket(store, name, "5/day", refill="interval"),
    "leaky bucket": lambda store, name: LeakyBucket(store, name, "5/day", capacity=5),
    "minimum interval": lambda store, name: MinInterval(store, name, "12s"),
    "fixed window": lambda store, name: FixedWindow(store, name, "5/day"),
    "fixed window, first": lambda store, name: FixedWindow(store, name, "5/day", align="first"),
    "fixed window, stagger": lambda store, name: FixedWindow(store, name, "5/day", align="stagger"),
    "sliding window": lambda store, name: SlidingWindow(store, name, "5/day"),
    "bucketed window": lambda store, name: BucketedWindow(store, name, "5/day", buckets=6),
    "sliding log": lambda store, name: make_log(store, name, "5/day"),
    "concurrency": lambda store, name: Concurrency(store, name, 5, lease="1 minute"),
}
every_kind = pytest.mark.parametrize("make", EVERY_KIND.values(), ids=EVERY_KIND)


@every_kind
def test_a_limiter_is_made_by_the_class_of_the_core(make: Callable[..., Any], redis_store: RedisStore) -> None:
    limiter = make(redis_store, "api")
    assert isinstance(limiter, RedisLimiter)
    assert limiter.name == "api"
    assert limiter.store is redis_store
    assert "'api'" in repr(limiter)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(limiter)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = limiter.nothing


def test_a_limiter_shows_its_parameters(redis_store: RedisStore) -> None:
    bucket = TokenBucket(redis_store, "b", "5/minute", burst=7, refill="interval")
    assert (bucket.rate, bucket.burst, bucket.refill, bucket.limit) == (Rate(5, 60), 7, "interval", 7)
    assert LeakyBucket(store=redis_store, name="l", rate="5/minute", capacity=3).capacity == 3
    assert MinInterval(redis_store, "m", "2s").interval_ns == 2 * 10**9
    assert FixedWindow(redis_store, "f", "5/minute", "first").align == "first"
    assert BucketedWindow(redis_store, "w", "5/minute", 3, keys=9).buckets == 3
    assert Concurrency(redis_store, "c", 3, lease=2.5).lease_ns == 2_500_000_000


def test_a_rule_refuses_an_all_of_and_a_store_over_redis(redis_store: RedisStore) -> None:
    several: Any = AllOf(TokenBucket(redis_store, "b", "1/s"))
    with pytest.raises(InvalidLimiter, match=r"one limiter.* are charged as one"):
        Rule(several)
    nothing: Any = redis_store
    with pytest.raises(InvalidLimiter, match=r"one limiter, not <RedisStore .*write TokenBucket\(store"):
        Rule(nothing)


def test_a_url_in_place_of_a_store_is_refused() -> None:
    """The error names the class, and never the URL, which may have a password in it."""
    url: Any = "redis://shop:secret@localhost"
    for make in (lambda: TokenBucket(url, "b", "1/s"), lambda: Store(url, keys=10)):
        with pytest.raises((TypeError, ValueError), match=r"RedisStore\(url\)") as caught:
            make()
        assert "secret" not in str(caught.value)
    with Store.private(keys=10) as host:
        kinds: list[Any] = [LeasedStore, AsyncLeasedStore, functools.partial(SyncedStore, keys=10)]
        for kind in kinds:
            with pytest.raises(TypeError, match=r"RedisStore, not a str") as refused:
                kind(url, host)
            assert "secret" not in str(refused.value)


def test_the_core_classes_still_make_limiters_of_their_own() -> None:
    with Store.private(keys=1, clock=ManualClock()) as store:
        bucket = TokenBucket(store=store, name="api", rate="1/s")
        assert type(bucket) is TokenBucket
        assert type(AllOf(bucket)) is AllOf
        make: Any = TokenBucket
        for arguments in ((), (store,), (None, "api", "1/s"), ("redis://", "api", "1/s")):
            with pytest.raises(TypeError, match="TokenBucket"):
                make(*arguments)
        with pytest.raises(TypeError, match="TokenBucket"):
            make.__new__(make)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda store: TokenBucket(store, "", "1/s"), InvalidLimiter, "name"),
        (lambda store: TokenBucket(store, "a\0", "1/s"), InvalidLimiter, "name"),
        (lambda store: TokenBucket(store, "a" * 101, "1/s"), InvalidLimiter, "name"),
        (lambda store: TokenBucket(store, "a\ud800", "1/s"), InvalidLimiter, "name"),
        (lambda store: Concurrency(store, "a", 1, keys=object()), InvalidLimiter, "keys"),
        (lambda store: SlidingLog(store, "a", "1/s", keys="no"), InvalidLimiter, "keys"),
        (lambda store: BucketedWindow(store, "a", "1/s", buckets=4, keys=0), InvalidLimiter, "keys"),
        (lambda store: TokenBucket(store, "a", "1/parsec"), InvalidRate, "parsec"),
        (lambda store: TokenBucket(store, "a", Rate.per_ns(1, 1500)), InvalidRate, "whole microseconds"),
        (lambda store: TokenBucket(store, "a", "2_000_000/s"), InvalidRate, "too fast"),
        (lambda store: TokenBucket(store, "a", "1/year", burst=80), InvalidLimiter, "years"),
        (lambda store: TokenBucket(store, "a", "1/year", burst=80, refill="interval"), InvalidLimiter, "too long"),
        (lambda store: TokenBucket(store, "a", "1/s", burst=0), InvalidLimiter, "burst"),
        (lambda store: TokenBucket(store, "a", "1/s", refill="never"), InvalidLimiter, "refill"),
        (lambda store: LeakyBucket(store, "a", "1/s", capacity=None), InvalidLimiter, "capacity"),
        (lambda store: TokenBucket(store, "a", "1/s", 9, initial=1), InvalidLimiter, "leave initial= out"),
        (lambda store: FixedWindow(store, "a", "1/s", align="moon"), InvalidLimiter, "align"),
        (lambda store: FixedWindow(store, "a", "1/s", timezone="UTC"), InvalidLimiter, "for windows by the calendar"),
        (
            lambda store: FixedWindow(store, "a", "1/day", align="calendar", timezone="UTC"),
            InvalidLimiter,
            "would follow a calendar",
        ),
        (lambda store: BucketedWindow(store, "a", "1/s", buckets=1001), InvalidLimiter, "1000"),
        (lambda store: BucketedWindow(store, "a", Rate.per_ns(1, 2000), buckets=3), InvalidLimiter, "microsecond"),
        (lambda store: Concurrency(store, "a", 0), InvalidLimiter, "limit"),
        (lambda store: Concurrency(store, "a", 2**24 + 1), InvalidLimiter, "limit"),
        (lambda store: Concurrency(store, "a", 1, lease="soon"), InvalidRate, "soon"),
        (lambda store: TokenBucket(store, "a"), TypeError, "TokenBucket.*rate"),
    ],
)
def test_invalid_parameters_are_refused(
    make: Callable[[RedisStore], Any], error: type[Exception], says: str, redis_store: RedisStore
) -> None:
    with pytest.raises(error, match=says):
        make(redis_store)


# Keys


class Text(str):
    def encode(self, *args: Any) -> bytes:
        raise AssertionError("a key's own methods are none of ours")


DIFFERENT_KEYS: list[Any] = [
    *("", "a", "1", "a,b", "s:a", "t:s:a", "{", "}", "a}", "é", "\udc80", "\0", "a:b", "%7D", "}%"),
    *(b"", b"a", b"1", b"\x00", b"\xff", 0, 1, -1, 255, 256, -128, 2**64, -(2**64), 2**600),
    *(
        (),
        ("",),
        ("", ""),
        ("a",),
        ("a", "b"),
        ("asb",),
        ("a,s:b",),
        ("ab",),
        (b"a",),
        (1,),
        ("1",),
        (1, 2),
        (b"",),
        ("}",),
    ),
]


@pytest.mark.parametrize("stand_in", [fingerprint, plain])
def test_different_keys_have_different_encodings(stand_in: Callable[[Any], bytes]) -> None:
    assert len({stand_in(key) for key in DIFFERENT_KEYS}) == len(DIFFERENT_KEYS)
    for key in DIFFERENT_KEYS:
        assert stand_in(key)
        assert not set(stand_in(key)) & set(b"{} ")


@pytest.mark.parametrize("stand_in", [fingerprint, plain])
def test_equal_keys_have_one_encoding(stand_in: Callable[[Any], bytes]) -> None:
    assert stand_in(Text("a")) == stand_in("a")
    assert stand_in((Text("a"), HTTPStatus.OK)) == stand_in(("a", 200))
    for nonsense in (1.5, None, ["a"], ("a", None), (("a",),), True, ("a", True)):
        with pytest.raises(InvalidKey, match="str, bytes"):
            stand_in(nonsense)  # type: ignore[arg-type]


def test_all_states_of_a_key_are_in_one_slot(server: RedisServer, client: redis.Redis) -> None:
    for plain_keys in (False, True):
        with RedisStore(server.url, timeout=60, namespace="shop", plain_keys=plain_keys) as store:
            for number, make in enumerate(EVERY_KIND.values()):
                make(store, f"limit {number}:{{x}}").allow("user:{42}")
    slots: dict[int, int] = {}
    names = [bytes(name) for name in client.keys("*")]
    for name in names:
        assert name.startswith(b"shop:{")
        slot = _slot(name)
        slots[slot] = slots.get(slot, 0) + 1
    assert sorted(slots.values()) == [len(EVERY_KIND)] * 2
    assert any(b"{s:user:%7B42%7D}:limit 0:{x}:tat" in name for name in names)


def _slot(name: bytes) -> int:
    from redis.crc import key_slot

    return int(key_slot(name))


# The ends of states


@every_kind
def test_a_state_expires_when_it_is_as_good_as_fresh(
    make: Callable[..., Any], redis_store: RedisStore, client: redis.Redis
) -> None:
    limiter = make(redis_store, "api")
    before_us = server_us(client)
    decision = limiter.hit("ada", min(limiter.limit, 3))
    after_us = server_us(client)
    (name,) = client.keys("*:api:*")
    ends_us = 1000 * expiry_ms(client, name)
    reset_us = decision.reset_after_ns // 1000
    # Rounded up to the millisecond, and for what has weight in the next window up to the end of that.
    assert before_us + reset_us <= ends_us <= after_us + reset_us + 1000 + 60_000_000 * (b":sliding-" in name)


def expiry_ms(client: redis.Redis, name: bytes) -> int:
    """As ``PEXPIRETIME``, which Redis has since 7.0."""
    program = """
        local function clock()
            local time = redis.call('TIME')
            return time[1] * 1000 + math.floor(time[2] / 1000)
        end
        local now, left
        repeat
            now, left = clock(), redis.call('PTTL', KEYS[1])
        until now == clock()
        return now + left
    """
    return int(client.eval(program, 1, name))  # type: ignore[arg-type]


def server_us(client: redis.Redis) -> int:
    seconds, us = client.time()
    return int(seconds * 1_000_000 + us)


def test_an_expired_state_is_gone(server: RedisServer) -> None:
    period = "40 ms"
    with RedisStore(server.url, timeout=60) as store, server.client() as client:
        for limiter in (
            TokenBucket(store, "t", f"5 per {period}"),
            TokenBucket(store, "i", f"5 per {period}", refill="interval"),
            LeakyBucket(store, "l", f"5 per {period}", capacity=5),
            FixedWindow(store, "f", f"5 per {period}"),
            FixedWindow(store, "ff", f"5 per {period}", align="first"),
            SlidingWindow(store, "s", f"5 per {period}"),
            BucketedWindow(store, "b", f"5 per {period}", 4),
            make_log(store, "g", f"5 per {period}"),
            Concurrency(store, "c", 5, lease=period),
        ):
            limiter.hit("ada")
        event = threading.Event()
        for _ in range(2000):
            if not client.keys():
                break
            event.wait(0.01)
        assert client.keys() == []


@every_kind
def test_a_denial_writes_nothing(make: Callable[..., Any], redis_store: RedisStore, client: redis.Redis) -> None:
    limiter = make(redis_store, "api")
    while limiter.allow("ada"):
        pass
    (name,) = client.keys()
    before, ends, written = client.dump(name), expiry_ms(client, name), changes(client)
    assert not limiter.allow("ada")
    assert not limiter.hit("ada")
    assert not limiter.peek("ada")
    assert not limiter.reserve("ada", 1, 0)
    assert limiter.allow_many(["ada"] * 3) == [False] * 3
    assert (client.dump(name), expiry_ms(client, name), changes(client)) == (before, ends, written)


def changes(client: redis.Redis) -> int:
    return int(client.info("persistence")["rdb_changes_since_last_save"])


def test_every_key_of_an_admission_expires(redis_store: RedisStore, client: redis.Redis) -> None:
    for kind, make in EVERY_KIND.items():
        limiter = make(redis_store, kind)
        cost = min(limiter.limit, 3)
        assert limiter.hit("ada", cost)
        limiter.refund("ada", cost - 1)
    names = client.keys()
    assert names
    assert all(client.pttl(name) > 0 for name in names)


# Failures


@every_kind
def test_a_foreign_value_under_a_key_is_an_error(
    make: Callable[..., Any], redis_store: RedisStore, client: redis.Redis
) -> None:
    limiter = make(redis_store, "api")
    limiter.allow("ada")
    (name,) = client.keys()
    plants: list[Callable[[], Any]] = [
        lambda: client.set(name, "5"),
        lambda: client.set(name, "t12x"),
        lambda: client.set(name, "t" + "9" * 400),
        lambda: client.set(name, "w1:2:3"),
        lambda: client.set(name, b"\x00\xff"),
        lambda: client.rpush(name, "x"),
        lambda: client.sadd(name, "x"),
        lambda: client.hset(name, "x", "1"),
        lambda: client.hset(name, "b1", "many"),
        lambda: client.zadd(name, {"x": 1}),
        lambda: client.zadd(name, {"p0000000000000001:1": 1.5}),
        lambda: client.xadd(name, {"x": "1"}),
    ]
    for plant in plants:
        client.delete(name)
        plant()
        before = client.dump(name)
        for ask in (limiter.allow, limiter.hit, limiter.peek, limiter.reserve, limiter.reset, limiter.refund):
            if ask == limiter.refund and isinstance(limiter, forebay.redis.RedisConcurrency):
                continue  # this process has taken no permit there that it could give back, and makes no call
            with pytest.raises(ForeignState, match="another namespace") as caught:
                ask("ada")
            assert caught.value.key == name.decode()
        with pytest.raises(ForeignState):
            limiter.allow_many(["bob", "ada"])
        assert client.dump(name) == before
        limiter.reset("bob")
    client.delete(name)
    assert limiter.allow("ada")


def test_a_foreign_value_under_one_of_several_keys_is_an_error(redis_store: RedisStore, client: redis.Redis) -> None:
    first, second = TokenBucket(redis_store, "a", "5/minute"), make_log(redis_store, "b", "5/minute")
    both = AllOf(first, second)
    assert both.allow("ada")
    (name,) = client.keys("*:b:*")
    client.set(name, "mine")
    for ask in (both.allow, both.hit, both.peek, both.refund, both.reset, both.reserve):
        with pytest.raises(ForeignState):
            ask("ada")
    assert first.peek("ada").remaining == 4


@pytest.mark.parametrize(
    "make", [functools.partial(TokenBucket, rate="5/minute"), functools.partial(Concurrency, limit=5)]
)
def test_a_foreign_value_under_the_key_of_a_mark_is_an_error(
    make: Callable[..., Any], redis_store: RedisStore, client: redis.Redis
) -> None:
    bucket = make(redis_store, "a")
    bucket.hit("ada", request_id="r")
    (name,) = client.keys("*:request:*")
    for plant in (lambda: client.set(name, "x"), lambda: client.rpush(name, "x")):
        client.delete(name)
        plant()
        for ask in (bucket.hit, bucket.refund):
            with pytest.raises(ForeignState) as caught:
                ask("ada", request_id="r")
            assert caught.value.key == name.decode()
    assert bucket.peek("ada").remaining == 4


def test_leased_limiter_refuses_to_convert(redis_store: RedisStore) -> None:
    with Store.private(keys=10) as host, LeasedStore(redis_store, host) as leased:
        limiter: Any = FixedWindow(leased, "c", "5/minute")
        with pytest.raises(InvalidLimiter, match="over the RedisStore itself can"):
            limiter.convert("ada", "9/minute", keep="share")


def test_leased_limiter_refuses_to_add(redis_store: RedisStore) -> None:
    with Store.private(keys=10) as host, LeasedStore(redis_store, host) as leased:
        limiter: Any = TokenBucket(leased, "c", "5/minute")
        with pytest.raises(InvalidLimiter, match=r"can't have permits above its limit.*the RedisStore itself can"):
            limiter.add("ada", 5)


def test_only_a_token_bucket_adds(redis_store: RedisStore) -> None:
    for kind, make in EVERY_KIND.items():
        limiter = make(redis_store, kind)
        if kind not in ("token bucket", "bucket"):
            with pytest.raises((InvalidLimiter, AttributeError)):
                limiter.add("ada", 1)


def test_key_above_its_burst_has_no_ttl(redis_store: RedisStore, client: redis.Redis) -> None:
    bucket = TokenBucket(redis_store, "api", "5/minute")
    assert bucket.add("ada", 3) == 8
    (name,) = client.keys()
    assert (client.get(name), client.ttl(name)) == (b"a3", -1)
    bucket.hit("ada", 2)
    assert (client.get(name), client.ttl(name)) == (b"a1", -1)
    bucket.hit("ada", 2)
    assert client.pttl(name) > 0
    assert bucket.add("ada", 3) == 7
    assert (client.get(name), client.ttl(name)) == (b"a2", -1)
    bucket.hit("ada", 2)
    assert client.keys() == []


@pytest.mark.parametrize("value", ["a", "a-1", "a1.5", "a99999999999999999999", "b1", "t1a"])
def test_foreign_number_of_permits_is_an_error(redis_store: RedisStore, client: redis.Redis, value: str) -> None:
    bucket = TokenBucket(redis_store, "api", "5/minute")
    bucket.add("ada", 3)
    (name,) = client.keys()
    client.set(name, value)
    for ask in (bucket.hit, lambda key: bucket.add(key, 1)):
        with pytest.raises(ForeignState):
            ask("ada")


def test_added_permits_while_redis_is_away(redis_store: RedisStore) -> None:
    with Store.private(keys=10) as host:
        nowhere = RedisStore("redis://127.0.0.1:1", when_unavailable="local", host=host, hosts=2)
        with nowhere, pytest.raises(StoreUnavailable):
            TokenBucket(nowhere, "api", "5/minute").add("ada", 5)


@every_kind
def test_flushed_scripts_are_loaded_again(
    make: Callable[..., Any], redis_store: RedisStore, client: redis.Redis
) -> None:
    limiter = make(redis_store, "api")
    both = AllOf(limiter)
    for ask in (limiter.allow, limiter.hit, limiter.peek, limiter.reserve, limiter.refund, limiter.reset, both.hit):
        client.script_flush()
        ask("ada")
    client.script_flush()
    assert limiter.allow_many(["eve"] * 2) == [True, limiter.limit > 1]
    assert not client.keys("*:x:*")


def test_scripts_that_are_flushed_during_a_batch_are_loaded_again(
    is_async: bool, server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with blocking_store(server.url, is_async, timeout=PATIENCE_S) as store:
        bucket = TokenBucket(store, "b", "9/hour")
        send, sizes = store.executor.client.execute_many, []

        def forgotten(calls: Any) -> Any:
            client.script_flush()
            sizes.append(len(calls))
            return send(calls)

        monkeypatch.setattr(store.executor.client, "execute_many", forgotten)
        assert bucket.allow_many(["ada"] * 12) == [True] * 9 + [False] * 3
        assert sizes == [12, 12]

        def unknown(calls: Any) -> Any:
            return [redis.exceptions.NoScriptError("never known")] * len(calls)

        async def unknown_later(calls: Any) -> Any:
            return unknown(calls)

        # By a server that doesn't take it at all.
        monkeypatch.setattr(store.executor.client, "execute_many", unknown_later if is_async else unknown)
        with pytest.raises(StoreUnavailable, match="never known"):
            bucket.allow_many(["ada"] * 3)


def test_an_unavailable_server_raises_store_unavailable(server: RedisServer) -> None:
    with redis_server() as other, RedisStore(other.url, timeout=60) as store:
        bucket = TokenBucket(store, "b", "5/minute")
        assert bucket.allow("ada")
        other.process.kill()
        other.process.wait()
        for ask in (bucket.allow, bucket.hit, bucket.peek):
            with pytest.raises(StoreUnavailable, match="has not decided") as caught:
                ask("ada")
            assert isinstance(caught.value.__cause__, redis.ConnectionError)
        # From now on no call goes to it.
        for ask in (bucket.allow, bucket.reserve, bucket.refund, bucket.reset):
            with pytest.raises(StoreUnavailable, match="has not decided") as caught:
                ask("ada")
            # A reset has no fallback.
            remedies = str(caught.value).count("the store's when_unavailable is 'deny': with 'allow' or 'local' it")
            assert remedies == (ask != bucket.reset)
        with pytest.raises(StoreUnavailable, match="when_unavailable is 'deny'"):
            bucket.allow_many(["ada"])
        with pytest.raises(StoreUnavailable):
            bucket.wait("ada")


def test_w27_a_server_that_stops_is_an_error_within_the_deadline(server: RedisServer) -> None:
    """W27 without a fallback: an error, within the socket's deadline."""
    with RedisStore(server.url, timeout=0.05) as store:
        bucket = TokenBucket(store, "b", "5/minute")
        while True:
            try:
                bucket.allow("ada")
                break
            except StoreUnavailable:  # a busy machine
                pass
        asked = threading.Event()
        errors: list[Exception] = []

        def ask() -> None:
            try:
                bucket.hit("ada")
            except StoreUnavailable as error:
                errors.append(error)
            asked.set()

        with server.stopped():
            thread = threading.Thread(target=ask)
            thread.start()
            # While the server does nothing, the answer comes; how soon is no test's affair.
            assert asked.wait(60)
            thread.join()
            with pytest.raises(StoreUnavailable):
                bucket.allow_many(["ada"])
        assert isinstance(errors[0].__cause__, redis.TimeoutError)


def test_a_server_that_refuses_scripts_raises_store_unavailable(
    server: RedisServer, client: redis.Redis, redis_store: RedisStore
) -> None:
    bucket = TokenBucket(redis_store, "b", "5/minute")
    assert bucket.allow("ada")
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            bucket.allow("ada")
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            bucket.allow_many(["ada"])
    finally:
        client.config_set("maxmemory", 0)
    assert bucket.peek("ada").remaining == 4


def test_a_full_server_refuses_every_kind_of_limiter(client: redis.Redis, redis_store: RedisStore) -> None:
    limiters = [make(redis_store, kind) for kind, make in EVERY_KIND.items()]
    for limiter in limiters:
        assert limiter.allow("ada")
    written = changes(client)
    client.config_set("maxmemory", 1)
    try:
        for limiter in limiters:
            for key in ("ada", "bob"):
                if limiter.peek(key):
                    with pytest.raises(StoreUnavailable, match="maxmemory"):
                        limiter.allow(key)
    finally:
        client.config_set("maxmemory", 0)
    assert changes(client) == written


def test_values_that_no_limiter_writes_are_errors(redis_store: RedisStore, client: redis.Redis) -> None:
    plants: dict[str, list[Callable[[Any], Any]]] = {
        "concurrency": [
            lambda name: client.zadd(name, {"h1:1": 9.2e18}),
            lambda name: client.zadd(name, {"h1:1": 1e300}),
            lambda name: client.zadd(name, {"h1:1": -5}),
        ],
        "sliding log": [lambda name: client.zadd(name, {"p0000000000000001:1": 1e300})],
        "interval bucket": [
            lambda name: client.set(name, "i9007199254740991:1"),
            lambda name: client.set(name, "i0:9007199254740991"),
        ],
    }
    for kind, of_kind in plants.items():
        limiter = EVERY_KIND[kind](redis_store, kind)
        limiter.allow("ada")
        (name,) = client.keys(f"*:{kind}:*")
        for plant in of_kind:
            client.delete(name)
            plant(name)
            for ask in (limiter.allow, limiter.hit, limiter.peek, limiter.reserve, limiter.reset):
                with pytest.raises(ForeignState):
                    ask("ada")
    bucketed = EVERY_KIND["bucketed window"](redis_store, "old")
    bucketed.allow("ada")
    (name,) = client.keys("*:old:*")
    client.hset(name, mapping={f"b{number}": "1" for number in range(20_000)})
    assert bucketed.hit("ada").remaining == 3
    assert client.hlen(name) <= 2


def test_running_totals_are_rebased(redis_store: RedisStore, client: redis.Redis) -> None:
    """For a sliding log: in one script, before a double can't hold them exactly."""
    make: Any = SlidingLog
    log = make(redis_store, "l", "1000/hour")
    for cost in (5, 7, 11):
        assert log.hit("ada", cost)
    (name,) = client.keys()
    # As if much had been admitted and had left.
    base = 2**52 - 30
    for member, date in client.zrange(name, 0, -1, withscores=True):
        total, permits = map(int, member[1:].split(b":"))
        client.zadd(name, {b"p%016d:%d" % (base + total, permits): date})
        client.zrem(name, member)
    assert log.peek("ada").remaining == 1000 - 23
    for number in range(10):
        assert log.hit("ada", 2).remaining == 1000 - 23 - 2 * (number + 1)
    totals = [int(member[1:].split(b":")[0]) for member in client.zrange(name, 0, -1)]
    assert totals == [5, 12, 23, *range(25, 44, 2)]
    log.refund("ada", 12)
    assert log.peek("ada").remaining == 1000 - 31
    assert client.pttl(name) > 0


def test_integers_of_other_types_are_accepted(redis_store: RedisStore, client: redis.Redis) -> None:
    class Number(enum.IntEnum):
        FIVE = 5

        def __repr__(self) -> str:
            return "five"

    bucket = TokenBucket(redis_store, "i", "5/second", burst=Number.FIVE, refill="interval")
    assert bucket.hit("ada", 2)
    for buckets in (5, Number.FIVE):
        assert BucketedWindow(redis_store, "b", "9/hour", buckets=buckets).allow("ada")
    assert len(client.keys("*:b:*")) == 1
    assert Concurrency(redis_store, "c", Number.FIVE).hit("ada", Number.FIVE)


def test_a_failed_batch_remembers_the_permits_it_took(redis_store: RedisStore, client: redis.Redis) -> None:
    held = Concurrency(redis_store, "h", 2)
    assert held.allow("bad")
    (name,) = client.keys()
    client.set(name, "mine")
    with pytest.raises(ForeignState):
        held.allow_many(["ada", "bad", "zoe"])
    for key in ("ada", "zoe"):
        held.refund(key)
        assert held.peek(key).remaining == 2


def test_the_permits_of_one_call_are_bounded(redis_store: RedisStore) -> None:
    held = Concurrency(redis_store, "h", 2**24)
    assert held.acquire("ada", 10_000).release()
    for ask in (held.acquire, held.hit, held.peek, held.reserve, held.refund):
        with pytest.raises(InvalidCost, match="10000"):
            ask("ada", 10_001)


def test_a_password_and_a_user_pass_through_the_url(server: RedisServer, client: redis.Redis) -> None:
    def allow(url: str, namespace: str) -> bool:
        with RedisStore(url, timeout=60, namespace=namespace) as store:
            return TokenBucket(store, "b", "5/minute").allow("ada")

    client.execute_command("ACL SETUSER", "shop", "on", ">secret", "~shop:*", "+@all")
    try:
        url = server.url.replace("//", "//shop:secret@")
        assert allow(url, "shop")
        with pytest.raises(StoreUnavailable, match=r"(?i)perm.*docs/redis\.md"):
            allow(url, "other")
        with pytest.raises(StoreUnavailable, match="check the user and the password"):
            allow(server.url.replace("//", "//shop:wrong@"), "shop")
    finally:
        client.execute_command("ACL DELUSER", "shop")


@pytest.mark.parametrize("reply", [None, b"OK", [], [1], [b"1", 2, 3, 4], [1, 2, 3, 4, 5], [-1, 7], 1])
def test_a_reply_that_no_script_makes_is_an_error(
    reply: Any, redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = TokenBucket(redis_store, "b", "5/minute")
    monkeypatch.setattr(redis_store.executor, "execute_command", lambda *_: reply)
    with pytest.raises(StoreUnavailable, match="answered"):
        bucket.hit("ada")


def test_a_store_uses_a_client_that_the_caller_made(server: RedisServer) -> None:
    for options in ({}, {"decode_responses": True}, {"protocol": 3}):
        with redis.Redis(port=server.port, socket_timeout=60, retry=None, **options) as client:  # type: ignore[arg-type]
            with RedisStore(client, namespace=f"n{len(options)}") as store:
                for make in EVERY_KIND.values():
                    limiter = make(store, "api")
                    assert limiter.hit("ada", limiter.limit).remaining == 0
                    assert not limiter.allow("ada")
                    limiter.reset("ada")
            assert client.ping()  # it isn't the store's to close


def test_invalid_servers_and_options_are_refused(server: RedisServer) -> None:
    make: Any = RedisStore
    with pytest.raises(TypeError, match="URL"):
        make(7)
    with pytest.raises(ValueError, match="socket_timeout"):
        make(redis.Redis(port=server.port, socket_timeout=None))
    with pytest.raises(ValueError, match="socket_timeout"):
        make(redis.Redis(port=server.port, socket_timeout=1), timeout=1)
    with pytest.raises(TypeError, match=r"not one of <class 'redis\.client\.Redis'>: a RedisStore takes"):
        AsyncRedisStore(redis.Redis(port=server.port, socket_timeout=1))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"'redis\.asyncio.*an AsyncRedisStore those of redis\.asyncio"):
        make(redis.asyncio.Redis(port=server.port, socket_timeout=1))
    for timeout in (0, -1, float("inf"), True, "1", "soon"):
        with pytest.raises(InvalidRate, match=r"timeout: .*500 ms"):
            make(server.url, timeout=timeout)
    for timeout in ("2s", "2000 ms", 2, timedelta(seconds=2)):
        with RedisStore(server.url, timeout=timeout) as store:
            options = store.executor.client.connection_pool.connection_kwargs
            assert options["socket_timeout"] == options["socket_connect_timeout"] == 2.0
    with pytest.raises(ValueError, match="socket_timeout is a number"):
        make(redis.Redis(port=server.port, socket_timeout="1"))  # type: ignore[arg-type]
    for kind in (make, AsyncRedisStore):
        for option in ("socket_timeout=60", "socket_connect_timeout=1", "retry_on_timeout=yes"):
            with pytest.raises(ValueError, match=f"{option.partition('=')[0]} has no place in the URL"):
                kind(f"{server.url}?{option}")
        with pytest.raises(ValueError, match=r"number of a database.*'/shop'"):
            kind("redis://localhost/shop")
        for option in ("foo=3", "ssl_cert_reqs=none"):
            with pytest.raises(ValueError, match=f"unknown option.*{option.partition('=')[0]}.*rediss"):
                kind(f"{server.url}?{option}")
            with pytest.raises(ValueError, match=f"unknown option.*{option.partition('=')[0]}"):
                kind(f"redis+cluster://127.0.0.1:{server.port}?{option}")
        for address in ("localhost", "127.0.0.1/0"):
            with pytest.raises(ValueError, match=f"not with '{address}': say redis://localhost"):
                kind(address)
    for namespace in ("", "a{b", "a}", "é", 7, "a" * 101):
        with pytest.raises(ValueError, match="namespace"):
            make(server.url, namespace=namespace)
    for plain_keys in ("no", 1, None):
        with pytest.raises(ValueError, match="plain_keys is True or False"):
            make(server.url, plain_keys=plain_keys)


@pytest.mark.parametrize("letter", "/?#[")
def test_the_error_for_an_unreadable_url_shows_no_password(letter: str, is_async: bool) -> None:
    make: Any = AsyncRedisStore if is_async else RedisStore
    for password in (f"SEC{letter}RET", f"12{letter}RET"):
        for url in (f"redis://:{password}@localhost", f"redis://shop:{password}@localhost:6379/0"):
            if (letter, password[0]) == ("?", "1"):
                # 12 is a port then, and the rest an option without a value.
                continue
            with pytest.raises(ValueError, match=r"quote\(password, safe=''\)") as refused:
                make(url)
            assert not any(part in f"{refused.value!r}{refused.value.__cause__!r}" for part in ("SEC", "RET"))
            quoted = url.replace(password, urllib.parse.quote(password, safe=""))
            assert make(quoted).executor.client.connection_pool.connection_kwargs["password"] == password


def test_the_repr_of_a_limiter_names_its_kind_and_store(server: RedisServer, is_async: bool) -> None:
    make: Any = AsyncRedisStore if is_async else RedisStore
    store = make(server.url)
    assert repr(Concurrency(store, "pdf", 20)).startswith("<Concurrency 'pdf' limit=20, lease_ns=30000000000, over <")
    with pytest.raises(AttributeError, match="TokenBucket over Redis has no attribute 'capacity'"):
        _ = TokenBucket(store, "api", "5/minute").capacity  # type: ignore[attr-defined]


def test_every_operation_has_a_deadline_and_none_is_repeated(server: RedisServer) -> None:
    for store in (RedisStore(server.url), AsyncRedisStore(server.url)):
        options = store.executor.client.connection_pool.connection_kwargs
        assert (options["socket_timeout"], options["socket_connect_timeout"]) == (0.5, 0.5)
        assert options["retry"].get_retries() == 0 if hasattr(options["retry"], "get_retries") else True


def test_why_redis_has_not_decided_is_logged_once_a_minute(
    server: RedisServer, is_async: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a fallback nor a 503 shows the reason."""

    # Not a failure: the breaker stays closed, and each call goes to Redis.
    url = server.url.replace("/0", "/99")
    with blocking_store(url, is_async, timeout=PATIENCE_S, when_unavailable="allow") as store:
        bucket = TokenBucket(store, "b", "5/minute")
        for _ in range(5):
            assert bucket.allow("ada")
        assert all(bucket.allow_many(["ada"] * 3))
        assert len(caplog.messages) == 1
        # As in the next minute.
        store.executor._log_turns = Seldom(LOG_EVERY_S)
        assert bucket.hit("ada")
    assert [(record.name, record.levelname) for record in caplog.records] == [("forebay.redis", "WARNING")] * 2
    assert all(f"127.0.0.1:{server.port}> has not decided" in text and "DB index" in text for text in caplog.messages)


def test_the_error_for_a_server_outside_a_cluster_names_a_remedy(server: RedisServer, is_async: bool) -> None:
    url = server.url.replace("redis://", "redis+cluster://")
    with (
        blocking_store(url, is_async, timeout=PATIENCE_S) as store,
        pytest.raises(StoreUnavailable, match="begins with redis:// or rediss://"),
    ):
        TokenBucket(store, "b", "5/minute").allow("ada")


def test_a_store_in_another_event_loop_is_refused(server: RedisServer) -> None:
    for ask in (lambda bucket: bucket.hit("ada"), lambda bucket: bucket.allow_many(["ada"])):
        store = AsyncRedisStore(server.url, timeout=PATIENCE_S)
        bucket = TokenBucket(store, "b", "5/minute")

        async def used(ask: Any = ask, bucket: Any = bucket, store: Any = store) -> None:
            assert await ask(bucket)
            await store.executor.client.aclose()

        asyncio.run(used())
        with pytest.raises(RuntimeError, match=r"another event loop before.*for each event loop"):
            asyncio.run(used())


def test_a_closed_store_refuses_calls(server: RedisServer) -> None:
    with RedisStore(server.url, timeout=60) as store:
        bucket = TokenBucket(store, "b", "5/minute")
        assert bucket.allow("ada")
    for ask in (bucket.allow, bucket.hit, bucket.wait, lambda key: bucket.allow_many([key])):
        with pytest.raises(StoreClosed):
            ask("ada")


# Several processes


def spend(url: str, kind: str, asked: int, results: Any) -> None:
    with RedisStore(url, timeout=60) as store:
        limiter = EVERY_KIND[kind](store, "shared")
        results.put(sum(limiter.allow("ada") for _ in range(asked)))


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_several_processes_get_no_more_than_the_limit(
    kind: str, server: RedisServer, server_clock: ServerClock
) -> None:
    """The clock stands still, so they get exactly the limit."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    workers = [context.Process(target=spend, args=(server.url, kind, 4, results)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    with RedisStore(server.url, timeout=60) as store:
        assert sum(results.get() for _ in workers) == EVERY_KIND[kind](store, "shared").limit


def test_a_limiter_works_on_both_sides_of_a_fork(
    redis_store: RedisStore, server_clock: ServerClock, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    bucket, held = TokenBucket(redis_store, "b", "5/minute"), Concurrency(redis_store, "c", 2)
    assert bucket.allow("ada")
    reservation = bucket.reserve("ada")
    lease = held.acquire("ada")
    assert held.allow("ada")

    def child() -> tuple[int, int, bool]:
        remaining = bucket.hit("ada").remaining
        # Its parent's bookings and permits are none of the child's.
        reservation.cancel()
        held.refund("ada")
        return remaining, held.peek("ada").remaining, lease.release()

    assert in_child(child) == (2, 0, False)
    assert bucket.hit("ada").remaining == 1
    assert lease.release()
    held.refund("ada")
    assert held.peek("ada").remaining == 2


def test_concurrent_threads_after_a_fork_close_no_connection_in_use(
    redis_store: RedisStore, in_child: Callable[[Callable[[], Any]], Any]
) -> None:
    """As under gunicorn's threads with preloading. A client's finalizer closes its connections, so only one is made."""
    bucket = TokenBucket(redis_store, "b", "5/minute")
    assert bucket.allow("ada")
    server: Any = redis_store.executor.client

    def child() -> tuple[int, int]:
        make, together = server._make, threading.Barrier(2, timeout=PATIENCE_S)

        def make_together() -> Any:
            made = make()
            together.wait()
            return made

        server._make = make_together
        pools = []
        threads = [threading.Thread(target=lambda: pools.append(server.connection_pool)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(pools), len({id(pool) for pool in pools})

    assert in_child(child) == (2, 1)
    assert bucket.allow("ada")


def test_concurrent_threads_after_a_fork_share_one_record_of_permits(
    redis_store: RedisStore, in_child: Callable[[Callable[[], Any]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter = Concurrency(redis_store, "c", 2)
    assert limiter.allow("ada")

    def child() -> int:
        together = threading.Barrier(2, timeout=PATIENCE_S)

        def make_together() -> Any:
            together.wait()
            return UnleasedPermits()

        monkeypatch.setattr("forebay.redis.concurrency.UnleasedPermits", make_together)
        threads = [threading.Thread(target=limiter.allow, args=("bob",)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        limiter.refund("bob", 2)
        return limiter.peek("bob").remaining

    assert in_child(child) == 2
    assert limiter.peek("ada").remaining == 1


def test_both_kinds_of_store_share_their_states(server: RedisServer, server_clock: ServerClock) -> None:
    async def asked() -> list[int]:
        async with AsyncRedisStore(server.url, timeout=60) as store:
            return [(await make(store, name).hit("ada")).remaining for name, make in EVERY_KIND.items()]

    remaining = asyncio.run(asked())
    with RedisStore(server.url, timeout=60) as store:
        assert [make(store, name).peek("ada").remaining for name, make in EVERY_KIND.items()] == remaining


@pytest.mark.parametrize(
    "url", ["localhost", "localhost:6379", "http://localhost", "redis+sentinel://a/b", "forebay:///a"]
)
def test_a_url_of_another_scheme_is_refused(url: str) -> None:
    for kind in (RedisStore, AsyncRedisStore):
        with pytest.raises(ValueError, match=r"begins with redis://.* master_for"):
            kind(url)
