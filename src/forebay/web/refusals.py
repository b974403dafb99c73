"""The standard response to a denied request, from what limiters return and raise."""

from __future__ import annotations

import math

from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, LimitExceeded, StoreUnavailable, short_repr
from forebay.web.answers import FULL, UNAVAILABLE, again, quota_exceeded, spent, unavailable
from forebay.web.denials import STORE_WAIT_S, wait_s_of, whole_seconds_up
from forebay.web.rules import Answer

__all__ = ["refusal"]


def refusal(*results: Decision | Exception) -> Answer:
    """The response to a request that was denied: a problem report (RFC 9457) with ``Retry-After``.

    `results`: decisions, or the errors that were raised instead of them. The status is 503 if a limit could not be
    checked (``StoreUnavailable``, or ``Decision.reason`` is ``"no room"``), else 429 (also for ``LimitExceeded`` and
    ``CostExceedsLimit``). There is no ``Retry-After`` if no time brings what a limit lacks (``CostExceedsLimit``, and
    ``Credits``). Of several denials the longest wait counts, and decisions that allow the request don't.

    ``decision = bucket.hit(key)``, and ``if not decision: return refusal(decision)`` as the framework's response.

    Raises ``ValueError`` if none of them denies, and ``TypeError`` for other objects, as the request must not be
    refused by mistake. Thread-safe; O(results).
    """
    denied = [result for result in results if not _allows(result)]
    if not denied:
        raise ValueError(f"refusal() is for denied requests, and none of {short_repr(results)} denies one")
    if any(isinstance(one, StoreUnavailable) for one in denied):
        return unavailable(503, UNAVAILABLE, STORE_WAIT_S)
    for one in denied:
        if isinstance(one, CostExceedsLimit):
            detail = f"The limit is {one.limit}: this request costs more than that, so it is never allowed."
            return quota_exceeded(429, detail, None)
    waits_s = [_wait_s(one) for one in denied]
    if None in waits_s:
        # No time brings what this limit lacks.
        spender = denied[waits_s.index(None)]
        assert isinstance(spender, (Decision, LimitExceeded))
        return quota_exceeded(429, spent(spender.limit), None)
    wait_s, longest = max(zip(waits_s, denied, strict=True), key=lambda pair: pair[0] or 0)
    assert wait_s is not None
    if any(isinstance(one, Decision) and one.reason == "no room" for one in denied):
        return unavailable(503, FULL, wait_s)
    assert isinstance(longest, (Decision, LimitExceeded))
    return quota_exceeded(429, f"The limit is {longest.limit}: {again(wait_s)}.", wait_s)


def _allows(result: object) -> bool:
    if isinstance(result, Decision):
        return result.allowed
    if isinstance(result, (StoreUnavailable, LimitExceeded, CostExceedsLimit)):
        return False
    raise TypeError(
        f"refusal() takes decisions, and StoreUnavailable, LimitExceeded or CostExceedsLimit, not {short_repr(result)}"
    )


def _wait_s(denied: Decision | Exception) -> int | None:
    """None: no time brings what it lacks."""
    if isinstance(denied, Decision):
        return wait_s_of(denied)
    assert isinstance(denied, LimitExceeded)
    return None if math.isinf(denied.retry_after) else max(1, whole_seconds_up(round(denied.retry_after * 1e9)))
