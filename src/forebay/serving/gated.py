"""Rules whose limits aren't in the memory of a host: `forebay_server` matches them, and asks Python to charge limits.

Limits over Redis, leased and synced ones are charged as by the gate of the middlewares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forebay.core.all_of import AllOf, reserve_each
from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, StoreUnavailable
from forebay.flows import run
from forebay.rules.building import Built, BuiltRule
from forebay.web.charging_once import ChargedOnce, charged_once, check_together
from forebay.web.cleanup import RequestCleanup
from forebay.web.denials import log_for_operator
from forebay.web.rules import Rule
from forebay.web.store_errors import STORE_ERRORS

__all__ = ["Charging", "GatePlan", "gate_plan"]

_THREADS: Final = 8
"""Threads that charge limits. While one waits for Redis, others use the processor."""
_PATIENCE_S: Final = 0.5
"""In addition to the deadlines of a question: of the one before it in its thread, and its own."""
_MOST_COMBINATIONS: Final = 4096
"""Of limits that are charged as one, and are remembered. Clients may choose the descriptors."""

Use: TypeAlias = tuple[int, str | tuple[str, ...], int]
"""The number of a limiter, a key, and a cost."""
Numbers: TypeAlias = tuple[bool, int, int, int, int, bool]
"""A decision: whether it allows, its limit, what remains, when to ask again and when the key is as fresh, in
nanoseconds, and whether the store has no room.
"""
Answer: TypeAlias = tuple[bool, list[Numbers | None]] | None
"""Whether a request is allowed, and the decisions of its uses: of a denied request, at least those that deny it.

A denial by a limit that is below the cost is for good. None: the store can't be asked.
"""


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What `forebay_server` decides by, where Python charges the limits."""

    document: str
    """The rules, as in a ``Plan``."""
    of_bans: tuple[Any, ...]
    """The limiters of its first limits, which are in the memory of the host."""
    charging: Charging
    within_s: float
    """A question that has waited so long has no answer."""
    store: Any
    trusts_unix: bool
    """Whether a peer behind a Unix socket may name a client. True if no rule needs one."""

    def compiled(self, server: Any) -> Any:
        """As the module `forebay_server` takes it."""
        return server.Gate(self.document, self.of_bans, self.charging, threads=_THREADS, within_s=self.within_s)


def gate_plan(
    built: Iterable[Built],
    store: Any,
    document: str,
    of_bans: tuple[Any, ...],
    limiters: Sequence[Any],
    trusts_unix: bool,
) -> GatePlan:
    """The plan of rules over this store. `document`: as of a ``Plan`` with these `limiters`, of which those `of_bans`
    come first. Raises ``InvalidLimiter`` for rules with a `request_id` that can't be charged as one.
    """
    rules: list[Any] = [
        rule for one in built if isinstance(one, BuiltRule) for own in one.rules.values() for rule in own
    ]
    check_together(rules)
    redis_store = getattr(store, "redis_store", store)
    within_s = 2 * redis_store.executor.timeout_s + _PATIENCE_S
    return GatePlan(document, of_bans, Charging(limiters, rules, store), within_s, store, trusts_unix)


class Charging:
    """Charges at most 16 uses at once. *Threads*: safe."""

    def __init__(self, limiters: Sequence[Any], rules: Iterable[Rule], store: Any) -> None:
        """`rules`: those of the limiters, with what charges a request and its retries once."""
        self._limiters = limiters
        self._rules_with_ids = {id(rule.limiter): rule for rule in rules if rule.request_id is not None}
        self._executor = store.executor if hasattr(store, "together") else None
        """If Redis decides each request, by one script."""
        self._is_leased = getattr(store, "is_leased", False)
        remembering = functools.lru_cache(_MOST_COMBINATIONS)
        self._all_of = remembering(self._make_all_of)
        self._once_of = remembering(self._make_once)

    def hit(self, uses: list[Use], once: tuple[int, list[str] | None] | None) -> Answer:
        """Charge all uses, or none.

        `once`: a request and its retries are charged once to the uses from this place on, by the `request_id` behind
        it, which is what ``RequestId.of`` returns.
        """
        if once is None:
            return self._answer(uses, self._hit)
        first, request_id = once
        of_request = None if request_id is None else tuple(request_id)
        return self._answer(uses, lambda uses: self._hit_once(uses[:first], uses[first:], of_request))

    def peek(self, uses: list[Use]) -> Answer:
        """What `hit` would return now, without an id."""
        return self._answer(uses, self._peek)

    def _answer(self, uses: list[Use], decide: Callable[[list[Use]], tuple[bool, Sequence[Decision | None]]]) -> Answer:
        try:
            is_allowed, each = decide(uses)
        except CostExceedsLimit as error:
            return False, [self._never(use, error) for use in uses]
        except STORE_ERRORS as error:
            # Redis logs its own outages.
            if not isinstance(error, StoreUnavailable):
                log_for_operator("charged to no limit", error)
            return None
        return is_allowed, [None if decision is None else _numbers(decision) for decision in each]

    def _hit(self, uses: list[Use]) -> tuple[bool, Sequence[Decision]]:
        if len(uses) == 1:
            [(number, key, cost)] = uses
            each = [self._limiters[number].hit(key, cost)]
        else:
            all_of = self._all_of(_numbers_of(uses))
            if self._executor is None:
                each = all_of.hit_each(*_lists(uses))
            else:
                each = all_of.hit_each_within(self._executor.patience(), *_lists(uses))
        return all(each), each

    def _peek(self, uses: list[Use]) -> tuple[bool, Sequence[Decision]]:
        if len(uses) == 1 or self._executor is None:
            each = [self._limiters[number].peek(key, cost) for number, key, cost in uses]
        else:
            all_of = self._all_of(_numbers_of(uses))
            each = all_of.peek_each_within(self._executor.patience(), *_lists(uses))
        return all(each), each

    def _hit_once(
        self, before: list[Use], last: list[Use], request_id: tuple[str, ...] | None
    ) -> tuple[bool, Sequence[Decision | None]]:
        """Charge uses, and those of a request and its retries: after all others, as they are never given back."""
        once = self._once_of(_numbers_of(last))
        cleanup = RequestCleanup(None if self._executor is None else self._executor.patience())
        is_allowed = False
        try:
            reserved = self._reserved(before, once.rules[0], cleanup) if before else []
            if len(cleanup.reserved) < bool(before):
                return False, [*reserved, *[None] * len(last)]
            is_allowed, each = run(once.charge_by(request_id, *_lists(last), cleanup))
            return is_allowed, [*(reserved if is_allowed else [None] * len(before)), *each]
        finally:
            if not is_allowed:
                cleanup.roll_back()

    def _reserved(self, uses: list[Use], rule: Rule, cleanup: RequestCleanup) -> Sequence[Decision]:
        """Charge uses so that `cleanup` can give them back. If they are denied, it has nothing."""
        all_of = self._all_of(_numbers_of(uses))
        if self._executor is not None:
            decisions, taken = all_of.admit(cleanup.patience, *_lists(uses))
        else:
            if self._is_leased:
                charge = all_of.charge(*_lists(uses))
                decisions = charge.decisions
            else:
                charge, decisions = reserve_each(all_of, *_lists(uses))
            taken = [charge] if charge else []
        cleanup.reserved += [(rule, one) for one in taken]
        return decisions  # type: ignore[no-any-return]

    def _never(self, use: Use, error: CostExceedsLimit) -> Numbers | None:
        """The denial by the limit that can never allow so much; None of another limit."""
        number, _, cost = use
        if self._limiters[number].name != error.limiter or cost <= error.limit:
            return None
        return False, error.limit, 0, 0, 0, False

    def _make_all_of(self, numbers: tuple[int, ...]) -> Any:
        return AllOf(*[self._limiters[number] for number in numbers])

    def _make_once(self, numbers: tuple[int, ...]) -> ChargedOnce:
        return charged_once([self._rules_with_ids[id(self._limiters[number])] for number in numbers])


def _numbers_of(uses: list[Use]) -> tuple[int, ...]:
    return tuple(number for number, _, _ in uses)


def _lists(uses: list[Use]) -> tuple[list[Any], list[int]]:
    return [key for _, key, _ in uses], [cost for _, _, cost in uses]


def _numbers(decision: Decision) -> Numbers:
    return (
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_after_ns,
        decision.reset_after_ns,
        decision.full,
    )
