"""A synced store: what it accepts and refuses, how it starts and ends, and every method of its limiters."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from process_helpers import Crew, wait_until
from redis_server import RedisServer
from synced_hosts import NEVER, Host, admitted, hosts, sum_of_all, sums

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    ForeignState,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    NotAwaited,
    Rate,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    StoreUnavailable,
    TokenBucket,
)
from forebay.redis import AsyncRedisStore, RedisStore, SyncedStore
from forebay.redis.keys import fingerprint
from forebay.verification import verify

KINDS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", "10/year"),
    "sliding": lambda store: SlidingWindow(store, "api", "10/year"),
    "bucket": lambda store: TokenBucket(store, "api", "1/day", burst=10),
}


@pytest.fixture(params=KINDS)
def host(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[Host]:
    with hosts(1, server.url, KINDS[request.param]) as (made,):
        yield made


@pytest.fixture
def synced(server: RedisServer) -> Iterator[SyncedStore]:
    with (
        Store.private(keys=100) as store,
        RedisStore(server.url, timeout=60) as redis_store,
        SyncedStore(redis_store, store, NEVER, keys=100) as opened,
    ):
        yield opened


def test_every_method_decides(host: Host) -> None:
    limiter = host.limiter
    decision = limiter.hit("k", 3)
    assert (decision.allowed, decision.limit, decision.remaining, decision.limiter) == (True, 10, 7, "api")
    assert limiter.allow("k")
    assert limiter.peek("k").remaining == 6
    assert limiter.hit("k", 0).allowed
    assert limiter.allow_many(["k", "k", "other"], [3, 4, 1]) == [True, False, True]
    assert limiter.hit("k", request_id="r").remaining == 2
    assert limiter.hit("k", request_id="r").remaining == 2
    limiter.refund("k", request_id="r")
    assert limiter.peek("k").remaining == 3
    booking = limiter.reserve("k", 3, 0)
    assert booking
    assert not limiter.allow("k")
    booking.cancel()
    assert limiter.wait("k", 3, timeout=0)
    assert not limiter.wait("k", timeout=0)
    assert limiter.hit("k").retry_after > 0
    assert AllOf(limiter, limiter).allow("new")
    assert limiter.peek("new").remaining == 8
    host.exchange()
    assert host.synced.status().unnamed_keys == 0
    limiter.reset("k")
    assert limiter.peek("k").remaining == 10
    assert repr(limiter).startswith(("<FixedWindow 'api'", "<SlidingWindow 'api'", "<TokenBucket 'api'"))


def test_a_rate_for_one_call(host: Host) -> None:
    """A bucket's TAT can be read with any rate; a window has one limit."""
    if hasattr(host.limiter, "slides"):
        with pytest.raises(InvalidLimiter, match="one limit for all calls"):
            host.limiter.hit("k", rate="20/year")
    else:
        assert host.limiter.hit("k", rate="2/day", burst=20).remaining == 19
        assert host.limiter.peek("k", rate="2/day", burst=20).remaining == 19
        host.limiter.refund("k", rate="2/day", burst=20)
        assert host.limiter.peek("k").remaining == 10


def test_limiters_work_in_an_event_loop(host: Host) -> None:
    async def ask() -> list[bool]:
        tasks = [host.limiter.wait_async("k", timeout=0) for _ in range(12)]
        return list(await asyncio.gather(*tasks))

    assert sorted(asyncio.run(ask())) == [False] * 2 + [True] * 10


def test_a_forgotten_await_admits_no_request(host: Host) -> None:
    for limiter in (host.limiter, AllOf(host.limiter, TokenBucket(host.limiter.store, "other", "10/day"))):
        answer = limiter.wait_async("k", timeout=0)
        with pytest.raises(NotAwaited, match=r"wait_async\(\) was not awaited"):
            bool(answer)
        answer.close()


def test_a_refused_call_changes_nothing(host: Host) -> None:
    limiter = host.limiter
    for wrong, error in (
        (lambda: limiter.allow(1.5), InvalidKey),
        (lambda: limiter.hit("k", 11), CostExceedsLimit),
        (lambda: limiter.hit("k", -1), InvalidCost),
        (lambda: limiter.allow_many("k"), InvalidKey),
        (lambda: limiter.allow_many(["k"], 3), InvalidCost),
        (lambda: limiter.allow_many(["k"], [1, 2]), InvalidCost),
        (lambda: limiter.allow_many(["k", 1.5]), InvalidKey),
        (lambda: limiter.allow_many(["k", "k"], [1, 11]), CostExceedsLimit),
        (lambda: limiter.hit("k", burst=5), InvalidLimiter),
        (lambda: limiter.reserve(None), InvalidKey),
    ):
        with pytest.raises(error):
            wrong()
    assert limiter.peek("k").remaining == 10


@pytest.mark.parametrize("host", ["bucket"], indirect=True)
def test_a_bucket_refuses_permits_above_its_burst(host: Host) -> None:
    with pytest.raises(InvalidLimiter, match="a token bucket over a Store or a RedisStore can"):
        host.limiter.add("k", 1)


@pytest.mark.parametrize("key", ["k", "ключ", b"k", 7, ("k", 7)])
def test_redis_knows_keys_by_their_fingerprints(host: Host, client: redis.Redis, key: Any) -> None:
    assert host.limiter.allow(key)
    host.exchange()
    (name,) = sums(client)
    encoded = fingerprint(key).decode()
    assert name.startswith(f"forebay:{{{encoded[1]}:api}}:{encoded}:synced-")
    assert client.pttl(name) > 0


def test_no_key_is_reported_under_the_name_of_another(server: RedisServer, client: redis.Redis) -> None:
    """Keys evict each other. The counts of a key from before it lost its cell remain as counts of other hosts."""
    with hosts(1, server.url, lambda store: FixedWindow(store, "api", "1000/year"), keys=2) as (host,):
        counted: dict[str, int] = {}
        for number in range(200):
            key = f"user:{number * 7 % 5}"
            counted[key] = counted.get(key, 0) + admitted(host.limiter, 1 + number % 3, key)
            host.exchange()
        assert host.store.stats().limiters["api"].evicted > 50
        assert {name.split(":")[3]: total for name, total in sums(client).items()} == {
            fingerprint(key).decode(): total for key, total in counted.items()
        }
        last = "user:3"
        assert host.limiter.allow(last)
        host.exchange()
        assert host.limiter.peek(last).remaining == 1000 - counted[last] - 1


def test_a_key_in_the_cell_of_another_begins_with_its_published_sum(server: RedisServer) -> None:
    with (
        hosts(1, server.url, KINDS["fixed"], keys=1) as (one,),
        hosts(1, server.url, KINDS["fixed"]) as (other,),
    ):
        assert admitted(other.limiter, 4, "first") == 4
        other.exchange()
        assert one.limiter.allow("first")
        one.exchange()
        assert one.limiter.peek("first").remaining == 5
        assert one.limiter.hit("second").remaining == 9
        assert one.limiter.hit("first").remaining == 5
        one.exchange()
        assert one.limiter.peek("first").remaining == 4


@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_a_full_table_follows_on_full(server: RedisServer, client: redis.Redis, on_full: Any) -> None:
    with (
        Store.private(keys=100, on_full=on_full) as store,
        hosts(1, server.url, KINDS["fixed"], store=store, keys=1) as (host,),
    ):
        assert host.limiter.allow("one")
        assert host.limiter.allow("two") is (on_full == "allow")
        host.exchange()
        assert sum_of_all(client) == 1


def test_a_half_written_record_is_not_reported(server: RedisServer, client: redis.Redis, name: str) -> None:
    """A process was stopped in the middle of writing a key's name, and the cell was another key's before."""
    with Store(name, keys=100) as store, hosts(1, server.url, KINDS["fixed"], store=store, keys=1) as (host,):
        assert host.limiter.allow("one")
        memory = open(store.path or "", "r+b")  # noqa: SIM115
        with memory:
            memory.seek(-64, 2)
            memory.write(b"another!")
        status = host.synced.status()
        assert (status.pending_keys, status.unnamed_keys) == (0, 1)
        host.exchange()
        assert sums(client) == {}
        # In its next cell it has a name again.
        assert host.limiter.allow("two")
        host.exchange()
        assert sum_of_all(client) == 1


def test_a_foreign_state_affects_only_its_own_key(host: Host, client: redis.Redis) -> None:
    assert host.limiter.allow("one")
    host.exchange()
    (foreign,) = sums(client)
    entries = ("what", f"1:1:{2**53}:1", f"{2**53}:1:1:1")
    for value in ("a text", {"sum": "-1"}, *({"sum": "1", host.field: entry} for entry in entries)):
        client.delete(foreign)
        if isinstance(value, str):
            client.set(foreign, value)
        else:
            client.hset(foreign, mapping=value)  # type: ignore[arg-type]
        assert host.limiter.allow_many(["one", "two"]) == [True, True]
        with pytest.raises(ForeignState, match="synced"):
            host.exchange()
        assert host.synced.status().pending_keys == 1
    client.delete(foreign)
    host.exchange()
    assert host.synced.status().pending_keys == 0


def test_one_thousand_hosts_have_room(host: Host, client: redis.Redis) -> None:
    """A bucket evicts the host with the oldest report. A window evicts none: its count would be added again."""
    assert host.limiter.allow("k")
    host.exchange()
    (key,) = sums(client)
    client.hset(key, mapping={f"{number:016x}": f"1:1:0:{number}" for number in range(1100)})
    client.hdel(key, host.field)
    total = sums(client)
    if hasattr(host.limiter, "slides"):
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="1000 hosts"):
                host.exchange()
            assert sums(client) == total
        assert host.synced.status().pending_keys == 1
        # It hears of the others all the same.
        assert host.limiter.peek("k").remaining == 8
    else:
        host.exchange()
        assert client.hlen(key) == 1101
        assert not client.hexists(key, f"{0:016x}")
        assert client.hexists(key, host.field)


def test_the_thread_exchanges_by_itself(server: RedisServer, client: redis.Redis) -> None:
    with hosts(2, server.url, KINDS["fixed"], interval="10 ms") as (one, other):
        assert admitted(one.limiter, 4) == 4
        assert admitted(other.limiter, 4) == 4
        wait_until(lambda: one.limiter.peek("k").remaining == other.limiter.peek("k").remaining == 2, "an exchange")
        assert one.synced.status().exchanged_ago is not None


def test_close_reports_the_rest_and_ends_the_thread(host: Host, client: redis.Redis) -> None:
    before = threading.active_count()
    assert host.limiter.allow("k")
    host.synced.close()
    assert len(sums(client)) == 1
    assert threading.active_count() == before - 1
    host.synced.close()
    with pytest.raises(StoreClosed):
        host.synced.exchange()
    with pytest.raises(StoreClosed):
        FixedWindow(host.synced, "other", "10/hour")


def test_stores_are_closed_in_any_order(server: RedisServer) -> None:
    """Closing one store first raises nothing."""
    for order in ((0, 1, 2), (1, 0, 2), (2, 1, 0)):
        store = Store.private(keys=100)
        redis_store = RedisStore(server.url, timeout=60)
        synced = SyncedStore(redis_store, store, "10 ms", keys=100)
        limiter = FixedWindow(synced, "api", "10/hour")
        assert limiter.allow("k")
        opened = (synced, redis_store, store)
        for which in order:
            opened[which].close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_hosts_store_is_closed_first(server: RedisServer, client: redis.Redis, kind: str) -> None:
    """The pending counts are reported, and closing raises nothing."""
    with Store.private(keys=100) as store, RedisStore(server.url, timeout=60) as redis_store:
        before = threading.active_count()
        synced = SyncedStore(redis_store, store, NEVER, keys=100)
        assert KINDS[kind](synced).allow("k")
        store.close()
        for act in (synced.status, synced.exchange):
            with pytest.raises(StoreClosed, match=r"SyncedStore.* after its host's store was closed"):
                act()
        synced.close()
        assert threading.active_count() == before
        assert len(sums(client)) == 1


def test_a_child_has_a_thread_of_its_own(name: str, crew: Crew, server: RedisServer, client: redis.Redis) -> None:
    def count() -> None:
        assert admitted(host.limiter, 3) == 3
        wait_until(lambda: sum_of_all(client_of_child) == 3, "an exchange by the child")

    with Store(name, keys=100) as store, hosts(1, server.url, KINDS["fixed"], store=store, interval="20 ms") as (host,):
        host.synced._exchanger._stop.set()  # the parent's ends
        with server.client() as client_of_child:
            crew.start(count).result()
    assert sum_of_all(client) == 3


def test_the_end_of_the_interpreter_reports_the_rest(name: str, server: RedisServer, client: redis.Redis) -> None:
    code = f"""
from forebay import *
from forebay.redis import *
synced = SyncedStore(RedisStore({server.url!r}, timeout=60), Store({name!r}, keys=10), keys=10)
limiter = FixedWindow(synced, "api", "10/year")
limiter.allow("k")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert sum_of_all(client) == 1


def test_a_segment_with_synced_limiters_is_sound(name: str, server: RedisServer) -> None:
    with Store(name, keys=100) as store:
        for number, make in enumerate(KINDS.values()):
            with hosts(1, server.url, make, store=store) as (host,):
                assert all(host.limiter.allow(f"user:{user}") for user in range(30)), number
                host.exchange()
            store = Store(name, keys=100)
        report = verify(name)
        assert report.findings == ()
        algorithms = {"synced FixedWindow", "synced SlidingWindow", "synced TokenBucket"}
        assert {part.algorithm for part in report.parts} == {"", *algorithms}
        assert algorithms <= {limiter.algorithm for limiter in store.stats().limiters.values()}
        store.close()


WORDS = {"checksum": 3, "incarnation": 2, "reported": 7, "until": 7}


@pytest.mark.parametrize(
    ("kind", "what", "value", "text"),
    [
        *((kind, "checksum", 1234, "found checksum 0x4d2 of a name, expected 0 or an odd number") for kind in KINDS),
        *((kind, "incarnation", 4095 << 28, "by a claim of a counter line that doesn't exist") for kind in KINDS),
        ("fixed", "reported", 16 << 32, "found reported counts 0x1000000000, expected no more bits"),
        ("sliding", "reported", 16, "found reported counts 0x10, expected no more bits"),
        ("sliding", "reported", 2**31 + 16, "found reported counts 0x80000010, expected no more bits"),
        ("bucket", "until", 2**62, "found a report to Redis until 4611686018427387904 ns"),
    ],
)
def test_verification_finds_records_that_no_limiter_has_written(
    name: str, server: RedisServer, kind: str, what: str, value: int, text: str
) -> None:
    with Store(name, keys=100) as store, hosts(1, server.url, KINDS[kind], store=store, keys=1) as (host,):
        assert host.limiter.allow("k")
        host.exchange()
        assert verify(name).findings == ()
        with open(store.path or "", "r+b") as memory:
            memory.seek(-64 + 8 * WORDS[what], 2)
            memory.write(value.to_bytes(8, "little"))
        (finding,) = verify(name).findings
        assert text in str(finding)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_reports_are_sound(name: str, server: RedisServer, kind: str) -> None:
    """The highest counts, unanswered, refunded, in several incarnations of a cell."""
    with Store(name, keys=100) as store, hosts(1, server.url, KINDS[kind], store=store, keys=1) as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        for key in ("one", "two"):
            assert host.limiter.hit(key, 10)
            for act in (lambda: list(exchange.messages(-1)), host.exchange):
                act()
                assert verify(name).findings == ()
        host.limiter.reset("two")
        assert len(list(exchange.messages(-1))) == 1
        assert verify(name).findings == ()


def test_hosts_of_one_segment_are_one_and_others_are_others(name: str, server: RedisServer) -> None:
    with (
        Store(name, keys=10) as one,
        Store(name, keys=10) as same,
        Store.private(keys=10) as other,
        RedisStore(server.url) as redis_store,
    ):
        ids = [SyncedStore(redis_store, store, keys=100)._host for store in (one, same, other)]
        assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda store: LeakyBucket(store, "api", "1/second", 5),
        lambda store: MinInterval(store, "api", "2s"),
        lambda store: BucketedWindow(store, "api", "1/second"),
        lambda store: SlidingLog(store, "api", "1/second", keys=10),
        lambda store: Concurrency(store, "api", 5),
    ],
)
def test_errors_name_the_alternative_to_a_synced_limiter(synced: SyncedStore, make: Callable[[Any], Any]) -> None:
    with pytest.raises(InvalidLimiter, match=r"can't be synced: take FixedWindow.* or make it over the RedisStore"):
        make(synced)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda store: FixedWindow(store, "api", "1/hour", align="first"), "by the clock"),
        (lambda store: FixedWindow(store, "api", "1/hour", align="stagger"), "by the clock"),
        (lambda store: FixedWindow(store, "api", "1/day", align="calendar", timezone="UTC"), "by the clock"),
        (lambda store: TokenBucket(store, "api", "1/hour", refill="interval"), "continuously"),
        (lambda store: TokenBucket(store, "api", "9/hour", initial=1), "starts with its burst"),
        (lambda store: FixedWindow(store, "api", "1/second"), "before the next exchange"),
        (lambda store: SlidingWindow(store, "api", "1/second"), "before the next exchange"),
        (lambda store: SlidingWindow(store, "api", "500000/minute"), "too much"),
        (lambda store: TokenBucket(store, "api", Rate.per_ns(1, 1001)), "whole microseconds"),
        (lambda store: TokenBucket(store, "api", "1/hour", burst=0), "burst"),
        (lambda store: FixedWindow(store, "", "1/hour"), "name"),
    ],
)
def test_invalid_parameters_are_refused(synced: SyncedStore, make: Callable[[Any], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(synced)


def test_invalid_stores_are_refused(server: RedisServer) -> None:
    with Store.private(keys=10) as store, RedisStore(server.url) as redis_store:
        with pytest.raises(TypeError, match="is a RedisStore, not"):
            SyncedStore(AsyncRedisStore(server.url), store, keys=100)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"is a forebay\.Store, not"):
            SyncedStore(redis_store, redis_store, keys=100)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="plain_keys"):
            SyncedStore(RedisStore(server.url, plain_keys=True), store, keys=100)
        with pytest.raises(ValueError, match="at least 10 ms"):
            SyncedStore(redis_store, store, "9 ms", keys=100)
        for keys in (0, "many", True):
            synced = SyncedStore(redis_store, store, keys=keys)  # type: ignore[arg-type]
            with pytest.raises(InvalidLimiter, match="keys"):
                FixedWindow(synced, "api", "10/hour")
        synced = SyncedStore(redis_store, store, keys=100)
        with pytest.raises(TypeError, match="can't be pickled"):
            pickle.dumps(synced)
        assert repr(synced) == f"<SyncedStore {store!r} with {redis_store!r} every 1 s>"
