"""The methods of limiters whose state is a key's in the table: every way to request a permit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from forebay import holding, waiting
from forebay.core.arguments import DEFAULT_REQUEST_TTL, cost_of, costs_of, keys_of, ttl_without_id
from forebay.errors import CostExceedsLimit, InvalidKey, InvalidLimiter, LimitExceeded, short_repr
from forebay.fallback.awaited import Awaited
from forebay.fallback.decision import Decision, Outlook, decision_of
from forebay.fallback.keys import Key, known_key
from forebay.fallback.limiter import Attempt, Limiter
from forebay.fallback.memory import Charge, LimitParams, Tag, Verdict
from forebay.fallback.reservation import Reservation, longest_delay_ns, reservation_of
from forebay.rate import Duration, Rate, as_period_ns

__all__ = ["CellAlgorithm", "CellLimiter", "insert_mark", "mark_tag", "remembers", "remove_mark"]


class CellAlgorithm:
    """The arithmetic of a limiter: pure functions of state, time and request. See ``memory.Algorithm``."""

    fresh: Any = 0

    def take(self, tag: Tag, state: Any, now_ns: int, charge: Charge) -> Any:
        raise NotImplementedError

    def give_back(self, tag: Tag, state: Any, now_ns: int, charge: Charge) -> Any:
        raise NotImplementedError

    def expiry_ns(self, state: Any) -> int:
        """States of KIND_COUNT have their time in quarters of a nanosecond, above their counts."""
        expiry_ns: int = state >> 2
        return expiry_ns

    def used(self, state: Any, now_ns: int) -> int | None:
        return None

    def charge(self, permits: int, params: LimitParams) -> Charge:
        """The charge of a request for so many permits, at most the limit."""
        return Charge(permits, params.limit - permits, params)

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        """The requests that the key may send, and when."""
        raise NotImplementedError

    def allow_wait(self, charge: Charge, max_wait_ns: int) -> None:
        """Let the request book ahead by up to `max_wait_ns`, if this limiter can."""

    def booked_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        """The time from now until a booked request may proceed."""
        return 0

    def refused_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        """The time from now until a refused request could have proceeded."""
        return self.describe(charge, verdict).retry_after_ns


class Marks(CellAlgorithm):
    """The mark of a request that was charged: until when it is remembered, rounded up to 2 ns.

    A mark has used nothing, so it is evicted before any key.
    """

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        return None if state > now_ns else (now_ns + charge.amount + 1) // 2 * 2

    def give_back(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        return 0 if state > now_ns else None

    def expiry_ns(self, state: int) -> int:
        return state

    def used(self, state: int, now_ns: int) -> int:
        return 0


MARKS = Marks()
NO_PARAMS = LimitParams(1, 1, 1)


def mark_tag(limiter: Limiter, request_id: Any, *parts: Any) -> Tag:
    """The tag of a request's mark. The parts include the amount: with another cost it is another request."""
    try:
        return ("mark", *limiter.identity, known_key(request_id), *parts)
    except InvalidKey:
        raise InvalidKey(f"a request_id is str, bytes, int or a tuple of them, not {short_repr(request_id)}") from None


def remembers(limiter: Limiter, tag: Tag, now_ns: int) -> bool:
    until_ns = limiter.memory.table.find(tag)
    return until_ns is not None and until_ns > now_ns


def insert_mark(limiter: Limiter, tag: Tag, now_ns: int, ttl_ns: int) -> None:
    """Remember a request that was charged, unless the store has no room for the mark."""
    charge, on_full = Charge(ttl_ns, 0, NO_PARAMS), limiter.store.on_full or "evict"
    limiter.memory.table.decide(tag, now_ns, MARKS, charge, on_full, limiter.counts)


def remove_mark(limiter: Limiter, tag: Tag, now_ns: int) -> bool:
    """Forget a request. False if it was not remembered any more."""
    return limiter.memory.table.give_back(tag, now_ns, MARKS, Charge(0, 0, NO_PARAMS))


def whole_cost(cost: Any) -> int:
    return min(cost_of(cost), 2**63 - 1)


def charge_left(charge: Charge, verdict: Verdict) -> Charge:
    """A charge to be given back."""
    return Charge(charge.amount, 0, charge.params, charged_state=verdict.state)


class CellLimiter(Limiter):
    """Base class of the limiters that decide by one state; not used by itself."""

    params: LimitParams
    algorithm: CellAlgorithm

    def charge_for(self, cost: Any, params: LimitParams) -> Charge:
        """The charge of a request of `cost` under a limit with these params."""
        permits = whole_cost(cost)
        if permits > params.limit:
            raise CostExceedsLimit(cost, params.limit, self.name)
        return self.algorithm.charge(permits, params)

    def params_for_call(self, rate: Any, burst: Any) -> LimitParams:
        """The limiter's own params, or those of a call with a rate."""
        if rate is not None or burst is not None:
            raise InvalidLimiter(f"{self!r} has one limit for all calls: make a second limiter for another one")
        return self.params

    def decision_by(self, charge: Charge, verdict: Verdict) -> Decision:
        if verdict.full and not verdict.allowed:
            # The key has no state. The verdict's state is the time at which there will be room.
            wait_ns = verdict.state - verdict.now_ns
            outlook = Outlook(retry_after_ns=wait_ns, reset_after_ns=wait_ns)
        else:
            outlook = self.algorithm.describe(charge, verdict)
        return decision_of(self.name, verdict.allowed, charge.params.limit, outlook, full=verdict.full)

    def decide(self, tag: Tag, charge: Charge, now_ns: int) -> Verdict:
        return self.table.decide(tag, now_ns, self.algorithm, charge, self.on_full, self.counts)

    def look(self, tag: Tag, charge: Charge, now_ns: int) -> Verdict:
        """The decision that `decide` would make, without a charge. Only a charge finds that a new key has no room."""
        state = self.table.find(tag)
        if state is None:
            state = self.algorithm.fresh
        return Verdict(tag, now_ns, state, self.algorithm.take(tag, state, now_ns, charge) is not None)

    def decide_and_count(self, tag: Tag, charge: Charge) -> Verdict:
        """Decide a request. One of cost 0 changes no state, but is counted."""
        with self.memory.lock:
            return self.decide_now(tag, charge, self.open_now_ns())

    def decide_now(self, tag: Tag, charge: Charge, now_ns: int) -> Verdict:
        verdict = self.decide(tag, charge, now_ns) if charge.amount else self.look(tag, charge, now_ns)
        self.count(verdict.allowed)
        return verdict

    def count(self, allowed: bool) -> None:
        if allowed:
            self.counts.allowed += 1
        else:
            self.counts.denied += 1

    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``.
        """
        return self.decide_and_count(self.tag_of(key), self.charge_for(1, self.params)).allowed

    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Decision:
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        `cost` is a whole number; with 0 the call checks whether the key is within its limit. With `rate` this one
        request is judged by that limit, on the same state. With a `request_id`, a request that is repeated with the
        same id within `request_ttl` (5 minutes by default) is allowed again without a second charge.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidLimiter``, ``InvalidKey``,
        ``StoreClosed``.
        """
        charge = self.charge_for(cost, self.params_for_call(rate, burst))
        if request_id is None:
            if request_ttl is not None:
                raise ttl_without_id(request_ttl)
        elif charge.amount:
            return self._hit_once(key, charge, request_id, DEFAULT_REQUEST_TTL if request_ttl is None else request_ttl)
        return self.decision_by(charge, self.decide_and_count(self.tag_of(key), charge))

    def _hit_once(self, key: Key, charge: Charge, request_id: Key, request_ttl: Duration) -> Decision:
        tag = self.tag_of(key)
        mark = mark_tag(self, request_id, tag, charge.amount)
        ttl_ns = as_period_ns(request_ttl)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            if not remembers(self, mark, now_ns):
                verdict = self.decide_now(tag, charge, now_ns)
                if verdict.allowed:
                    insert_mark(self, mark, now_ns, ttl_ns)
                return self.decision_by(charge, verdict)
            self.count(True)
            # Charged before: the decision of a request of cost 0, but always allowed.
            charge = Charge(0, charge.room + charge.amount, charge.params)
            verdict = self.look(tag, charge, now_ns)
            verdict.allowed = True
            return self.decision_by(charge, verdict)

    def take_up_to(self, key: Key, most: int, *, rate: str | Rate | None = None, burst: int | None = None) -> int:
        """Charge as many permits of `key` as there are, at most `most`, and return how many: 0 is a denial.

        `most` may be above the limit; no more than the limit is charged at once. `rate` and `burst` are those of
        ``hit``. Raises what ``hit`` raises, except ``CostExceedsLimit``.
        """
        params = self.params_for_call(rate, burst)
        wanted = min(whole_cost(most), params.limit)
        tag = self.tag_of(key)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            if wanted == 0:
                return 0
            nothing = self.algorithm.charge(0, params)
            seen = self.look(tag, nothing, now_ns)
            seen.allowed = True
            count = min(wanted, self.decision_by(nothing, seen).remaining)
            taken = count > 0 and self.decide(tag, self.algorithm.charge(count, params), now_ns).allowed
            self.count(taken)
            return count if taken else 0

    def peek(self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None) -> Decision:
        """The decision that `hit` with the same arguments would return now. Charges and counts nothing."""
        charge = self.charge_for(cost, self.params_for_call(rate, burst))
        tag = self.tag_of(key)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            return self.decision_by(charge, self.look(tag, charge, now_ns))

    def reserve(
        self,
        key: Key,
        cost: int = 1,
        max_delay: Duration | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Reservation:
        """Book `cost` permits of `key`: a ``Reservation``, with the ``delay`` in seconds until they may be used.

        A token bucket, a leaky bucket and a minimum interval book ahead, by at most `max_delay`: text like
        ``"500 ms"``, seconds or a ``timedelta``. Every other limiter charges only a request that is allowed now. If
        nothing is booked, ``delay`` is the time until another attempt may succeed.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid `max_delay`.
        """
        tag = self.tag_of(key)
        charge = self.charge_for(cost, self.params_for_call(rate, burst))
        self.algorithm.allow_wait(charge, longest_delay_ns(max_delay))
        verdict = self.decide_and_count(tag, charge)
        if verdict.allowed:
            delay_ns = self.algorithm.booked_delay_ns(charge, verdict)
        elif verdict.full:
            delay_ns = verdict.state - verdict.now_ns
        else:
            delay_ns = self.algorithm.refused_delay_ns(charge, verdict)
        undo = None
        # A request that was allowed because the table was full was not charged.
        if verdict.allowed and not verdict.full:
            undo = self.undo(tag, charge, verdict)
        return reservation_of(verdict.allowed, verdict.now_ns, delay_ns, undo, full=verdict.full)

    def undo(self, tag: Tag, charge: Charge, verdict: Verdict) -> Callable[[], object]:
        """A function that gives back a charge, if it still counts."""
        left = charge_left(charge, verdict)
        return lambda: self.return_charge(tag, left)

    def return_charge(self, tag: Tag, charge: Charge) -> None:
        with self.memory.lock:
            now_ns = self.open_now_ns()
            self.give_back(tag, now_ns, charge)

    def give_back(self, tag: Tag, now_ns: int, charge: Charge) -> None:
        """Give a charge back, if it still counts. The caller holds the lock."""
        self.table.give_back(tag, now_ns, self.algorithm, charge)

    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        """Give back the charge of an allowed ``hit`` with the same arguments; never more than a fresh key has.

        Several requests may have charged a cost above the limit together: such a refund gives back as much as the
        limit. With the `request_id` of a ``hit``, gives back once, and only while the id is remembered.
        """
        tag = self.tag_of(key)
        permits = whole_cost(cost)
        params = self.params_for_call(rate, burst)
        charge = self.algorithm.charge(min(permits, params.limit), params)
        mark = None if request_id is None else mark_tag(self, request_id, tag, charge.amount)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            # No single request can have charged more than the limit.
            if mark is None or (permits <= params.limit and remembers(self, mark, now_ns)):
                # Before its mark is removed: if it raises StoreFull, a later refund may find room.
                self.give_back(tag, now_ns, charge)
                if mark is not None:
                    remove_mark(self, mark, now_ns)

    def reset(self, key: Key) -> None:
        """Forget `key`: its next request finds a fresh key."""
        tag = self.tag_of(key)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            self.forget(tag, now_ns)

    def forget(self, tag: Tag, now_ns: int) -> None:
        self.table.remove(tag)

    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged.
        """
        listed = keys_of(keys)
        charges = [self.charge_for(cost, self.params) for cost in costs_of(costs, len(listed))]
        tags = [self.tag_of(key) for key in listed]
        with self.memory.lock:
            now_ns = self.open_now_ns()
            return [self.decide_now(tag, charge, now_ns).allowed for tag, charge in zip(tags, charges, strict=True)]

    def wait(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> bool:
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Waiters get their permits in the order of their calls, those with one `rate` and `burst` among themselves, which
        are those of ``hit``. A wait charges nothing if it ends early or would take too long. With `jitter` 0.1 each
        sleep is longer by a random share of up to a tenth, within the timeout. With a ``ManualClock`` the thread
        doesn't sleep: the wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
        return waiting.wait(self, key, cost, timeout, jitter, rate, burst)

    def wait_async(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Awaited[bool]:
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter, rate, burst))

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> holding.Limited:
        """A decorator: each call of the function, or each run of the coroutine, first waits for `cost` permits.

        Also a ``with`` or ``async with`` block, which waits at its beginning. Both raise ``LimitExceeded`` if the
        permits don't come within `timeout`. The permits are spent, however the call or the block ends.

        `key` is a key, or for a decorator a callable that makes a key from the call's arguments.
        """
        return holding.Limited(self, key, cost, timeout, jitter)

    def exceeded(self, key: Key, cost: int = 1) -> LimitExceeded:
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
        decision = self.peek(key, cost)
        return LimitExceeded(self.name, decision.limit, decision.retry_after)

    def attempt_for(self, key: Any, cost: Any) -> Attempt:
        attempt = Attempt()
        attempt.tag, attempt.charge = self.tag_of(key), self.charge_for(cost, self.params)
        return attempt

    def check(self, attempt: Attempt, now_ns: int) -> bool:
        attempt.verdict = self.look(attempt.tag, attempt.charge, now_ns)
        return attempt.verdict.allowed

    def commit(self, attempt: Attempt, now_ns: int) -> bool:
        if attempt.charge.amount:
            attempt.verdict = self.decide(attempt.tag, attempt.charge, now_ns)
        return attempt.verdict.allowed

    def roll_back(self, attempt: Attempt, now_ns: int) -> None:
        # A request that was allowed because the table was full has left no charge.
        if attempt.charge.amount and not attempt.verdict.full:
            self.give_back(attempt.tag, now_ns, charge_left(attempt.charge, attempt.verdict))

    def decision_on(self, attempt: Attempt) -> Decision:
        return self.decision_by(attempt.charge, attempt.verdict)
