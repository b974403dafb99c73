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
def test_buckets_that_are_none(store: Any, buckets: Any) -> None:
    with pytest.raises(InvalidLimiter, match="buckets"):
        BucketedWindow(store, "api", "5/hour", buckets=buckets)


def test_it_has_one_limit_for_all_calls(store: Any) -> None:
    limiter = BucketedWindow(store, "api", "5/hour", keys=8)
    for ask in (limiter.hit, limiter.peek, limiter.refund):
        with pytest.raises(InvalidLimiter):
            ask("k", rate="6/hour")
