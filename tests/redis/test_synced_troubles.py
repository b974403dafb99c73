"""Synced limits in trouble: full stores, a Redis that lost its data, errors, keys that come back, wrong clocks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from process_helpers import DEADLINE_S, wait_until
from redis.exceptions import ResponseError
from redis_cluster import RedisCluster
from redis_server import RedisServer
from scripts_clock import ServerClock
from synced_hosts import NEVER, admitted, before_the_answer, hosts, sum_of_all, sums, two_of_one_host

from forebay import AllOf, FixedWindow, SlidingWindow, Store, StoreUnavailable, TokenBucket
from forebay.redis import RedisStore, SyncedStore
from forebay.redis.keys import fingerprint
from forebay.redis.synced import background, exchanger
from forebay.redis.synced.exchange import Exchange
from forebay.testing import ManualClock

START = 1_000_000_020
MINUTE_US = 60_000_000
ONE_ROUND = 0

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", "100/year"),
    "sliding": lambda store: SlidingWindow(store, "api", "100/year"),
}


def slow_bucket(store: Any) -> TokenBucket:
    return TokenBucket(store, "api", "1/minute", burst=100)


@pytest.fixture
def clock(server_clock: ServerClock) -> ManualClock:
    """The clock of hosts, set to the server's time."""
    server_clock.set(START)
    return ManualClock(START)


def ahead(client: redis.Redis) -> float:
    """The permits of a slow bucket that Redis has booked."""
    return (sum_of_all(client) - START * 1_000_000) / MINUTE_US


def in_time(act: Callable[[], object]) -> None:
    """Run something that would hang if it were wrong."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive(), "it hangs"


def test_one_process_of_a_host_exchanges_in_an_interval(server: RedisServer, client: redis.Redis) -> None:
    with Store.private(keys=100) as store, two_of_one_host(store, server.url, WINDOWS["fixed"]) as (one, other):
        for host, total in ((one, 1), (other, 1), (one, 1)):
            assert host.limiter.allow("k")
            assert host.synced._exchanger.exchange(ONE_ROUND, elected=True) is None
            assert sum_of_all(client) == total
        assert other.synced.status().exchanged_ago is not None


def test_processes_with_other_intervals_exchange_at_their_own(server: RedisServer, client: redis.Redis) -> None:
    """As during a deployment that changes the interval."""
    with (
        Store.private(keys=100) as store,
        RedisStore(server.url, timeout=60) as redis_store,
        SyncedStore(redis_store, store, "1 hour", keys=10) as slow,
        SyncedStore(redis_store, store, "10 ms", keys=10) as fast,
    ):
        of_slow, of_fast = (FixedWindow(synced, "api", "100/year") for synced in (slow, fast))
        assert of_slow.allow("k")
        assert slow._exchanger.exchange(ONE_ROUND, elected=True) is None
        for total in (2, 3):
            assert of_fast.allow("k")
            wait_until(
                lambda total=total: sum_of_all(client) == total, "an exchange by the one with the shorter interval"
            )
        assert slow._exchanger.exchange(ONE_ROUND, elected=True) is None


def test_a_process_that_cannot_exchange_leaves_it_to_another(server: RedisServer, client: redis.Redis) -> None:
    with (
        Store.private(keys=100) as store,
        two_of_one_host(store, server.url, WINDOWS["fixed"]) as (one, other),
    ):
        one.synced._exchanger.exchanges[0].store = away = RedisStore("redis://127.0.0.1:1", timeout=0.05)
        assert other.limiter.allow("k")
        assert isinstance(one.synced._exchanger.exchange(ONE_ROUND, elected=True), StoreUnavailable)
        assert other.synced._exchanger.exchange(ONE_ROUND, elected=True) is None
        assert sum_of_all(client) == 1
        # It is the other one's turn now: that puts nothing right here.
        assert one.synced._exchanger.exchange(ONE_ROUND, elected=True) is None
        assert "Connection" in (one.synced.status().error or "")
        away.close()


@pytest.mark.parametrize("on_full", ["deny", "allow", "evict", None])
def test_a_full_host_store_does_not_prevent_exchanges(server: RedisServer, client: redis.Redis, on_full: Any) -> None:
    with Store.private(keys=100, on_full=on_full) as store:
        local = TokenBucket(store, "local", "1/day")
        for number in range(2000):
            local.allow(f"user:{number}")
        with hosts(1, server.url, WINDOWS["fixed"], store=store) as (host,):
            for total in (1, 2, 3):
                assert host.limiter.allow("k")
                host.synced._exchanger.exchange(ONE_ROUND, elected=True)
                if on_full == "deny":
                    assert sum_of_all(client) == total
            assert sum_of_all(client) > 0
            assert host.synced.status().exchanged_ago is not None


@pytest.mark.parametrize("on_full", ["evict", None])
def test_one_process_of_a_full_host_exchanges_in_an_interval(server: RedisServer, on_full: Any) -> None:
    with (
        Store.private(keys=100, on_full=on_full) as store,
        two_of_one_host(store, server.url, WINDOWS["fixed"]) as both,
    ):
        local = TokenBucket(store, "local", "2/second")
        for host in (*both, *both):
            for number in range(2000):
                local.allow(f"user:{number}")
            assert host.synced._exchanger.exchange(ONE_ROUND, elected=True) is None
        assert [host.synced._exchanger.exchanges[0].done_ns is not None for host in both] == [True, False]
        assert all(host.synced.status().exchanged_ago is not None for host in both)


def test_the_age_of_an_exchange_is_not_negative(server: RedisServer) -> None:
    with hosts(1, server.url, WINDOWS["fixed"]) as (host,):
        for _ in range(100):
            host.exchange()
            host.synced._exchanger.exchanges[0].done_ns = None
            assert (host.synced.status().exchanged_ago or 0.0) >= 0.0


def test_an_unexpected_error_does_not_end_the_thread(server: RedisServer, client: redis.Redis) -> None:
    with hosts(1, server.url, WINDOWS["fixed"], interval="10 ms") as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        run = exchange.run

        def fail(turn: int) -> None:
            raise RuntimeError("unexpected")

        exchange.run = fail  # type: ignore[method-assign]
        wait_until(lambda: host.synced.status().error == "RuntimeError: unexpected", "the error")
        assert host.limiter.allow("k")
        exchange.run = run  # type: ignore[method-assign]
        wait_until(lambda: sum_of_all(client) == 1, "an exchange after it")


def test_an_error_affects_only_its_own_key(server: RedisServer, client: redis.Redis) -> None:
    """Another key and another limiter are exchanged."""
    with hosts(1, server.url, WINDOWS["fixed"]) as (host,):
        other = FixedWindow(host.synced, "other", "100/year")
        exchange, _ = host.synced._exchanger.exchanges
        send = host.redis_store.executor.send

        def refused(messages: list[Any]) -> list[Any]:
            is_first = messages[0].script is exchange.script and b":api}" in messages[0].keys[0]
            return [ResponseError("NOPERM of this key"), *send(messages[1:])] if is_first else send(messages)

        assert host.limiter.allow_many(["one", "two"]) == [True, True]
        assert other.allow("k")
        host.exchange()
        assert sum_of_all(client) == 3
        assert host.limiter.allow_many(["one", "two"]) == [True, True]
        assert other.allow("k")
        host.redis_store.executor.send = refused  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable, match="NOPERM of this key"):
            host.exchange()
        assert sum_of_all(client) == 5
        assert host.synced.status().pending_keys == 1
        host.redis_store.executor.send = send  # type: ignore[method-assign]
        host.exchange()
        assert sum_of_all(client) == 6


def test_an_unavailable_server_costs_one_deadline_for_all_limiters(server: RedisServer) -> None:
    with hosts(1, server.url, WINDOWS["fixed"]) as (host,):
        host.synced._exchanger.exchanges[0].store = away = RedisStore("redis://127.0.0.1:1", timeout=0.05)
        assert host.limiter.allow("k")
        for _ in range(3):
            with pytest.raises(StoreUnavailable, match="ConnectionError"):
                host.exchange()
        assert away.status().state == "open"
        with pytest.raises(StoreUnavailable, match="asked again within"):
            host.exchange()
        away.close()


def test_a_store_is_closed_in_the_middle_of_an_exchange(server: RedisServer, client: redis.Redis) -> None:
    """As by a signal handler."""
    with hosts(1, server.url, WINDOWS["fixed"]) as (host,):
        assert host.limiter.allow("k")
        with before_the_answer(host, host.synced.close):
            in_time(host.exchange)
        assert sum_of_all(client) == 1


def test_making_a_limiter_does_not_wait_for_an_exchange(server: RedisServer) -> None:
    with hosts(1, server.url, WINDOWS["fixed"]) as (host,):
        assert host.limiter.allow("k")
        with before_the_answer(host, lambda: in_time(lambda: FixedWindow(host.synced, "other", "10/year"))):
            host.exchange()


def test_limits_of_one_name_and_period_are_reported_separately(server: RedisServer, client: redis.Redis) -> None:
    """As while a deployment changes a limit. Each learns what the other has admitted, and nothing counts twice."""
    with (
        Store.private(keys=100) as store,
        RedisStore(server.url, timeout=60) as redis_store,
        SyncedStore(redis_store, store, NEVER, keys=10) as synced,
        SyncedStore(redis_store, store, NEVER, keys=10) as of_another_process,
    ):
        small, large = (FixedWindow(synced, "api", f"{limit}/year") for limit in (100, 1000))
        also_small = FixedWindow(of_another_process, "api", "120/year")
        assert (admitted(small, 10), admitted(large, 20), admitted(also_small, 3)) == (10, 20, 3)
        for _ in range(3):
            synced.exchange()
            of_another_process.exchange()
            assert sum_of_all(client) == 33
        assert [limiter.peek("k").remaining for limiter in (small, also_small, large)] == [67, 87, 967]


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_redis_that_lost_its_data_admits_nothing(server: RedisServer, client: redis.Redis, kind: str) -> None:
    """The first host that exchanges learns that counts were lost; so does a host that only queries."""
    with hosts(4, server.url, WINDOWS[kind]) as made:
        for host, count in zip(made, (30, 40, 29, 1), strict=True):
            assert admitted(host.limiter, count) == count
        for host in made * 2:
            host.exchange()
        for number in (0, 2):
            client.flushall()
            made[number].exchange()
            assert [host.limiter.peek("k").remaining for host in made] == [0, 0, 0, 0]
            # A host that has never reported the key knows no better.
            with hosts(1, server.url, WINDOWS[kind]) as (new,):
                assert new.limiter.allow("k")
                new.exchange()
            for host in made:
                host.exchange()
                assert [host.limiter.peek("k").remaining for host in made] == [0, 0, 0, 0]
            assert sum_of_all(client) == 101


@pytest.mark.parametrize("kind", WINDOWS)
def test_lost_data_is_detected_after_other_hosts_have_reported(
    server: RedisServer, client: redis.Redis, kind: str
) -> None:
    with hosts(3, server.url, WINDOWS[kind]) as made, hosts(1, server.url, WINDOWS[kind]) as (new,):
        for host, count in zip(made, (30, 40, 30), strict=True):
            assert admitted(host.limiter, count) == count
        for host in made * 2:
            host.exchange()
        client.flushall()
        assert new.limiter.allow("k")
        for host in (new, *made):
            host.exchange()
            assert [host.limiter.peek("k").remaining for host in made] == [0, 0, 0]
        assert sum_of_all(client) == 101


def test_data_lost_while_redis_was_unavailable(server: RedisServer, client: redis.Redis) -> None:
    """A report without a reply doesn't make the host forget what it knew."""
    with hosts(3, server.url, WINDOWS["fixed"]) as (one, other, new):
        assert (admitted(one.limiter, 60), admitted(other.limiter, 30)) == (60, 30)
        for host in (one, other, one):
            host.exchange()
        (exchange,) = one.synced._exchanger.exchanges
        redis_store, exchange.store = exchange.store, RedisStore("redis://127.0.0.1:1")
        assert admitted(one.limiter, 5) == 5
        with pytest.raises(StoreUnavailable):
            one.exchange()
        exchange.store.close()
        exchange.store = redis_store
        client.flushall()
        assert new.limiter.allow("k")
        new.exchange()
        one.exchange()
        assert one.limiter.peek("k").remaining == 5


def test_a_lost_bucket_begins_with_the_charges_since(
    server: RedisServer, client: redis.Redis, clock: ManualClock, server_clock: ServerClock
) -> None:
    with hosts(1, server.url, slow_bucket, clock=clock) as (host,):
        assert host.limiter.hit("k", 50)
        host.exchange()
        assert ahead(client) == 50
        client.flushall()
        server_clock.set(START)
        assert host.limiter.hit("k", 2)
        host.exchange()
        assert ahead(client) == 2
        assert host.limiter.peek("k").remaining == 48


def test_a_key_that_comes_back_to_its_cell_before_the_reply(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    """The reply belongs to its former incarnation. It takes nothing away from the others' count."""
    with (
        hosts(1, server.url, slow_bucket, clock=clock) as (other,),
        hosts(1, server.url, slow_bucket, clock=clock, keys=1) as (host,),
    ):
        assert other.limiter.hit("k", 50)
        other.exchange()
        assert host.limiter.hit("k", 40)

        def come_back() -> None:
            assert host.limiter.allow("another")
            assert host.limiter.hit("k", 3)
            assert host.store.stats().limiters["api"].evicted == 2

        with before_the_answer(host, come_back):
            host.exchange()
        host.exchange()
        assert ahead(client) == 93


def test_a_key_that_redis_does_not_know_lowers_no_sum(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    """Its host believes Redis to know more than it has charged."""
    with hosts(2, server.url, slow_bucket, clock=clock) as (host, other):
        assert other.limiter.hit("k", 50)
        other.exchange()
        assert host.limiter.hit("k", 3)
        (exchange,) = host.synced._exchanger.exchanges
        ((*usage, _charged_us, read_ns, until_ns),), _ = exchange.limiter.reports(0, exchange.limiter.cell_count, -1)
        message = exchange.message((*usage, 40 * MINUTE_US, read_ns, until_ns))
        (reply,) = exchange.send([message])
        message.result(reply)
        assert ahead(client) == 50
        assert host.limiter.hit("k", 3)
        host.exchange()
        assert ahead(client) == 53


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_of_a_key_that_comes_back_to_its_cell(server: RedisServer, client: redis.Redis, kind: str) -> None:
    with hosts(1, server.url, WINDOWS[kind], keys=1) as (host,):
        assert admitted(host.limiter, 3) == 3

        def come_back() -> None:
            assert host.limiter.allow("another")
            assert admitted(host.limiter, 3) == 3

        with before_the_answer(host, come_back):
            host.exchange()
        assert host.synced.status().pending_keys == 1
        host.synced._exchanger.exchange(ONE_ROUND, elected=False)
        assert sum_of_all(client) == 6
        assert host.limiter.peek("k").remaining == 94


def test_a_bucket_in_the_cell_of_another_reports_its_own_charges(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    with hosts(1, server.url, slow_bucket, clock=clock, keys=1) as (host,):
        for key, permits in (("one", 40), ("two", 7), ("three", 5)):
            assert host.limiter.hit(key, permits)
            host.exchange()
        minutes_ahead = {name.split(":")[3]: (total / 1_000_000 - START) / 60 for name, total in sums(client).items()}
        assert minutes_ahead == {
            fingerprint(key).decode(): permits for key, permits in (("one", 40), ("two", 7), ("three", 5))
        }


def test_a_bucket_that_is_reset_on_each_host_is_full(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    with hosts(2, server.url, slow_bucket, clock=clock) as (one, other):
        assert other.limiter.allow("k")
        assert one.limiter.hit("k", 99)
        for host in (other, one, other):
            host.exchange()
        assert other.limiter.peek("k").remaining == 0
        one.limiter.reset("k")
        assert one.limiter.peek("k").remaining == 100
        one.exchange()
        # The other's is still known.
        assert one.limiter.peek("k").remaining == 99
        other.limiter.reset("k")
        for host in (one, other, one, other):
            host.exchange()
        assert ahead(client) == 0
        assert other.limiter.peek("k").remaining == 100


def test_a_bucket_that_is_reset_before_the_reply_merges_no_charges_of_its_own(
    server: RedisServer, client: redis.Redis, clock: ManualClock
) -> None:
    with hosts(2, server.url, slow_bucket, clock=clock) as (one, other):
        assert other.limiter.hit("k", 10)
        other.exchange()
        assert one.limiter.hit("k", 80)
        with before_the_answer(one, lambda: one.limiter.reset("k")):
            one.exchange()
        one.exchange()
        assert ahead(client) == 10
        assert one.limiter.peek("k").remaining == 90


def test_a_charge_before_the_reply_counts_beside_it(server: RedisServer, clock: ManualClock) -> None:
    with hosts(2, server.url, slow_bucket, clock=clock) as (one, other):
        assert other.limiter.hit("k", 50)
        other.exchange()
        assert one.limiter.hit("k", 10)
        with before_the_answer(one, lambda: one.limiter.hit("k", 20)):
            one.exchange()
        assert one.limiter.peek("k").remaining == 20


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_that_is_reset_forgets_the_others_until_the_next_exchange(server: RedisServer, kind: str) -> None:
    with hosts(2, server.url, WINDOWS[kind]) as (one, other):
        assert admitted(other.limiter, 40) == 40
        other.exchange()
        assert admitted(one.limiter, 20) == 20
        one.exchange()
        assert one.limiter.peek("k").remaining == 40
        one.limiter.reset("k")
        assert one.limiter.peek("k").remaining == 100
        one.exchange()
        assert one.limiter.peek("k").remaining == 60


def test_a_cancelled_charge_comes_back_after_a_merge(
    server: RedisServer, client: redis.Redis, clock: ManualClock, server_clock: ServerClock
) -> None:
    def make(store: Any) -> TokenBucket:
        return TokenBucket(store, "api", "1/minute", burst=10)

    with hosts(2, server.url, make, clock=clock) as (one, other):
        assert other.limiter.hit("k", 10)
        other.exchange()
        booking = one.limiter.reserve("k", 8)
        assert booking
        one.exchange()
        assert ahead(client) == 18
        booking.cancel()
        one.exchange()
        assert ahead(client) == 10
        assert other.limiter.hit("new", 10)
        other.exchange()
        booking = one.limiter.reserve("new", 8)
        one.exchange()
        before = sum_of_all(client)
        # Permits that have been refilled meanwhile don't come back.
        clock.set(START + 5 * 60)
        server_clock.set(START + 5 * 60)
        booking.cancel()
        one.exchange()
        assert before - sum_of_all(client) == 3 * MINUTE_US


def test_a_charge_of_one_of_two_limits_comes_back(server: RedisServer, client: redis.Redis, clock: ManualClock) -> None:
    with hosts(1, server.url, slow_bucket, clock=clock) as (host,):
        one = FixedWindow(host.store, "one", "1/hour")
        both = AllOf(host.limiter, one)
        assert [both.allow("k"), both.allow("k")] == [True, False]
        host.exchange()
        assert ahead(client) == 1


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_a_key_with_only_denials_is_queried_in_the_new_window(
    server: RedisServer, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    """On this host it stays in the window before, while other hosts count in the new one."""
    with hosts(2, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (one, other):
        assert (admitted(one.limiter, 1), admitted(other.limiter, 1)) == (1, 1)
        clock.set(START + 60)
        server_clock.set(START + 60)
        assert admitted(one.limiter, 90) == 90
        one.exchange()
        other.exchange()
        assert not other.limiter.hit("k", 60)
        # It comes by itself at its turn.
        assert admitted(one.limiter, 5) == 5
        one.exchange()
        for round_number in range(8):
            other.synced._exchanger.exchange(round_number, elected=False)
        assert other.limiter.peek("k").remaining == (5 if kind is FixedWindow else 3)


def test_every_key_is_queried_however_long_exchanges_take(
    server: RedisServer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With exchanges of eight intervals, a round number from the clock would always query the same keys."""
    interval_s = 60
    # They would bring the same news.
    monkeypatch.setattr(Exchange, "lists", lambda *_: iter(()))
    with hosts(2, server.url, WINDOWS["fixed"], clock=clock) as (one, other):
        keys = [f"user:{number}" for number in range(16)]
        for host in (other, one):
            assert all(host.limiter.hit(key, 25) for key in keys)
            host.exchange()

        class Stop:
            rounds = 0

            def wait(self, timeout: float) -> bool:
                clock.advance(8 * timeout)
                self.rounds += 1
                return self.rounds > 9

        monkeypatch.setattr(exchanger, "time", SimpleNamespace(monotonic_ns=lambda: round(clock.now() * 1e9)))
        background.run(weakref.ref(other.synced._exchanger), cast(Any, Stop()), interval_s)
        assert other.synced.status().error is None
        assert [other.limiter.peek(key).remaining for key in keys] == [50] * 16


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_a_key_that_is_denied_for_many_windows_is_queried_in_each(
    server: RedisServer, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    """One host takes each permit at once. The other wants many together, and may get them only early in a window."""
    with hosts(2, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (one, other):
        for host in (one, other):
            assert admitted(host.limiter, 50) == 50
        for host in (one, other, one):
            host.exchange()
        for window in range(1, 8):
            total = 0
            for tick in range(300):
                now = START + 60 * window + tick / 5
                clock.set(now)
                server_clock.set(now)
                total += admitted(one.limiter, 1) + 60 * other.limiter.hit("k", 60).allowed
                if tick % 5 == 0:
                    one.exchange()
                    other.exchange()
            # The permits that the one host may take in two exchanges.
            assert total <= 100 + 2 * 5


def test_lost_data_is_detected_by_a_host_that_has_counted_nothing(server: RedisServer, client: redis.Redis) -> None:
    """After a host that knew nothing has reported a new count."""
    with hosts(3, server.url, WINDOWS["fixed"]) as (one, idle, new):
        assert admitted(one.limiter, 100) == 100
        one.exchange()
        assert idle.limiter.allow("k")
        idle.limiter.refund("k")
        idle.exchange()
        assert not idle.limiter.allow("k")
        client.flushall()
        assert new.limiter.allow("k")
        new.exchange()
        idle.exchange()
        assert not idle.limiter.allow("k")


def test_refunds_of_other_hosts_are_not_taken_for_lost_data(server: RedisServer) -> None:
    with hosts(2, server.url, WINDOWS["fixed"]) as (one, idle):
        assert admitted(one.limiter, 100) == 100
        one.exchange()
        assert idle.limiter.allow("k")
        idle.limiter.refund("k")
        idle.exchange()
        assert not idle.limiter.allow("k")
        one.limiter.refund("k", 60)
        one.exchange()
        idle.exchange()
        assert admitted(idle.limiter, 100) == 60


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_lost_data_is_detected_by_a_host_that_only_queries(
    server: RedisServer, client: redis.Redis, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    with (
        hosts(3, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (one, other, new),
    ):
        assert (admitted(one.limiter, 1), admitted(other.limiter, 1)) == (1, 1)
        clock.set(START + 60)
        server_clock.set(START + 60)
        assert admitted(one.limiter, 90) == 90
        one.exchange()
        other.exchange()
        known = other.limiter.peek("k").remaining
        assert known <= 10
        client.flushall()
        server_clock.set(START + 60)
        other.exchange()
        assert other.limiter.peek("k").remaining == known
        assert new.limiter.allow("k")
        new.exchange()
        other.exchange()
        assert other.limiter.peek("k").remaining == known


def test_a_slow_clock_is_reported(
    server: RedisServer, client: redis.Redis, clock: ManualClock, server_clock: ServerClock
) -> None:
    """Redis refuses reports for windows that ended long ago, and the host's status shows it."""
    with hosts(1, server.url, lambda store: FixedWindow(store, "api", "100/minute"), clock=clock) as (host,):
        server_clock.set(START + 119)
        assert host.limiter.allow("k")
        host.exchange()
        assert sum_of_all(client) == 1
        server_clock.set(START + 120)
        assert host.limiter.allow("k")
        with pytest.raises(StoreUnavailable, match="clock is late"):
            host.exchange()
        assert sum_of_all(client) == 1
        status = host.synced.status()
        assert "clock is late" in (status.error or "")
        assert status.pending_keys == 1


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_a_fast_clock_is_reported(
    server: RedisServer, client: redis.Redis, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    """Redis refuses reports for a window that begins more than a window later."""
    with hosts(1, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (host,):
        clock.set(START + 120)
        assert host.limiter.allow("k")
        server_clock.set(START + 59)
        with pytest.raises(StoreUnavailable, match="clock is fast"):
            host.exchange()
        assert sums(client) == {}
        status = host.synced.status()
        assert "clock is fast" in (status.error or "")
        assert status.pending_keys == 1
        server_clock.set(START + 60)
        host.exchange()
        assert sum_of_all(client) == 1
        assert (host.synced.status().error, host.synced.status().pending_keys) == (None, 0)


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_known_counts_stay_while_a_clock_is_wrong(
    server: RedisServer, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    with hosts(2, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (one, other):
        assert (admitted(one.limiter, 30), admitted(other.limiter, 20)) == (30, 20)
        for host in (one, other, one):
            host.exchange()
        for wrong in (-61, 180):
            server_clock.set(START + wrong)
            with pytest.raises(StoreUnavailable, match="clock is"):
                one.exchange()
            assert one.limiter.peek("k").remaining == 50


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_counts_of_other_hosts_apply_to_their_window(
    server: RedisServer, clock: ManualClock, server_clock: ServerClock, kind: Any
) -> None:
    """Before the next exchange, and for a request that came before it and is decided afterwards."""
    with hosts(2, server.url, lambda store: kind(store, "api", "100/minute"), clock=clock) as (one, other):
        assert (admitted(one.limiter, 30), admitted(other.limiter, 20)) == (30, 20)
        for host in (one, other, one):
            host.exchange()
        for exchanges in (False, True):
            clock.set(START + 60)
            server_clock.set(START + 60)
            if exchanges:
                one.exchange()
            assert one.limiter.peek("k").remaining == (100 if kind is FixedWindow else 50)
            clock.set(START + 59)
            assert one.limiter.peek("k").remaining == 50


def test_keys_of_several_slots_of_a_cluster(cluster: RedisCluster) -> None:
    for make in (*WINDOWS.values(), slow_bucket):
        cluster.on_masters("FLUSHALL")
        with hosts(2, cluster.url, make) as (one, other):
            for number in range(50):
                assert one.limiter.hit(f"user:{number}", 10)
                assert other.limiter.hit(f"user:{number}", 10)
            for host in (one, other, one):
                host.exchange()
            assert {one.limiter.peek(f"user:{number}").remaining for number in range(50)} == {80}
