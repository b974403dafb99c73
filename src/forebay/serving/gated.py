"""Rules whose limits aren't in the memory of a host: `forebay_server` matches them, and asks Python to charge limits.

Limits over Redis, leased and synced ones are charged as by the gate of the middlewares.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from forebay.core.all_of import AllOf, reserve_each
from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, StoreUnavailable
from forebay.flows import run
from forebay.rate import NS
from forebay.rules.building import Built, BuiltRule
from forebay.serving.taken import TakenCharges
from forebay.web.charging_once import ChargedOnce, charged_once, check_together
from forebay.web.cleanup import RequestCleanup
from forebay.web.denials import log_for_operator
from forebay.web.rules import Rule
from forebay.web.store_errors import STORE_ERRORS

__all__ = ["Charging", "GatePlan", "charging_of", "within_s_of"]

_THREADS: Final = 8
"""Threads that charge limits. While one waits for Redis, others use the processor."""
_PATIENCE_S: Final = 0.5
"""In addition to the deadlines of a question: of the one before it in its thread, and its own."""
_MOST_COMBINATIONS: Final = 4096
"""Of limits that are charged as one, and are remembered. Clients may choose the descriptors."""

Use: TypeAlias = tuple[int, str | tuple[str, ...], int]
"""The number of a limiter, a key, and a cost."""
Numbers: TypeAlias = tuple[bool, int, int, int, int, bool, int]
"""A decision: whether it allows, its limit, what remains, when to ask again and when the key is as fresh, whether the
store has no room, and the time until the request may proceed. Times are in nanoseconds.
"""
Decided: TypeAlias = tuple[bool, Sequence[Numbers | None], str | None]
"""Whether a request is allowed, and the decisions of its uses: of a denied request, at least those that deny it.

A denial by a limit that is below the cost is for good. Behind them the id of the charge, if that can be given back.
"""
Answer: TypeAlias = Decided | None
"""None: the store can't be asked."""


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
        options = {"books": self.charging.books, "threads": _THREADS, "within_s": self.within_s}
        return server.Gate(self.document, self.of_bans, self.charging, **options)


def charging_of(built: Iterable[Built], limiters: Sequence[Any], store: Any, taken: TakenCharges) -> Charging:
    """What charges the `limiters` of a plan of these rules. `taken`: where charges are that can be given back.

    Raises ``InvalidLimiter`` for rules with a `request_id` that can't be charged as one.
    """
    groups = [own for one in built if isinstance(one, BuiltRule) for own in one.rules.values()]
    # With `bytes` it would be another kind, which is refused before.
    rules: list[Any] = [rule for own in groups for rule in own]
    check_together(rules)
    return Charging(limiters, rules, store, taken)


def within_s_of(store: Any) -> float:
    """How long a question about limits of this store may wait."""
    timeout_s: float = _redis_of(store).timeout_s
    return 2 * timeout_s + _PATIENCE_S


def _redis_of(store: Any) -> Any:
    """The executor that asks Redis."""
    return getattr(store, "redis_store", store).executor


class Charging:
    """Charges at most 16 uses at once. *Threads*: safe."""

    def __init__(self, limiters: Sequence[Any], rules: Iterable[Rule], store: Any, taken: TakenCharges) -> None:
        """`rules`: those of the limiters, with what charges a request and its retries once."""
        self._limiters = limiters
        self._rules_with_ids = {id(rule.limiter): rule for rule in rules if rule.request_id is not None}
        self._executor = store.executor if hasattr(store, "together") else None
        """If Redis decides each request, by one script."""
        self._is_leased = getattr(store, "is_leased", False)
        self._redis = _redis_of(store)
        self._taken = taken
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

    def take(self, uses: list[Use]) -> Answer:
        """As `hit`, without an id. The charge can be given back."""
        return self._answer(uses, self._take)

    @property
    def books(self) -> bool:
        """Whether `book` may be called."""
        return not self._is_leased

    def book(self, uses: list[Use], max_delay_ns: int) -> Answer:
        """As `take`, if the request may proceed within this time."""
        return self._answer(uses, lambda uses: self._book(uses, max_delay_ns))

    def give_back(self, charge: str) -> bool | None:
        """Give a charge back: whether it is known, which it is once. None: nobody knows whether it has come back."""
        taken = self._taken.pop(charge)
        if taken is None:
            return False
        # A policy other than to deny raises nothing, and decides that the charge stays.
        before = self._redis.status().decided_by_policy
        is_sure = _give_back(taken)
        return (is_sure and self._redis.status().decided_by_policy == before) or None

    def _answer(self, uses: list[Use], decide: Callable[[list[Use]], Decided]) -> Answer:
        try:
            return decide(uses)
        except CostExceedsLimit as error:
            return False, [self._never(use, error) for use in uses], None
        except STORE_ERRORS as error:
            # Redis logs its own outages.
            if not isinstance(error, StoreUnavailable):
                log_for_operator("charged to no limit", error)
            return None

    def _hit(self, uses: list[Use]) -> Decided:
        if len(uses) == 1:
            [(number, key, cost)] = uses
            return _decided([self._limiters[number].hit(key, cost)])
        all_of = self._all_of(_numbers_of(uses))
        if self._executor is None:
            return _decided(all_of.hit_each(*_lists(uses)))
        return _decided(all_of.hit_each_within(self._executor.patience(), *_lists(uses)))

    def _peek(self, uses: list[Use]) -> Decided:
        return _decided(self._peeked(uses))

    def _peeked(self, uses: list[Use]) -> list[Decision]:
        if len(uses) <= 1 or self._executor is None:
            return [self._limiters[number].peek(key, cost) for number, key, cost in uses]
        all_of = self._all_of(_numbers_of(uses))
        return all_of.peek_each_within(self._executor.patience(), *_lists(uses))  # type: ignore[no-any-return]

    def _hit_once(self, before: list[Use], last: list[Use], request_id: tuple[str, ...] | None) -> Decided:
        """Charge uses, and those of a request and its retries: after all others, as they are never given back."""
        once = self._once_of(_numbers_of(last))
        cleanup = RequestCleanup(self._patience())
        is_allowed = False
        try:
            is_reserved, reserved, taken = self._reserved(before, cleanup.patience)
            if not is_reserved:
                return False, [*map(_numbers, reserved), *[None] * len(last)], None
            cleanup.reserved += [(once.rules[0], one) for one in taken]
            is_allowed, each = run(once.charge_by(request_id, *_lists(last), cleanup))
            shown = map(_numbers, reserved) if is_allowed else [None] * len(before)
            return is_allowed, [*shown, *map(_numbers, each)], None
        finally:
            if not is_allowed:
                cleanup.roll_back()

    def _take(self, uses: list[Use]) -> Decided:
        is_allowed, decisions, taken = self._reserved(uses, self._patience())
        return is_allowed, [*map(_numbers, decisions)], self._taken.add(_lists(uses)[0], taken) if is_allowed else None

    def _reserved(self, uses: list[Use], patience: Any) -> tuple[bool, Sequence[Decision], Sequence[Any]]:
        """Charge uses, all or none: whether they are, the decisions, and what gives the charges back."""
        if not uses:
            return True, [], []
        all_of = self._all_of(_numbers_of(uses))
        if self._executor is not None:
            decisions, taken = all_of.admit(patience, *_lists(uses))
            return bool(taken), decisions, taken
        if self._is_leased:
            charge = all_of.charge(*_lists(uses))
            return bool(charge), charge.decisions, [charge]
        charge, decisions = reserve_each(all_of, *_lists(uses))
        return bool(charge), decisions, [charge]

    def _book(self, uses: list[Use], max_delay_ns: int) -> Decided:
        until_s = time.monotonic() + self._redis.timeout_s
        booked: list[Any] = []
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: _give_back(booked))
            for place, (number, key, cost) in enumerate(uses):
                if booked and time.monotonic() > until_s:
                    raise StoreUnavailable("the store has taken too long for the limits before")
                booking = self._limiters[number].reserve(key, cost, max_delay_ns / NS)
                if not booking:
                    each: list[Numbers | None] = [None] * len(uses)
                    each[place] = self._refused(uses[place], booking)
                    return False, each, None
                booked.append(booking)
            seen = self._peeked([(number, key, 0) for number, key, _ in uses])
            stack.pop_all()
        shown = [
            (True, decision.limit, decision.remaining, 0, decision.reset_after_ns, False, booking.delay_ns)
            for decision, booking in zip(seen, booked, strict=True)
        ]
        return True, shown, self._taken.add(_lists(uses)[0], booked)

    def _refused(self, use: Use, booking: Any) -> Numbers:
        """The decision of a limit that hasn't booked."""
        number, key, cost = use
        seen = self._limiters[number].peek(key, cost)
        return False, seen.limit, seen.remaining, booking.delay_ns, seen.reset_after_ns, booking.full, 0

    def _patience(self) -> Any:
        return None if self._executor is None else self._executor.patience()

    def _never(self, use: Use, error: CostExceedsLimit) -> Numbers | None:
        """The denial by the limit that can never allow so much; None of another limit."""
        number, _, cost = use
        if self._limiters[number].name != error.limiter or cost <= error.limit:
            return None
        return False, error.limit, 0, 0, 0, False, 0

    def _make_all_of(self, numbers: tuple[int, ...]) -> Any:
        return AllOf(*[self._limiters[number] for number in numbers])

    def _make_once(self, numbers: tuple[int, ...]) -> ChargedOnce:
        return charged_once([self._rules_with_ids[id(self._limiters[number])] for number in numbers])


def _numbers_of(uses: list[Use]) -> tuple[int, ...]:
    return tuple(number for number, _, _ in uses)


def _lists(uses: list[Use]) -> tuple[list[Any], list[int]]:
    return [key for _, key, _ in uses], [cost for _, _, cost in uses]


def _give_back(taken: Iterable[Any]) -> bool:
    """Give charges back, the last first. Whether all have come back for sure."""
    is_sure = True
    for one in reversed([*taken]):
        try:
            one.cancel()
        except STORE_ERRORS as error:
            is_sure = False
            if not isinstance(error, StoreUnavailable):
                log_for_operator("not given back", error)
    return is_sure


def _decided(decisions: Sequence[Decision]) -> Decided:
    return all(decisions), [*map(_numbers, decisions)], None


def _numbers(decision: Decision) -> Numbers:
    return (
        decision.allowed,
        decision.limit,
        decision.remaining,
        decision.retry_after_ns,
        decision.reset_after_ns,
        decision.full,
        0,
    )
