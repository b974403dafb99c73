"""A warning for one name of limiters that count apart, or that share a state by mistake."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from forebay import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    LimiterNameWarning,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)

pytestmark = pytest.mark.filterwarnings("error::forebay.LimiterNameWarning")

Make = Callable[[Store, str], Any]

APART: dict[str, tuple[Make, Make]] = {
    "limits of other sizes": (
        lambda store, name: FixedWindow(store, name, "50/minute"),
        lambda store, name: FixedWindow(store, name, "64/minute"),
    ),
    "periods": (
        lambda store, name: SlidingWindow(store, name, "5/minute"),
        lambda store, name: SlidingWindow(store, name, "5/hour"),
    ),
    "alignments": (
        lambda store, name: FixedWindow(store, name, "5/minute"),
        lambda store, name: FixedWindow(store, name, "5/minute", align="stagger"),
    ),
    "refills": (
        lambda store, name: TokenBucket(store, name, "5/minute"),
        lambda store, name: TokenBucket(store, name, "5/minute", refill="interval"),
    ),
    "buckets": (
        lambda store, name: BucketedWindow(store, name, "5/minute", 6, keys=9),
        lambda store, name: BucketedWindow(store, name, "5/minute", 10, keys=9),
    ),
    "logs": (
        lambda store, name: SlidingLog(store, name, "5/minute", keys=9),
        lambda store, name: SlidingLog(store, name, "6/minute", keys=9),
    ),
    "held permits": (
        lambda store, name: Concurrency(store, name, 5, keys=9),
        lambda store, name: Concurrency(store, name, 6, keys=9),
    ),
}
TOGETHER: dict[str, Sequence[Make]] = {
    "rates of buckets": [
        lambda store, name: TokenBucket(store, name, "5/minute"),
        lambda store, name: TokenBucket(store, name, "500/hour", burst=7),
    ],
    "intervals": [lambda store, name: MinInterval(store, name, "1s"), lambda store, name: MinInterval(store, name, 60)],
    "bursts": [
        lambda store, name: TokenBucket(store, name, "5/minute", refill="interval"),
        lambda store, name: TokenBucket(store, name, "5/minute", burst=9, refill="interval"),
    ],
    "limits of one size": [
        lambda store, name: FixedWindow(store, name, "50/minute"),
        lambda store, name: FixedWindow(store, name, "63/minute"),
    ],
    "roundings": [
        lambda store, name: SlidingWindow(store, name, "5/minute", rounding="up"),
        lambda store, name: SlidingWindow(store, name, "5/minute", rounding="down"),
    ],
    "leases": [
        lambda store, name: Concurrency(store, name, 5, "1s", keys=9),
        lambda store, name: Concurrency(store, name, 5, "2s", keys=9),
    ],
    "windows of several classes": [
        lambda store, name: FixedWindow(store, name, "5/minute"),
        lambda store, name: SlidingWindow(store, name, "5/minute"),
        lambda store, name: BucketedWindow(store, name, "5/minute", keys=9),
        lambda store, name: TokenBucket(store, name, "5/minute"),
    ],
}


def noted(store: Store, *makers: Make, name: str = "api") -> list[str]:
    """The warnings while limiters are made that all live until the last is made. Each warning names this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alive = [make(store, name) for make in makers]
    assert len(alive) == len(makers)
    assert {one.category for one in caught} <= {LimiterNameWarning}
    assert {one.filename for one in caught} <= {__file__}
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_limiters_of_one_name_that_count_apart_warn_once(store: Store, pair: tuple[Make, Make]) -> None:
    one, other = pair
    [message] = noted(store, one, one, other, one, other)
    assert "two limiters" in message
    assert "'api' whose parameters make them count apart" in message
    assert noted(store, one, other) == []
    assert noted(store, one, other, name="another name") != []


@pytest.mark.parametrize("makers", TOGETHER.values(), ids=TOGETHER)
def test_limiters_that_may_have_one_name_warn_of_nothing(store: Store, makers: Sequence[Make]) -> None:
    assert noted(store, *makers, *makers) == []


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_a_limit_that_replaces_another_warns_of_nothing(store: Store, pair: tuple[Make, Make]) -> None:
    one, other = pair
    for make in (one, other) * 3:
        assert noted(store, make) == []
    # As long as a limiter lives, it counts, and the first of those that share a state is not the last to live.
    first, second = one(store, "api"), one(store, "api")
    del first
    assert noted(store, one) == []
    assert len(noted(store, other)) == 1
    assert second.name == "api"


def test_limiters_of_several_classes_that_share_a_state_warn_once(store: Store) -> None:
    def gap(store: Store, name: str) -> Any:
        return MinInterval(store, name, "1s")

    def bucket(store: Store, name: str) -> Any:
        return TokenBucket(store, name, "5/minute")

    def queue(store: Store, name: str) -> Any:
        return LeakyBucket(store, name, "5/minute", 9)

    assert [noted(store, make) for make in (gap, bucket, queue)] == [[], [], []]
    [message] = noted(store, gap, bucket, queue, gap, bucket)
    assert "a MinInterval and a TokenBucket that are both named 'api': they share one state" in message


def test_each_store_has_names_of_its_own(store: Store) -> None:
    one, other = APART["periods"]
    with Store.private(keys=9) as another:
        alive = one(store, "api")
        assert noted(another, other) == []
        assert alive.name == "api"


def test_warning_may_be_made_an_error(store: Store) -> None:
    one, other = APART["periods"]
    alive = one(store, "api")
    with pytest.raises(LimiterNameWarning):
        other(store, "api")
    assert other(store, "api").hit("ada").remaining == alive.hit("ada").remaining == 4
