"""Requests of at least as much as a host may have on loan: Redis charges them without a loan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from leased_hosts import Hosts, answered
from redis_server import RedisServer
from scripts_clock import ServerClock

from forebay import FixedWindow, SlidingWindow, Store, TokenBucket
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, RedisStore
from forebay.redis.commands import Command
from forebay.redis.leased.fetch import Holdings, Outcome, Steps, closing_ns

KEY = "user:42"

every_kind = pytest.mark.parametrize("kind", [TokenBucket, FixedWindow, SlidingWindow])


def begun(limiter: Any, cost: int) -> tuple[Steps[Outcome], Command[Any]]:
    steps = answered(limiter, Holdings(), KEY, cost)
    asked = next(steps)
    assert isinstance(asked, Command), "it waits for others"
    return steps, asked


def ended(steps: Steps[Outcome], answer: Any) -> Outcome:
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    outcome: Outcome = end.value.value
    return outcome


@every_kind
@pytest.mark.parametrize(("share", "cost"), [(1e-9, 1), (0.1, 10), (0.1, 12)])
def test_large_requests_are_sent_concurrently(hosts: Hosts, kind: Callable[..., Any], share: float, cost: int) -> None:
    limiter = kind(hosts.new(share=share), "l", "100/hour")
    fetches = [begun(limiter, cost) for _ in range(100 // cost)]
    assert all(ended(steps, hosts.executor.run_command(asked)).allowed for steps, asked in fetches)
    steps, asked = begun(limiter, cost)
    denied = ended(steps, hosts.executor.run_command(asked))
    assert not denied.allowed
    assert denied.retry_ns > 0
    stats = limiter.store.host_store.stats().limiters["l"]
    assert (stats.allowed, stats.denied) == (100 // cost, 1)
    assert stats.algorithm == f"leased {kind.__name__}"


@every_kind
def test_the_host_remembers_denials_of_large_requests(hosts: Hosts, kind: Callable[..., Any]) -> None:
    limiter = kind(hosts.new(), "l", "100/hour")
    for _ in range(9):
        assert limiter.hit(KEY, 11)
    assert not limiter.hit(KEY, 11)
    before = hosts.calls()
    retry_after = limiter.hit(KEY, 11).retry_after
    assert hosts.calls() == before
    hosts.advance(retry_after + 0.01)
    assert limiter.hit(KEY, 11)


@every_kind
def test_permits_on_loan_count_beside_those_in_redis(hosts: Hosts, kind: Callable[..., Any]) -> None:
    limiter = kind(hosts.new(), "l", "100/hour")
    tag = limiter.tag(KEY)
    while limiter.left(tag)[0] < 3:
        assert limiter.allow(KEY)
    there = limiter.peek(KEY, 100).remaining
    assert there > 80
    assert not limiter.hit(KEY, there + 1)
    assert limiter.hit(KEY, there)
    assert not limiter.allow(KEY)


def test_a_denial_that_ends_before_the_host_stores_it(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is high: the deciding process is stopped for longer than the denial holds."""
    limiter = TokenBucket(hosts.new(), "l", "1000000/second", burst=100)
    steps, asked = begun(limiter, 100)
    denial = hosts.executor.run_command(asked)._replace(permits=0, retry_ns=1000)

    def late(until_ns: int) -> int:
        hosts.advance(0.005)
        return closing_ns(until_ns)

    monkeypatch.setattr("forebay.redis.leased.fetch.closing_ns", late)
    answer = ended(steps, denial)
    assert not answer.allowed
    assert answer.retry_ns >= 1000


def test_a_charge_of_a_bucket_is_used_within_the_deadline(hosts: Hosts) -> None:
    """A late charge is discarded: its permits have been refilled meanwhile."""
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    (in_time, first), (late, second) = begun(limiter, 30), begun(limiter, 30)
    answers = [hosts.executor.run_command(asked) for asked in (first, second)]
    hosts.advance(59.9)
    assert ended(in_time, answers[0]).allowed
    hosts.advance(0.2)
    assert isinstance(late.send(answers[1]), Command)


def test_a_long_lease_does_not_extend_the_time_to_use_a_charge(server: RedisServer, server_clock: ServerClock) -> None:
    """The fetch slot is held for a 64th of the lease, which is longer than the deadline."""
    with RedisStore(server.url, timeout=0.9) as redis_store:
        hosts = Hosts(redis_store, server_clock)
        with hosts.new(lease=60) as store, store.host_store:
            late, asked = begun(TokenBucket(store, "l", "100/hour"), 30)
            answer = redis_store.executor.run_command(asked)
            hosts.advance(0.92)
            assert isinstance(late.send(answer), Command)


@pytest.mark.parametrize("kind", [FixedWindow, SlidingWindow])
def test_a_charge_of_a_window_is_used_in_that_window(hosts: Hosts, kind: Callable[..., Any]) -> None:
    limiter = kind(hosts.new(), "l", "100/second")
    late, asked = begun(limiter, 30)
    answer = hosts.executor.run_command(asked)
    hosts.advance(1)
    assert isinstance(late.send(answer), Command)


def test_large_requests_change_no_loan(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    tag = limiter.tag(KEY)
    while limiter.left(tag)[0] < 3:
        assert limiter.allow(KEY)
    left = limiter.left(tag)
    free = limiter.peek(KEY, 100).remaining
    assert limiter.hit(KEY, 20)
    assert limiter.left(tag) == left
    assert limiter.peek(KEY, 100).remaining == free - 20


@pytest.mark.parametrize("share", [1e-9, 0.1])
def test_large_requests_of_tasks_do_not_queue(server: RedisServer, share: float) -> None:
    cost = 1 if share < 0.1 else 10

    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=60) as redis_store:
            with Store.private(keys=100) as host_store:
                async with AsyncLeasedStore(redis_store, host_store, share=share) as store:
                    limiter: Any = TokenBucket(store, "l", "100/hour")
                    asked, all_ask, ask = 0, asyncio.Event(), store.executor.redis.execute

                    async def ask_together(what: Command[Any]) -> Any:
                        nonlocal asked
                        asked += 1
                        if asked == 8:
                            all_ask.set()
                        async with asyncio.timeout(30):
                            await all_ask.wait()
                        return await ask(what)

                    store.executor.redis.execute = ask_together  # type: ignore[method-assign]
                    assert all(await asyncio.gather(*[limiter.hit(KEY, cost) for _ in range(8)]))
                    assert not store.executor.flight.queues

    asyncio.run(work())
