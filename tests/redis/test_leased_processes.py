"""Leases of several hosts with several processes each, which are killed and stopped at any point."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from process_helpers import Crew, SharedNumbers, Worker, wait_until
from redis_server import RedisServer

from forebay import FixedWindow, Store, StoreUnavailable, TokenBucket
from forebay.redis import LeasedStore, RedisStore
from forebay.redis.leased import fetch as leased_fetch

KEY = "hot"


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.end()


@dataclass
class Host:
    """Shared memory of several processes. Each process makes its own connections."""

    url: str
    memory: Store
    share: float = 0.1
    lease: float = 1
    timeout: float = 0.25

    def open(self) -> LeasedStore:
        return LeasedStore(RedisStore(self.url, timeout=self.timeout), self.memory, share=self.share, lease=self.lease)


@pytest.fixture
def host_of(server: RedisServer) -> Iterator[Callable[..., Host]]:
    opened: list[Store] = []

    def make(**options: Any) -> Host:
        opened.append(Store.private(keys=1000))
        return Host(server.url, opened[-1], **options)

    yield make
    for memory in opened:
        memory.close()


def server_us(client: redis.Redis) -> int:
    seconds, us = client.time()
    return int(seconds) * 1_000_000 + int(us)


def most(limiter: Any, elapsed_us: int) -> int:
    algorithm = limiter.terms.strict.algorithm
    return int((algorithm.tolerance_us + elapsed_us) * algorithm.rate.limit // algorithm.period_us)


def patiently(ask: Callable[[], Any]) -> bool:
    """Retry a request that misses its deadline on a busy machine."""
    answers: list[bool] = []

    def answered() -> bool:
        with contextlib.suppress(StoreUnavailable):
            answers.append(bool(ask()))
        return bool(answers)

    wait_until(answered, "an answer")
    return answers[0]


def calls(client: redis.Redis) -> int:
    stats: Any = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "eval"))


def spend(number: int, host: Host, make: Callable[[Any], Any], counts: SharedNumbers, stop: SharedNumbers) -> int:
    """Send requests until `stop` is set. Return how many were not decided."""
    undecided = 0
    with host.open() as store:
        allow = make(store).allow
        while not stop[0]:
            try:
                for _ in range(50):
                    if allow(KEY):
                        counts[number] += 1
            except StoreUnavailable:
                undecided += 1
    return undecided


def bucket(store: Any) -> Any:
    return TokenBucket(store, "api", "20000/second", burst=5000)


@pytest.mark.parametrize("seconds", [1.5])
def test_hosts_of_several_processes(
    crew: Crew,
    host_of: Callable[..., Host],
    client: redis.Redis,
    record: Callable[[str, object], None],
    seconds: float,
) -> None:
    hosts = [host_of(timeout=10) for _ in range(3)]
    counts, stop = SharedNumbers(9), SharedNumbers(1)
    client.config_resetstat()
    since_us = server_us(client)
    workers = [crew.start(spend, i, hosts[i % 3], bucket, counts, stop) for i in range(9)]
    wait_until(lambda: server_us(client) - since_us > seconds * 1e6, "the end of the test")
    stop[0] = 1
    assert crew.results(workers) == [0] * 9
    elapsed_us = server_us(client) - since_us
    admitted = sum(counts)
    with hosts[0].open() as store:
        allowed = most(bucket(store), elapsed_us)
    assert 5000 <= admitted <= allowed
    record(
        "leased, three hosts of three processes: admitted, of what one limiter would have", f"{admitted} of {allowed}"
    )
    record("leased, the same: round trips to Redis", calls(client))


def test_fixed_windows_of_several_processes(
    crew: Crew, host_of: Callable[..., Host], client: redis.Redis, record: Callable[[str, object], None]
) -> None:
    def window(store: Any) -> Any:
        return FixedWindow(store, "w", "3000/day")

    hosts = [host_of(timeout=10) for _ in range(3)]
    counts, stop = SharedNumbers(6), SharedNumbers(1)
    workers = [crew.start(spend, i, hosts[i % 3], window, counts, stop) for i in range(6)]
    # Permits that a host hasn't used for a while go to the others.
    wait_until(lambda: sum(counts) >= 3000, "the whole window's permits")
    stop[0] = 1
    assert crew.results(workers) == [0] * 6
    assert sum(counts) == 3000


def test_denied_floods_send_few_calls(crew: Crew, host_of: Callable[..., Host], client: redis.Redis) -> None:
    """A whole host sends at most one call per `retry_after`."""
    host = host_of(timeout=10)
    with host.open() as store:
        limiter = TokenBucket(store, "d", "10/minute")
        assert sum(limiter.allow(KEY) for _ in range(30)) == 10

        def flood(number: int) -> int:
            with host.open() as own:
                allow = TokenBucket(own, "d", "10/minute").allow
                return sum(allow(KEY) for _ in range(20_000))

        client.config_resetstat()
        since_us = server_us(client)
        admitted = sum(crew.run(4, flood))
        elapsed_us = server_us(client) - since_us
    assert admitted <= 1 + elapsed_us // 6_000_000
    # One more for each that came back, to give back the remaining permits.
    assert calls(client) <= 2 * (2 + elapsed_us // 6_000_000)


def test_killed_workers_lose_little(
    crew: Crew,
    host_of: Callable[..., Host],
    client: redis.Redis,
    record: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request is a fetch, so most workers die in one. The next request fetches again."""
    kills = 40
    monkeypatch.setattr(leased_fetch, "next_size", lambda *_: 0)
    host = host_of(timeout=0.05)
    counts, stop = SharedNumbers(kills + 4), SharedNumbers(1)
    chance = random.Random(1)
    since_us = server_us(client)
    workers: list[Worker] = [crew.start(spend, i, host, bucket, counts, stop) for i in range(4)]
    for i in range(kills):
        # Two more are admitted: none is stuck for longer than a fetch slot is closed.
        before = sum(counts)
        wait_until(lambda before=before: sum(counts) >= before + chance.randrange(2, 40), "going on")
        victim = chance.randrange(4)
        workers[victim].kill()
        workers[victim] = crew.start(spend, 4 + i, host, bucket, counts, stop)
    stop[0] = 1
    crew.results(workers)
    elapsed_us = server_us(client) - since_us
    with host.open() as store:
        assert sum(counts) <= most(bucket(store), elapsed_us)
        limiter = bucket(store)
        assert patiently(lambda: limiter.allow(KEY))
    record("leased, workers killed while they fetch", kills)


WHERE = ["before it asks", "after it has asked", "with the answer", "after the deposit", "before it gives back"]


def die(where: str, host: Host, how: int) -> bool:
    """Borrow; the process is killed or stopped during the fetch."""
    store = host.open()
    limiter: Any = TokenBucket(store, "k", "100/hour", burst=100)
    store.executor.keeper.end()

    times = iter([how])

    def end() -> None:
        if (number := next(times, None)) is not None:
            os.kill(os.getpid(), number)

    do, send = store.executor.redis.execute, store.redis_store.executor.run_many
    deposit = limiter.deposit
    if where == "before it asks":
        store.executor.redis.execute = lambda asked: (end(), do(asked))[1]  # type: ignore[method-assign, func-returns-value]
    elif where == "after it has asked":
        # The sent request is executed, and no process reads the reply.
        kind: Any = store.redis_store.executor.client.connection_pool.connection_class
        read = kind.read_response
        limiter.peek(KEY)
        kind.read_response = lambda *a, **k: (end(), read(*a, **k))[1]
    elif where == "with the answer":
        limiter.deposit = lambda *a: (end(), deposit(*a))[1]
    elif where == "after the deposit":
        limiter.deposit = lambda *a: (deposit(*a), end())[0]
    else:
        while limiter.left(limiter.tag(KEY))[0] < 3:
            limiter.allow(KEY)
        store.redis_store.executor.run_many = lambda *a: (end(), send(*a))[1]  # type: ignore[method-assign, func-returns-value]
        store.executor.give_back(store.executor.holdings.unused(everything=True))
    return bool(limiter.allow(KEY))


@pytest.mark.parametrize("where", WHERE)
def test_a_process_killed_during_a_fetch(crew: Crew, host_of: Callable[..., Host], where: str) -> None:
    host = host_of(timeout=1, share=0.5)
    crew.start(die, where, host, signal.SIGKILL)._reap()
    with host.open() as store:
        limiter = TokenBucket(store, "k", "100/hour", burst=100)
        # A request that comes at once waits until the fetch slot opens.
        admitted = int(patiently(lambda: limiter.wait(KEY, timeout=60)))
        while patiently(lambda: limiter.allow(KEY)):
            admitted += 1
        # All except the permits lost with it, and perhaps one that has come back.
        assert 50 <= admitted <= 101


@pytest.mark.parametrize("where", WHERE[:4])
def test_a_process_stopped_during_a_fetch(
    crew: Crew, host_of: Callable[..., Host], redis_store: RedisStore, where: str
) -> None:
    """Another process overtakes it. When it goes on, it spends no granted permit that Redis counts as spent."""
    host = host_of(timeout=1, share=0.5, lease=30)
    stopped = crew.start(die, where, host, signal.SIGSTOP)
    stopped.wait_for_stop()
    with host.open() as store:
        limiter = TokenBucket(store, "k", "100/hour", burst=100)
        admitted = sum(patiently(lambda: limiter.allow(KEY)) for _ in range(10))
        assert admitted == 10
        stopped.resume()
        try:
            admitted += stopped.result()
        except AssertionError as error:
            # Its own deadline has passed meanwhile.
            assert "StoreUnavailable" in str(error)  # noqa: PT017
        place = limiter.terms.place(KEY)
        free, _ = redis_store.executor.run_command(limiter.terms.peek(place, 1))
        assert free + limiter.left(limiter.tag(KEY))[0] + admitted <= 101
        while patiently(lambda: limiter.allow(KEY)):
            admitted += 1
        assert 50 <= admitted <= 101
