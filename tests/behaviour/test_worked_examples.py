"""The worked examples of the algorithms, by number: at every place, with one process and with several.

The oracle passes the same examples, so the reference of the property tests has met the same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import cycle
from multiprocessing import Pipe
from typing import Any, Final, NamedTuple

import oracle_counts
import pytest
from oracle import AllOfOracle, Answer, Booking, Bucket, Oracle, Queue, Rule
from oracle_counts import ClockWindow, IntervalBucket, Log
from places import NS, OVER_REDIS, STRICT, Clock, Place, opened
from redis_server import RedisServer

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    Decision,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)

SECOND_NS = NS
MINUTE_NS = 60 * NS
HOUR_NS = 3600 * NS
# The start of a second, a minute, an hour and a day.
START = 86_400


class SharedLimiter:
    """A limit that several processes or stores share; they answer in turn."""

    def __init__(self, callers: Sequence[Callable[..., Any]]) -> None:
        self.turns = cycle(callers)

    def hit(self, key: Any, cost: int = 1) -> Answer:
        answer: Answer = next(self.turns)("hit", key, cost)
        return answer

    def peek(self, key: Any, cost: int = 1) -> Answer:
        answer: Answer = next(self.turns)("peek", key, cost)
        return answer

    def reserve(self, key: Any, cost: int = 1) -> Booking:
        booking: Booking = next(self.turns)("reserve", key, cost)
        return booking


def answer_in_process(limiter: Any, method: str, *arguments: Any) -> Answer | Booking:
    """The limiter's answer in the oracle's types, which a child can send."""
    answer = getattr(limiter, method)(*arguments)
    if not isinstance(answer, Decision):
        return Booking(answer.allowed, answer.delay_ns)
    bound_by = answer.limiter if hasattr(limiter, "limiters") else None
    return Answer(
        answer.allowed, answer.limit, answer.remaining, answer.retry_after_ns, answer.reset_after_ns, bound_by
    )


def call_oracle(limit: Rule[Any] | AllOfOracle, clock: Clock) -> Callable[..., Any]:
    oracle: Oracle[Any] = Oracle()

    def call(method: str, key: Any, cost: int) -> Any:
        if isinstance(limit, AllOfOracle):
            keys = key if isinstance(key, list) else [key] * len(limit.rules)
            return getattr(limit, method)(keys, [cost] * len(limit.rules), clock.now_ns)
        return getattr(oracle, method)(limit, key, cost, clock.now_ns)

    return call


def call_child(limiter: Any, stack: ExitStack) -> Callable[..., Any]:
    """Calls of a forked process, which ends when `stack` is closed."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            with suppress(EOFError):
                while True:
                    theirs.send(answer_in_process(limiter, *theirs.recv()))
        finally:
            os._exit(0)
    theirs.close()
    stack.callback(os.waitpid, pid, 0)
    stack.callback(ours.close)

    def call(*request: Any) -> Any:
        ours.send(request)
        return ours.recv()

    return call


Limit = Callable[[Callable[[Any], Any], Rule[Any] | AllOfOracle], SharedLimiter]
At = Callable[[float], None]


class Sharing(NamedTuple):
    limit: Limit
    clock: Clock


SHARERS: Final = [
    *("oracle", "private", "private and forked child", "named", "named and another store", "named and forked child"),
    *("redis", "redis and another store", "asyncio", "redis and asyncio"),
]
"""The places and processes that answer in turn."""
of_one_host_too = pytest.mark.parametrize("sharing", [*SHARERS, "synced"], indirect=True)
and_on_loan = pytest.mark.parametrize("sharing", [*SHARERS, "synced", "leased"], indirect=True)


@pytest.fixture(params=SHARERS)
def sharing(request: pytest.FixtureRequest, shared_server: RedisServer) -> Iterator[Sharing]:
    kind, _, other = request.param.partition(" and ")
    if kind == "oracle":
        clock = Clock(1, None, None, START * NS)
        yield Sharing(lambda _, rule: SharedLimiter([call_oracle(rule, clock)]), clock)
        return
    with opened(kind, shared_server, START * NS, keys=100) as place, ExitStack() as stack:
        stores = [place.store]
        if other in ("another store", "asyncio"):
            stores.append(stack.enter_context(place.another(other if other == "asyncio" else kind)))

        def make(make_limiter: Callable[[Any], Any], rule: Rule[Any] | AllOfOracle) -> SharedLimiter:
            limiters = [make_limiter(store) for store in stores]
            callers = [lambda *request, limiter=limiter: answer_in_process(limiter, *request) for limiter in limiters]
            if other == "forked child":
                callers.append(call_child(limiters[0], stack))
            return SharedLimiter(callers)

        yield Sharing(make, place.clock)


@pytest.fixture
def limit(sharing: Sharing) -> Limit:
    """Makes a limiter in each of the stores; the oracle gets the rule instead."""
    return sharing.limit


@pytest.fixture
def clock(sharing: Sharing) -> Clock:
    return sharing.clock


@pytest.fixture
def at(clock: Clock) -> At:
    """Moves the clock to this many seconds after the start."""
    return lambda seconds: clock.set(START + seconds)


def fixed_window(limit: Limit, rate: str, rule: ClockWindow) -> SharedLimiter:
    return limit(lambda store: FixedWindow(store, "example", rate), rule)


@of_one_host_too
def test_w1_sixth_request_of_a_minute_is_denied_and_the_first_of_the_next_allowed(limit: Limit, at: At) -> None:
    window = fixed_window(limit, "5/minute", ClockWindow(5, MINUTE_NS))
    for number in range(5):
        at(number * 11)
        assert window.hit("k").remaining == 4 - number
    at(59.999)
    denied = window.hit("k")
    assert not denied
    assert denied.retry_after_ns == MINUTE_NS // 60_000
    at(60)
    assert window.hit("k").remaining == 4


@of_one_host_too
def test_w2_twice_the_limit_passes_at_the_edge_of_two_windows(limit: Limit, at: At) -> None:
    window = fixed_window(limit, "5/minute", ClockWindow(5, MINUTE_NS))
    at(59)
    assert [bool(window.hit("k")) for _ in range(6)] == [True] * 5 + [False]
    at(60)
    assert [bool(window.hit("k")) for _ in range(6)] == [True] * 5 + [False]


# W3 and W6: nine requests from 1:30 to 2:00, then five from 2:00 to 2:30.
NINE_AND_FIVE = [90 + 3 * number for number in range(9)] + [120 + 6 * number for number in range(5)]


@of_one_host_too
def test_w3_aligned_hour_counts_only_its_own_requests(limit: Limit, at: At) -> None:
    window = fixed_window(limit, "10/hour", ClockWindow(10, HOUR_NS))
    for minute in NINE_AND_FIVE:
        at(minute * 60)
        assert window.hit("k")


@and_on_loan
def test_w4_request_counts_for_its_own_minute(limit: Limit, at: At) -> None:
    window = fixed_window(limit, "5 per 60 seconds", ClockWindow(5, MINUTE_NS))
    noon_and_ten = (12 * 60 + 10) * 60
    at(noon_and_ten + 30)
    assert window.hit("k", 2).reset_after_ns == 30 * NS
    for seconds, remaining in ((0, 3), (59.999, 3), (60, 5)):
        at(noon_and_ten + seconds)
        assert window.peek("k").remaining == remaining


def test_w5_log_counts_the_requests_allowed_in_the_minute_before(limit: Limit, at: At) -> None:
    log = limit(lambda store: SlidingLog(store, "example", "2/minute", keys=10), Log(2, MINUTE_NS))
    for seconds, allowed in ((1, True), (15, True), (55, False), (87, True)):
        at(seconds)
        assert bool(log.hit("k")) is allowed
    # The requests of 0:01, 0:15 and 0:55 no longer count.
    assert log.peek("k").remaining == 1


def test_w6_log_never_allows_more_than_the_limit_in_any_hour(limit: Limit, at: At) -> None:
    log = limit(lambda store: SlidingLog(store, "example", "10/hour", keys=10), Log(10, HOUR_NS))
    passed = []
    for minute in NINE_AND_FIVE + [150 + number for number in range(60)]:
        at(minute * 60)
        answer = log.hit("k")
        if answer:
            passed.append(minute)
        else:
            # The oldest of the ten frees its place an hour after it passed.
            assert minute * 60 * NS + answer.retry_after_ns == (passed[-10] + 60) * MINUTE_NS
    assert passed[:10] == NINE_AND_FIVE[:10]
    assert passed[10] == NINE_AND_FIVE[0] + 60
    assert all(later - earlier >= 60 for earlier, later in zip(passed, passed[10:], strict=False))


@and_on_loan
def test_w7_previous_window_counts_by_its_overlap(limit: Limit, at: At) -> None:
    window = limit(lambda store: SlidingWindow(store, "example", "7/minute"), oracle_counts.SlidingWindow(7, MINUTE_NS))
    at(10)
    assert window.hit("k", 5)
    at(60)
    assert window.hit("k", 2)  # 5 + 2
    at(60 + 0.3 * 60)
    assert window.hit("k", 1)  # 3.5 + 2 + 1
    # 3.5 + 3 is rounded down to 6.
    assert window.peek("k", 0).remaining == 1
    assert window.hit("k")
    assert not window.hit("k")
    assert window.peek("k", 0).remaining == 0


@and_on_loan
@pytest.mark.parametrize(("rate", "per_window"), [("100/minute", 100), ("1000/minute", 1000), ("41/minute", 41)])
def test_w8_three_quarters_of_the_previous_count_weigh_after_a_quarter(
    limit: Limit, at: At, rate: str, per_window: int
) -> None:
    window = limit(
        lambda store: SlidingWindow(store, "example", rate), oracle_counts.SlidingWindow(per_window, MINUTE_NS)
    )  # fmt: skip
    at(30)
    assert window.hit("k", 40)
    at(60 + 15)
    assert window.peek("k").remaining == per_window - 30


@of_one_host_too
def test_w9_two_keys_have_ten_each_and_a_denied_request_leaves_the_count(limit: Limit, at: At) -> None:
    window = limit(
        lambda store: SlidingWindow(store, "example", "10/minute"), oracle_counts.SlidingWindow(10, MINUTE_NS)
    )
    assert [bool(window.hit("one")) for _ in range(11)] == [True] * 10 + [False]
    assert window.hit("two").remaining == 9
    for _ in range(3):
        assert not window.hit("one")
    # Ten rather than fourteen: half of the previous count weighs in the middle of the next minute.
    at(90)
    assert window.peek("one").remaining == 5


def test_w10_interval_bucket_is_filled_at_the_top_of_each_minute(limit: Limit, at: At) -> None:
    bucket = limit(
        lambda store: TokenBucket(store, "example", "3/minute", burst=3, refill="interval"),
        IntervalBucket(3, MINUTE_NS, 3),
    )
    for seconds, cost, allowed in ((1, 1, True), (15, 1, True), (15, 1, True), (58, 1, False)):
        at(seconds)
        assert bool(bucket.hit("k", cost)) is allowed
    at(59)
    assert bucket.hit("k").retry_after_ns == NS
    for seconds in (60, 600, 365 * 86_400):
        at(seconds)
        assert bucket.peek("k").remaining == 3
    assert [bool(bucket.hit("k")) for _ in range(4)] == [True] * 3 + [False]


def token_bucket(limit: Limit, burst: int) -> SharedLimiter:
    return limit(
        lambda store: TokenBucket(store, "example", "60/minute", burst=burst), Bucket(60, MINUTE_NS, burst)
    )  # fmt: skip


@of_one_host_too
def test_w11_requests_a_second_apart_pass_and_the_second_of_two_at_once_waits_a_second(
    limit: Limit, clock: Clock
) -> None:
    bucket = token_bucket(limit, burst=1)
    for _ in range(5):
        assert bucket.hit("k")
        clock.advance(1)
    first, second = bucket.hit("k"), bucket.hit("k")
    assert first
    assert not second
    assert second.retry_after_ns == SECOND_NS


@of_one_host_too
def test_w12_three_reservations_at_once_are_a_second_apart_and_are_kept(limit: Limit, clock: Clock) -> None:
    bucket = token_bucket(limit, burst=1)
    assert [bucket.reserve("k") for _ in range(3)] == [Booking(True, delay * SECOND_NS) for delay in range(3)]
    clock.advance(2)
    # All three places are taken, although no further request came.
    assert bucket.hit("k").retry_after_ns == SECOND_NS
    clock.advance(1)
    assert bucket.hit("k")


@of_one_host_too
def test_w13_denied_request_changes_nothing_and_retry_after_is_exact(limit: Limit, clock: Clock) -> None:
    bucket = token_bucket(limit, burst=1)
    start = clock.now()
    for _ in range(4):
        assert bucket.hit("k")
        clock.advance(0.25)
        denied = bucket.hit("k")
        assert not denied
        assert denied.retry_after_ns == 3 * SECOND_NS // 4
        for _ in range(3):
            assert bucket.hit("k").retry_after_ns == 3 * SECOND_NS // 4
        clock.advance(0.75 - 0.001)
        assert not bucket.hit("k")
        clock.advance(0.001)
    assert bucket.hit("k")
    assert clock.now() == start + 4


@of_one_host_too
def test_w14_credit_never_exceeds_the_burst_after_a_long_idle_time(limit: Limit, clock: Clock) -> None:
    bucket = token_bucket(limit, burst=5)
    for idle in (0, 5, 60, 365 * 86_400):
        clock.advance(idle)
        answers = [bucket.hit("k") for _ in range(7)]
        assert [bool(answer) for answer in answers] == [True] * 5 + [False] * 2
        assert [answer.remaining for answer in answers] == [4, 3, 2, 1, 0, 0, 0]
        assert answers[-1].retry_after_ns == SECOND_NS
        clock.advance(5)


def test_w15_queue_releases_one_per_second_and_denies_when_full(limit: Limit, clock: Clock) -> None:
    queue = limit(lambda store: LeakyBucket(store, "example", "1/second", 4), Queue(1, SECOND_NS, 4))
    at_once = [queue.reserve("k") for _ in range(5)]
    assert [booking.allowed for booking in at_once] == [True] * 4 + [False]
    assert [booking.delay_ns for booking in at_once[:4]] == [0, SECOND_NS, 2 * SECOND_NS, 3 * SECOND_NS]
    # Requests leave a second apart, however they arrive: the next departures are at 4, 5, 6 and 7 seconds.
    departures = []
    for pause in (1.5, 0.25, 0.5, 1.75):
        clock.advance(pause)
        booking = queue.reserve("k")
        if booking:
            departures.append(clock.now_ns - START * NS + booking.delay_ns)
    assert departures == [4 * SECOND_NS, 5 * SECOND_NS, 6 * SECOND_NS]


def test_w16_newest_sixty_buckets_hold_the_limit(limit: Limit, at: At) -> None:
    window = limit(
        lambda store: BucketedWindow(store, "example", "500/hour", buckets=60),
        oracle_counts.BucketedWindow(500, HOUR_NS, 60),
    )
    for minute in range(0, 60, 12):
        at(minute * 60 + 30)
        assert window.hit("k", 100)
    at(59 * 60 + 59)
    denied = window.hit("k")
    assert not denied
    assert denied.retry_after_ns == SECOND_NS  # the requests of 0:30 count for 0:00
    assert window.peek("k", 0).remaining == 0
    at(3600)
    assert window.hit("k", 100).remaining == 0
    assert not window.hit("k")
    # The requests of 12:30 expire with minute 12, those of minute 60 an hour after it.
    for minute, remaining in ((71, 0), (72, 100), (84, 200), (108, 400), (119, 400), (120, 500)):
        at(minute * 60)
        assert window.peek("k").remaining == remaining


def test_w17_request_denied_by_the_gap_does_not_use_up_the_ten(limit: Limit, at: At) -> None:
    both = limit(
        lambda store: AllOf(FixedWindow(store, "ten", "10/minute"), MinInterval(store, "gap", "2s")),
        AllOfOracle({"ten": ClockWindow(10, MINUTE_NS), "gap": Bucket(1, 2 * SECOND_NS, 1)}),
    )
    for seconds, allowed in ((0, True), (1, False), (2, True), (4, True)):
        at(seconds)
        answer = both.hit("k")
        assert bool(answer) is allowed
        assert answer.limiter == "gap"
    assert answer.reset_after_ns == 56 * SECOND_NS
    # Seven of the ten remain: as many as fit two seconds apart.
    for number in range(8):
        at(6 + 2 * number)
        answer = both.hit("k")
        assert bool(answer) is (number < 7)
    assert answer.limiter == "ten"
    assert answer.retry_after_ns == 40 * SECOND_NS


def test_w18_request_is_charged_to_all_three_limits_or_to_none(limit: Limit, at: At) -> None:
    every = limit(
        lambda store: AllOf(
            FixedWindow(store, "user, second", "10/second"),
            FixedWindow(store, "user, hour", "1000/hour"),
            FixedWindow(store, "all, second", "5000/second"),
        ),
        AllOfOracle({
            "user, second": ClockWindow(10, SECOND_NS),
            "user, hour": ClockWindow(1000, HOUR_NS),
            "all, second": ClockWindow(5000, SECOND_NS),
        }),
    )  # fmt: skip

    def call(user: str, cost: int) -> Answer:
        return every.hit([user, user, "all"], cost)

    assert call("one", 10).limiter == "user, second"
    denied = call("one", 1)
    assert (denied.allowed, denied.limiter, denied.retry_after_ns) == (False, "user, second", SECOND_NS)
    # The denied request was charged nowhere: a hundred seconds at full speed use up the hour, and not a second less.
    for second in range(1, 100):
        at(second)
        assert call("one", 10)
        assert not call("one", 1)
    at(100)
    denied = call("one", 1)
    assert (denied.allowed, denied.limiter) == (False, "user, hour")
    assert denied.retry_after_ns == HOUR_NS - 100 * SECOND_NS
    for number in range(500):
        assert call(f"user {number}", 10)
    denied = call("two", 1)
    assert (denied.allowed, denied.limiter, denied.retry_after_ns) == (False, "all, second", SECOND_NS)
    assert every.peek(["two", "two", "another"], 10).remaining == 10
    # For a user whose hour is used up, the hour's limit binds: its wait is longer.
    assert call("one", 1).limiter == "user, hour"


@pytest.mark.places(*STRICT)
def test_w19_each_user_has_twenty_requests_in_flight(place: Place, in_child: Callable[..., Any]) -> None:
    limiter = Concurrency(place.store, "in flight", 20, lease="1 minute", keys=2)
    # Twelve of these belong to a worker that is killed.
    assert in_child(lambda: all(limiter.acquire("user") for _ in range(12)))
    if place.kind in OVER_REDIS:
        # The server doesn't notice its end, but its leases end.
        assert not limiter.acquire("user", 9)
        place.clock.advance(60)
    leases = [limiter.acquire("user") for _ in range(20)]
    assert all(leases)
    denied = limiter.hit("user")
    assert (denied.allowed, denied.limit, denied.remaining) == (False, 20, 0)
    assert limiter.acquire("another user")
    assert leases[7].release()
    assert limiter.acquire("user")
    assert not limiter.acquire("user")
