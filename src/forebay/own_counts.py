"""Counts that forebay keeps in a store for its own metrics. All processes of the host add to one count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.store import Store

__all__ = ["DELAYED", "LEASE_FETCHES", "own_count"]

DELAYED: Final = "forebay.delayed"
LEASE_FETCHES: Final = "forebay.lease fetches"


def own_count(store: Store, name: str) -> Callable[[], object]:
    """A function that adds 1 to the count `name`: the allowed decisions of the limiter of that name.

    A decision of cost 0 is counted and charges nothing. So a count takes none of the store's cells, and a full store
    counts as well. It takes one place in the store's list of limiters. *Threads*, *processes*, *fork*: safe. O(1).
    """
    return partial(TokenBucket(store, name, "1/second").hit, name, 0)
