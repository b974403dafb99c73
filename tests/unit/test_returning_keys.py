"""Keys that come back after their state has expired find their cells, unless other keys needed them.

A store of 5,000 keys has 6,560 cells. `inserted` counts the keys that had lost their cell, or had none yet. Each store
has a random hash key. In 40 stores, 4 of 100,000 keys lost theirs at the most; 200 may here, and 2,000 in a full store.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from forebay import SlidingLog, Store, TokenBucket
from forebay.testing import ManualClock

KEYS = 5_000
PASSES = 5


def one_by_one(limiter: Any, keys: Sequence[int]) -> None:
    for key in keys:
        assert limiter.allow(key)


def in_a_batch(limiter: Any, keys: Sequence[int]) -> None:
    assert all(limiter.allow_many(keys))


WAYS = {"one by one": one_by_one, "in a batch": in_a_batch}


def inserted(store: Store) -> int:
    return store.stats().total.inserted


def share_inserted_anew(store: Store, limiter: Any, clock: ManualClock, count: int, way: str) -> float:
    """Of five passes in random order. Whenever the next 20 keys come, the states of all others have expired."""
    shuffled = random.Random(1)
    keys = list(range(count))
    before = 0
    for number in range(1 + PASSES):
        if number == 1:
            before = inserted(store)
        shuffled.shuffle(keys)
        for start in range(0, count, 20):
            WAYS[way](limiter, keys[start : start + 20])
            clock.advance(60)
    return (inserted(store) - before) / (PASSES * count)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fill", "most"), [(1.0, 0.02), (0.75, 0.01), (0.5, 0.002)])
def test_returning_keys_find_their_cells(clock: ManualClock, fill: float, most: float, way: str) -> None:
    with Store.private(keys=KEYS, clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/minute")
        assert share_inserted_anew(store, bucket, clock, round(fill * KEYS), way) <= most


def test_returning_keys_of_a_limiter_with_memory_of_its_own_find_their_cells(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        log = SlidingLog(store, "export", "2/minute", keys=KEYS)
        assert share_inserted_anew(store, log, clock, KEYS, "in a batch") <= 0.02


def test_the_longest_expired_goes_first(clock: ManualClock) -> None:
    """A store that holds no empty cell any more: keys of long ago give way, and the others are found again."""
    with Store.private(keys=KEYS, on_full="evict", clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/minute")
        long_ago, lately, newcomers = range(4000), range(4000, 8000), range(8000, 10_000)
        in_a_batch(bucket, long_ago)
        clock.advance(100 * 3600)
        in_a_batch(bucket, lately)
        clock.advance(3600)
        in_a_batch(bucket, newcomers)
        before = inserted(store)
        in_a_batch(bucket, lately)
        lost = inserted(store) - before
    assert lost <= len(lately) * 0.02


def test_an_expired_key_gives_way_where_no_cell_is_empty(clock: ManualClock) -> None:
    with Store.private(keys=KEYS, on_full="deny", clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/minute")
        for wave in range(10):
            in_a_batch(bucket, range(wave * KEYS, (wave + 1) * KEYS - KEYS // 10))
            clock.advance(3600)
        assert store.stats().total.full == 0
