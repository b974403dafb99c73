"""What `forebay_server` asks about limits: they are charged as by the gate of the middlewares, and permits are held."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, TypeAlias

from forebay.core.all_of import AllOf, reserve_each
from forebay.core.decision import Decision
from forebay.core.kinds import Concurrency
from forebay.errors import CostExceedsLimit, ForeignState, StoreUnavailable
from forebay.flows import run
from forebay.rate import NS
from forebay.serving.decided import Answer, Decided, Numbers
from forebay.serving.leases import HeldPermits
from forebay.serving.remembered import Remembered
from forebay.web.charging_once import ChargedOnce, charged_once
from forebay.web.cleanup import RequestCleanup
from forebay.web.denials import log_for_operator
from forebay.web.rules import Rule, kind_of
from forebay.web.store_errors import STORE_ERRORS

__all__ = ["Charging", "redis_of"]

_MOST_COMBINATIONS: Final = 4096
"""Of limits that are charged as one, and are remembered. Clients may choose the descriptors."""

Use: TypeAlias = tuple[int, str | tuple[str, ...], int]
"""The number of a limiter, a key, and a cost."""
Once: TypeAlias = tuple[int, list[str] | None]
"""A request and its retries are charged once to the uses from this place on, by the `request_id` behind it, which is
what ``RequestId.of`` returns.
"""


def redis_of(store: Any) -> Any:
    """The executor that asks Redis."""
    return getattr(store, "redis_store", store).executor


class Charging:
    """Charges at most 16 uses at once. *Threads*: safe."""

    def __init__(self, limiters: Sequence[Any], rules: Iterable[Rule], store: Any, remembered: Remembered) -> None:
        """`rules`: those of the limiters, with what charges a request and its retries once."""
        self._limiters = limiters
        self._rules_with_ids = {id(rule.limiter): rule for rule in rules if rule.request_id is not None}
        self._executor = store.executor if hasattr(store, "together") else None
        """If Redis decides each request, by one script."""
        self._is_leased = getattr(store, "is_leased", False)
        self._redis = redis_of(store)
        self._remembered = remembered
        remembering = functools.lru_cache(_MOST_COMBINATIONS)
        self._all_of = remembering(self._make_all_of)
        self._once_of = remembering(self._make_once)

    def hit(self, uses: list[Use], once: Once | None) -> Answer:
        """Charge all uses, or none."""
        if once is None:
            return self._answer(uses, self._hit)
        return self._answer(uses, lambda uses: self._hit_once(uses, once)[0])

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

    def hold(self, uses: list[Use], once: Once | None, is_refundable: bool) -> Answer:
        """As `hit`, and hold permits of the limits of requests at one time. The other charges can be given back if the
        question is refundable.
        """
        if not self._remembered.leases.have_room():
            return "the server holds too many leases: release some"
        return self._answer(uses, lambda uses: self._hold(uses, once, is_refundable))

    def ask_once(self, request_id: str, question: str, method: str, arguments: list[Any]) -> Answer:
        """The answer of a method, which decides a question with this id once."""

        def decide() -> tuple[Answer, float]:
            answer = getattr(self, method)(*arguments)
            if not isinstance(answer, Decided) or answer.lease is None:
                return answer, math.inf
            held = self._remembered.leases.get(answer.lease)
            # The permits of a lease that is over are others' by now.
            return answer, 0.0 if held is None else held.lasts_s

        uses: list[Use] = arguments[0]
        # Another version of the rules may have other limits by the same numbers.
        charged = repr([(self._limiters[number], key, cost) for number, key, cost in uses])
        return self._remembered.answers.once(request_id, question, charged, decide, self._undo)

    def give_back(self, charge: str) -> bool | None:
        """Give a charge back: whether it is known, which it is once. None: nobody knows whether it has come back."""
        taken = self._remembered.charges.pop(charge)
        if taken is None:
            return False
        # A question that is sent again is charged again.
        self._remembered.answers.forget(charge)
        return self._given_back(taken) or None

    def renew(self, lease: str) -> bool | None:
        """Restart a lease: whether all its permits are held. If not, it is over. None: nobody knows.

        Renewals and releases of one lease come one after the other.
        """
        held = self._remembered.leases.get(lease)
        if held is None:
            return False
        begun_s = time.monotonic()
        each_held = self._each_held(held, lambda one: one.renewing())
        # Of several limits, some may still hold.
        is_lost = each_held is not None and not all(each_held)
        if is_lost and self.release(lease) is not None:
            return False
        if is_lost or each_held is None:
            self._remembered.leases.restart(lease, held, is_sure=False)
            return None
        # In the order against that of a release, which marks the lease before it forgets the answer.
        if self._remembered.answers.prolong(lease, begun_s + held.lasts_s):
            if self._remembered.leases.restart(lease, held, is_sure=True):
                return True
            self._remembered.answers.forget(lease)
        # It was forgotten or released meanwhile, or is given back, and Redis may have begun it anew.
        return None if self._each_held(held, lambda one: one.releasing()) is None else False

    def release(self, lease: str) -> bool | None:
        """Give the permits of a lease back: whether any were held. None: nobody knows, and it may be asked again."""
        held = self._remembered.leases.begin_end(lease)
        if held is None:
            return False
        # A question that is sent again holds others.
        self._remembered.answers.forget(lease)
        each_held = self._each_held(held, lambda one: one.releasing())
        if each_held is None:
            held.is_ending = False
            return None
        self._remembered.leases.remove(lease)
        return any(each_held)

    def _each_held(self, held: HeldPermits, flow: Callable[[Any], Any]) -> list[bool] | None:
        """Whether the permits of each limit were held, by Redis and no policy. None: nobody knows."""

        def run_flow(one: Any) -> bool:
            try:
                return bool(self._redis.run(flow(one)))
            except ForeignState as error:
                log_for_operator("not held", error)
                return False

        is_sure, each_held = _each(held.leases, run_flow, time.monotonic() + self._redis.timeout_s)
        if is_sure:
            return each_held
        # Another one is asked first the next time, as this one may take all the time again.
        held.leases = [*held.leases[1:], *held.leases[:1]]
        return None

    def _given_back(self, taken: Iterable[Any]) -> bool:
        """Give charges back, whatever the policy is. False: nobody knows whether each has come back."""
        if self._executor is not None:
            refunds = [_Refund(one) for one in taken]
            with contextlib.suppress(*STORE_ERRORS):
                self._executor.give_back(refunds, self._executor.patience())
            return all(refund.is_done for refund in refunds)
        # A policy other than to deny raises nothing, and decides that the charge stays.
        before = self._redis.status().decided_by_policy
        is_sure, _ = _each([*taken][::-1], lambda one: one.cancel())
        return is_sure and bool(self._redis.status().decided_by_policy == before)

    def _undo(self, decided: Decided) -> bool:
        """Give back what an answer has taken, whose names nobody may know. False: nobody knows whether that is done."""
        is_released = decided.lease is None or self.release(decided.lease) is not None
        return is_released and (decided.charge is None or self.give_back(decided.charge) is not None)

    def _answer(self, uses: list[Use], decide: Callable[[list[Use]], Decided]) -> Answer:
        try:
            return decide(uses)
        except CostExceedsLimit as error:
            return Decided(False, [self._never(use, error) for use in uses])
        except STORE_ERRORS as error:
            # Redis logs its own outages.
            if not isinstance(error, StoreUnavailable):
                log_for_operator("charged to no limit", error)
            return None

    def _hit(self, uses: list[Use]) -> Decided:
        if not uses:
            return Decided(True, [])
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

    def _hit_once(self, uses: list[Use], once: Once) -> tuple[Decided, Sequence[Any]]:
        """Charge uses, and those of a request and its retries: after all others, as they are never given back.

        Also what gives the others back.
        """
        first, sent = once
        before, last = uses[:first], uses[first:]
        charged = self._once_of(_numbers_of(last))
        cleanup = RequestCleanup(self._patience())
        is_allowed = False
        try:
            is_reserved, reserved, taken = self._reserved(before, cleanup.patience)
            if not is_reserved:
                return Decided(False, [*map(_numbers, reserved), *[None] * len(last)]), []
            cleanup.reserved += [(charged.rules[0], one) for one in taken]
            request_id = None if sent is None else tuple(sent)
            is_allowed, each = run(charged.charge_by(request_id, *_lists(last), cleanup))
            shown = map(_numbers, reserved) if is_allowed else [None] * len(before)
            return Decided(is_allowed, [*shown, *map(_numbers, each)]), taken
        finally:
            if not is_allowed:
                # Permits come back also if the time of the question is used up.
                cleanup.patience = self._patience()
                cleanup.roll_back()

    def _take(self, uses: list[Use]) -> Decided:
        is_allowed, decisions, taken = self._reserved(uses, self._patience())
        return self._refundable(uses, Decided(is_allowed, [*map(_numbers, decisions)]), taken)

    def _hold(self, uses: list[Use], once: Once | None, is_refundable: bool) -> Decided:
        if once is None:
            is_allowed, decisions, taken = self._reserved(uses, self._patience())
            decided = Decided(is_allowed, [*map(_numbers, decisions)])
        else:
            decided, taken = self._hit_once(uses, once)
        held = [one for one in taken if hasattr(one, "renew")]
        if decided.allowed and held:
            of_permits = [use for use in uses if kind_of(self._limiters[use[0]]) is Concurrency]
            each_lasts_s = [self._limiters[number].lease_ns / NS for number, _, _ in of_permits]
            keys, costs = _lists(of_permits)
            decided = decided.with_lease(self._remembered.leases.add(held, keys, sum(costs), each_lasts_s))
        if is_refundable:
            decided = self._refundable(uses, decided, [one for one in taken if not hasattr(one, "renew")])
        return decided

    def _refundable(self, uses: list[Use], decided: Decided, taken: Iterable[Any]) -> Decided:
        """`taken` gives the charge back, if it was made."""
        if not decided.allowed:
            return decided
        return decided.with_charge(self._remembered.charges.add(_lists(uses)[0], taken))

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
            stack.callback(self._given_back, booked)
            for place, (number, key, cost) in enumerate(uses):
                if booked and time.monotonic() > until_s:
                    raise StoreUnavailable("the store has taken too long for the limits before")
                booking = self._limiters[number].reserve(key, cost, max_delay_ns / NS)
                if not booking:
                    each: list[Numbers | None] = [None] * len(uses)
                    each[place] = self._refused(uses[place], booking)
                    return Decided(False, each)
                booked.append(booking)
            seen = self._peeked([(number, key, 0) for number, key, _ in uses])
            stack.pop_all()
        shown = [
            (True, decision.limit, decision.remaining, 0, decision.reset_after_ns, False, booking.delay_ns)
            for decision, booking in zip(seen, booked, strict=True)
        ]
        return self._refundable(uses, Decided(True, shown), booked)

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


class _Refund:
    """A charge in Redis that is given back with others, by one call."""

    def __init__(self, taken: Any) -> None:
        self.is_done = False
        self._taken = taken

    def give_back_flow(self) -> Generator[Any, Any, None]:
        """The commands. They end only if Redis replies to all."""
        yield from self._taken.give_back_flow()
        self.is_done = True


def _numbers_of(uses: list[Use]) -> tuple[int, ...]:
    return tuple(number for number, _, _ in uses)


def _lists(uses: list[Use]) -> tuple[list[Any], list[int]]:
    return [key for _, key, _ in uses], [cost for _, _, cost in uses]


def _each(taken: Iterable[Any], act: Callable[[Any], Any], until_s: float = math.inf) -> tuple[bool, list[Any]]:
    """Do it with each, begun until then: whether that was done for sure with all of them, and the results."""
    is_sure = True
    results: list[Any] = []
    for one in taken:
        if time.monotonic() > until_s:
            return False, results
        try:
            results.append(act(one))
        except STORE_ERRORS as error:
            is_sure = False
            if not isinstance(error, StoreUnavailable):
                log_for_operator("not given back", error)
    return is_sure, results


def _decided(decisions: Sequence[Decision]) -> Decided:
    return Decided(all(decisions), [*map(_numbers, decisions)])


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
