"""Synced hosts of several processes, killed and stopped at any moment; and servers that are unavailable."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from process_helpers import Crew, Meeting, SharedNumbers, wait_until
from redis_server import RedisServer, redis_server
from synced_hosts import Host, admitted, hosts, sum_of_all, sums

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.errors import StoreUnavailable
from forebay.redis import RedisStore, SyncedStore

KINDS: dict[str, Callable[[Any], Any]] = {
    "fixed": lambda store: FixedWindow(store, "api", "1000000/year"),
    "sliding": lambda store: SlidingWindow(store, "api", "1000000/year"),
    "bucket": lambda store: TokenBucket(store, "api", "100000/day", burst=100_000),
}
KEYS = [f"user:{number}" for number in range(5)]
UNIT_US = 864_000
"""The bucket's refill time for one permit."""


def count_and_exchange(name: str, url: str, kind: str, counted: SharedNumbers, who: int, seed: int) -> None:
    """Count until killed. The count is noted afterwards, so a kill may leave one request that is not noted."""
    random.seed(seed)
    host = Host(url, KINDS[kind], store=Store(name, keys=100))
    while True:
        for _ in range(random.randrange(1, 30)):
            counted[who] += host.limiter.allow(random.choice(KEYS))
        host.exchange()


@pytest.mark.parametrize("kind", KINDS)
def test_processes_killed_at_random_lose_no_counts(
    name: str, crew: Crew, server: RedisServer, client: redis.Redis, record: Callable[[str, object], None], kind: str
) -> None:
    kills, workers = 20, 3
    with Store(name, keys=100) as store:
        counted = SharedNumbers(kills + workers)
        running = [crew.start(count_and_exchange, name, server.url, kind, counted, i, i) for i in range(workers)]
        for number in range(kills):
            victim = running.pop(0)
            before = counted[number]
            wait_until(lambda before=before, number=number: counted[number] > before + 5, "counting")
            time.sleep(random.random() / 200)
            victim.kill()
            i = number + workers
            running.append(crew.start(count_and_exchange, name, server.url, kind, counted, i, i))
        for worker in running:
            worker.kill()
        killed = kills + workers
        with hosts(1, server.url, KINDS[kind], store=store) as (survivor,):
            for _ in range(2):
                survivor.exchange()
            assert survivor.synced.status().pending_keys == survivor.synced.status().unnamed_keys == 0
            total = sum(counted)
            in_redis = reported_to(client, survivor) if kind == "bucket" else sum_of_all(client)
            if kind == "bucket":
                # With each kill, one charged request may not have been reported, and one reported request may not have
                # been counted.
                assert abs(in_redis - total * UNIT_US) <= killed * UNIT_US
            else:
                # To the last one what this host's cells hold: no more, no less.
                assert in_redis == sum(1_000_000 - survivor.limiter.peek(key).remaining for key in KEYS)
                assert total <= in_redis <= total + killed
            assert len(sums(client)) == len(KEYS)
    record(f"synced, {kind}: killed processes", killed)


def slow_bucket(store: Any) -> Any:
    """A bucket that refills so slowly that no key expires during a test."""
    return TokenBucket(store, "api", "100/day")


def charge_new_keys(name: str, url: str, meeting: Meeting, who: int, rounds: int) -> int:
    host = Host(url, slow_bucket, store=Store(name, keys=100), keys=2 * rounds)
    done = 0
    for number in range(rounds):
        meeting.wait(who)
        done += host.limiter.allow(f"new:{number}")
    host.close()
    return done


def test_several_processes_charge_a_new_key_at_once(
    name: str, crew: Crew, server: RedisServer, client: redis.Redis, record: Callable[[str, object], None]
) -> None:
    """Each writes the record behind the cell; one of them late, after the others have charged."""
    count, rounds = 4, 3000
    meeting = Meeting(count)
    with Store(name, keys=100) as store:
        workers = [crew.start(charge_new_keys, name, server.url, meeting, i, rounds) for i in range(count)]
        assert sum(crew.results(workers)) == count * rounds
        with hosts(1, server.url, slow_bucket, store=store, keys=2 * rounds) as (host,):
            host.exchange()
            assert host.synced.status().unnamed_keys == 0
            assert reported_to(client, host) == count * rounds * 86_400_000_000 // 100
            races = store.stats().limiters["api"].cas_retries
    record("synced: new keys charged by several processes at once; lost races", races)


def reported_to(client: redis.Redis, host: Host) -> int:
    """The charges that Redis knows of a host, in microseconds of refill."""
    entries = [client.hget(key, host.field) or b"0:0:0:0" for key in sums(client)]
    return sum(int(entry.split(b":")[2]) for entry in entries)


def work(name: str, url: str, requests: int) -> int:
    with Store(name, keys=100) as store, RedisStore(url, timeout=60) as redis_store:
        synced = SyncedStore(redis_store, store, "20 ms", keys=100)
        limiter = FixedWindow(synced, "api", "1000000/year")
        done = admitted(limiter, requests)
        signal.pause()
        return done


def test_a_killed_exchanger_is_replaced(name: str, crew: Crew, server: RedisServer, client: redis.Redis) -> None:
    """A surviving process reports what the killed processes have counted."""
    with Store(name, keys=100):
        workers = [crew.start(work, name, server.url, 1000) for _ in range(3)]
        for worker in workers:
            wait_until(lambda: sum_of_all(client) == 3000, "an exchange of all")
            worker.kill()
            client.flushall()
            if worker is workers[-1]:
                break
            # Redis has lost everything, and gets it back: a report has the sum, not the difference.
            wait_until(lambda: sum_of_all(client) == 3000, "an exchange by another process")


def test_a_stopped_process_delays_no_other(name: str, crew: Crew, server: RedisServer, client: redis.Redis) -> None:
    with Store(name, keys=100):
        first, second = (crew.start(work, name, server.url, 500) for _ in range(2))
        wait_until(lambda: sum_of_all(client) == 1000, "an exchange of all")
        for stopped in (first, second):
            stopped.pause()
            client.flushall()
            wait_until(lambda: sum_of_all(client) == 1000, "an exchange by the other process")
            stopped.resume()


def hammer(name: str, url: str, limit: int, asks: int, go: SharedNumbers, exchanged: SharedNumbers, who: int) -> int:
    with Store(name, keys=100) as store, RedisStore(url, timeout=60) as redis_store:
        synced = SyncedStore(redis_store, store, "1 hour", keys=100)
        limiter = FixedWindow(synced, "api", f"{limit}/year")
        done = 0
        wait_until(lambda: go[0], "the start")
        while not go[1]:
            done += admitted(limiter, asks)
            synced.exchange()
            exchanged[who] += 1
        # Now that all charges are reported, no process admits any more.
        assert admitted(limiter, 100) == 0
        return done


def test_greedy_hosts_stay_within_the_bound(
    make_name: Callable[[], str], crew: Crew, server: RedisServer, record: Callable[[str, object], None]
) -> None:
    """When Redis knows the whole limit, each host has sent as many requests since its exchange as between two."""
    count, limit, asks = 4, 3000, 25
    names = [make_name() for _ in range(count)]
    go, exchanged = SharedNumbers(2), SharedNumbers(count)
    workers = [crew.start(hammer, name, server.url, limit, asks, go, exchanged, i) for i, name in enumerate(names)]
    go[0] = 1
    wait_until(lambda: min(exchanged) > limit // asks, "more exchanges than it takes")
    go[1] = 1
    total = sum(crew.results(workers))
    assert limit <= total < limit + count * asks
    record(f"synced: admitted by {count} hosts that ask {asks} times between exchanges, of {limit}", total)


def test_hosts_go_on_while_redis_is_unavailable_and_report_later(client: redis.Redis, server: RedisServer) -> None:
    with hosts(2, server.url, lambda store: FixedWindow(store, "api", "100/year")) as (one, other):
        impatient = RedisStore(server.url, timeout=0.05)
        (exchange,) = one.synced._exchanger.exchanges
        patient, exchange.store = exchange.store, impatient
        assert admitted(one.limiter, 10) == 10
        with server.stopped():
            with pytest.raises(StoreUnavailable):
                one.exchange()
            assert "TimeoutError" in (one.synced.status().error or "")
            # More than the limit: neither host knows of the other.
            assert admitted(one.limiter, 200) == 90
            assert admitted(other.limiter, 200) == 100
            assert one.synced.status().pending_keys == 1
        exchange.store = patient
        for _ in range(2):
            one.exchange()
            other.exchange()
        status = one.synced.status()
        assert (status.error, status.pending_keys) == (None, 0)
        assert status.exchanged_ago is not None
        assert sum_of_all(client) == 200
        impatient.close()


def test_a_server_that_starts_empty_gets_all_counts_back() -> None:
    with redis_server() as server, hosts(2, server.url, lambda store: FixedWindow(store, "api", "100/year")) as made:
        for host in made:
            assert admitted(host.limiter, 20) == 20
            host.exchange()
        with server.client() as client:
            client.flushall()
            client.script_flush()
            for host in made:
                host.exchange()
            assert sum_of_all(client) == 40


def test_two_processes_exchange_at_once(name: str, crew: Crew, server: RedisServer, client: redis.Redis) -> None:
    """One is stopped in the middle of its exchange, and goes on after others have exchanged later counts."""
    with Store(name, keys=100) as store, hosts(1, server.url, KINDS["fixed"], store=store) as (host,):
        (exchange,) = host.synced._exchanger.exchanges
        assert admitted(host.limiter, 5) == 5
        stale = list(exchange.messages(-1))
        assert admitted(host.limiter, 5) == 5
        host.limiter.refund("k", 3)
        host.exchange()
        assert sum_of_all(client) == 7
        for message, reply in zip(stale, exchange.send(stale), strict=True):
            message.result(reply)
        assert sum_of_all(client) == 7
        assert host.limiter.peek("k").remaining == 1_000_000 - 7
