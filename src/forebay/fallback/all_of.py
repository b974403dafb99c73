"""Several limits at once, all or none: checked, then charged, under the one lock of their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final

from forebay import holding, waiting
from forebay.core.arguments import (
    DEFAULT_REQUEST_TTL,
    ambiguous_key,
    costs_of,
    keys_of,
    no_id_beside_charges,
    ttl_without_id,
)
from forebay.core.limiter_arguments import check_limiters
from forebay.errors import CostExceedsLimit, InvalidCost, InvalidKey, LimitExceeded
from forebay.fallback.awaited import Awaited
from forebay.fallback.cell_limiter import CellLimiter, insert_mark, mark_tag, remembers, remove_mark, whole_cost
from forebay.fallback.decision import Decision, Outlook, decision_of
from forebay.fallback.limiter import Attempt, Limiter, Made
from forebay.fallback.reservation import Reservable, Reservation, longest_delay_ns, reservation_of
from forebay.fallback.store import Store
from forebay.rate import Duration, as_period_ns

__all__ = ["AllOf", "binding", "reserve_each"]

MOST: Final = 16


class AllOf(Made, Reservable):
    """Several limiters of one store as one: a request is charged to all of them or to none.

    ``AllOf(per_second, per_hour, for_everybody)``. A key is for all limiters, or a list with one key for each:
    ``limits.hit(["user:42", "user:42", "everybody"])``. The same holds for a cost. A tuple with as many parts as there
    are limiters is refused, as it may mean either: for one key write ``[key] * 3``.

    A ``Decision`` names the limit that bound the request, ``decision.limiter``. For a denial it is the limit with the
    longest ``retry_after`` among those that denied, for an allowed request the one with the fewest ``remaining``.

    Raises ``InvalidLimiter`` unless given 1 to 16 limiters of one store.
    """

    store: Store
    name: str
    limiters: tuple[Limiter, ...]
    may_free_early: bool

    def __init__(self, *limiters: Any) -> None:
        check_limiters(limiters, Limiter, MOST)
        self.limiters, self.store = limiters, limiters[0].store
        self.name = " + ".join(limiter.name for limiter in limiters)
        self.may_free_early = any(limiter.may_free_early for limiter in limiters)
        self._memory = limiters[0].memory
        self.is_made = True

    @staticmethod
    def maker_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        # A leased limiter joins limits of several stores, wherever it stands.
        joining = (limiter for limiter in args if getattr(type(limiter), "joins_stores", False))
        return next(joining, args[0] if args else None)

    def __repr__(self) -> str:
        return f"AllOf({', '.join(repr(limiter) for limiter in self.limiters)})"

    def _each(self, one: Any) -> list[Any]:
        """A list with a key or a cost for each limiter."""
        return list(one) if type(one) is list else [one] * len(self.limiters)

    def _attempts(self, key: Any, cost: Any) -> list[Attempt]:
        count = len(self.limiters)
        keys, costs = self._each(key), self._each(cost)
        if len(keys) != count:
            raise InvalidKey(f"{count} limiters need one key for all or {count} keys, not {len(keys)}")
        if isinstance(key, tuple) and count > 1 and len(key) == count:
            raise ambiguous_key(key, count)
        if len(costs) != count:
            raise InvalidCost(f"{count} limiters need one cost for all or {count} costs, not {len(costs)}")
        parts = zip(self.limiters, keys, costs, strict=True)
        return [limiter.attempt_for(its_key, its_cost) for limiter, its_key, its_cost in parts]

    def _now_ns(self) -> int:
        return self.limiters[0].open_now_ns()

    def _check(self, attempts: list[Attempt], now_ns: int) -> bool:
        """Whether all limits would allow the request. Checks each."""
        pairs = zip(self.limiters, attempts, strict=True)
        results = [limiter.check(attempt, now_ns) for limiter, attempt in pairs]
        return all(results)

    def _decide(self, attempts: list[Attempt], now_ns: int, *, at_each: bool = True) -> bool:
        """Charge all limits or none. The denial of the first is counted, unless it is `at_each`."""
        pairs = list(zip(self.limiters, attempts, strict=True))
        allowed = self._check(attempts, now_ns)
        charged = 0
        while allowed and charged < len(pairs):
            limiter, attempt = pairs[charged]
            # Several limiters may have one state: then a charge may leave no room for the next.
            allowed = limiter.commit(attempt, now_ns)
            charged += allowed
        if not allowed:
            for limiter, attempt in reversed(pairs[:charged]):
                limiter.roll_back(attempt, now_ns)
        for limiter, attempt in pairs:
            if allowed:
                limiter.counts.allowed += 1
            elif not attempt.verdict.allowed:
                limiter.counts.denied += 1
                if not at_each:
                    break
        return allowed

    def _decisions(self, attempts: list[Attempt]) -> list[Decision]:
        return [limiter.decision_on(attempt) for limiter, attempt in zip(self.limiters, attempts, strict=True)]

    def _binding(self, attempts: list[Attempt], allowed: bool) -> Decision:
        return _bound(self._decisions(attempts), allowed)

    def allow(self, key: Any, /) -> bool:
        """Charge one permit of `key` to every limiter if all allow it: the fast path of ``hit``."""
        attempts = self._attempts(key, 1)
        with self._memory.lock:
            return self._decide(attempts, self._now_ns(), at_each=False)

    def hit(self, key: Any, cost: Any = 1, *, request_id: Any = None, request_ttl: Duration | None = None) -> Decision:
        """Charge `cost` permits of `key` to every limiter if all allow it, and return the ``Decision``.

        `request_id` and `request_ttl` are those of each limiter's ``hit``: a repeated request with the same id, keys
        and costs is charged once to all. None of the limiters may be a ``Concurrency`` then.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``InvalidLimiter``, ``StoreClosed``.
        """
        if request_id is not None:
            return self._hit_once(key, cost, request_id, DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
        if request_ttl is not None:
            raise ttl_without_id(request_ttl)
        attempts = self._attempts(key, cost)
        with self._memory.lock:
            return self._binding(attempts, self._decide(attempts, self._now_ns()))

    def _marking(self) -> CellLimiter:
        """The limiter that counts what happens to marks. Raises if the limits can't remember requests."""
        for limiter in self.limiters:
            if not isinstance(limiter, CellLimiter):
                raise no_id_beside_charges(limiter, self)
        first = self.limiters[0]
        assert isinstance(first, CellLimiter)
        return first

    def _hit_once(self, key: Any, cost: Any, request_id: Any, request_ttl: Duration) -> Decision:
        marking = self._marking()
        ttl_ns = as_period_ns(request_ttl)
        attempts = self._attempts(key, [whole_cost(its_cost) for its_cost in self._each(cost)])
        with self._memory.lock:
            now_ns = self._now_ns()
            if not any(attempt.charge.amount for attempt in attempts):
                return self._binding(attempts, self._decide(attempts, now_ns))
            mark = self._mark(marking, request_id, attempts)
            if not remembers(marking, mark, now_ns):
                allowed = self._decide(attempts, now_ns)
                if allowed:
                    insert_mark(marking, mark, now_ns, ttl_ns)
                return self._binding(attempts, allowed)
            for limiter in self.limiters:
                limiter.counts.allowed += 1
            # Charged before: the decision of a request of cost 0, but always allowed.
            attempts = self._attempts(key, 0)
            self._check(attempts, now_ns)
            for attempt in attempts:
                attempt.verdict.allowed = True
            return self._binding(attempts, True)

    def _mark(self, marking: CellLimiter, request_id: Any, attempts: list[Attempt]) -> Any:
        parts = [(attempt.tag, attempt.charge.amount) for attempt in attempts]
        return mark_tag(marking, request_id, *parts)

    def hit_each(self, key: Any, cost: Any = 1) -> list[Decision]:
        """``hit``, but returns the ``Decision`` of each limiter, in order, instead of the one that binds.

        The request is allowed if all decisions allow it. Otherwise nothing was charged, even in limits that allow it.
        """
        attempts = self._attempts(key, cost)
        with self._memory.lock:
            self._decide(attempts, self._now_ns())
            return self._decisions(attempts)

    def peek(self, key: Any, cost: Any = 1) -> Decision:
        """The decision that ``hit`` would return now. Charges and counts nothing."""
        attempts = self._attempts(key, cost)
        with self._memory.lock:
            return self._binding(attempts, self._check(attempts, self._now_ns()))

    def allow_many(self, keys: Iterable[Any], costs: Iterable[Any] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key. Takes keys and costs as ``hit`` does.

        An invalid key or cost raises an exception, after everything before it was charged.
        """
        listed = keys_of(keys)
        listed_costs = costs_of(costs, len(listed))
        allowed = []
        for key, cost in zip(listed, listed_costs, strict=True):
            attempts = self._attempts(key, cost)
            with self._memory.lock:
                allowed.append(self._decide(attempts, self._now_ns(), at_each=False))
        return allowed

    def reserve_all(self, key: Any, cost: Any) -> tuple[Reservation, list[Decision]]:
        """A reservation, and the decision of each limiter."""
        keys = self._each(key)
        attempts = self._attempts(key, cost)
        with self._memory.lock:
            now_ns = self._now_ns()
            allowed = self._decide(attempts, now_ns)
            undo: list[Callable[[], object]] = []
            for limiter, its_key, attempt in zip(self.limiters, keys, attempts, strict=True):
                # A request that was allowed because the table was full has left no charge.
                if allowed and attempt.charge.amount and not attempt.verdict.full:
                    undo.insert(0, _undo_of(limiter, its_key, attempt))
            decisions = self._decisions(attempts)
            bound = _bound(decisions, allowed)
            cancel = partial(_do_each, undo) if allowed else None
            return reservation_of(allowed, now_ns, bound.retry_after_ns, cancel, full=bound.full), decisions

    def reserve(self, key: Any, cost: Any = 1, max_delay: Duration | None = None) -> Reservation:
        """Charge the request if it is allowed now: a ``Reservation`` with a delay of 0.

        Otherwise nothing is charged, and ``delay`` is the time until another attempt may succeed.
        """
        longest_delay_ns(max_delay)
        return self.reserve_all(key, cost)[0]

    def wait(self, key: Any, cost: Any = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        """Wait until all limiters allow the request, and charge it: see ``Limiter.wait``."""
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(
        self, key: Any, cost: Any = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Awaited[bool]:
        """``wait`` for asyncio."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter))

    def limited(
        self, key: Any, cost: Any = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> holding.Limited:
        """A decorator, and a ``with`` block: see each limiter's ``limited``.

        Raises ``InvalidLimiter`` if one of the limiters is a ``Concurrency``, whose permits would not come back.
        """
        if self.may_free_early:
            raise holding.never_back(self)
        return holding.Limited(self, key, cost, timeout, jitter)

    def exceeded(self, key: Any, cost: Any = 1) -> LimitExceeded:
        """The exception for a wait in which the permits of `key` didn't come in time: it names the limit that bound."""
        decision = self.peek(key, cost)
        return LimitExceeded(decision.limiter, decision.limit, decision.retry_after)

    def refund(self, key: Any, cost: Any = 1, *, request_id: Any = None) -> None:
        """Give back the charges of an allowed ``hit`` with the same arguments: see each limiter's ``refund``."""
        # Invalid arguments raise before anything is given back.
        costs = [whole_cost(its_cost) for its_cost in self._each(cost)]
        self._attempts(key, [0] * len(costs))
        if request_id is not None:
            marking = self._marking()
            try:
                attempts = self._attempts(key, costs)
            except CostExceedsLimit:
                # No single request can have charged that much.
                return
            with self._memory.lock:
                if not remove_mark(marking, self._mark(marking, request_id, attempts), self._now_ns()):
                    return
        pairs = zip(self.limiters, self._each(key), costs, strict=True)
        _do_each([partial(limiter.refund, its_key, its_cost) for limiter, its_key, its_cost in pairs])  # type: ignore[attr-defined]

    def reset(self, key: Any) -> None:
        """Forget `key` in every limiter."""
        self._attempts(key, 1)
        pairs = zip(self.limiters, self._each(key), strict=True)
        _do_each([partial(limiter.reset, its_key) for limiter, its_key in pairs])  # type: ignore[attr-defined]


def _undo_of(limiter: Any, key: Any, attempt: Attempt) -> Callable[[], object]:
    if isinstance(limiter, CellLimiter):
        return limiter.undo(attempt.tag, attempt.charge, attempt.verdict)
    undo: Callable[[], object] = limiter.undo(key, attempt.charge.amount, attempt.verdict)
    return undo


def reserve_each(limits: AllOf, key: Any, cost: Any) -> tuple[Reservation, list[Decision]]:
    """The results of ``limits.reserve`` and ``limits.hit_each`` for one request, which is charged once."""
    return limits.reserve_all(key, cost)


def binding(decisions: Iterable[Decision]) -> Decision:
    """The decision of the limit that bound a request, by those of all its limits: as ``AllOf.hit`` returns it."""
    listed = list(decisions)
    return _bound(listed, all(decision.allowed for decision in listed))


def _bound(decisions: list[Decision], allowed: bool) -> Decision:
    """The limit with the fewest remaining permits binds an allowed request. A denied request is bound by the limit with
    the longest time to a retry, among those that denied it.
    """
    if allowed:
        bound = min(decisions, key=lambda decision: decision.remaining)
    else:
        denials = [decision for decision in decisions if not decision.allowed]
        bound = max(denials, key=lambda decision: decision.retry_after_ns)
    outlook = Outlook(
        min(decision.remaining for decision in decisions),
        retry_after_ns=bound.retry_after_ns,
        reset_after_ns=max(decision.reset_after_ns for decision in decisions),
    )
    return decision_of(bound.limiter, allowed, bound.limit, outlook, degraded=bound.degraded, full=bound.full)


def _do_each(calls: list[Callable[[], object]]) -> None:
    """Make every call even if one raises, then raise. A signal handler may raise where a limiter wakes waiters."""
    raised: BaseException | None = None
    for call in calls:
        try:
            call()
        except BaseException as error:
            # An interrupt takes precedence over an error such as StoreClosed.
            if raised is None or isinstance(raised, Exception):
                raised = error
    if raised is not None:
        raise raised
