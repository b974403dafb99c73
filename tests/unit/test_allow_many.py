"""Batches decide like single requests in order, or raise and charge nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from thread_helpers import FREE_THREADED

from forebay import CostExceedsLimit, InvalidCost, InvalidKey, LimiterStats, Store, StoreClosed, TokenBucket
from forebay.testing import ManualClock

# Both sides of two thresholds: up to 256 keys fit on the stack, below 1024 the GIL is kept.
SIZES = [0, 1, 2, 15, 16, 17, 24, 25, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 5000]


@pytest.fixture
def bucket(clock: ManualClock) -> Iterator[TokenBucket]:
    with Store.private(keys=10_000, clock=clock) as store:
        yield TokenBucket(store, "api", "10/second", burst=3)


def charged(bucket: TokenBucket, keys: Any) -> int:
    return sum(3 - bucket.peek(key).remaining for key in set(keys))


@pytest.mark.parametrize("size", SIZES)
def test_batch_of_any_size_gives_one_answer_per_key(bucket: TokenBucket, size: int) -> None:
    keys = [f"key {n}" for n in range(size)]
    answers = bucket.allow_many(keys)
    assert answers == [True] * size
    assert all(answer is True for answer in answers)
    # The pattern's length divides no size, so that a cost paired with another key is noticed.
    costs = [n % 7 % 4 for n in range(size)]
    assert bucket.allow_many(keys, costs) == [cost <= 2 for cost in costs]
    assert charged(bucket, keys) == size + sum(cost for cost in costs if cost <= 2)
    assert bucket.store.stats().live_keys == size
    denied = costs.count(3)
    assert bucket.store.stats().total == LimiterStats(allowed=2 * size - denied, denied=denied, inserted=size)


@pytest.mark.parametrize("size", SIZES)
def test_batch_decides_repeated_keys_in_order(bucket: TokenBucket, size: int) -> None:
    assert bucket.allow_many(["k"] * size) == [n < 3 for n in range(size)]
    assert bucket.allow_many(["l", "m"] * size, [1, 3] * size) == [
        allowed for n in range(size) for allowed in (n < 3, n < 1)
    ]


@pytest.mark.parametrize("size", [1, 3, 300, 2000])
def test_batch_needs_as_many_costs_as_keys(bucket: TokenBucket, size: int) -> None:
    keys = list(range(size))
    for wrong in (0, size - 1, size + 1, 2 * size):
        if wrong != size:
            with pytest.raises(InvalidCost, match=f"{size} keys need {size} costs, not {wrong}"):
                bucket.allow_many(keys, [1] * wrong)
    with pytest.raises(InvalidCost):
        bucket.allow_many([], [1])
    assert charged(bucket, keys) == 0


@pytest.mark.parametrize("size", [1, 3, 256, 300, 2000])
@pytest.mark.parametrize("where", [0, 0.5, 1])
@pytest.mark.parametrize("wrong", [None, 1.5, ["k"], ("k", None), (("k",),)])
def test_batch_with_an_invalid_key_charges_nothing(bucket: TokenBucket, size: int, where: float, wrong: Any) -> None:
    keys: list[Any] = list(range(size))
    good = list(keys)
    keys[round(where * (size - 1))] = wrong
    for given in (keys, tuple(keys), iter(keys)):
        with pytest.raises(InvalidKey):
            bucket.allow_many(given)
    with pytest.raises(InvalidKey):
        bucket.allow_many(keys, [1] * size)
    assert charged(bucket, good) == 0
    assert bucket.store.stats().total == LimiterStats()
    assert bucket.allow_many(good) == [True] * size


@pytest.mark.parametrize("size", [1, 3, 256, 300, 2000])
@pytest.mark.parametrize("where", [0, 0.5, 1])
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (-1, InvalidCost),
        (1.0, InvalidCost),
        (float("nan"), InvalidCost),
        (None, InvalidCost),
        (True, InvalidCost),
        ("1", InvalidCost),
        (4, CostExceedsLimit),
        (2**64 + 1, CostExceedsLimit),
    ],
)
def test_batch_with_an_invalid_cost_charges_nothing(
    bucket: TokenBucket, size: int, where: float, wrong: Any, error: type[Exception]
) -> None:
    keys = list(range(size))
    costs = [1] * size
    costs[round(where * (size - 1))] = wrong
    for given in (costs, tuple(costs), iter(costs)):
        with pytest.raises(error):
            bucket.allow_many(keys, given)
    assert charged(bucket, keys) == 0
    assert bucket.store.stats().total == LimiterStats()


def test_batch_gives_a_fresh_key_its_whole_burst() -> None:
    """An insertion reads the clock again; the batch must not continue with its older reading."""
    with Store.private(keys=1) as store:
        limiter = TokenBucket(store, "api", "1/hour", 100)
        assert limiter.allow_many(["k"] * 101) == [True] * 100 + [False]


@pytest.mark.parametrize("size", [3, 300, 2000])
@pytest.mark.parametrize("change", ["replace", "clear", "shorten", "grow", "close"])
@pytest.mark.parametrize("by", ["cost", "iterable of costs"])
def test_batch_survives_costs_that_change_its_keys(in_child: Any, size: int, change: str, by: str) -> None:
    def run() -> list[bool] | None:
        with Store.private(keys=10_000) as store:
            limiter = TokenBucket(store, "api", "10/second", burst=3)
            keys: list[Any] = [f"key {n}" for n in range(size)]

            def meddle() -> None:
                if change == "replace":
                    keys[:] = [2**4000] * size
                elif change == "clear":
                    keys.clear()
                elif change == "shorten":
                    del keys[1:]
                elif change == "grow":
                    keys.extend(["more"] * 5000)
                else:
                    store.close()

            class Meddler:
                def __index__(self) -> int:
                    meddle()
                    return 0

            def costs() -> Iterator[Any]:
                yield from [0] * (size - 1)
                if by == "cost":
                    yield Meddler()
                else:
                    meddle()
                    yield 0

            try:
                return limiter.allow_many(keys, costs())
            except (RuntimeError, StoreClosed):
                return None

    answers = in_child(run)
    assert answers is None or answers == [True] * size


@pytest.mark.parametrize("size", [3, 300, 2000])
@pytest.mark.parametrize("change", ["replace", "clear", "grow", "close", "recurse"])
def test_batch_survives_keys_whose_code_changes_its_list(in_child: Any, size: int, change: str) -> None:
    """Reading the parts of a tuple's subclass may run any code, and the batch doesn't copy the list of keys."""

    def run() -> list[bool] | None:
        with Store.private(keys=10_000) as store:
            limiter = TokenBucket(store, "api", "10/second", burst=3)

            class Meddler(tuple):
                def __iter__(self) -> Iterator[Any]:
                    if change == "replace":
                        keys[:] = [2**4000] * len(keys)
                    elif change == "clear":
                        keys.clear()
                    elif change == "grow":
                        keys.extend(["more"] * 5000)
                    elif change == "close":
                        store.close()
                    else:
                        limiter.allow_many(keys[:-1])
                    return iter(("part",))

            keys: list[Any] = [f"key {n}" for n in range(size - 1)] + [Meddler()]
            try:
                return limiter.allow_many(keys)
            except (RuntimeError, StoreClosed):
                return None

    answers = in_child(run)
    assert answers is None or answers == [True] * size


def test_large_batch_lets_other_threads_run() -> None:
    """This thread sees the first key of another thread's batch charged and the last one not yet."""
    size = 200_000
    with Store.private(keys=size, clock=ManualClock(1)) as store:
        # Each attempt needs fresh keys, so a new limiter.
        for attempt in range(100):
            limiter = TokenBucket(store, f"attempt {attempt}", "1/hour")
            batch = threading.Thread(target=limiter.allow_many, args=(list(range(size)),))
            batch.start()
            seen_half_done = False
            while batch.is_alive() and not seen_half_done:
                last, first = limiter.peek(size - 1), limiter.peek(0)
                seen_half_done = first.remaining == 0 and last.remaining == 1 and limiter.peek(size - 1).remaining == 1
            batch.join()
            if seen_half_done:
                break
        assert seen_half_done


def test_large_batches_of_several_threads_share_one_limit(clock: ManualClock) -> None:
    keys = list(range(3000)) * 2
    answers: list[list[bool]] = []
    with Store.private(keys=10_000, clock=clock) as store:
        limiter = TokenBucket(store, "api", "5/hour")
        threads = [threading.Thread(target=lambda: answers.append(limiter.allow_many(keys))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(map(sum, answers)) == 5 * 3000
        total = store.stats().total
        assert (total.allowed, total.denied, total.inserted) == (5 * 3000, 3 * 3000, 3000)


@pytest.mark.parametrize("change", ["clear", "replace"])
def test_batch_survives_keys_that_change_while_its_limiter_is_registered(in_child: Any, change: str) -> None:
    """A limiter's first decision runs Python code, after which the batch must check its keys again.

    Without the GIL, where other threads may change the list at any time, the batch has copied it by then.
    """

    def run() -> bool:
        with Store.private(keys=1000) as store:
            limiter = TokenBucket(store, "api", "100/day")
            keys: list[Any] = [f"user:{n}" * 30 for n in range(200)]

            def meddle(frame: Any, event: str, argument: Any) -> None:
                if event == "call" and frame.f_code.co_name == "counter_line":
                    keys[:] = [] if change == "clear" else [5] * 200

            sys.setprofile(meddle)
            try:
                answers = limiter.allow_many(keys)
            except RuntimeError:
                answers = []
            finally:
                sys.setprofile(None)
            if FREE_THREADED:
                return answers == [True] * 200
            return answers == ([] if change == "clear" else [True] * 100 + [False] * 100)

    assert in_child(run)
