"""Bucketed windows by example."""

from __future__ import annotations

from typing import Any

import pytest
from places import STRICT

from forebay import BucketedWindow, InvalidLimiter

pytestmark = pytest.mark.places(*STRICT)


@pytest.mark.parametrize(
    "buckets", [0, -1, True, 1.0, None, "60", 2**40, 10**5000], ids=lambda value: type(value).__name__
)
def test_bucketed_window_refuses_invalid_numbers_of_buckets(store: Any, buckets: Any) -> None:
    with pytest.raises(InvalidLimiter, match="buckets"):
        BucketedWindow(store, "api", "5/hour", buckets=buckets)


def test_bucketed_window_refuses_a_rate_for_one_call(store: Any) -> None:
    limiter = BucketedWindow(store, "api", "5/hour", keys=8)
    for method in (limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(InvalidLimiter):
            method("k", rate="6/hour")
