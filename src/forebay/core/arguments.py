"""Keys and costs as callers give them, checked: the same errors whichever store a limiter is over."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from forebay.errors import InvalidCost, InvalidKey, InvalidLimiter, short_repr

__all__ = [
    "DEFAULT_REQUEST_TTL",
    "MOST_PERMITS",
    "ambiguous_key",
    "cost_of",
    "costs_of",
    "kept",
    "keys_of",
    "no_id_beside_charges",
    "no_reset_of_credits",
    "permits_of",
    "too_many_permits",
    "ttl_without_id",
]

DEFAULT_REQUEST_TTL: Final = "5 minutes"
KEPT: Final = ("permits", "share", "used")
# The most that a key may have above its burst: see `holds_permits` in table/table.pxd.
MOST_PERMITS: Final = 2**48 - 1

T = TypeVar("T")


def cost_of(cost: Any) -> int:
    """A cost as an integer. Raises ``InvalidCost``."""
    with suppress(TypeError):
        if not isinstance(cost, bool):
            cost = operator.index(cost)
            if cost >= 0:
                return int(cost)
    raise InvalidCost(f"a cost is a whole number of at least 0, not {short_repr(cost)}")


def permits_of(permits: Any, limiter: str) -> int:
    """Permits to add, as an integer. Raises ``InvalidCost``."""
    with suppress(TypeError):
        if not isinstance(permits, bool):
            permits = operator.index(permits)
            if permits > MOST_PERMITS:
                raise too_many_permits(permits, limiter)
            if permits >= 0:
                return int(permits)
    raise InvalidCost(f"permits to add are a whole number of at least 0, not {short_repr(permits)}")


def too_many_permits(permits: int, limiter: str) -> InvalidCost:
    """The exception for permits that a key can't get."""
    return InvalidCost(
        f"{short_repr(permits)} more permits are too many for the key: in limiter {limiter!r} a key may have at most "
        f"{MOST_PERMITS} above its burst, and as many credits. Add fewer, or use a limit of a larger unit"
    )


def no_reset_of_credits(limiter: Any) -> InvalidLimiter:
    return InvalidLimiter(
        f"{limiter!r} is not reset, as that would delete what a key has paid for: take_up_to(key, 2**48) takes all "
        "that the key has left, and returns how much it was"
    )


def keys_of(keys: Iterable[T]) -> list[T]:
    """The keys of a batch, as a list of its own. Raises ``InvalidKey`` for a single key."""
    if isinstance(keys, (str, bytes)):
        raise InvalidKey(f"allow_many takes a list of keys, not the one key {short_repr(keys)}")
    return list(keys)


def costs_of(costs: Iterable[Any] | None, count: int) -> list[Any]:
    """The costs of a batch of `count` keys, not checked one by one. Raises ``InvalidCost`` for another number."""
    if isinstance(costs, int):
        raise InvalidCost(f"costs is a list with one cost for each key, not {short_repr(costs)}")
    listed = [1] * count if costs is None else list(costs)
    if len(listed) != count:
        raise InvalidCost(f"{count} keys need {count} costs, not {len(listed)}")
    return listed


def kept(keep: Any) -> int:
    """The position in `KEPT` of what a key keeps when its limit changes. Raises ``InvalidLimiter``."""
    if not isinstance(keep, str) or keep not in KEPT:
        raise InvalidLimiter(f"keep is 'permits', 'share' or 'used', not {short_repr(keep)}")
    return KEPT.index(keep)


def ttl_without_id(request_ttl: Any) -> InvalidKey:
    return InvalidKey(
        f"a request_ttl of {short_repr(request_ttl)} says how long a request_id is remembered, and none is given"
    )


def no_id_beside_charges(limiter: Any, limits: Any) -> InvalidLimiter:
    """The exception for a `Concurrency` in an ``AllOf`` whose request has an id."""
    return InvalidLimiter(
        f"{limiter!r} takes no request_id in {limits!r}: held permits go to the latest request with an id, and charges "
        "don't. Give each of the two limits the id in a call of its own"
    )


def ambiguous_key(key: tuple[Any, ...], count: int) -> InvalidKey:
    """The exception for a tuple that may be one key or several."""
    return InvalidKey(
        f"{short_repr(key)} may be one key for all of {count} limiters, or a key for each: write a list of {count} "
        f"keys, {short_repr(list(key))} for a key each, or {short_repr([key])} * {count} for that one"
    )
