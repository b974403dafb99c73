"""Hot keys, of which a host knows though it hasn't counted them: see core/synced/hot.pyx."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis_cluster import RedisCluster
from redis_server import RedisServer
from scripts_clock import ServerClock
from synced_hosts import Host, admitted, hosts, two_of_one_host

from forebay import AllOf, Decision, FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.errors import ForeignState, StoreUnavailable
from forebay.redis.keys import fingerprint
from forebay.testing import ManualClock

START = 1_000_000_020.0
"""A whole minute of the clock on the wall."""
LIMIT = 10
QUARTER = 3
"""The smallest count that is a quarter of the limit."""
LISTS = "forebay:*:hot-*"

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", f"{LIMIT}/minute"),
    "sliding": lambda store: SlidingWindow(store, "api", f"{LIMIT}/minute"),
}
EVERY_KIND = {**WINDOWS, "bucket": lambda store: TokenBucket(store, "api", f"{LIMIT}/minute")}
every_kind = pytest.mark.parametrize("kind", EVERY_KIND)


class Fleet:
    """Hosts whose clocks, and the server's, the test moves."""

    def __init__(self, server: RedisServer, server_clock: ServerClock) -> None:
        self.url, self.server_clock, self.host_clock = server.url, server_clock, ManualClock(START)
        self.made: list[Iterator[Any]] = []
        self.at(0)

    def at(self, seconds: float) -> None:
        self.host_clock.set(START + seconds)
        self.server_clock.set(START + seconds)

    def hosts(self, count: int, kind: str, **options: Any) -> Any:
        return hosts(count, self.url, EVERY_KIND[kind], clock=self.host_clock, **options)


@pytest.fixture
def fleet(server: RedisServer, server_clock: ServerClock) -> Fleet:
    return Fleet(server, server_clock)


def exchange_quickly(host: Host, round_number: int = 1) -> None:
    """An exchange that asks for no key without a reason. The only cell of `keys=1` is due in every eighth round."""
    assert host.synced._exchanger.exchange(round_number, elected=False) is None


def fields(decision: Decision) -> tuple[Any, ...]:
    """Its times in milliseconds: Redis counts microseconds."""
    times = (round(1000 * time) for time in (decision.retry_after, decision.reset_after))
    return (decision.allowed, decision.limit, decision.remaining, *times)


def lists(client: redis.Redis) -> dict[str, float]:
    """The names of hot keys, with their sums."""
    found: dict[str, float] = {}
    for key in client.scan_iter(LISTS):
        found.update({name.decode(): score for name, score in client.zrange(key, 0, -1, withscores=True)})
    found.pop("version", None)
    return found


def keys_of_shard(count: int) -> list[str]:
    named = (f"key {number}" for number in range(100_000))
    return [key for key, _ in zip((key for key in named if fingerprint(key)[1:2] == b"0"), range(count), strict=False)]


@every_kind
def test_w24_a_host_knows_of_a_key_before_it_is_first_asked(fleet: Fleet, kind: str) -> None:
    """A counts, exchange, B asks for the first time."""
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, 20) == LIMIT
        a.exchange()
        b.exchange()
        assert admitted(b.limiter, 20) == 0


@every_kind
def test_a_client_that_moves_over_five_hosts_gets_its_limit(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(5, kind) as made:
        total = 0
        for host in made:
            total += admitted(host.limiter, 20)
            for other in made:
                exchange_quickly(other)
        assert total == LIMIT


@every_kind
@pytest.mark.parametrize("each", [1, 2, 3, 4])
def test_a_client_that_moves_on_and_on_gets_less_than_a_quarter_more(fleet: Fleet, kind: str, each: int) -> None:
    """It takes little on each host: a key is hot from a quarter of its limit on."""
    with fleet.hosts(5, kind, keys=1) as made:
        total = 0
        for round_number in range(1, 30):
            total += admitted(made[round_number % 5].limiter, each)
            for other in made:
                exchange_quickly(other, 1 + round_number % 7)
        assert LIMIT <= total < LIMIT + QUARTER


@every_kind
@pytest.mark.parametrize("used", [QUARTER - 1, QUARTER])
def test_a_key_is_hot_from_a_quarter_of_its_limit_on(fleet: Fleet, client: redis.Redis, kind: str, used: int) -> None:
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, used) == used
        a.exchange()
        b.exchange()
        assert b.limiter.peek("k").remaining == (LIMIT if used < QUARTER else LIMIT - used)
        assert (fingerprint("k").decode() in lists(client)) == (used >= QUARTER)


WAYS: dict[str, Callable[[Host], bool]] = {
    "allow": lambda host: host.limiter.allow("k"),
    "hit": lambda host: host.limiter.hit("k").allowed,
    "hit of cost 0": lambda host: host.limiter.hit("k", 0).allowed and host.limiter.peek("k").remaining > 0,
    "hit with a request id": lambda host: host.limiter.hit("k", request_id=1).allowed,
    "allow_many": lambda host: host.limiter.allow_many(["k"])[0],
    "reserve": lambda host: bool(host.limiter.reserve("k", max_delay=0)),
    "take_up_to": lambda host: host.limiter.take_up_to("k", 2) > 0,
    "wait": lambda host: host.limiter.wait("k", timeout=0),
    "peek": lambda host: host.limiter.peek("k").allowed,
    "AllOf.allow": lambda host: AllOf(host.limiter, TokenBucket(host.store, "other", "5/second")).allow("k"),
}


@every_kind
@pytest.mark.parametrize("way", WAYS)
def test_every_request_knows_what_is_hot(fleet: Fleet, kind: str, way: str) -> None:
    with fleet.hosts(3, kind) as (a, b, unaware):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        assert not WAYS[way](b)
        assert WAYS[way](unaware)


@every_kind
def test_a_decision_of_a_hot_key_describes_it(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        a.limiter.hit("k", 7)
        a.exchange()
        b.exchange()
        assert fields(b.limiter.peek("k")) == fields(a.limiter.peek("k"))
        assert fields(b.limiter.peek("k", 4)) == fields(a.limiter.peek("k", 4))
        denied = b.limiter.hit("k", 4)
        assert not denied
        assert fields(denied) == fields(a.limiter.hit("k", 4))
        allowed = b.limiter.hit("k", 3)
        assert allowed
        assert fields(allowed) == fields(a.limiter.hit("k", 3))


@every_kind
def test_a_look_at_a_hot_key_inserts_nothing_and_a_request_inserts_it(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        admitted(a.limiter, LIMIT)
        a.exchange()
        b.exchange()
        b.limiter.peek("k")
        assert b.store.stats().limiters["api"].inserted == 0
        b.limiter.allow("k")
        b.limiter.allow("k")
        stats = b.store.stats().limiters["api"]
        assert (stats.inserted, stats.denied, stats.evicted, stats.full) == (1, 2, 0, 0)


@every_kind
def test_a_host_that_has_counted_a_key_learns_more(fleet: Fleet, kind: str) -> None:
    """It has nothing to report, and the key isn't due."""
    with fleet.hosts(2, kind, keys=1) as (a, b):
        b.limiter.allow("k")
        b.exchange()
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        exchange_quickly(b)
        assert admitted(b.limiter, LIMIT) == 0


@every_kind
@pytest.mark.parametrize(("used", "turn"), [(QUARTER - 1, 64), (QUARTER, 8)])
def test_a_host_rarely_queries_a_key_that_is_not_hot(fleet: Fleet, kind: str, used: int, turn: int) -> None:
    with fleet.hosts(1, kind, keys=1) as (host,):
        assert admitted(host.limiter, used) == used
        host.exchange()
        cells = host.limiter.cell_count
        queried = [len(host.limiter.reports(0, cells, number)[0]) for number in range(1, turn + 1)]
        assert queried == [0] * (turn - 1) + [1]


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_host_that_knows_of_a_hot_key_learns_what_others_give_back(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind, keys=1) as (a, b):
        b.limiter.allow("k")
        assert admitted(a.limiter, LIMIT - 1) == LIMIT - 1
        for host in (a, b):
            host.exchange()
        assert not b.limiter.allow("k")
        a.limiter.refund("k", LIMIT - 1)
        a.exchange()
        for number in range(1, 9):
            exchange_quickly(b, number)
        assert admitted(b.limiter, LIMIT) == LIMIT - 1


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_host_that_has_counted_a_key_in_the_window_before_learns_of_it(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind, keys=1) as (a, b):
        b.limiter.allow("k")
        exchange_quickly(b)
        fleet.at(90)
        used = admitted(a.limiter, LIMIT)
        a.exchange()
        exchange_quickly(b, 2)
        assert used == LIMIT
        assert admitted(b.limiter, LIMIT) == 0


def test_the_window_before_is_published_too(fleet: Fleet) -> None:
    with fleet.hosts(2, "sliding") as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        fleet.at(90)
        b.exchange()
        # Half of the window before still counts.
        assert b.limiter.peek("k").remaining == LIMIT // 2
        assert admitted(b.limiter, LIMIT) == LIMIT // 2


@every_kind
def test_a_published_sum_ends_with_its_time(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        fleet.at(120)
        assert admitted(b.limiter, 20) == LIMIT


@every_kind
def test_a_refund_is_hot(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        assert b.limiter.peek("k").remaining == 0
        a.limiter.refund("k", 9)
        a.exchange()
        exchange_quickly(b)
        assert b.limiter.peek("k").remaining == 9


@every_kind
def test_reset_forgets_a_published_sum_until_it_is_read_again(fleet: Fleet, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        b.limiter.reset("k")
        assert b.limiter.peek("k").remaining == LIMIT
        exchange_quickly(b, 8)
        assert b.limiter.peek("k").remaining == 0


@every_kind
def test_nothing_counts_twice(fleet: Fleet, kind: str) -> None:
    """A published sum has the host's own counts, too, and those that it has forgotten since."""
    with fleet.hosts(2, kind, keys=1) as (a, b):
        assert admitted(a.limiter, 4) == 4
        for round_number in range(1, 20):
            exchange_quickly(a, round_number)
            exchange_quickly(b, round_number)
        assert a.limiter.peek("k").remaining == b.limiter.peek("k").remaining == LIMIT - 4
        # Another key takes its only cell.
        a.limiter.allow("other")
        assert a.limiter.peek("k").remaining == LIMIT - 4
        assert admitted(a.limiter, LIMIT) == LIMIT - 4
        a.exchange()
        exchange_quickly(b)
        assert b.limiter.peek("k").remaining == 0


def test_an_exchange_by_one_process_is_for_all_of_its_host(fleet: Fleet) -> None:
    kind = EVERY_KIND["fixed"]
    with (
        fleet.hosts(1, "fixed") as (a,),
        Store.private(keys=100, clock=fleet.host_clock) as store,
        two_of_one_host(store, fleet.url, kind) as (b, of_one_host),
    ):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        assert admitted(of_one_host.limiter, LIMIT) == 0


def test_limiters_of_one_name_have_their_own_hot_keys(fleet: Fleet) -> None:
    with fleet.hosts(2, "fixed") as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        others = [
            SlidingWindow(b.synced, "api", "10/minute"),
            TokenBucket(b.synced, "api", "10/minute"),
            FixedWindow(b.synced, "api", "10/2 minutes"),
            FixedWindow(b.synced, "api 2", "10/minute"),
        ]
        a.exchange()
        b.exchange()
        assert [admitted(limiter, 20) for limiter in others] == [LIMIT] * len(others)
        assert admitted(b.limiter, 20) == 0


def test_limits_of_one_name_and_period_share_what_is_hot(fleet: Fleet) -> None:
    """A quarter of the smaller limit is enough. A higher limit needs more bits, and so is a host of its own."""
    with fleet.hosts(2, "fixed") as (a, b):
        higher = FixedWindow(b.synced, "api", "1000/minute")
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        assert higher.peek("k").remaining == 1000 - LIMIT
        higher.hit("k", 5)
        b.exchange()
        a.exchange()
        b.exchange()
        assert higher.peek("k").remaining == 1000 - LIMIT - 5


def test_a_list_has_room_for_the_hottest_keys(fleet: Fleet, client: redis.Redis) -> None:
    keys = keys_of_shard(200)
    with fleet.hosts(2, "fixed", keys=1000) as (a, b):
        for number, key in enumerate(keys):
            a.limiter.hit(key, QUARTER + number % 8)
            a.exchange()
        (name,) = client.scan_iter(LISTS)
        assert client.zcard(name) == 64 + 1
        assert set(lists(client).values()) == {LIMIT, LIMIT - 1, LIMIT - 2}
        b.exchange()
        known = [key for key in keys if b.limiter.peek(key).remaining < LIMIT]
        assert len(known) == 64
        assert all(not b.limiter.allow(key) for key in known if a.limiter.peek(key).remaining == 0)


def test_a_hot_key_evicts_none(server: RedisServer, server_clock: ServerClock) -> None:
    clock = ManualClock(START)
    server_clock.set(START)
    with (
        hosts(1, server.url, EVERY_KIND["fixed"], clock=clock, keys=2000) as (a,),
        Store.private(keys=100, on_full="evict", clock=clock) as store,
        hosts(1, server.url, EVERY_KIND["fixed"], store=store) as (b,),
    ):
        keys = [f"key {number}" for number in range(1000)]
        for key in keys:
            a.limiter.hit(key, LIMIT)
        a.exchange()
        plain = FixedWindow(store, "plain", "1/hour", align="first")
        filled = [number for number in range(5000) if plain.allow(number)]
        evicted = store.stats().limiters["plain"].evicted
        live = [number for number in filled if not plain.peek(number).allowed]
        # Without the exchanger, which counts in the same store.
        assert b.synced._exchanger.exchanges[0].run(-1) is None
        assert [number for number in filled if not plain.peek(number).allowed] == live
        stats = store.stats()
        assert stats.limiters["plain"].evicted == evicted
        assert stats.limiters["api"].evicted == stats.limiters["api"].inserted == stats.limiters["api"].full == 0


@pytest.mark.parametrize("on_full", ["deny", "allow", "evict"])
def test_a_hot_key_without_room_is_decided_by_the_policy(
    server: RedisServer, server_clock: ServerClock, on_full: Any
) -> None:
    clock = ManualClock(START)
    server_clock.set(START)
    with (
        hosts(1, server.url, EVERY_KIND["fixed"], clock=clock) as (a,),
        Store.private(keys=100, on_full=on_full, clock=clock) as store,
        hosts(1, server.url, EVERY_KIND["fixed"], store=store, keys=1) as (b,),
    ):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        b.exchange()
        b.limiter.allow("another")
        decision = b.limiter.hit("k")
        assert decision.allowed == (on_full == "allow")
        stats = store.stats().limiters["api"]
        assert (stats.full, stats.evicted) == ((0, 1) if on_full == "evict" else (1, 0))


@every_kind
def test_a_lost_list_is_published_again(fleet: Fleet, client: redis.Redis, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        assert admitted(a.limiter, LIMIT) == LIMIT
        a.exchange()
        client.delete(*client.scan_iter(LISTS))
        b.exchange()
        assert b.limiter.peek("k").remaining == LIMIT
        a.exchange()
        b.exchange()
        assert b.limiter.peek("k").remaining == 0


@every_kind
def test_a_sum_that_redis_has_lost_stays_published(fleet: Fleet, client: redis.Redis, kind: str) -> None:
    """A host that doesn't know of the loss reports its own part only."""
    with fleet.hosts(3, kind) as (a, b, c):
        assert admitted(a.limiter, LIMIT - 1) == LIMIT - 1
        a.exchange()
        client.delete(*client.scan_iter("forebay:*:synced-*"))
        assert admitted(c.limiter, 1) == 1
        c.synced._exchanger.exchange(-2, elected=False)
        b.exchange()
        assert b.limiter.peek("k").remaining <= 1


def test_a_version_that_was_read_is_not_sent_again(fleet: Fleet, client: redis.Redis) -> None:
    with fleet.hosts(2, "fixed") as (a, b):
        admitted(a.limiter, LIMIT)
        a.exchange()
        exchange_quickly(b)
        client.config_resetstat()
        exchange_quickly(b, 2)
        ranges = client.info("commandstats")["cmdstat_zrange"]["calls"]
        assert ranges == 16
        client.config_resetstat()
        exchange_quickly(b, 8)
        # The list of one shard is read whole.
        assert client.info("commandstats")["cmdstat_zrange"]["calls"] == 16 + 1


def test_a_list_that_was_lost_and_made_again_is_another_version(fleet: Fleet, client: redis.Redis) -> None:
    with fleet.hosts(2, "fixed") as (a, b):
        admitted(a.limiter, 4)
        a.exchange()
        exchange_quickly(b)
        client.delete(*client.scan_iter(LISTS))
        fleet.at(1)
        a.limiter.allow("k")
        a.exchange()
        exchange_quickly(b, 2)
        assert b.limiter.peek("k").remaining == LIMIT - 5


@every_kind
def test_a_list_vanishes_by_itself(client: redis.Redis, server: RedisServer, kind: str) -> None:
    """By the server's own clock."""
    with hosts(1, server.url, EVERY_KIND[kind]) as (a,):
        admitted(a.limiter, LIMIT)
        a.exchange()
        (name,) = client.scan_iter(LISTS)
        assert 0 < client.pttl(name) <= 180_000
        (key,) = client.scan_iter("forebay:*:synced-*")
        assert client.pttl(name) >= client.pttl(key)


@every_kind
def test_a_foreign_value_in_place_of_a_list_is_reported(fleet: Fleet, client: redis.Redis, kind: str) -> None:
    with fleet.hosts(2, kind) as (a, b):
        admitted(a.limiter, LIMIT)
        a.exchange()
        (name,) = client.scan_iter(LISTS)
        client.set(name, "foreign")
        admitted(b.limiter, 1, "another")
        with pytest.raises(ForeignState, match="hot-"):
            b.exchange()
        with pytest.raises(ForeignState, match="hot-"):
            a.exchange()
        assert b.synced.status().pending_keys == 0


@pytest.mark.parametrize("member", ["no name", "f" * 33, ""])
def test_a_member_that_is_no_name_is_reported(fleet: Fleet, client: redis.Redis, member: str) -> None:
    with fleet.hosts(2, "fixed") as (a, b):
        admitted(a.limiter, LIMIT)
        a.exchange()
        (name,) = client.scan_iter(LISTS)
        client.zadd(name, {member: 5})
        with pytest.raises(StoreUnavailable, match="answered"):
            b.exchange()
        client.zrem(name, member)
        b.exchange()
        assert b.limiter.peek("k").remaining == 0


def test_hosts_of_a_cluster_have_hot_keys(cluster: RedisCluster) -> None:
    keys = [f"key {number}" for number in range(40)]
    with hosts(2, cluster.url, lambda store: FixedWindow(store, "api", f"{LIMIT}/day")) as (a, b):
        for key in keys:
            a.limiter.hit(key, LIMIT)
        a.exchange()
        b.exchange()
        assert not any(b.limiter.allow_many(keys))


INTERVAL = 8
WALKS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 6)), max_size=40)


@pytest.mark.parametrize("kind", WINDOWS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(walk=WALKS)
def test_the_bound_of_a_window(
    server: RedisServer, client: redis.Redis, server_clock: ServerClock, kind: str, walk: list[tuple[int, int, int]]
) -> None:
    """Five hosts, each of which exchanges at a time of its own in every interval; and a client that moves.

    At each admission all have admitted at most the limit, what the other hosts have admitted within two intervals, and
    less than a quarter of the limit.
    """
    client.flushall()
    fleet = Fleet(server, server_clock)
    with fleet.hosts(5, kind, keys=1) as made:
        now, admissions = 0, []
        for host, requests, later in walk:
            for _ in range(later):
                now += 1
                fleet.at(now / 10)
                for number, other in enumerate(made):
                    if now % INTERVAL == number:
                        exchange_quickly(other, 1 + now // INTERVAL % 7)
            for _ in range(requests):
                if made[host].limiter.allow("k"):
                    admissions.append((now, host))
                    lately = sum(other != host and when > now - 2 * INTERVAL for when, other in admissions)
                    assert len(admissions) <= LIMIT + lately + QUARTER - 1
        counted = {host: sum(other == host for _, other in admissions) for host in range(5)}
        for host in chain(made, made):
            host.exchange()
        for number, host in enumerate(made):
            assert host.limiter.peek("k").remaining == max(LIMIT - len(admissions), 0) or (
                not counted[number] and len(admissions) < QUARTER
            )
