"""The rules of a plan that charge a request and its retries once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forebay.core.algorithms.window import FixedWindow
from forebay.core.all_of import AllOf
from forebay.core.decision import Decision
from forebay.errors import InvalidLimiter
from forebay.flows import Flow
from forebay.rate import NS, Rate
from forebay.web.cleanup import RequestCleanup
from forebay.web.request import Request
from forebay.web.request_ids import RequestId
from forebay.web.rules import Rule

__all__ = ["ChargedOnce", "charged_once", "check_together", "name_of_attempts"]


def name_of_attempts(limiter: str) -> str:
    """The name of the limiter that counts the attempts of each request id, beside the limiter of a rule."""
    return f"{limiter} attempts"


def is_over_redis(rule: Rule) -> bool:
    """Whether each decision of a rule is one of Redis."""
    return rule.is_remote and not rule.is_leased


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
                f"{rule.limiter!r} need the same request_id and one store"
            )
        if is_over_redis(first) and first.limiter.store.executor.has_slots and rule.key is not first.key:
            raise InvalidLimiter(
                f"one script charges all rules with a request_id, and keys of a cluster may be in several slots: the "
                f"rules of {first.limiter!r} and {rule.limiter!r} need the same key function"
            )


class Decided(NamedTuple):
    """Whether a request is allowed, and the decision of each rule."""

    is_allowed: bool
    each: list[Decision]

    @classmethod
    def by_each(cls, each: list[Decision]) -> Decided:
        return cls(all(each), each)


class ChargedOnce:
    """The rules of a plan with a request id, charged last, all or none: so none of them is ever refunded.

    A refund is unsafe. A retry is allowed by the mark of an earlier attempt, and to give its charge back would be to
    give back that of a request that was handled.

    This one is for limiters of a ``Store``. Attempts are counted there, and marks are in its table.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = rules
        self.limiters: list[Any] = [rule.limiter for rule in rules]
        self.all_of: Any = AllOf(*self.limiters)
        ids: Any = rules[0].request_id
        self._ids: RequestId = ids
        first = self.limiters[0]
        rate = Rate(ids.retries + 1, ids.lasts)
        self._margin_ns = rate.period_ns // 100
        # A leased store counts in that of its host.
        store = getattr(first.store, "host_store", first.store)
        self.attempts: Any = FixedWindow(store, name_of_attempts(first.name), rate, align="first")

    def charge(self, request: Request, keys: list[Any], costs: list[int], cleanup: RequestCleanup) -> Flow[Decided]:
        """The decisions of the rules. If they deny, none is charged; the caller rolls `cleanup` back."""
        return self.charge_by(self._ids.of(request), keys, costs, cleanup)

    def charge_by(
        self, request_id: tuple[str, ...] | None, keys: list[Any], costs: list[int], cleanup: RequestCleanup
    ) -> Flow[Decided]:
        """As ``charge``, by what ``RequestId.of`` returns."""
        if request_id is None:
            return (yield from self.charge_anew(keys, costs, cleanup))
        key = keys[0] if isinstance(keys[0], tuple) else (keys[0],)
        attempt = (*key, *request_id)
        # Counted before the mark is looked up, so requests that come at once are no more than others.
        counted = yield from self.count(attempt, cleanup)
        # A mark ends before the window that counts its retries, although it begins a moment later.
        ttl_ns = counted.reset_after_ns - self._margin_ns
        if not counted or ttl_ns <= 0:
            return (yield from self.charge_anew(keys, costs, cleanup))
        decided = yield from self.charge_once(keys, costs, request_id, ttl_ns / NS, cleanup)
        if not decided.is_allowed:
            # It will be sent again, and has been charged nothing.
            self.uncount(attempt)
        return decided

    def count(self, attempt: Any, cleanup: RequestCleanup) -> Flow[Decision]:
        """Count an attempt, unless there were too many."""
        yield from ()
        return self.attempts.hit(attempt)  # type: ignore[no-any-return]

    def uncount(self, attempt: Any) -> None:
        """Forget an attempt that is denied."""
        self.attempts.refund(attempt)

    def charge_anew(self, keys: list[Any], costs: list[int], cleanup: RequestCleanup) -> Flow[Decided]:
        """Charge a request, whatever its id is."""
        yield from ()
        return Decided.by_each(self.all_of.hit_each(keys, costs))

    def charge_once(
        self, keys: list[Any], costs: list[int], request_id: Any, ttl_s: float, cleanup: RequestCleanup
    ) -> Flow[Decided]:
        """Charge a request, unless its id is marked."""
        yield from ()
        decision = self.all_of.hit(keys, costs, request_id=request_id, request_ttl=ttl_s)
        wanted = [0] * len(costs) if decision else costs
        each = [limiter.peek(*of_it) for limiter, *of_it in zip(self.limiters, keys, wanted, strict=True)]
        # Permits may have come back since.
        return Decided(bool(decision), each)


class LeasedOnce(ChargedOnce):
    """For leased limiters: a charge may call Redis. Attempts and marks are in the host's store."""

    def charge_anew(self, keys: list[Any], costs: list[int], cleanup: RequestCleanup) -> Flow[Decided]:
        """As the base class's."""
        return Decided.by_each((yield from _result(self.all_of.hit_each(keys, costs))))

    def charge_once(
        self, keys: list[Any], costs: list[int], request_id: Any, ttl_s: float, cleanup: RequestCleanup
    ) -> Flow[Decided]:
        """As the base class's."""
        return Decided.by_each((yield from _result(self.all_of.hit_each_once(keys, costs, request_id, ttl_s))))


class RedisOnce(ChargedOnce):
    """For limiters over Redis: two round trips, one to count the attempt and one to charge, within one deadline."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        super().__init__(rules)
        store: Any = self.attempts.store
        self._counting = store.together([self.attempts])

    def count(self, attempt: Any, cleanup: RequestCleanup) -> Flow[Decision]:
        """As the base class's. A roll-back gives the attempt back, which `uncount` has not to do."""
        [counted], taken = yield self._counting.admit(cleanup.patience, [attempt], [1])
        cleanup.reserved += [(self.rules[0], one) for one in taken]
        return counted  # type: ignore[no-any-return]

    def uncount(self, attempt: Any) -> None:
        """Nothing: see `count`."""

    def charge_anew(self, keys: list[Any], costs: list[int], cleanup: RequestCleanup) -> Flow[Decided]:
        """As the base class's."""
        return Decided.by_each((yield self.all_of.hit_each_within(cleanup.patience, keys, costs)))

    def charge_once(
        self, keys: list[Any], costs: list[int], request_id: Any, ttl_s: float, cleanup: RequestCleanup
    ) -> Flow[Decided]:
        """As the base class's."""
        return Decided.by_each((yield self.all_of.hit_each_once(cleanup.patience, keys, costs, request_id, ttl_s)))


def _result(pending: Any) -> Flow[list[Decision]]:
    """The decisions of a leased ``AllOf``: at once, or of a call to Redis."""
    return pending if isinstance(pending, list) else (yield pending)


def charged_once(rules: Sequence[Rule]) -> ChargedOnce:
    """For the store of these rules."""
    if rules[0].is_leased:
        return LeasedOnce(rules)
    return RedisOnce(rules) if is_over_redis(rules[0]) else ChargedOnce(rules)
