"""Late and lost messages of leases: reports after a loan ended, lost replies, lost cells."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from leased_hosts import Hosts, drained

from forebay import FixedWindow, SlidingWindow, StoreUnavailable, TokenBucket
from forebay.redis.commands import Command
from forebay.redis.leased import fetch as leased_fetch
from forebay.redis.leased.fetch import Holdings, Outcome, Steps, borrowed, reported
from forebay.redis.leased.terms import OVERTAKEN

KEY = "user:42"


def left(limiter: Any) -> int:
    return int(limiter.left(limiter.tag(KEY))[0])


def free(limiter: Any) -> int:
    """The permits that Redis would lend."""
    return int(limiter.store.redis_store.executor.run_command(limiter.terms.peek(limiter.terms.place(KEY), 1))[0])


def begun(limiter: Any, cost: int) -> tuple[Steps[Outcome], Command[Any]]:
    steps = borrowed(limiter, Holdings(), KEY, cost)
    asked = next(steps)
    assert isinstance(asked, Command)
    return steps, asked


def ended(steps: Steps[Outcome], answer: Any) -> Outcome:
    with pytest.raises(StopIteration) as end:
        steps.send(answer)
    outcome: Outcome = end.value.value
    return outcome


def with_permits(limiter: Any, least: int) -> int:
    used = 0
    while left(limiter) < least:
        used += limiter.allow(KEY)
    return used


def test_a_report_after_the_lease_ended_revives_no_permits(hosts: Hosts) -> None:
    """The permits counted as spent at the lease's end. Redis has refilled them since and lent them to other hosts."""
    late, other = (TokenBucket(hosts.new(share=1.0, lease=0.3), "l", "1000/second", burst=100) for _ in range(2))
    with_permits(late, 20)
    had = left(late)
    hosts.advance(0.299)
    steps, asked = begun(late, had + 1)
    hosts.advance(0.101)
    admitted = drained(other)
    hosts.advance(0.1)
    other.reset("nothing of this key")
    admitted += 100 * other.hit(KEY, 100).allowed
    hosts.advance(0.05)
    answer = hosts.executor.run_command(asked)
    assert (answer.dropped, answer.permits >= had + 1) == (had, True)
    outcome = ended(steps, answer)
    assert outcome.allowed
    # Of those that it had, nothing is left.
    assert left(late) == answer.permits - (had + 1)
    assert left(late) + had + 1 + drained(other) <= 100


def test_a_late_report_that_is_denied_drops_the_reported_permits(hosts: Hosts) -> None:
    late, other = (TokenBucket(hosts.new(share=1.0, lease=3), "l", "10/second", burst=100) for _ in range(2))
    with_permits(late, 20)
    hosts.advance(2.999)
    steps, asked = begun(late, left(late) + 1)
    hosts.server_clock.advance(1)
    assert drained(other) >= 70
    outcome = ended(steps, hosts.executor.run_command(asked))
    assert not outcome.allowed
    assert left(late) == 0


def test_a_request_needs_dropped_permits_again(hosts: Hosts) -> None:
    """A request that relied on dropped permits is not granted just the rest."""
    late, other = (TokenBucket(hosts.new(share=1.0, lease=3), "l", "10/hour", burst=100) for _ in range(2))
    with_permits(late, 20)
    had = left(late)
    hosts.advance(2.999)
    steps, asked = begun(late, had + 1)
    hosts.server_clock.advance(1)
    assert other.hit(KEY, free(late) - 5)
    answer = hosts.executor.run_command(asked)
    assert (answer.dropped, answer.permits) == (had, 0)
    outcome = ended(steps, answer)
    assert not outcome.allowed
    assert free(late) == 5


def test_a_late_refund_drops_the_reported_permits(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(share=1.0, lease=3), "l", "10/second", burst=100)
    with_permits(limiter, 20)
    hosts.advance(2.999)
    steps = reported(limiter, KEY, 1)
    asked: Any = next(steps)
    hosts.server_clock.advance(5)
    answer = hosts.executor.run_command(asked)
    assert answer.dropped == left(limiter) >= 20
    with pytest.raises(StopIteration):
        steps.send(answer)
    assert left(limiter) == 0


def test_redis_takes_the_first_of_two_requests_of_one_microsecond(hosts: Hosts) -> None:
    """Their stamps don't show which is later."""
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    terms, place = limiter.terms, limiter.terms.place(KEY)
    assert hosts.executor.run_command(terms.borrow(place, 1000, -1, 0, 1, 10)).permits == 10
    for left, unspent in ((0, 0), (0, 10), (10, 0)):
        assert hosts.executor.run_command(terms.borrow(place, 1000, left, unspent, 1, 1)).status == OVERTAKEN
    assert free(limiter) == 90
    assert hosts.executor.run_command(terms.borrow(place, 1001, 0, 10, 0, 0)).permits == 0
    assert free(limiter) == 100


def test_an_empty_server_takes_over_no_loan(hosts: Hosts, client: redis.Redis) -> None:
    """The permits that a host has left were never charged there: the host drops them after the next reply."""
    limiter = TokenBucket(hosts.new(share=1.0, lease=30), "l", "100/hour", burst=100)
    with_permits(limiter, 20)
    client.delete(limiter.terms.place(KEY).redis_key)
    had = left(limiter)
    decision = limiter.hit(KEY, had + 1)
    assert decision.allowed
    hosts.give_back(everything=True)
    assert decision.remaining + drained(limiter) <= 2 * (100 - (had + 1))
    assert decision.remaining < 100 - (had + 1)


def test_an_abort_drops_permits_without_a_loan(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    tag = limiter.tag(KEY)
    generation, now_ns, *_ = limiter.begin(tag)
    assert limiter.deposit(tag, generation, 10, now_ns + 10**9, 1) == (True, True)
    generation = limiter.begin(tag)[0]
    assert limiter.take(tag, 2)
    # Nine were reported, and only five count: two are spent since, so three are left.
    limiter.abort(tag, generation, 4)
    assert limiter.left(tag)[::2] == (3, False)
    generation, now_ns, *_ = limiter.begin(tag)
    assert limiter.deposit(tag, generation, 5, now_ns + 10**9, 0, 8) == (True, True)
    assert left(limiter) == 5


def test_other_requests_may_spend_the_lease_during_a_fetch(hosts: Hosts) -> None:
    """Then a grant of only what the request lacked doesn't suffice. It stays in the lease."""
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    tag = limiter.tag(KEY)
    generation, now_ns, *_ = limiter.begin(tag)
    assert limiter.deposit(tag, generation, 5, now_ns + 10**9, 1) == (True, True)
    generation, now_ns, *_ = limiter.begin(tag)
    assert limiter.take(tag, 3)
    assert limiter.deposit(tag, generation, 2, now_ns + 10**9, 6) == (True, False)
    assert left(limiter) == 3


@pytest.mark.parametrize("kind", [TokenBucket, FixedWindow, SlidingWindow])
def test_lost_replies_lose_no_batches(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Each loses only as much as a lost reply of a strict limiter."""
    store = hosts.new()
    limiter, other = kind(store, "l", "10000/day"), kind(hosts.new(share=1.0), "l", "10000/day")
    admitted = sum(limiter.allow(KEY) for _ in range(1500))
    ask = store.executor.redis.execute

    def lost(asked: Command[Any]) -> Any:
        ask(asked)
        raise StoreUnavailable("late")

    monkeypatch.setattr(store.executor.redis, "execute", lost)
    refused = 0
    while refused < 12:
        try:
            admitted += limiter.allow(KEY)
        except StoreUnavailable:
            refused += 1
    monkeypatch.setattr(store.executor.redis, "execute", ask)
    # And then it goes on as before.
    before = hosts.calls()
    admitted += sum(limiter.allow(KEY) for _ in range(500))
    assert hosts.calls() - before <= 12
    hosts.give_back(everything=True)
    admitted += drained(other)
    assert 10_000 - 1000 - 12 <= admitted <= 10_000


def test_fetches_killed_one_after_the_other_lose_one_batch(hosts: Hosts) -> None:
    """Each fetch is killed after it has sent its request."""
    limiter = FixedWindow(hosts.new(), "l", "10000/day")
    admitted = sum(limiter.allow(KEY) for _ in range(1500))
    while limiter.allow_now(KEY):
        admitted += 1
    dead = []
    for _ in range(12):
        steps, asked = begun(limiter, 1)
        hosts.executor.run_command(asked)
        dead.append(steps)
        hosts.advance(61)
    assert limiter.peek(KEY).remaining >= 10_000 - admitted - 1000 - 12


def test_a_late_reply_is_not_deposited_for_another_fetch(hosts: Hosts) -> None:
    """Cells are lost, and other fetches begin in the same moment."""
    for number in range(40):
        limiter = TokenBucket(hosts.new(lease=60), f"l{number}", "100/hour", burst=100)
        late, asked = begun(limiter, 1)
        granted = hosts.executor.run_command(asked)
        limiter.forget(limiter.tag(KEY))
        assert limiter.allow(KEY)
        while limiter.allow_now(KEY):
            pass
        third, third_asked = begun(limiter, 1)
        with contextlib.suppress(StopIteration):
            late.send(granted)
        answer = hosts.executor.run_command(third_asked)
        assert ended(third, answer).allowed
        assert left(limiter) == answer.permits - 1


def test_a_late_reply_is_not_deposited_in_a_new_cell_of_its_generation(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(lease=60), "l", "100/hour", burst=100)

    def generation_of(steps: Any) -> int:
        return int(steps.gi_yieldfrom.gi_frame.f_locals["generation"])

    late, asked = begun(limiter, 1)
    granted = hosts.executor.run_command(asked)
    others = [(late, asked)]
    while len(others) == 1 or generation_of(others[-1][0]) != generation_of(late):
        limiter.forget(limiter.tag(KEY))
        others.append(begun(limiter, 1))
    assert isinstance(late.send(granted), float)
    assert left(limiter) == 0
    steps, asked = others[-1]
    assert ended(steps, hosts.executor.run_command(asked)).allowed


def test_a_new_cell_begins_with_a_random_generation(hosts: Hosts) -> None:
    limiter = TokenBucket(hosts.new(lease=60), "l", "100/hour")
    tag = limiter.tag(KEY)
    generations = set()
    for _ in range(100):
        generations.add(limiter.begin(tag)[0])
        limiter.forget(tag)
    assert len(generations) > 10


@pytest.fixture
def patience(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clocks, and the time that bounds how long a request waits."""
    passed_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal passed_s
        passed_s += seconds
        hosts.advance(seconds)

    monkeypatch.setattr(leased_fetch, "time", SimpleNamespace(monotonic=lambda: passed_s))
    return advance


def test_every_waiting_request_outlasts_two_killed_fetches(hosts: Hosts, patience: Callable[[float], None]) -> None:
    """One fetch holds the slot when they come; the first of them fetches next and is killed, too."""
    limiter = TokenBucket(hosts.new(), "l", "1000/hour")
    deadline_s = limiter.terms.fetch_deadline_ns / 1e9 + 0.002
    dead = [begun(limiter, 1)]
    waiting = [borrowed(limiter, Holdings(), KEY, 1) for _ in range(4)]
    assert all(isinstance(next(steps), float) for steps in waiting)
    patience(deadline_s)
    dead.append((waiting[0], waiting[0].send(None)))
    assert isinstance(dead[-1][1], Command)
    assert all(isinstance(steps.send(None), float) for steps in waiting[1:])
    patience(deadline_s)
    for steps in waiting[1:]:
        outcome = None
        try:
            asked = steps.send(None)
        except StopIteration as end:
            # By what the one before has brought.
            outcome = end.value
        else:
            assert isinstance(asked, Command)
            outcome = ended(steps, hosts.executor.run_command(asked))
        assert outcome.allowed


def test_a_request_whose_fetches_never_suffice_is_denied(hosts: Hosts, patience: Callable[[float], None]) -> None:
    """Redis answers, so the request must not fail as unavailable."""
    hosts.executor.timeout_s = 1
    limiter = TokenBucket(hosts.new(share=1.0, lease=60), "l", "10/hour", burst=10)
    other = TokenBucket(hosts.new(), "l", "10/hour", burst=10)
    with_permits(limiter, 2)
    had = left(limiter)
    assert other.hit(KEY, free(limiter) - 2)
    steps, asked = begun(limiter, had + 2)
    # The remaining permits are spent, and the granted ones alone don't suffice.
    assert limiter.take(limiter.tag(KEY), had)
    answer = hosts.executor.run_command(asked)
    assert answer.permits == 2
    patience(2.1)
    outcome = ended(steps, answer)
    assert not outcome.allowed
    assert left(limiter) == 2


def test_a_request_of_several_permits_beside_a_flood_of_single_ones(hosts: Hosts) -> None:
    """Its own fetch serves it, however much other requests spend meanwhile."""
    limiter = TokenBucket(hosts.new(share=0.05), "l", "1000000/second", burst=1000)
    for _ in range(50):
        assert limiter.allow(KEY)
    had = left(limiter)
    steps, asked = begun(limiter, 60)
    for _ in range(had):
        assert limiter.allow_now(KEY)
    assert not limiter.allow_now(KEY)
    assert ended(steps, hosts.executor.run_command(asked)).allowed


def test_a_fetch_adds_to_the_remaining_permits(hosts: Hosts) -> None:
    """If Redis has less than the request needs, the permits left on the host count, too."""
    limiter = TokenBucket(hosts.new(share=1.0), "l", "10/hour", burst=10)
    tag = limiter.tag(KEY)
    while left(limiter) < 2:
        assert limiter.allow(KEY)
    assert limiter.hit(KEY, left(limiter) + free(limiter))
    assert limiter.left(tag)[0] == 0


@pytest.mark.parametrize("cost", [1, 5])
def test_a_refund_gives_back_the_whole_charge(hosts: Hosts, cost: int) -> None:
    limiter = TokenBucket(hosts.new(), "l", "1000/hour", burst=1000)
    for _ in range(200):
        assert limiter.hit(KEY, cost)
        limiter.refund(KEY, cost)
    hosts.give_back(everything=True)
    assert limiter.peek(KEY).remaining == 1000
    for _ in range(40):
        assert limiter.allow(KEY)
    limiter.refund(KEY, 1000)
    # Of what is on loan nothing can be given back.
    assert left(limiter) + free(limiter) == 1000


@pytest.mark.parametrize("seed", range(20))
def test_retry_after_considers_loans(hosts: Hosts, seed: int) -> None:
    """To the microsecond: the permits can't be had before, and can be had then if no other request comes first."""
    chance = random.Random(seed)
    rate, burst = chance.choice([("7/second", 10), ("10/hour", 100), ("1000/minute", 20), ("3/second", 3)])
    limiter = TokenBucket(hosts.new(lease=chance.choice([0.1, 1, 60])), "l", rate, burst=burst)
    terms, place = limiter.terms, limiter.terms.place(KEY)
    ask, clock = hosts.executor.run_command, hosts.server_clock
    unit_us = terms.strict.algorithm.period_us // terms.strict.algorithm.rate.limit
    loans: dict[bytes, tuple[int, int]] = {}
    for step in range(1, 60):
        clock.set_us(clock.now_us + chance.choice([0, 1, unit_us, terms.lease_ns // 3000]))
        terms.host = chance.choice([b"a1", b"b2", b"c3"])
        had, end_us = loans.get(terms.host, (0, 0))
        had = chance.randint(0, had) if end_us > clock.now_us else 0
        need = chance.randint(1, burst)
        want = chance.choice([need, burst])
        granted = ask(terms.borrow(place, step, had, 0, need, want))
        if granted.permits:
            end_us = clock.now_us + granted.left_ns // 1000
            # After a part of what was wanted: when there is any.
            need = 1
        if granted.permits < want:
            now_us, retry_us = clock.now_us, granted.retry_ns // 1000
            clock.set_us(now_us + retry_us - 1)
            assert retry_us == 0 or ask(terms.peek(place, need))[0] < need
            clock.set_us(now_us + retry_us)
            assert ask(terms.peek(place, need))[0] >= need
            clock.set_us(now_us)
        loans[terms.host] = had + granted.permits, end_us
        on_loan = sum(permits for permits, end_us in loans.values() if end_us > clock.now_us)
        assert ask(terms.peek(place, 1))[0] + on_loan <= burst


def test_a_pending_lease_keeps_its_cell(hosts: Hosts) -> None:
    """During the fetch no other key may evict the cell."""
    limiter = TokenBucket(hosts.new(), "l", "100/hour")
    crowd = FixedWindow(hosts.stores[0].host_store, "crowd", "1/day")
    tags = [limiter.tag(number) for number in range(60)]
    for number in range(60):
        assert limiter.allow(number)
    hosts.advance(2)
    for tag in tags:
        limiter.begin(tag)
    hosts.advance(0.3)
    for number in range(600):
        crowd.allow(number)
    assert all(limiter.left(tag)[2] for tag in tags)


@pytest.mark.parametrize("seed", range(20))
def test_level_and_loans_grow_only_by_time(hosts: Hosts, client: redis.Redis, seed: int) -> None:
    """For any reports, however late, the level and the loans together rise by no more than the refill."""
    chance = random.Random(seed)
    rate, burst = chance.choice([("7/second", 10), ("1000/second", 100), ("1000/minute", 20), ("3/second", 3)])
    limiter = TokenBucket(hosts.new(lease=chance.choice([0.1, 1, 10])), "l", rate, burst=burst)
    terms, place, clock = limiter.terms, limiter.terms.place(KEY), hosts.server_clock
    algorithm = terms.strict.algorithm
    unit_us = Fraction(algorithm.period_us, algorithm.rate.limit)
    before_us, seen_us = Fraction(algorithm.tolerance_us), clock.now_us
    late = 0
    for step in range(2, 100):
        clock.set_us(clock.now_us + chance.choice([0, 1, int(unit_us), terms.lease_ns // 3000, terms.lease_ns // 800]))
        terms.host = chance.choice([b"a1", b"b2", b"c3"])
        left, unspent = chance.choice([(chance.randint(0, burst), 0), (0, chance.randint(0, burst)), (-1, 0)])
        need = chance.randint(1, burst)
        asked = chance.choice([step, step, step - 2])
        granted = hosts.executor.run_command(
            terms.borrow(place, asked, left, unspent, need, chance.choice([need, burst]))
        )
        late += granted.dropped > 0
        tat_us, *loans = (client.get(place.redis_key) or b"l0").decode()[1:].split(";")  # type: ignore[union-attr]
        on_loan = sum(int(loan.split(":")[1]) for loan in loans)
        level_us = algorithm.tolerance_us - max(int(tat_us) - clock.now_us, 0)
        assert 0 <= level_us + on_loan * unit_us <= min(before_us + clock.now_us - seen_us, algorithm.tolerance_us)
        before_us, seen_us = level_us + on_loan * unit_us, clock.now_us
    assert late
