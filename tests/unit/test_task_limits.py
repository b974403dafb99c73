"""The common part of the limited task queues, with a clock that moves from one task to the next."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from process_helpers import DEADLINE_S, wait_until

from forebay import (
    AllOf,
    Concurrency,
    CostExceedsLimit,
    Credits,
    FixedWindow,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LeakyBucket,
    LimitExceeded,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.contrib.tasks import NEVER, Admission, Options, TaskLimit
from forebay.testing import ManualClock, private_stores

NS = 1_000_000_000
LEASE_S = 0.03


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with private_stores(clock), Store("shop", keys=1000) as opened:
        yield opened


def notify(order: int, *, urgent: bool = False) -> None:
    """The task."""


def limit_of(limiter: Any, key: Any = "partner", **options: Any) -> TaskLimit:
    return TaskLimit(notify, limiter, key, Options(**options), in_loop=False)


def ask(limit: TaskLimit, order: int = 1) -> Admission:
    return limit.ask((order,), {}, f"task {order}")


class Queue:
    """Tasks that all come at once, and come back when their turn is, `late_s(order)` late. No time passes else."""

    def __init__(self, limit: TaskLimit, clock: ManualClock, late_s: Callable[[int], float] = lambda order: 0.0):
        self.limit, self.clock, self.late_s = limit, clock, late_s
        self.asked = 0

    def run(self, count: int) -> list[float]:
        """The times in seconds at which the tasks have run."""
        begin_ns = self.clock.now_ns()
        waiting = [(begin_ns, order) for order in range(count)]
        ran = []
        while waiting:
            due_ns, order = heapq.heappop(waiting)
            if due_ns > self.clock.now_ns():
                self.clock.set_ns(due_ns)
            self.asked += 1
            assert self.asked < 100 * count
            later_s = ask(self.limit, order).later_s
            if later_s is None:
                ran.append((self.clock.now_ns() - begin_ns) / NS)
            else:
                delay_s = later_s + self.late_s(order)
                heapq.heappush(waiting, (self.clock.now_ns() + round(delay_s * NS), order))
        return ran


LIMITERS: dict[str, Callable[[Store], Any]] = {
    "token bucket": lambda store: TokenBucket(store, "partner", "10/second", burst=5),
    "leaky bucket": lambda store: LeakyBucket(store, "partner", "10/second", capacity=5),
    "minimum interval": lambda store: MinInterval(store, "partner", "100 ms"),
    "fixed window": lambda store: FixedWindow(store, "partner", "10/second"),
    "sliding window": lambda store: SlidingWindow(store, "partner", "10/second"),
    "sliding log": lambda store: SlidingLog(store, "partner", "10/second", keys=10),
    "both": lambda store: AllOf(
        TokenBucket(store, "partner", "10/second", burst=5), FixedWindow(store, "minute", "500/minute")
    ),
}


@pytest.mark.parametrize("kind", LIMITERS)
def test_denied_tasks_return_one_by_one_at_the_rate_of_the_limit(kind: str, store: Store, clock: ManualClock) -> None:
    """Without turns, all denied tasks would ask at each permit: about 45,000 times in all."""
    queue = Queue(limit_of(LIMITERS[kind](store)), clock)
    ran = queue.run(300)
    assert len(ran) == 300
    assert queue.asked <= 2 * 300
    assert ran[-1] <= 30


@pytest.mark.parametrize("kind", ["leaky bucket", "minimum interval"])
def test_late_tasks_keep_an_even_flow(kind: str, store: Store, clock: ManualClock) -> None:
    queue = Queue(limit_of(LIMITERS[kind](store)), clock, late_s=lambda order: order % 7 / 1000)
    ran = queue.run(100)
    assert all(later - earlier >= 0.1 - 1e-9 for earlier, later in itertools.pairwise(ran))
    assert queue.asked < 3 * 100


def test_tasks_that_return_late_together_do_not_exceed_the_limit(store: Store, clock: ManualClock) -> None:
    """All workers stand still for a minute. Booked permits would let all tasks run then."""
    limit = limit_of(TokenBucket(store, "partner", "1/second", burst=5))
    assert [ask(limit, order).later_s for order in range(5)] == [None] * 5
    assert [ask(limit, order).later_s for order in range(5, 25)] == [float(turn) for turn in range(1, 21)]
    clock.advance(60)
    assert [ask(limit, order).later_s is None for order in range(5, 25)] == [True] * 5 + [False] * 15


def test_turns_of_keys_are_apart(store: Store) -> None:
    limit = TaskLimit(notify, TokenBucket(store, "partner", "1/second"), lambda order, urgent: order, {}, in_loop=False)
    assert [ask(limit, order).later_s for order in (1, 2, 1, 2, 1)] == [None, None, 1.0, 1.0, 2.0]


def test_turn_of_the_binding_limit_counts(store: Store) -> None:
    each, everybody = TokenBucket(store, "each", "1/second"), TokenBucket(store, "all", "3/minute")
    limit = limit_of(AllOf(each, everybody), key=lambda order, urgent: [order, "everybody"])
    assert [ask(limit, order).later_s for order in (1, 1, 2, 3)] == [None, 1.0, None, None]
    # The whole limit is spent: one permit each 20 seconds.
    assert [ask(limit, order).later_s for order in (4, 5, 6)] == [20.0, 40.0, 60.0]


def test_costs_space_the_turns(store: Store) -> None:
    limit = limit_of(TokenBucket(store, "partner", "1/second", burst=8), cost=4)
    assert [ask(limit).later_s for _ in range(5)] == [None, None, 4.0, 8.0, 12.0]


def test_function_of_the_arguments_makes_the_cost(store: Store, clock: ManualClock) -> None:
    limit = limit_of(TokenBucket(store, "partner", "1/second", burst=8), cost=lambda order, urgent: order)
    assert ask(limit, 6).later_s is None
    assert ask(limit, 4).later_s == 2
    with pytest.raises(CostExceedsLimit):
        ask(limit, 9)


def test_function_for_several_costs_is_refused(store: Store) -> None:
    limits = AllOf(TokenBucket(store, "each", "5/second"), TokenBucket(store, "all", "9/second"))
    with pytest.raises(InvalidCost, match=r"not \[1, 2\]"):
        ask(limit_of(limits, cost=lambda order, urgent: [1, 2]))


def test_task_is_charged_once_to_each_of_several_limits(store: Store) -> None:
    """Two decorators, with one id of the task."""
    buckets = [TokenBucket(store, name, "2/minute") for name in ("upper", "lower")]
    for bucket in buckets:
        limit = limit_of(bucket, request_ttl="1 hour")
        assert [ask(limit).later_s for _ in range(3)] == [None] * 3
    assert [bucket.peek("partner").remaining for bucket in buckets] == [1, 1]


def test_functions_take_the_arguments_however_the_caller_passed_them(store: Store) -> None:
    seen = []

    def key(number: int, *, urgent: bool) -> str:
        seen.append((number, urgent))
        return "partner"

    limit = limit_of(TokenBucket(store, "partner", "5/second"), key)
    limit.ask((7,), {"urgent": True}, "1")
    limit.ask((), {"order": 8}, "2")
    assert seen == [(7, True), (8, False)]
    with pytest.raises(TypeError):
        limit.ask((), {}, "3")


def test_turns_end_at_the_longest_delay(store: Store) -> None:
    """Tasks without a turn return at random: not together, and within the delay."""
    limit = limit_of(TokenBucket(store, "partner", "1/second", burst=1), max_delay=10)
    delays = [ask(limit, order).later_s for order in range(200)]
    turns = sorted(delay for delay in delays if delay is not None)
    assert max(turns) <= 10
    assert len(set(turns)) > 150


def test_longer_wait_than_the_longest_delay_is_spread(store: Store) -> None:
    limit = limit_of(FixedWindow(store, "partner", "1/day"), max_delay="1 minute")
    assert ask(limit).later_s is None
    delays = {ask(limit).later_s for _ in range(20)}
    assert all(delay is not None and 30 <= delay <= 60 for delay in delays)
    assert len(delays) > 10


def test_full_store_spreads_the_tasks(clock: ManualClock) -> None:
    with private_stores(clock), Store("full", keys=1, on_full="deny") as store:
        bucket = TokenBucket(store, "partner", "1/second", burst=1)
        number = 0
        while bucket.hit(("user", number)).reason != "no room":
            number += 1
        delay_s = ask(limit_of(bucket, ("user", number))).later_s
        assert delay_s is not None
        assert 300 <= delay_s <= 600


def test_each_run_of_a_task_is_charged_unless_it_has_a_time(store: Store, clock: ManualClock) -> None:
    each = limit_of(TokenBucket(store, "each", "2/minute"))
    assert [ask(each).later_s is None for _ in range(3)] == [True, True, False]
    once = limit_of(TokenBucket(store, "once", "2/minute"), request_ttl="10 minutes")
    assert [ask(once, order).later_s is None for order in (1, 1, 1, 2, 3)] == [True, True, True, True, False]
    # After that time it counts as another task.
    clock.advance(601)
    assert [ask(once, order).later_s is None for order in (1, 2, 3)] == [True, True, False]


def test_held_permit_limits_the_running_tasks(store: Store) -> None:
    limit = limit_of(Concurrency(store, "exports", 2), task_time=4)
    first, second = ask(limit, 1), ask(limit, 2)
    assert [ask(limit, order).later_s for order in (3, 4, 5)] == [2.0, 4.0, 6.0]
    with contextlib.suppress(ZeroDivisionError), limit.held(first):
        assert ask(limit, 6).later_s is not None
        _ = 1 / 0
    third = ask(limit, 7)
    assert third.later_s is None
    for admission in (second, third):
        with limit.held(admission):
            pass


def test_long_task_renews_its_permit(store: Store, clock: ManualClock) -> None:
    exports = Concurrency(store, "exports", 1, lease=LEASE_S)
    with (limit := limit_of(exports, "all")).held(ask(limit)):
        # Several leases, by a clock that waits for each renewal.
        for _ in range(5):
            clock.advance(LEASE_S * 0.9)
            assert not exports.allow("all")
            wait_until(lambda: exports.peek("all").reset_after == LEASE_S, "a renewal")
    assert exports.acquire("all")


def test_long_job_renews_its_permit_in_an_event_loop(store: Store, clock: ManualClock) -> None:
    exports = Concurrency(store, "exports", 1, lease=LEASE_S)

    async def run() -> None:
        limit = TaskLimit(notify, exports, "all", {}, in_loop=True)
        async with limit.held_async(await limit.ask_async((1,), {}, "1")):
            for _ in range(5):
                clock.advance(LEASE_S * 0.9)
                assert not exports.allow("all")
                while exports.peek("all").reset_after < LEASE_S:
                    await asyncio.sleep(LEASE_S / 10)
        assert exports.acquire("all")

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


def test_task_that_has_lost_its_permit_says_so(
    store: Store, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    exports = Concurrency(store, "exports", 1, lease=LEASE_S)
    limit = limit_of(exports, "all")
    with limit.held(ask(limit)):
        # As after a process was stopped for longer than a lease.
        clock.advance(1)
        assert exports.acquire("all")
        wait_until(lambda: caplog.records, "a warning")
    assert "without its permit" in caplog.text


def test_denial_without_a_queue_is_an_error(store: Store) -> None:
    bucket = TokenBucket(store, "partner", "1/second", burst=1)
    for limiter, key in (
        (bucket, "a"),
        (LeakyBucket(store, "slow", "1/second", capacity=3), "b"),
        (AllOf(bucket), "c"),
    ):
        limit = limit_of(limiter, key)
        assert limit.ask((1,), {}, None).later_s is None
        with pytest.raises(LimitExceeded) as raised:
            limit.ask((1,), {}, None)
        assert raised.value.retry_after == 1
    held = limit_of(Concurrency(store, "exports", 1))
    lease = held.ask((1,), {}, None).lease
    with pytest.raises(LimitExceeded):
        held.ask((1,), {}, None)
    lease.release()


async def coroutine(context: dict[str, Any], order: int) -> None:
    """A job of arq."""


class TestRefusals:
    def test_limits_that_limit_nothing_are_refused(self, store: Store) -> None:
        bucket = TokenBucket(store, "partner", "1/second", burst=5)
        slots, queue = Concurrency(store, "exports", 1), LeakyBucket(store, "queue", "1/second", capacity=5)
        refused: list[tuple[type[Exception], str, Any, Any, dict[str, Any]]] = [
            (InvalidLimiter, "not by 'partner'", "partner", "key", {}),
            (InvalidLimiter, "above @limited", AllOf(bucket, slots), "key", {}),
            (InvalidLimiter, "above @limited", AllOf(bucket, queue), "key", {}),
            (InvalidLimiter, "above @limited", AllOf(slots), "key", {}),
            (InvalidKey, "not \\[None\\]", AllOf(bucket), [None], {}),
            (InvalidKey, "not None", bucket, None, {}),
            (InvalidKey, "not \\['a'\\]", bucket, ["a"], {}),
            (InvalidLimiter, "can't be called so: too many", bucket, lambda: "key", {}),
            (InvalidLimiter, "can't be called so: missing", bucket, lambda a, b, *, urgent: "key", {}),
            (InvalidLimiter, "can't be called so: got an unexpected", bucket, lambda order: "key", {}),
            (InvalidLimiter, "has to be awaited", bucket, coroutine, {}),
            (InvalidCost, "not -1", bucket, "key", {"cost": -1}),
            (InvalidLimiter, "can't be called so", bucket, "key", {"cost": lambda: 1}),
            (CostExceedsLimit, "a cost of 6", bucket, "key", {"cost": 6}),
            (CostExceedsLimit, "a cost of 6", AllOf(bucket), "key", {"cost": 6}),
            (InvalidLimiter, "task_time is for a Concurrency", bucket, "key", {"task_time": 1}),
            (InvalidLimiter, "takes no request_ttl", slots, "key", {"request_ttl": 1}),
            (InvalidLimiter, "takes no request_ttl", queue, "key", {"request_ttl": 1}),
            (ValueError, "length of time", bucket, "key", {"max_delay": 0}),
            (TypeError, "no option 'burst'", bucket, "key", {"burst": 1}),
        ]
        for error, message, limiter, key, options in refused:
            with pytest.raises(error, match=message):
                limit_of(limiter, key, **options)

    def test_private_store_is_refused(self) -> None:
        with Store.private(keys=10) as private, pytest.raises(InvalidLimiter, match="name the store"):
            limit_of(TokenBucket(private, "partner", "1/second"))


def test_task_without_credits_fails(store: Store) -> None:
    prepaid = Credits(store, "paid")
    limit = limit_of(prepaid)
    prepaid.add("partner", 1)
    assert ask(limit).later_s is None
    with pytest.raises(NEVER) as caught:
        ask(limit)
    assert isinstance(caught.value, LimitExceeded)
    assert "no time brings more" in str(caught.value)
    both = limit_of(AllOf(TokenBucket(store, "api", "1/second", burst=9), prepaid))
    with pytest.raises(LimitExceeded, match="'paid'"):
        ask(both)
