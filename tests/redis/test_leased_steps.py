"""Single steps of leases, in orders in which a wrong step would do harm."""

from __future__ import annotations

from typing import Any

import pytest
from leased_hosts import Hosts, drained

from forebay import FixedWindow, TokenBucket
from forebay.redis import LeasedStore
from forebay.redis.leased.fetch import Holdings, borrowed

KEY = "user:42"


def bucket(store: LeasedStore) -> Any:
    return TokenBucket(store, "l", "100/second", burst=100)


def hoarding(hosts: Hosts, make: Any = bucket, least: int = 20) -> Any:
    """A limiter whose host has unused permits."""
    limiter = make(hosts.new(share=0.5, lease=3))
    while left(limiter) < least:
        assert limiter.allow(KEY)
    return limiter


def left(limiter: Any) -> int:
    return int(limiter.left(limiter.tag(KEY))[0])


def free(limiter: Any) -> int:
    """The permits that Redis would lend."""
    return int(limiter.store.redis_store.executor.run_command(limiter.terms.peek(limiter.terms.place(KEY), 1))[0])


def test_permits_of_a_new_window_are_not_given_back_to_the_old_one(hosts: Hosts) -> None:
    """The new window begins while Redis answers the query before the permits are given back."""
    limiter = hoarding(hosts, lambda store: FixedWindow(store, "l", "100/minute"))
    holdings = limiter.store.executor.holdings
    given_back = holdings.unused(everything=True)
    next(given_back)
    hosts.advance(60)
    assert limiter.allow(KEY)
    there = left(limiter)
    assert there
    assert list(given_back) == []
    assert left(limiter) == there
    hosts.give_back(everything=True)
    assert left(limiter) == 0
    assert free(limiter) == 99


def test_permits_on_loan_are_not_refilled(hosts: Hosts) -> None:
    limiter = hoarding(hosts)
    hosts.advance(2)
    assert free(limiter) + left(limiter) <= 100
    assert free(limiter) >= 50


def test_permits_count_as_spent_when_their_lease_ends(hosts: Hosts) -> None:
    limiter = hoarding(hosts)
    hosts.advance(2.4)
    spent = drained_locally(limiter)
    hosts.advance(0.65)
    # Of those spent 0.65 s ago all are back; of what counts as spent at the end of its lease, 0.05 s ago, five.
    assert spent >= 20
    assert free(limiter) <= 100 - spent + 5


def drained_locally(limiter: Any) -> int:
    spent = 0
    while limiter.allow_now(KEY):
        spent += 1
    return spent


def test_permits_left_at_the_lease_end_are_not_given_back_after_a_refill(hosts: Hosts) -> None:
    limiter = hoarding(hosts)
    other = bucket(hosts.new(share=1))
    hosts.advance(3.6)
    assert drained(other) == 100
    hosts.advance(0.0005)
    assert drained(limiter) == 0
    assert drained(other) == 0


def test_a_new_grant_extends_the_lease_of_reported_permits(hosts: Hosts) -> None:
    """If a host reports permits and borrows more, all of them are on loan until the new end."""
    limiter = hoarding(hosts)
    terms, tag = limiter.terms, limiter.tag(KEY)
    place = terms.place(KEY)
    hosts.advance(2)
    generation, now_ns, stamp_us, reported, unspent, _ = limiter.begin(tag)
    assert (reported, unspent) == (left(limiter), 0)
    granted = hosts.executor.run_command(terms.borrow(place, stamp_us, reported, 0, 1, 1))
    assert limiter.deposit(tag, generation, granted.permits, now_ns + granted.left_ns, 0) == (True, True)
    hosts.advance(2.5)
    assert left(limiter) == reported + 1
    assert free(limiter) + left(limiter) <= 100


def test_permits_of_a_window_are_not_spent_in_the_next(hosts: Hosts) -> None:
    hosts.server_clock.set(hosts.server_clock.now() // 1 + 1)
    limiter = hoarding(hosts, lambda store: FixedWindow(store, "w", "100/second"))
    before = left(limiter)
    steps = borrowed(limiter, Holdings(), KEY, before + 1)
    hosts.advance(0.95)
    asked: Any = next(steps)
    hosts.advance(0.1)
    granted = hosts.executor.run_command(asked)
    with pytest.raises(StopIteration) as end:
        steps.send(granted)
    assert end.value.value.allowed
    assert left(limiter) == granted.permits - (before + 1)
    assert free(limiter) + granted.permits <= 100


@pytest.mark.parametrize(("later_s", "both"), [(-0.01, 8), (0.4, 8), (0.6, 3), (1.0, 3)])
def test_permits_of_two_windows_are_not_added_up(hosts: Hosts, later_s: float, both: int) -> None:
    """By the host's clock the earlier window isn't over: the server's clock may have been set."""
    limiter: Any = FixedWindow(hosts.new(), "w", "100/second")
    tag = limiter.tag(KEY)
    end_ns = limiter.now_ns() + 900_000_000
    for permits, seconds in ((5, 0.0), (3, later_s)):
        generation = limiter.begin(tag)[0]
        assert limiter.deposit(tag, generation, permits, end_ns + round(seconds * 1e9), 0)[0]
    assert left(limiter) == both


def test_nothing_is_withdrawn_while_a_fetch_is_pending(hosts: Hosts) -> None:
    limiter = hoarding(hosts)
    tag = limiter.tag(KEY)
    generation = limiter.begin(tag)[0]
    assert limiter.withdraw(tag) is None
    limiter.abort(tag, generation)
    _, permits = limiter.withdraw(tag)
    assert permits >= 20
    assert left(limiter) == 0
    assert limiter.withdraw(tag) is None


def test_only_the_fetch_that_began_last_deposits(hosts: Hosts) -> None:
    """Also if all fetches began at once."""
    limiter = bucket(hosts.new())
    tag = limiter.tag(KEY)
    assert limiter.allow(KEY)
    generations = [limiter.begin(tag)[0] for _ in range(100)]
    end_ns = limiter.now_ns() + 1_000_000_000
    assert len(set(generations)) == 100
    for generation in generations[:-1]:
        limiter.abort(tag, generation)
        assert limiter.deposit(tag, generation, 5, end_ns, 1) == (False, False)
    assert limiter.deposit(tag, generations[-1], 5, end_ns, 1) == (True, True)
    assert limiter.deposit(tag, generations[-1], 5, end_ns, 1) == (False, False)
    assert left(limiter) == 4


def test_a_deposit_after_the_lease_ended_is_refused(hosts: Hosts) -> None:
    limiter = bucket(hosts.new())
    tag = limiter.tag(KEY)
    generation, now_ns, *_ = limiter.begin(tag)
    hosts.advance(1)
    assert limiter.deposit(tag, generation, 5, now_ns + 1_000_000_000, 1) == (False, False)


def test_steps_are_stamped_in_their_order(hosts: Hosts) -> None:
    limiter = hoarding(hosts)
    tag = limiter.tag(KEY)
    generation, _, first_us, *_ = limiter.begin(tag)
    limiter.abort(tag, generation)
    second_us, _ = limiter.withdraw(tag)
    assert first_us <= second_us <= limiter.begin(tag)[2]


@pytest.mark.parametrize("late", ["report", "return"])
def test_an_overtaken_request_changes_nothing(hosts: Hosts, late: str) -> None:
    limiter = hoarding(hosts)
    terms, tag = limiter.terms, limiter.tag(KEY)
    place = terms.place(KEY)
    if late == "report":
        _, _, stamp_us, *_ = limiter.begin(tag)
        delayed: Any = terms.borrow(place, stamp_us, 0, 0, 1, 1)
    else:
        stamp_us, permits = limiter.withdraw(tag)
        delayed = terms.give_back(place, stamp_us, permits, 0)
    generation, now_ns, stamp_us, reported, *_ = limiter.begin(tag)
    granted = hosts.executor.run_command(terms.borrow(place, stamp_us, reported, 0, 1, 30))
    assert limiter.deposit(tag, generation, granted.permits, now_ns + granted.left_ns, 0)[0]
    before = free(limiter)
    hosts.executor.run_command(delayed)
    assert free(limiter) == before
    hosts.advance(2)
    assert free(limiter) + left(limiter) <= 100
