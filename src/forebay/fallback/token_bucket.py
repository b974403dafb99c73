"""Token bucket: with continuous refill, perhaps with fewer permits for new keys, or with refill in intervals."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, final

from forebay.core.arguments import kept, permits_of, too_many_permits
from forebay.core.limiter_arguments import check_refill, interval_refill_ns, interval_start_ns
from forebay.errors import CostExceedsLimit, InvalidLimiter, StoreFull
from forebay.fallback.cell_limiter import CellAlgorithm, whole_cost
from forebay.fallback.decision import Outlook
from forebay.fallback.gcra import PERMITS, Adding, Gcra, GcraLimiter, most_ahead_ns
from forebay.fallback.keys import Key
from forebay.fallback.memory import Charge, LimitParams, Tag, Verdict
from forebay.rate import Rate, as_rate

__all__ = ["TokenBucket"]


class Intervals(CellAlgorithm):
    """The state has the boundary at which the bucket is full again. See core/algorithms/interval_bucket.pxd.

    Here a state is that boundary and the number of permits of its refill that fit, less one.
    """

    fresh = (0, 0)

    def __init__(self, longest_wait_ns: int) -> None:
        self.longest_wait_ns = longest_wait_ns

    def expiry_ns(self, state: tuple[int, int]) -> int:
        return state[0]

    def take(self, tag: Tag, state: tuple[int, int], now_ns: int, charge: Charge) -> tuple[int, int] | None:
        params = charge.params
        end_ns = end_of_period(params, now_ns)
        deficit = deficit_of(params, state, end_ns) + charge.amount
        if delay_of(params, deficit, now_ns, end_ns) > charge.max_wait_ns:
            return None
        return state_of_deficit(params, deficit, end_ns)

    def give_back(self, tag: Tag, state: tuple[int, int], now_ns: int, charge: Charge) -> tuple[int, int] | None:
        params = charge.params
        end_ns = end_of_period(params, now_ns)
        deficit = deficit_of(params, state, end_ns)
        amount = charge.amount
        if charge.charged_state is not None:
            if charge.charged_state != state and deficit > params.limit:
                # Later bookings keep their times, so no other request can take the permits of this one.
                return None
            # The rest has been refilled.
            amount = min(amount, deficit_of(params, charge.charged_state, end_ns))
        amount = min(amount, deficit)
        return state_of_deficit(params, deficit - amount, end_ns) if amount else None

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        params, now_ns = charge.params, verdict.now_ns
        end_ns = end_of_period(params, now_ns)
        deficit = deficit_of(params, verdict.state, end_ns)
        return Outlook(
            max(params.limit - deficit, 0),
            retry_after_ns=0 if verdict.allowed else delay_of(params, deficit + charge.amount, now_ns, end_ns),
            reset_after_ns=end_ns - now_ns + (boundaries_for(params, deficit) - 1) * params.period_ns if deficit else 0,
        )

    def allow_wait(self, charge: Charge, max_wait_ns: int) -> None:
        charge.max_wait_ns = min(max_wait_ns, self.longest_wait_ns)

    def booked_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        end_ns = end_of_period(charge.params, verdict.now_ns)
        return delay_of(charge.params, deficit_of(charge.params, verdict.state, end_ns), verdict.now_ns, end_ns)

    def refused_delay_ns(self, charge: Charge, verdict: Verdict) -> int:
        end_ns = end_of_period(charge.params, verdict.now_ns)
        deficit = deficit_of(charge.params, verdict.state, end_ns) + charge.amount
        return delay_of(charge.params, deficit, verdict.now_ns, end_ns)


def end_of_period(params: LimitParams, now_ns: int) -> int:
    return now_ns + params.period_ns - (now_ns + params.phase_ns) % params.period_ns


def deficit_of(params: LimitParams, state: tuple[int, int], end_ns: int) -> int:
    """The number of missing permits in the period that ends at `end_ns`."""
    full_ns, rest = state
    return 0 if full_ns < end_ns else (full_ns - end_ns) // params.period_ns * params.rate_limit + rest + 1


def boundaries_for(params: LimitParams, permits: int) -> int:
    """The number of refills that bring `permits` permits."""
    return -(-permits // params.rate_limit)


def state_of_deficit(params: LimitParams, deficit: int, end_ns: int) -> tuple[int, int]:
    if deficit == 0:
        return 0, 0
    others = boundaries_for(params, deficit) - 1
    return end_ns + others * params.period_ns, deficit - others * params.rate_limit - 1


def delay_of(params: LimitParams, deficit: int, now_ns: int, end_ns: int) -> int:
    """The time until a bucket that lacks `deficit` permits, perhaps more than its limit, lacks at most its limit."""
    if deficit <= params.limit:
        return 0
    return end_ns - now_ns + (boundaries_for(params, deficit - params.limit) - 1) * params.period_ns


@final
class TokenBucket(GcraLimiter):
    """Up to `burst` permits at once, refilled at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. With ``refill="continuous"`` permits come back one by
    one. With ``refill="interval"`` the permits of a whole period come back at once, at the start of each period: at
    multiples of their length by the wall clock, or, with `start`, whole periods before and after that. With
    ``initial=5`` a new key has 5 permits, and the others come at the rate from its first request on.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    burst: int
    refill: str
    initial: Any
    start: Any

    def __init__(
        self,
        store: Any,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: str = "continuous",
        *,
        initial: int | None = None,
        start: datetime | None = None,
    ) -> None:
        self.begin(store, name)
        self.rate = as_rate(rate)
        self.params = self.gcra_params(self.rate, self.rate.limit if burst is None else burst, "burst")
        self.burst = self.params.limit
        check_refill(refill, initial, start, self.burst, name)
        self.refill, self.initial, self.start = refill, initial, start
        most_ns = most_ahead_ns(self.memory)
        self.algorithm = Gcra(most_ns)
        encoding = ""
        if refill == "interval":
            encoding = self._refill_in_intervals(most_ns, start)
        elif initial is not None:
            encoding = self._start_with(initial, most_ns)
        else:
            self.params = replace(self.params, may_exceed=True)
        self.register("TokenBucket", encoding, self.burst if initial is None else initial)

    def _refill_in_intervals(self, most_ns: int, start: datetime | None) -> str:
        """Returns the encoding of states."""
        start_ns = interval_start_ns(start)
        period_ns = self.params.period_ns
        phase_ns = (self.memory.wall_epoch_ns - start_ns) % period_ns
        self.params = replace(self.params, phase_ns=phase_ns)
        self.algorithm = Intervals(most_ns - interval_refill_ns(self.rate, self.burst, most_ns, self.name))
        return f"intervals {self.params.rate_limit} {period_ns} {start_ns % period_ns}"

    def _start_with(self, initial: int, most_ns: int) -> str:
        # A new key allows as much as a bucket with this burst.
        new_key = self.gcra_params(self.rate, initial, "initial")
        missing_ns = self.params.tolerance_ns - new_key.tolerance_ns
        if missing_ns > most_ns - self.params.tolerance_ns:
            raise InvalidLimiter(
                f"limiter {self.name!r} would remember a full bucket of {self.burst} at {self.rate} for too long: "
                "lower the burst, or raise the rate or the initial permits"
            )
        tolerance_ns = self.params.tolerance_ns + missing_ns
        self.params = replace(self.params, missing_ns=missing_ns, tolerance_ns=tolerance_ns, due_ns=tolerance_ns)
        return f"initial {missing_ns}"

    def __repr__(self) -> str:
        refill = "" if self.refill == "continuous" else ", refill='interval'"
        initial = "" if self.initial is None else f", initial={self.initial}"
        start = "" if self.start is None else f", start={self.start.isoformat()!r}"
        return f"<TokenBucket {self.name!r} {self.rate}, burst={self.burst}{refill}{initial}{start}>"

    def charge_for(self, cost: Any, params: LimitParams) -> Charge:
        if self.initial is not None and whole_cost(cost) > self.initial:
            # A new key never has as much, and nothing comes to a key before its first request is charged.
            raise CostExceedsLimit(cost, self.initial, self.name)
        return super().charge_for(cost, params)

    def params_for_call(self, rate: Any, burst: Any) -> LimitParams:
        if rate is None and burst is None:
            return self.params
        if self.refill == "interval":
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: refill='continuous' takes another rate for each"
            )
        if self.initial is not None:
            raise InvalidLimiter(
                f"{self!r} has one limit for all calls: without initial= a token bucket takes another rate for each"
            )
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        rate = as_rate(rate)
        params = self.shared(self.gcra_params(rate, rate.limit if burst is None else burst, "burst"))
        return replace(params, may_exceed=True)

    def add(self, key: Key, permits: int, *, rate: str | Rate | None = None, burst: int | None = None) -> int:
        """Give `key` so many permits more, also above the burst. Returns how many it then has.

        As long as a key has more permits than the burst, none are refilled, and the store keeps the key. ``refund``
        never fills a bucket above its burst. One request still costs at most the burst. `rate` and `burst` are those of
        ``hit``; at any rate, a request takes as many permits above the burst as it costs.

        Raises ``InvalidCost``, ``StoreFull`` and what ``peek`` raises: then nothing was added.
        """
        number = permits_of(permits, self.name)
        params = self.params_for_call(rate, burst)
        if not params.may_exceed:
            raise InvalidLimiter(
                f"{self!r} can't have permits above its burst: a token bucket without initial= and with "
                "refill='continuous' can"
            )
        if not number:
            return self.peek(key, 0, rate=rate, burst=burst).remaining
        tag = self.tag_of(key)
        charge = Charge(number, 0, params)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            adding = Adding(most_ahead_ns(self.memory))
            verdict = self.table.decide(tag, now_ns, adding, charge, self.on_full, self.counts)
            if verdict.full:
                raise StoreFull(self.name)
            if not verdict.allowed:
                raise too_many_permits(number, self.name)
            return self.decision_by(charge, verdict).remaining

    def convert(
        self,
        key: Key,
        old_rate: str | Rate,
        old_burst: int | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        keep: str = "permits",
    ) -> int:
        """Carry what `key` has used over to another limit. Returns how many permits remain under it.

        The new limit is the limiter's own, or that of `rate` and `burst`, as in ``hit``. `keep` is what stays the same:
        ``"permits"``, the number that remain, at most the new burst; ``"share"``, their share of the burst;
        ``"used"``, the number that are missing. Parts of a permit are rounded against the key, and bookings stay
        booked. A key whose bucket is full is as a new one.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``.
        """
        tag = self.tag_of(key)
        kept(keep)
        old, new = self.params_for_call(as_rate(old_rate), old_burst), self.params_for_call(rate, burst)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            state = self.table.find(tag)
            # Permits above a burst stay as they are, above the new one.
            if state is not None and now_ns < state < PERMITS:
                ahead_ns = converted_ns(old, new, keep, most_ahead_ns(self.memory), state - now_ns)
                self.table.put(tag, now_ns + ahead_ns, self.algorithm)
            return self.peek(key, rate=rate, burst=burst).remaining


def converted_ns(old: LimitParams, new: LimitParams, keep: str, most_ns: int, ahead_ns: int) -> int:
    """How far ahead of now a state becomes that was so far ahead."""

    def scaled(value: int, by: int, divisor: int, most: int) -> int:
        return min(-(-value * by // divisor), most)

    if keep == "share":
        return scaled(ahead_ns, new.tolerance_ns, old.tolerance_ns, most_ns)
    if keep == "used":
        permits = scaled(ahead_ns, old.rate_limit, old.period_ns, most_ns)
        return scaled(permits, new.period_ns, new.rate_limit, most_ns)
    if ahead_ns > old.tolerance_ns:
        # Booked ahead.
        permits = scaled(ahead_ns - old.tolerance_ns, old.rate_limit, old.period_ns, most_ns)
        return new.tolerance_ns + scaled(permits, new.period_ns, new.rate_limit, most_ns - new.tolerance_ns)
    permits = min((old.tolerance_ns - ahead_ns) * old.rate_limit // old.period_ns, new.limit)
    return new.tolerance_ns - scaled(permits, new.period_ns, new.rate_limit, new.tolerance_ns)
