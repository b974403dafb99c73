"""Permits above a bucket's burst in a segment's file: what damage, other limiters and ``verify`` make of them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_helpers import read_cells

from forebay import LeakyBucket, MinInterval, Store, TokenBucket
from forebay.segment import layout
from forebay.testing import ManualClock
from forebay.verification import verify

MOST = 2**48 - 1
PERMITS = 2**63 - 1 - MOST


def bucket_in(store: Store) -> TokenBucket:
    return TokenBucket(store, "api", "1/minute", burst=100)


@pytest.mark.parametrize(
    "make",
    [
        lambda store: LeakyBucket(store, "x", "1/minute", capacity=5),
        lambda store: MinInterval(store, "x", "1 minute"),
        lambda store: TokenBucket(store, "x", "1/minute", burst=5, initial=5),
        lambda store: TokenBucket(store, "x", "1/minute", burst=5),
    ],
    ids=["leaky bucket", "minimum interval", "initial permits", "bucket"],
)
@pytest.mark.parametrize("state", [2**62, 2**62 + 7, PERMITS, PERMITS + 7, PERMITS + MOST + 1, 2**64 - 1])
def test_damaged_state_is_a_fresh_keys(store_name: str, make: Callable[[Store], Any], state: int) -> None:
    """Only a bucket to which permits can be added believes a number of permits."""
    with Store(store_name, keys=1) as store:
        limiter = make(store)
        limiter.hit("k")
        path = Path(store.path or "")
        (cell,) = [number for number, (tag, _) in enumerate(read_cells(str(path))) if tag]
        with path.open("r+b", buffering=0) as file:
            file.seek(layout.TABLE_OFFSET + cell * layout.CELL.size + 8)
            file.write(struct.pack("<Q", state))
        adds = isinstance(limiter, TokenBucket) and limiter.initial is None
        above = 7 if adds and state == PERMITS + 7 else 0
        most = limiter.peek("k").limit
        assert limiter.peek("k").remaining == most + above
        taken = [limiter.allow("k") for _ in range(most + above + 3)]
        assert sum(taken) == most + above
        assert not taken[-1]


def test_damaged_bit_makes_no_permits_of_a_time(store_name: str, clock: ManualClock) -> None:
    with Store(store_name, keys=1, clock=clock) as store:
        limiter = bucket_in(store)
        limiter.hit("k", 100)
        path = Path(store.path or "")
        ((cell, state),) = [(number, state) for number, (tag, state) in enumerate(read_cells(str(path))) if tag]
        for bit in range(64):
            with path.open("r+b", buffering=0) as file:
                file.seek(layout.TABLE_OFFSET + cell * layout.CELL.size + 8)
                file.write(struct.pack("<Q", state ^ 1 << bit))
            assert limiter.peek("k").remaining <= 100


def test_verification_accepts_permits_and_nothing_above_them(store_name: str) -> None:
    with Store(store_name, keys=1) as store:
        limiter = bucket_in(store)
        for key, permits in (("a", 1), ("b", MOST)):
            limiter.add(key, permits)
        assert store.stats().live_keys == 2
        assert verify(store_name).sound


def test_kept_permits_survive_a_restart(store_name: str) -> None:
    with Store(store_name, keys=1) as store:
        bucket_in(store).add("ada", 5)
    with Store(store_name, keys=1) as store:
        assert bucket_in(store).peek("ada").remaining == 105
