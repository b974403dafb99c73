"""The rules of a plan that charge a request and its retries once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from forebay.core.algorithms.window import FixedWindow
from forebay.core.all_of import AllOf
from forebay.core.decision import Decision
from forebay.errors import InvalidLimiter
from forebay.rate import NS, Rate
from forebay.web.request import Request
from forebay.web.request_ids import RequestId
from forebay.web.rules import Rule

__all__ = ["ChargedOnce", "check_together", "name_of_attempts"]


def name_of_attempts(limiter: str) -> str:
    """The name of the limiter that counts the attempts of each request id, beside the limiter of a rule."""
    return f"{limiter} attempts"


def check_together(rules: Iterable[Rule]) -> None:
    """Raises ``InvalidLimiter`` unless the rules of a gate can charge retries as one."""
    rules = list(rules)
    once: list[Any] = [rule for rule in rules if rule.request_id is not None]
    if not once:
        return
    first = once[0]
    for rule in once:
        if rule.request_id != first.request_id or rule.limiter.store is not first.limiter.store:
            raise InvalidLimiter(
                f"a request has one id, and its mark is in one store: the rules of {first.limiter!r} and "
                f"{rule.limiter!r} need the same request_id and one Store"
            )
    for rule in rules:
        if rule.is_remote:
            raise InvalidLimiter(
                f"{rule.limiter!r} can't stand beside the rule of {first.limiter!r}, whose request_id needs limiters "
                "of Stores only: put one middleware around another"
            )


class ChargedOnce:
    """The rules of a plan with a request id, charged last, all or none: so none of them is ever refunded.

    A refund is unsafe. A retry is allowed by the mark of an earlier attempt, and to give its charge back would be to
    give back that of a request that was handled.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self._limiters: list[Any] = [rule.limiter for rule in rules]
        self._all_of: Any = AllOf(*self._limiters)
        ids: Any = rules[0].request_id
        self._ids: RequestId = ids
        first = self._limiters[0]
        rate = Rate(ids.retries + 1, ids.lasts)
        self._margin_ns = rate.period_ns // 100
        self._attempts = FixedWindow(first.store, name_of_attempts(first.name), rate, align="first")

    def charge(self, request: Request, keys: list[Any], costs: list[int]) -> tuple[bool, list[Decision]]:
        """Whether the request is allowed, and the decision of each rule."""
        request_id = self._ids.of(request)
        if request_id is None:
            return self._charge_anew(keys, costs)
        key = keys[0] if isinstance(keys[0], tuple) else (keys[0],)
        attempt = (*key, *request_id)
        # Counted before the mark is looked up, so requests that come at once are no more than others.
        counted = self._attempts.hit(attempt)
        # A mark ends before the window that counts its retries, although it begins a moment later.
        ttl_ns = counted.reset_after_ns - self._margin_ns
        if not counted or ttl_ns <= 0:
            return self._charge_anew(keys, costs)
        decision = self._all_of.hit(keys, costs, request_id=request_id, request_ttl=ttl_ns / NS)
        if not decision:
            # It will be sent again, and has been charged nothing.
            self._attempts.refund(attempt)
        wanted = [0] * len(costs) if decision else costs
        each = [limiter.peek(*of_it) for limiter, *of_it in zip(self._limiters, keys, wanted, strict=True)]
        return bool(decision), each

    def _charge_anew(self, keys: list[Any], costs: list[int]) -> tuple[bool, list[Decision]]:
        decisions: list[Decision] = self._all_of.hit_each(keys, costs)
        return all(decisions), decisions
