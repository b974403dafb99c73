"""The library's memory storage is the oracle: in one process, the forebay storage makes the same decisions.

The test moves Python's clock. No step falls within a rounding error of a window's end.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import limits.strategies
import pytest
import time_machine
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from limits import parse
from limits.storage import MemoryStorage
from limits_storages import SCHEMES, limiter, open_storage

from forebay import Store

T0 = 1_700_000_000.123456
STEP_S = 7.3

# Includes the largest limit of an exact moving window.
ITEMS = ("1/minute", "10/minute", "40 per 2 minute", "100/hour")
REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("ab"), st.sampled_from((1, 1, 1, 2, 5, 9, 300))), max_size=60
)


@pytest.fixture(scope="module", params=SCHEMES)
def storage(request: pytest.FixtureRequest) -> Iterator[Any]:
    name = f"test-limits-{os.getpid()}-{secrets.token_hex(4)}"
    storage = open_storage(f"{request.param}:///{name}?keys=1000&moving_window_keys=100&clock=time")
    yield storage
    storage.store.close()
    Store.unlink(name)


@pytest.mark.parametrize("strategy", ["fixed-window", "moving-window", "sliding-window-counter"])
@pytest.mark.parametrize("limit", ITEMS)
@examples(15)
@given(requests=REQUESTS)
def test_storage_decides_as_the_memory_storage(
    storage: Any, strategy: str, limit: str, requests: list[tuple[int, str, int]]
) -> None:
    item = parse(limit)
    with time_machine.travel(T0, tick=False) as traveller:
        storage.reset()
        ours, theirs = limiter(strategy, storage), limits.strategies.STRATEGIES[strategy](MemoryStorage())
        steps_taken = 0
        for steps, key, cost in requests:
            steps_taken += steps
            traveller.move_to(T0 + steps_taken * STEP_S)
            assert ours.test(item, key, cost=cost) == theirs.test(item, key, cost=cost)
            assert ours.hit(item, key, cost=cost) == theirs.hit(item, key, cost=cost)
            stats, expected = ours.get_window_stats(item, key), theirs.get_window_stats(item, key)
            assert stats.remaining == expected.remaining
            # For a moving window without live entries, the library returns an end in the past.
            if stats.remaining < item.amount and strategy != "sliding-window-counter":
                # A fixed window starts, and so ends, up to half a millisecond early.
                assert -0.0006 < stats.reset_time - expected.reset_time < 1e-5
