"""Limiters by GCRA whose state is a theoretical arrival time: LeakyBucket, MinInterval, and the base of TokenBucket."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from forebay.core.arguments import MOST_PERMITS
from forebay.errors import InvalidLimiter, LimitExceeded, short_repr
from forebay.fallback.cell_limiter import CellAlgorithm, CellLimiter
from forebay.fallback.decision import Outlook
from forebay.fallback.keys import Key
from forebay.fallback.memory import NEVER, Charge, LimitParams, Memory, Tag, Verdict
from forebay.rate import MAX_PERIOD_NS, Rate, as_period_ns, as_rate

__all__ = ["PERMITS", "Adding", "Gcra", "GcraLimiter", "LeakyBucket", "MinInterval", "most_ahead_ns"]

YEAR_NS: Final = 365 * 86_400 * 10**9
# 73 years: as in the compiled core, whose states have 62 bits for a time.
MAX_AHEAD_NS: Final = 2**61 - 1
# A state above this is no time, but so many permits more than the burst.
PERMITS: Final = NEVER


def most_ahead_ns(memory: Memory) -> int:
    """The furthest that a state is ahead of now."""
    return 2 * MAX_PERIOD_NS if memory.follows_python else MAX_AHEAD_NS


class Gcra(CellAlgorithm):
    """The state is the time at which the bucket is full again, or the queue is empty. See core/algorithms/gcra.pxd.

    A token bucket with `initial` gives a new key fewer permits; the others come in `missing_ns`: its state is later by
    that. See core/algorithms/initial_bucket.pxd.

    A key with more permits than the burst has a state above `PERMITS`.
    """

    def __init__(self, most_ahead_ns: int) -> None:
        self.most_ahead_ns = most_ahead_ns

    def expiry_ns(self, state: int) -> int:
        return state

    def charge(self, permits: int, params: LimitParams) -> Charge:
        amount = -(-permits * params.period_ns // params.rate_limit)
        return Charge(amount, params.tolerance_ns - amount, params)

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        if state > PERMITS:
            permits, above = permits_of(charge), above_of(charge.params, state)
            if permits < above:
                return state - permits
            return now_ns + self.charge(permits - above, charge.params).amount
        start_ns = state_now(charge.params, state, now_ns)
        return start_ns + charge.amount if start_ns - now_ns <= charge.room else None

    def give_back(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        full_ns = now_ns + charge.params.missing_ns
        amount = charge.amount
        if state > PERMITS or (charge.charged_state or 0) > PERMITS:
            # A cancelled charge of permits above the burst gives back to such permits only.
            if not above_of(charge.params, state) or (charge.charged_state or 0) < PERMITS:
                return None
            return min(state + permits_of(charge), PERMITS + MOST_PERMITS)
        if state <= full_ns:
            return None
        if charge.charged_state is not None:
            # Later bookings keep their times, so no other request can take the time of this one.
            is_overtaken = charge.charged_state != state and state - now_ns > charge.params.due_ns
            if charge.charged_state <= full_ns or is_overtaken:
                return None
            # The rest has been refilled.
            amount = min(amount, charge.charged_state - full_ns)
        return max(state - amount, full_ns)

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        params = charge.params
        if verdict.state > PERMITS:
            return Outlook(params.limit + above_of(params, verdict.state))
        ahead_ns = state_now(params, verdict.state, verdict.now_ns) - verdict.now_ns
        return Outlook(
            max(params.tolerance_ns - ahead_ns, 0),
            params.rate_limit,
            params.period_ns,
            0 if verdict.allowed else max(ahead_ns - charge.room, 0),
            ahead_ns - params.missing_ns if verdict.state > verdict.now_ns else 0,
        )

    def allow_wait(self, charge: Charge, max_wait_ns: int) -> None:
        charge.room += min(max_wait_ns, self.most_ahead_ns - charge.params.tolerance_ns)

    def booked_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        return max(ahead_of(verdict) - charge.params.tolerance_ns, 0)

    def refused_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        return ahead_of(verdict) + charge.amount - charge.params.tolerance_ns


class Adding(Gcra):
    """``add`` as a request: it charges the permits that it adds, to what is missing in the bucket and then above it."""

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        permits, params = charge.amount, charge.params
        if state > PERMITS:
            permits += state - PERMITS
        elif state > now_ns:
            # As many permits fill the bucket; the last one perhaps in part.
            missing = -(-(state - now_ns) * params.rate_limit // params.period_ns)
            if permits < missing:
                return state - permits * params.period_ns // params.rate_limit
            permits -= missing
        if permits > MOST_PERMITS:
            return None
        return PERMITS + permits if permits else now_ns


def permits_of(charge: Charge) -> int:
    """The permits of a charge, from its time."""
    return charge.amount * charge.params.rate_limit // charge.params.period_ns


def above_of(params: LimitParams, state: int) -> int:
    """The permits above the burst. A limiter that adds none has none, though another one of its name may add some."""
    return max(state - PERMITS, 0) if params.may_exceed else 0


def state_now(params: LimitParams, state: int, now_ns: int) -> int:
    """The state that a key with this state has now."""
    return max(state, now_ns + params.missing_ns) if state > now_ns else now_ns + 2 * params.missing_ns


def ahead_of(verdict: Verdict) -> int:
    """How far a state is ahead of now, in ns."""
    ahead_ns: int = max(verdict.state - verdict.now_ns, 0)
    return 0 if verdict.state > PERMITS else ahead_ns


class Queue(Gcra):
    """Requests depart one after the other."""

    def allow_wait(self, charge: Charge, max_wait_ns: int) -> None:
        """Limit the queue to the places that depart within `max_wait_ns`; it never has more than its capacity."""
        charge.max_wait_ns = max_wait_ns
        charge.room = min(charge.room, max_wait_ns)

    def refused_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        """The time until its departure, if that would be too late; else until the queue has room."""
        ahead_ns = ahead_of(verdict)
        return ahead_ns if ahead_ns > charge.max_wait_ns else ahead_ns + charge.amount - charge.params.tolerance_ns

    def booked_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        """The time until all earlier requests have departed."""
        return max(ahead_of(verdict) - charge.amount, 0)


class GcraLimiter(CellLimiter):
    """Base class of the limiters by GCRA; not used by itself."""

    rate: Rate

    def gcra_params(self, rate: Rate, burst: Any, burst_name: str) -> LimitParams:
        """The params of a rate and a burst."""
        if isinstance(burst, bool) or not isinstance(burst, int) or burst < 1:
            raise InvalidLimiter(
                f"the {burst_name} of limiter {self.name!r} is a whole number of at least 1, not {short_repr(burst)}"
            )
        limit, period_ns, most_ns = rate.limit, rate.period_ns, most_ahead_ns(self.memory)
        unit_ns = -(-period_ns // limit)
        tolerance_ns = min(burst * unit_ns, burst * period_ns // limit + unit_ns - 1)
        if tolerance_ns > most_ns:
            raise InvalidLimiter(
                f"limiter {self.name!r} would take more than {most_ns // YEAR_NS} years to refill a "
                f"{burst_name} of {short_repr(burst)} at {rate}: lower the {burst_name} or raise the rate"
            )
        return LimitParams(burst, limit, period_ns, tolerance_ns, due_ns=tolerance_ns)

    def params_for_call(self, rate: Any, burst: Any) -> LimitParams:
        if burst is not None:
            raise InvalidLimiter(f"{self!r} has no burst")
        if rate is None:
            return self.params
        return self.shared(self.gcra_params(as_rate(rate), self.params.limit, "capacity"))

    def shared(self, params: LimitParams) -> LimitParams:
        """Bookings of this limiter and of a call wait on one state: neither takes the other's time."""
        return replace(params, due_ns=min(params.due_ns, self.params.due_ns))


class LeakyBucket(GcraLimiter):
    """A queue of `capacity` places that empties at `rate`, however requests arrive.

    ``LeakyBucket(store, "printer", "1/second", capacity=4)``. ``reserve`` and ``wait`` give each request a time of
    departure; they deny when the queue is full. ``allow`` and ``hit`` also take a place in the queue.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    capacity: int

    def __init__(self, store: Any, name: str, rate: str | Rate, capacity: int) -> None:
        self.begin(store, name)
        self.rate = as_rate(rate)
        # Every place in the queue is a booking.
        self.params = replace(self.gcra_params(self.rate, capacity, "capacity"), due_ns=0)
        self.capacity = capacity
        self.algorithm = Queue(most_ahead_ns(self.memory))
        self.register("LeakyBucket", "", self.capacity)

    def __repr__(self) -> str:
        return f"<LeakyBucket {self.name!r} {self.rate}, capacity={self.capacity}>"

    def exceeded(self, key: Key, cost: int = 1) -> LimitExceeded:
        """The exception for a wait in which `cost` permits of `key` didn't come in time.

        If the queue has room, its departures were too late: then ``retry_after`` is the time until it is empty.
        """
        decision = self.peek(key, cost)
        return LimitExceeded(self.name, decision.limit, decision.retry_after or decision.reset_after)


class MinInterval(GcraLimiter):
    """At least `interval` from one allowed request of a key to the next.

    ``MinInterval(store, "sms", "30s")``. `interval` is text, a number of seconds or a ``timedelta``. ``interval_ns`` is
    the same in nanoseconds. In a full store a new key is denied, unless the store has an `on_full`.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    interval_ns: int

    def __init__(self, store: Any, name: str, interval: Any) -> None:
        self.begin(store, name)
        self.interval_ns = as_period_ns(interval)
        self.rate = Rate.per_ns(1, self.interval_ns)
        self.params = self.gcra_params(self.rate, 1, "burst")
        self.algorithm = Gcra(most_ahead_ns(self.memory))
        self.register("MinInterval", "", 1)

    def __repr__(self) -> str:
        return f"<MinInterval {self.name!r} {self.rate}>"
