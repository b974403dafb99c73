"""Leased limits: what a host borrows, spends, gives back, remembers and refuses."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import redis
import redis.asyncio
import redis.sentinel
from leased_hosts import Hosts, drained
from process_helpers import Crew, wait_until
from redis_server import RedisServer, redis_server

from forebay import (
    BucketedWindow,
    Concurrency,
    CostExceedsLimit,
    FixedWindow,
    ForeignState,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    StoreUnavailable,
    TokenBucket,
)
from forebay.redis import AsyncLeasedStore, AsyncRedisStore, LeasedStore, RedisStore
from forebay.testing import ManualClock

KEY = "user:42"
KINDS: dict[str, Callable[[Any, str], Any]] = {
    "token bucket": lambda store, rate: TokenBucket(store, "l", rate),
    "fixed window": lambda store, rate: FixedWindow(store, "l", rate),
    "fixed window, first": lambda store, rate: FixedWindow(store, "l", rate, align="first"),
    "fixed window, stagger": lambda store, rate: FixedWindow(store, "l", rate, align="stagger"),
    "sliding window": lambda store, rate: SlidingWindow(store, "l", rate),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


@every_kind
def test_hosts_together_have_the_limit(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiters = [make(hosts.new(), "1000/hour") for _ in range(3)]
    admitted = sum(limiter.allow(KEY) for _ in range(400) for limiter in limiters)
    hosts.give_back(everything=True)
    hosts.advance(1)
    admitted += sum(drained(limiter) for limiter in limiters)
    assert admitted == 1000
    assert hosts.calls() < 120
    assert [limiter.allow(KEY) for limiter in limiters] == [False] * 3


def test_the_store_can_be_named(hosts: Hosts) -> None:
    limiter: Any = TokenBucket(store=hosts.new(), name="l", rate="5/hour", burst=3)
    assert (limiter.name, limiter.limit, limiter.allow(KEY)) == ("l", 3, True)


@every_kind
def test_loans_grow_with_demand(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "100000/hour")
    assert all(limiter.allow(KEY) for _ in range(5000))
    assert hosts.calls() <= 15
    assert limiter.left(limiter.tag(KEY))[0] <= limiter.terms.most_on_loan == 10_000


@every_kind
def test_a_host_borrows_nothing_to_spare_for_a_rare_key(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "1000/hour")
    for _ in range(10):
        assert limiter.allow(KEY)
        assert limiter.left(limiter.tag(KEY))[0] == 0
        hosts.advance(0.3)


def test_a_loan_does_not_exceed_the_share(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(share=0.01), "l", "100000/hour")
    for _ in range(10_000):
        assert limiter.allow(KEY)
        assert limiter.left(limiter.tag(KEY))[0] <= 1000


@every_kind
def test_workers_of_a_host_share_a_lease(hosts: Hosts, make: Callable[..., Any]) -> None:
    first = hosts.new()
    with LeasedStore(hosts.redis_store, first.host_store) as second:
        limiters = [make(first, "1000/hour"), make(second, "1000/hour")]
        for limiter in itertools.islice(itertools.cycle(limiters), 100):
            assert limiter.allow(KEY)
        assert hosts.calls() <= 8


@every_kind
def test_a_denied_flood_sends_one_call_per_retry_after(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "20/hour")
    assert drained(limiter) == 20
    for _ in range(3):
        before = hosts.calls()
        decisions = [limiter.hit(KEY) for _ in range(500)]
        assert not any(decisions)
        assert hosts.calls() - before <= 1
        retry_after = decisions[-1].retry_after
        assert 0 < retry_after <= 2 * 3600
        hosts.advance(retry_after * 0.9)
        assert not limiter.allow(KEY)
        assert hosts.calls() - before <= 1
        hosts.advance(retry_after * 0.1 + 0.01)
        before = hosts.calls()
        assert limiter.allow(KEY)
        assert hosts.calls() == before + 1
        drained(limiter)


def test_a_denial_applies_to_requests_of_at_least_its_cost(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "10/hour")
    assert limiter.hit(KEY, 8)
    assert not limiter.hit(KEY, 5)
    before = hosts.calls()
    assert not limiter.hit(KEY, 6)
    assert hosts.calls() == before
    assert limiter.hit(KEY, 2)


def test_a_denial_of_a_cost_above_the_slots_bits_is_not_remembered(hosts: Hosts) -> None:
    """Nor is it taken for a denial of a smaller cost."""
    limiter = TokenBucket(hosts.new(), "l", "100000/hour")
    assert limiter.hit(KEY, 30_001)
    assert not limiter.hit(KEY, 70_000)
    before = hosts.calls()
    assert not limiter.hit(KEY, 70_000)
    assert hosts.calls() == before + 1
    assert limiter.hit(KEY, 66_000)
    assert not limiter.hit(KEY, 65_535)
    before = hosts.calls()
    assert not any(limiter.hit(KEY, cost) for cost in (65_535, 65_536, 70_000))
    assert hosts.calls() == before


def test_a_denial_applies_to_its_key_only(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "1/hour")
    assert [limiter.allow(key) for key in ("a", "a", "b", "b")] == [True, False, True, False]


@every_kind
def test_unused_permits_are_given_back(hosts: Hosts, make: Callable[..., Any]) -> None:
    idle, busy = make(hosts.new(), "1000/hour"), make(hosts.new(), "1000/hour")
    used = 0
    while idle.left(idle.tag(KEY))[0] < 50:
        used += idle.allow(KEY)
    # A lease of which something was used since the last look is kept.
    hosts.give_back()
    assert idle.left(idle.tag(KEY))[0] >= 50
    hosts.give_back()
    assert idle.left(idle.tag(KEY))[0] == 0
    assert drained(busy) == 1000 - used


@every_kind
def test_close_gives_back_the_permits_left(hosts: Hosts, make: Callable[..., Any]) -> None:
    store = hosts.new()
    limiter = make(store, "1000/hour")
    used = sum(limiter.allow(KEY) for _ in range(40))
    store.close()
    with pytest.raises(StoreClosed, match="was used after it was closed"):
        make(hosts.stores[0], "1000/hour").peek(KEY)
    assert drained(make(hosts.new(), "1000/hour")) == 1000 - used


@every_kind
def test_a_fetch_that_ends_after_close_gives_its_permits_back(
    hosts: Hosts, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetching thread gives them back. Its own request is served."""
    store = hosts.new()
    limiter = make(store, "1000/hour")
    used = sum(limiter.allow(KEY) for _ in range(40))
    while limiter.left(limiter.tag(KEY))[0]:
        used += limiter.allow(KEY)
    call = hosts.executor._call

    def closing(*asked: Any) -> Any:
        answer = call(*asked)
        store.close()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(hosts.executor, "_call", closing)
        assert limiter.allow(KEY)
    assert store.closed
    assert drained(make(hosts.new(), "1000/hour")) == 1000 - used - 1


def away(*asked: Any) -> Any:
    raise StoreUnavailable("for the test")


@every_kind
def test_permits_stay_on_the_host_while_redis_is_unavailable(
    hosts: Hosts, make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permits taken out of a lease that can't be given back would be lost."""
    limiter, other = (make(hosts.new(), "1000/hour") for _ in range(2))
    used = sum(limiter.allow(KEY) for _ in range(40))
    left = limiter.left(limiter.tag(KEY))[0]
    with monkeypatch.context() as patch:
        for name in ("_call", "run_many"):
            patch.setattr(hosts.executor, name, away)
        with pytest.raises(StoreUnavailable):
            hosts.give_back(everything=True)
    assert limiter.left(limiter.tag(KEY))[0] == left > 0
    used += limiter.allow(KEY)
    hosts.give_back(everything=True)
    assert drained(other) == 1000 - used


def test_a_foreign_state_does_not_prevent_giving_back_other_keys(hosts: Hosts, client: redis.Redis) -> None:
    limiter, other = (FixedWindow(hosts.new(), "l", "1000/hour") for _ in range(2))
    for key in ("foreign", KEY):
        while limiter.left(limiter.tag(key))[0] < 10:
            limiter.allow(key)
    client.set(limiter.terms.strict.key("foreign"), "something else")
    left = limiter.left(limiter.tag(KEY))[0]
    before = other.peek(KEY).remaining
    with pytest.raises(ForeignState):
        hosts.give_back(everything=True)
    assert other.peek(KEY).remaining == before + left


def test_permits_of_a_dead_host_count_as_spent(hosts: Hosts) -> None:
    dead, other = (TokenBucket(hosts.new(share=0.5), "l", "100/100 s", burst=100) for _ in range(2))
    while dead.left(dead.tag(KEY))[0] < 25:
        dead.allow(KEY)
    before = other.peek(KEY).remaining
    hosts.advance(0.999)
    assert other.peek(KEY).remaining <= before
    hosts.advance(30)
    # All of it has been refilled since.
    assert before + 28 <= other.peek(KEY).remaining <= before + 31


def test_permits_are_not_spent_after_their_lease_ended(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "1000/hour")
    while limiter.left(limiter.tag(KEY))[0] < 25:
        limiter.allow(KEY)
    before = hosts.calls()
    hosts.advance(1.0)
    assert limiter.left(limiter.tag(KEY))[0] == 0
    assert limiter.allow(KEY)
    assert hosts.calls() == before + 1


def test_loans_shrink_when_they_are_unused(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "1000/hour")
    for _ in range(200):
        limiter.allow(KEY)
    borrowed = []
    for _ in range(8):
        hosts.advance(1.0)
        limiter.allow(KEY)
        borrowed.append(limiter.left(limiter.tag(KEY))[0] + 1)
    assert borrowed[-1] <= 2 < borrowed[0]
    assert borrowed == sorted(borrowed, reverse=True)


def test_decisions_have_the_numbers_that_the_host_knows(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/second", burst=1000)
    decisions = [limiter.hit(KEY) for _ in range(4)]
    assert [decision.remaining for decision in decisions] == [0, 1, 0, 3]
    assert {(decision.limiter, decision.limit, decision.retry_after) for decision in decisions} == {("l", 1000, 0.0)}
    assert all(0 < decision.reset_after <= 11 for decision in decisions)
    assert limiter.peek(KEY).remaining == 3
    # Redis is queried for permits that the host doesn't have, and nothing is borrowed.
    assert limiter.peek(KEY, 100).remaining >= 995
    assert limiter.peek(KEY).remaining == 3
    assert (limiter.limit, limiter.name, str(limiter.rate), limiter.burst) == (1000, "l", "100 per second", 1000)
    assert "leased" in repr(limiter)
    with pytest.raises(AttributeError):
        _ = limiter.capacity


@every_kind
def test_peek_and_a_cost_of_zero_charge_nothing(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "10/hour")
    assert limiter.peek(KEY)
    assert limiter.hit(KEY, 0)
    assert limiter.peek(KEY, 10)
    assert drained(limiter) == 10
    denied = limiter.peek(KEY)
    assert not denied
    assert 0 < denied.retry_after <= 2 * 3600
    assert limiter.hit(KEY, 0)


@every_kind
def test_refunded_permits_can_be_used_again(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter, other = make(hosts.new(), "20/hour"), make(hosts.new(), "20/hour")
    assert drained(limiter) == 20
    limiter.refund(KEY, 3)
    assert drained(limiter) == 3
    limiter.refund(KEY)
    assert drained(other) == 1
    # Redis now knows that the borrowed permits are spent.
    hosts.advance(1)
    limiter.refund(KEY, 20)
    limiter.refund(KEY, 20)
    assert drained(limiter) == 20


@every_kind
def test_reset_forgets_a_key(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "20/hour")
    limiter.allow("other")
    assert drained(limiter) == 20
    limiter.reset(KEY)
    assert drained(limiter) == 20


@every_kind
def test_allow_many_decides_in_order(hosts: Hosts, make: Callable[..., Any]) -> None:
    limiter = make(hosts.new(), "20/hour")
    assert limiter.allow_many(["a", "b", "a"], [15, 20, 6]) == [True, True, False]
    assert limiter.allow_many(["a"] * 7) == [True] * 5 + [False] * 2
    for keys, costs, error in [
        (["c", 1.5], None, InvalidKey),
        (["c", "c"], [1, -1], InvalidCost),
        (["c", "c"], [1, 21], CostExceedsLimit),
        ("c", None, InvalidKey),
        (["c"], 1, InvalidCost),
    ]:
        with pytest.raises(error):
            limiter.allow_many(keys, costs)
    assert drained(limiter, "c") == 20


def test_limiters_with_other_terms_have_other_leases(hosts: Hosts) -> None:
    first = hosts.new()
    with LeasedStore(hosts.redis_store, first.host_store, share=0.3) as second:
        limiters = [TokenBucket(store, "l", "1000/hour", burst=100) for store in (first, second)]
        assert sum(limiter.allow(KEY) for _ in range(100) for limiter in limiters) <= 100
        assert sum(map(drained, limiters)) <= 10


def test_equal_rates_share_a_bucket(hosts: Hosts) -> None:
    one, other = (TokenBucket(hosts.new(share=1.0), "n", rate, burst=60) for rate in ("60/hour", "1440/day"))
    assert drained(one) + drained(other) == 60


def test_leased_and_strict_windows_share_their_limit(hosts: Hosts, redis_store: RedisStore) -> None:
    leased, strict = (FixedWindow(store, "l", "100/hour") for store in (hosts.new(), redis_store))
    assert all(leased.allow(KEY) for _ in range(30))
    hosts.give_back(everything=True)
    assert drained(strict) == 70
    assert not leased.allow(KEY)


@pytest.mark.parametrize("seconds", [1.01, 0.5, 3.0])
def test_a_window_begins_anew(hosts: Hosts, seconds: float) -> None:
    limiter = FixedWindow(hosts.new(), "l", "100/second")
    hosts.server_clock.set(hosts.server_clock.now() // 1 + 1)
    assert drained(limiter) == 100
    hosts.advance(seconds)
    assert drained(limiter) == (100 if seconds >= 1 else 0)


def test_a_host_that_lost_its_cells_fetches_again(hosts: Hosts) -> None:
    limiter, other = (TokenBucket(hosts.new(share=0.5), "l", "100/hour") for _ in range(2))
    used = 0
    while limiter.left(limiter.tag(KEY))[0] < 25:
        used += limiter.allow(KEY)
    limiter.forget(limiter.tag(KEY))
    used += limiter.allow(KEY)
    # The lost permits stay on loan until their lease is over.
    assert used + drained(limiter) + drained(other) <= 75


def fill(store: Store) -> None:
    TokenBucket(store, "crowd", "1/day").allow_many(range(10_000))


@pytest.mark.parametrize("missing", ["fetch slot", "lease"])
@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_a_full_table_follows_on_full(redis_store: RedisStore, clock: ManualClock, on_full: Any, missing: str) -> None:
    with (
        Store.private(keys=1, on_full=on_full, clock=clock) as host,
        LeasedStore(redis_store, host, share=0.5) as store,
    ):
        limiter = TokenBucket(store, "l", "100/hour")
        if missing == "lease":
            # The key's lease expires. Its fetch slot remembers a denial of 40 permits until 40 are there.
            assert [limiter.hit(KEY, 40).allowed for _ in range(3)] == [True, True, False]
            clock.advance(5)
        before = host.stats().limiters["l"]
        fill(host)
        decisions = [limiter.hit(KEY, 5), limiter.hit(KEY, 5)]
        passed = limiter.allow(KEY)
        after = host.stats().limiters["l"]
    assert [decision.allowed for decision in decisions] == [passed, passed] == [on_full == "allow"] * 2
    assert all(decision.full for decision in decisions)
    assert all(decision or decision.retry_after > 0 for decision in decisions)
    assert after.full - before.full == 3
    assert (after.allowed - before.allowed, after.denied - before.denied) == ((3, 0) if passed else (0, 3))


def test_only_a_lack_of_room_is_flagged_as_full(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    decisions = [limiter.hit(KEY, cost) for cost in (1, 5, 60, 60, 60, 99)]
    assert [decision.allowed for decision in decisions] == [True, True, True, False, False, False]
    assert not any(decision.full for decision in (*decisions, limiter.peek(KEY)))


def test_forgotten_scripts_are_sent_again(hosts: Hosts, client: redis.Redis) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    assert limiter.allow(KEY)
    client.script_flush()
    assert limiter.allow(KEY)
    client.script_flush()
    hosts.give_back(everything=True)
    assert limiter.peek(KEY).remaining == 98


@pytest.mark.parametrize(
    "value",
    [
        b"something else",
        b"l",
        b"l12;",
        b"l12;xyz:1:2:3",
        b"l12;ab:1:2",
        b"l12;ab:1:2:3junk",
        b"l99999999999999999999",
        b"l12;ab:99999999999999999999:2:3",
        b"t12",
    ],
)
def test_a_foreign_value_is_an_error(hosts: Hosts, client: redis.Redis, value: bytes) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    redis_key = limiter.terms.place(KEY).redis_key
    client.set(redis_key, value)
    for ask in (limiter.allow, limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(ForeignState, match=redis_key.decode()):
            ask(KEY)
    assert client.get(redis_key) == value
    client.delete(redis_key)
    client.lpush(redis_key, "a list")
    with pytest.raises(ForeignState):
        limiter.allow(KEY)
    client.delete(redis_key)
    assert limiter.allow(KEY)


def test_states_expire(redis_store: RedisStore, client: redis.Redis) -> None:
    with Store.private(keys=100) as host_store, LeasedStore(redis_store, host_store, lease=60) as store:
        limiter = TokenBucket(store, "l", "60/hour", burst=1)
        assert limiter.allow(KEY)
        # The lease, and a full bucket's time.
        assert 0 < client.pttl(limiter.terms.place(KEY).redis_key) <= 120_001


@pytest.mark.parametrize(
    "make",
    [
        lambda store: TokenBucket(store, "l", "5/minute", refill="interval"),
        lambda store: LeakyBucket(store, "l", "5/minute", capacity=5),
        lambda store: MinInterval(store, "l", "12s"),
        lambda store: BucketedWindow(store, "l", "5/minute"),
        lambda store: SlidingLog(store, "l", "5/minute", keys=1),
        lambda store: Concurrency(store, "l", 5),
    ],
)
def test_errors_name_the_alternative_to_a_lease(hosts: Hosts, make: Callable[..., Any]) -> None:
    with pytest.raises(InvalidLimiter, match=r"nothing can be lent.* over the RedisStore itself"):
        make(hosts.new())


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda store: FixedWindow(store, "l", "5/day", align="calendar", timezone="UTC"), "would follow a calendar"),
        (lambda store: TokenBucket(store, "l", "5/minute", initial=1), "leave initial= out"),
    ],
)
def test_what_redis_can_not_keep_is_not_leased(hosts: Hosts, make: Callable[..., Any], match: str) -> None:
    with pytest.raises(InvalidLimiter, match=match):
        make(hosts.new())


def test_a_leased_limiter_refuses_limits_per_call(hosts: Hosts) -> None:
    store = hosts.new()
    limiter: Any = TokenBucket(store, "l", "5/minute")
    for options in ({"rate": "6/minute"}, {"burst": 3}):
        with pytest.raises(InvalidLimiter, match="over the RedisStore itself a call may have"):
            limiter.hit(KEY, **options)
    with pytest.raises(InvalidLimiter, match="can't book ahead"):
        limiter.reserve(KEY)
    with pytest.raises(TypeError, match="would stop the event loop"):
        limiter.wait_async(KEY)
    for error, key, cost in [
        (InvalidKey, 1.5, 1),
        (InvalidCost, KEY, -1),
        (InvalidCost, KEY, 1.5),
        (CostExceedsLimit, KEY, 6),
    ]:
        for ask in (limiter.hit, limiter.peek, limiter.refund):
            if error is not CostExceedsLimit or ask != limiter.refund:
                with pytest.raises(error):
                    ask(key, cost)
    with pytest.raises(InvalidRate):
        TokenBucket(store, "l", "nonsense")
    with pytest.raises(TypeError, match="TokenBucket"):
        TokenBucket(store, "l")  # type: ignore[call-overload]
    for one in (store, limiter):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(one)


def test_the_arguments_of_a_leased_store_are_checked(redis_store: RedisStore) -> None:
    make: Any = LeasedStore
    make_async: Any = AsyncLeasedStore
    with Store.private(keys=10) as host_store:
        for arguments in ((host_store, redis_store), (redis_store, redis_store), (None, host_store)):
            with pytest.raises(TypeError, match="argument of LeasedStore is"):
                make(*arguments)
        with pytest.raises(TypeError, match=r"is its AsyncRedisStore, not <RedisStore .*an AsyncLeasedStore over"):
            make_async(redis_store, host_store)
        for lease in (0.001, 61, "1 hour"):
            with pytest.raises(ValueError, match="from 10 ms to a minute"):
                make(redis_store, host_store, lease=lease)
        for share in (0, 1.1, True, "a tenth"):
            with pytest.raises(ValueError, match="share is a number above 0"):
                make(redis_store, host_store, share=share)


def test_a_host_spends_its_lease_after_the_server_is_gone(client: redis.Redis) -> None:
    with redis_server() as own, Store.private(keys=100) as host_store:
        redis_store = RedisStore(own.url, timeout=10)
        with redis_store, LeasedStore(redis_store, host_store, share=1) as store:
            limiter = TokenBucket(store, "l", "100/hour")
            while limiter.left(limiter.tag(KEY))[0] < 5:
                assert limiter.allow(KEY)
            own.process.kill()
            own.process.wait()
            # It may spend the permits that it has.
            assert limiter.allow(KEY)
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    limiter.hit(KEY, 90)
                with pytest.raises(StoreUnavailable):
                    limiter.hit("another", 1)


def test_threads_outlast_a_server_that_does_not_answer(server: RedisServer) -> None:
    with (
        Store.private(keys=100) as host_store,
        RedisStore(server.url, timeout=0.2) as redis_store,
        LeasedStore(redis_store, host_store) as store,
    ):
        limiter = TokenBucket(store, "l", "100/hour")
        outcomes: list[type[Exception] | bool] = []

        def ask() -> None:
            try:
                outcomes.append(limiter.allow(KEY))
            except StoreUnavailable as error:
                outcomes.append(type(error))

        with server.stopped():
            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert outcomes == [StoreUnavailable] * 8
        wait_until(lambda: _answers(limiter), "an answer")


def _answers(limiter: Any) -> bool:
    try:
        return bool(limiter.allow(KEY))
    except StoreUnavailable:
        return False


def test_threads_wait_for_the_one_that_fetches(hosts: Hosts) -> None:
    store = hosts.new()
    limiter = TokenBucket(store, "l", "100000/hour")
    admitted = []

    def work() -> None:
        admitted.append(sum(limiter.allow(KEY) for _ in range(2000)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(admitted) == 8000
    assert hosts.calls() <= 40


def test_wait_sleeps_until_a_permit_is_free(redis_store: RedisStore) -> None:
    with Store.private(keys=100) as host_store, LeasedStore(redis_store, host_store) as store:
        limiter = TokenBucket(store, "l", "50/second", burst=5)
        assert all(limiter.wait(KEY) for _ in range(20))
        slow = TokenBucket(store, "slower", "1/hour", burst=1)
        assert slow.wait(KEY, timeout=0.01)
        assert not slow.wait(KEY, timeout=0.01)


def test_the_thread_gives_back_unused_permits(redis_store: RedisStore) -> None:
    with Store.private(keys=100) as first, Store.private(keys=100) as second:
        stores = [LeasedStore(redis_store, host_store, lease=0.05) for host_store in (first, second)]
        idle, busy = (FixedWindow(store, "l", "1000/day") for store in stores)
        used = 0
        while idle.left(idle.tag(KEY))[0] < 30:
            used += idle.allow(KEY)
        wait_until(lambda: busy.peek(KEY).remaining == 1000 - used, "giving back")
        for store in stores:
            store.close()
            store.close()


def test_a_child_gives_back_only_its_own_leases(redis_store: RedisStore, server: RedisServer) -> None:
    crew = Crew()
    with Store.private(keys=100) as host_store, LeasedStore(redis_store, host_store, lease=30) as store:
        limiter = TokenBucket(store, "l", "1000/hour")
        while limiter.left(limiter.tag("parent"))[0] < 20:
            limiter.allow("parent")
        left = limiter.left(limiter.tag("parent"))[0]

        def work() -> int:
            while limiter.left(limiter.tag("child"))[0] < 20:
                limiter.allow("child")
            store.close()
            return int(limiter.left(limiter.tag("child"))[0])

        try:
            assert crew.start(work).result() == 0
        finally:
            crew.end()
        assert limiter.left(limiter.tag("parent"))[0] == left
        assert limiter.allow("parent")


def test_asyncio_limiters_together_have_the_limit(server: RedisServer) -> None:
    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=10) as redis_store:
            with Store.private(keys=100) as first, Store.private(keys=100) as second:
                # No lease ends before its permits are asked for, however slow the machine is.
                stores = [AsyncLeasedStore(redis_store, host_store, lease=60) for host_store in (first, second)]
                limiters: list[Any] = [TokenBucket(store, "l", "1000/hour") for store in stores]
                redis_store.executor.client.connection_pool.max_connections = 100
                answers = await asyncio.gather(*[limiters[i % 2].allow(KEY) for i in range(600)])
                admitted = sum(answers)
                assert await limiters[0].peek(KEY)
                assert (await limiters[0].hit(KEY, 0)).allowed
                admitted += sum(await limiters[0].allow_many([KEY] * 2))
                await stores[0].close()
                await stores[0].close()
                with pytest.raises(StoreClosed):
                    await limiters[0].peek(KEY)
                decision = await limiters[1].hit(KEY)
                while decision:
                    admitted += 1
                    decision = await limiters[1].hit(KEY)
                assert decision.retry_after > 0
                assert admitted == 1000
                assert not await limiters[1].wait(KEY, timeout=0.01)
                await limiters[1].reset(KEY)
                assert await limiters[1].wait_async(KEY)
                for refused in (
                    limiters[1].reserve(KEY),
                    limiters[1].reserve(KEY, rate="1/s"),
                    limiters[1].hit(KEY, rate="1/s"),
                    limiters[1].wait(KEY, rate="1/s"),
                ):
                    with pytest.raises(InvalidLimiter):
                        await refused
                with pytest.raises(TypeError, match="pickled"):
                    pickle.dumps(limiters[1])
                assert (limiters[1].name, limiters[1].limit, limiters[1].burst) == ("l", 1000, 1000)
                await stores[1].close()

    asyncio.run(work())


def test_a_task_that_fetches_after_close_gives_its_permits_back(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=10) as redis_store:
            with Store.private(keys=100) as first, Store.private(keys=100) as second:
                stores = [AsyncLeasedStore(redis_store, host_store, lease=60) for host_store in (first, second)]
                limiter, other = (cast(Any, FixedWindow(store, "l", "1000/year")) for store in stores)
                permits = limiter._permits
                used = 1 + await limiter.allow(KEY)
                while permits.left(permits.tag(KEY))[0] < 30:
                    used += await limiter.allow(KEY)
                while permits.allow_now(KEY):
                    used += 1
                call = redis_store.executor._call

                async def closing(*asked: Any) -> Any:
                    answer = await call(*asked)
                    await stores[0].close()
                    return answer

                with monkeypatch.context() as patch:
                    patch.setattr(redis_store.executor, "_call", closing)
                    assert await limiter.allow(KEY)
                assert stores[0].closed
                assert (await other.peek(KEY)).remaining == 1000 - used
                await stores[1].close()

    asyncio.run(work())


def test_a_closed_asyncio_store_leaves_permits_while_redis_is_unavailable(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers of the host can spend them."""

    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=10) as redis_store:
            with Store.private(keys=100) as host_store:
                store = AsyncLeasedStore(redis_store, host_store, lease=60)
                permits = cast(Any, FixedWindow(store, "l", "1000/year"))._permits
                while permits.left(permits.tag(KEY))[0] < 10:
                    await cast(Any, FixedWindow(store, "l", "1000/year")).allow(KEY)
                left = permits.left(permits.tag(KEY))[0]
                with monkeypatch.context() as patch:
                    for name in ("_call", "run_many"):
                        patch.setattr(redis_store.executor, name, away)
                    await store.close()
                assert permits.left(permits.tag(KEY))[0] == left

    asyncio.run(work())


def test_a_cancelled_close_gives_back_the_withdrawn_permits(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task is cancelled before the permits are sent."""

    async def work() -> None:
        withdrawn, may_be_sent = asyncio.Event(), asyncio.Event()
        with Store.private(keys=100) as host_store:
            async with AsyncRedisStore(server.url, timeout=10) as redis_store:
                store = AsyncLeasedStore(redis_store, host_store, lease=60)
                limiter = cast(Any, FixedWindow(store, "l", "1000/year"))
                permits, used = limiter._permits, 0
                while permits.left(permits.tag(KEY))[0] < 30:
                    used += await limiter.allow(KEY)
                send = redis_store.executor.client.execute_many

                async def late(*calls: Any) -> Any:
                    withdrawn.set()
                    await may_be_sent.wait()
                    return await send(*calls)

                monkeypatch.setattr(redis_store.executor.client, "execute_many", late)
                closing = asyncio.create_task(store.close())
                await withdrawn.wait()
                closing.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await closing
                assert permits.left(permits.tag(KEY))[0] == 0
                may_be_sent.set()
        with RedisStore(server.url, timeout=10) as strict:
            assert FixedWindow(strict, "l", "1000/year").peek(KEY).remaining == 1000 - used

    asyncio.run(work())


def test_a_cancelled_task_lets_the_next_one_fetch(server: RedisServer) -> None:
    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=10) as redis_store:
            with Store.private(keys=100) as host_store:
                async with AsyncLeasedStore(redis_store, host_store) as store:
                    limiter: Any = TokenBucket(store, "l", "1000/hour")
                    with server.stopped():
                        task = asyncio.create_task(limiter.allow(KEY))
                        await asyncio.sleep(0.02)
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                    assert await limiter.allow(KEY)

    asyncio.run(work())


def test_names_in_redis_reveal_nothing_of_the_segment(hosts: Hosts, client: redis.Redis) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    assert limiter.allow(KEY)
    assert len(limiter.terms.host) == 16
    other = TokenBucket(hosts.new(), "l", "100/hour")
    assert limiter.terms.host != other.terms.host
    assert limiter.terms.encoding == other.terms.encoding


def sentinel(service: str, port: int = 1) -> RedisStore:
    sentinels = redis.sentinel.Sentinel([("127.0.0.1", port)], sentinel_kwargs={"socket_timeout": 1, "retry": None})
    return RedisStore(sentinels.master_for(service, socket_timeout=0.5))


def test_different_servers_share_nothing() -> None:
    servers = [
        sentinel("prod"),
        sentinel("test"),
        sentinel("prod", 2),
        RedisStore("redis://127.0.0.1:1"),
        RedisStore("redis://127.0.0.1:2"),
        RedisStore("redis://127.0.0.1:1/3"),
        RedisStore("redis://127.0.0.1:1?db=4"),
        RedisStore("unix:///nowhere"),
        RedisStore("redis+cluster://127.0.0.1:1"),
    ]
    with Store.private(keys=100) as host_store:
        terms = [TokenBucket(LeasedStore(server, host_store), "l", "1/second").terms for server in [*servers, *servers]]
        assert len({one.encoding for one in terms}) == len({one.host for one in terms}) == len(servers)
    for server in servers:
        server.close()


def test_a_url_and_a_client_of_one_server_have_one_identity(server: RedisServer) -> None:
    with Store.private(keys=100) as host_store, RedisStore(server.url) as by_url, server.client() as client:
        client.connection_pool.connection_kwargs.update(socket_timeout=0.5, retry=None)
        stores = [LeasedStore(one, host_store) for one in (by_url, RedisStore(client))]
        first, second = (TokenBucket(store, "l", "1/second").terms.encoding for store in stores)
        assert first == second


@pytest.mark.parametrize("policy", ["allow", "local"])
def test_the_policy_answers_when_redis_is_away(policy: Any) -> None:
    with Store.private(keys=1000) as host_store, redis_server() as own:
        options: Any = {} if policy == "allow" else {"host": host_store, "hosts": 2}
        redis_store = RedisStore(own.url, timeout=60, when_unavailable=policy, **options)
        with redis_store, LeasedStore(redis_store, host_store) as store:
            limiter = TokenBucket(store, "l", "40/hour")
            assert not limiter.hit(KEY).degraded
            own.process.kill()
            own.process.wait()
            decisions = [limiter.hit(KEY) for _ in range(60)]
            degraded = [decision for decision in decisions if decision.degraded]
            assert len(degraded) >= 50
            assert sum(decision.allowed for decision in degraded) == (len(degraded) if policy == "allow" else 20)
            assert limiter.allow("another")
            assert limiter.peek("another", 3).degraded
            limiter.refund(KEY)
            with pytest.raises(StoreUnavailable):
                limiter.reset(KEY)
            assert redis_store.status().decided_by_policy >= 50

        async def work() -> None:
            async with (
                AsyncRedisStore(own.url, timeout=60, when_unavailable=policy, **options) as redis_store,
                AsyncLeasedStore(redis_store, host_store) as store,
            ):
                limiter: Any = TokenBucket(store, "a", "40/hour")
                assert await limiter.allow(KEY)
                assert (await limiter.hit(KEY)).degraded
                assert (await limiter.peek(KEY)).degraded
                await limiter.refund(KEY)

        asyncio.run(work())


def test_many_tasks_of_one_key(server: RedisServer) -> None:
    async def work() -> None:
        async with AsyncRedisStore(server.url, timeout=10) as redis_store:
            with Store.private(keys=100) as host_store:
                async with AsyncLeasedStore(redis_store, host_store) as store:
                    limiter: Any = TokenBucket(store, "l", "100000/hour")
                    assert all(await asyncio.gather(*[limiter.allow(KEY) for _ in range(10_000)]))
                    assert all(await asyncio.gather(*[limiter.hit("k2", 2) for _ in range(1000)]))

    asyncio.run(work())


def test_a_signal_while_the_keeper_begins(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its handler may use the limiter."""
    with Store.private(keys=100) as host_store, LeasedStore(redis_store, host_store) as store:
        limiter = TokenBucket(store, "l", "1000/hour")
        start = threading.Thread.start
        answers = []

        def interrupted(thread: threading.Thread) -> None:
            answers.append(limiter.allow("in the handler"))
            start(thread)
            answers.append(limiter.allow("in the handler"))

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            assert limiter.allow(KEY)
        assert answers == [True, True]


def test_without_a_thread_leases_end_by_themselves(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with (
        Store.private(keys=100) as host_store,
        LeasedStore(redis_store, host_store) as store,
        monkeypatch.context() as patch,
    ):
        patch.setattr(threading.Thread, "start", refuse)
        assert TokenBucket(store, "l", "1000/hour").allow(KEY)


def test_the_thread_survives_every_error(redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.private(keys=100) as host_store, LeasedStore(redis_store, host_store, lease=0.05) as store:
        limiter = FixedWindow(store, "l", "1000/day")
        give_back = store.executor.give_back
        calls: list[int] = []

        def fails_first(asked: Any) -> None:
            calls.append(0)
            if len(calls) < 3:
                raise OSError("of somebody else's client")
            give_back(asked)

        monkeypatch.setattr(store.executor, "give_back", fails_first)
        used = 0
        limiter.allow("before")
        wait_until(lambda: len(calls) >= 3, "the errors")
        while limiter.left(limiter.tag(KEY))[0] < 30:
            used += limiter.allow(KEY)
        wait_until(lambda: limiter.left(limiter.tag(KEY))[0] == 0, "giving back")
        wait_until(lambda: limiter.peek(KEY).remaining == 1000 - used, "what was given back")


def test_the_end_of_the_interpreter_gives_back(server: RedisServer) -> None:
    code = f"""
from forebay import *
from forebay.redis import *
leased = LeasedStore(RedisStore({server.url!r}, timeout=60), Store.private(keys=10), share=0.5)
limiter = FixedWindow(leased, "api", "1000/year")
print(sum(limiter.allow("k") for _ in range(70)))
"""
    ended = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout == "70\n"
    with RedisStore(server.url, timeout=60) as store:
        assert FixedWindow(store, "api", "1000/year").peek("k").remaining == 930
