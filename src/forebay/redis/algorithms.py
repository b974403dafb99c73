"""Builds the arguments of the scripts and decodes their replies: one class for each algorithm.

Pure functions over whole microseconds, without I/O. The scripts in ``scripts/`` decide. A class here checks a limiter's
parameters, turns a cost into a script's arguments, and makes a ``Decision`` of the state that the script has left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

from forebay.core.arguments import MOST_PERMITS
from forebay.core.decision import Decision, _decision
from forebay.core.limiter_arguments import rounds_up
from forebay.errors import CostExceedsLimit, InvalidLimiter, InvalidRate, short_repr
from forebay.rate import NEVER_NS, Duration, Rate, as_delay_ns, as_period_ns, as_rate
from forebay.redis.keys import digest
from forebay.segment import layout

__all__ = [
    "Algorithm",
    "BucketedWindow",
    "Charge",
    "Concurrency",
    "Credits",
    "FixedWindow",
    "Gcra",
    "IntervalBucket",
    "LeakyBucket",
    "SlidingLog",
    "SlidingWindow",
]

US: Final = 1_000_000
# A state lies at most 71 years ahead of now. So its time since 1970 stays below 2**53 for more than a century.
MAX_AHEAD_US: Final = 2**51
MAX_REDIS_BUCKETS: Final = 1000


class Charge(NamedTuple):
    """The permits that a request needs, as its script takes them."""

    cost: int
    arguments: tuple[int | bytes, ...]
    """For the script: the amount, the most that may be used before the charge, and the algorithm's own arguments."""
    max_wait_us: int = 0
    """How far ahead the request may be booked."""


class Seen(NamedTuple):
    """A script's reply for one limiter."""

    allowed: bool
    now_us: int
    numbers: Sequence[int]
    """The script's ``report`` for this limiter: the state that the request has left."""


class Algorithm(ABC):
    """One limit: the arguments of its script and the meaning of its replies."""

    script: ClassVar[str]
    number_count: ClassVar[int]
    """How many numbers the script replies with for this limit."""
    may_free_early: ClassVar[bool] = False
    suffix: bytes
    """The end of the name of a state's Redis key. Limiters of one name and suffix share a state."""
    limit: int
    """The most permits that can be allowed at once."""

    def charge(self, cost: int, name: str) -> Charge:
        if cost > self.limit:
            raise CostExceedsLimit(cost, self.limit, name)
        return self.charge_for(cost)

    @abstractmethod
    def charge_for(self, cost: int) -> Charge: ...

    @cached_property
    def unit(self) -> Charge:
        return self.charge_for(1)

    def tier(self, rate: str | Rate | None, burst: int | None, limiter: object) -> Algorithm:
        """The algorithm for a call with a rate or burst of its own. Raises ``InvalidLimiter`` if there is none."""
        raise InvalidLimiter(f"{limiter!r} has one limit for all calls: make a second limiter for another one")

    def allow_wait(self, charge: Charge, max_wait_us: int) -> Charge:
        """The charge of a request that may be booked up to `max_wait_us` ahead, if the algorithm can book ahead."""
        return charge

    def booked_delay_us(self, charge: Charge, seen: Seen) -> int:
        """The time from now until a booked request may proceed."""
        return 0

    def refused_delay_us(self, charge: Charge, seen: Seen) -> int:
        """The delay that a denied request would have needed."""
        return self.times_us(charge, seen)[1]

    @abstractmethod
    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        """The permits left, the time until this request may be allowed, and the time until nothing counts any more."""

    def cancellation(self, charge: Charge, seen: Seen) -> Charge:
        """The charge that takes `charge` back, if that counts. Its room is a number of the state that `charge` left."""
        return Charge(charge.cost, (charge.arguments[0], seen.numbers[0], *charge.arguments[2:]))

    def usual_decision(self, name: str, reply: Sequence[int]) -> Decision:
        """The decision of a request for one permit."""
        return self.decision(name, self.unit, Seen(reply[0] != 0, reply[1], reply[3:]))

    def decision(self, name: str, charge: Charge, seen: Seen) -> Decision:
        remaining, retry_us, reset_us = self.times_us(charge, seen)
        return _decision(
            name, seen.allowed, self.limit, remaining, 1, 1, 0 if seen.allowed else 1000 * retry_us, 1000 * reset_us
        )


def period_us(period_ns: int) -> int:
    us, rest = divmod(period_ns, 1000)
    if rest:
        raise InvalidRate(
            f"a limiter over Redis knows whole microseconds, so it can't have a period of {period_ns} ns: round it"
        )
    return us


def rate_us(rate: str | Rate) -> tuple[Rate, int]:
    """A rate, and its period in microseconds."""
    checked = as_rate(rate)
    us = period_us(checked.period_ns)
    if checked.limit > us:
        raise InvalidRate(f"{checked} is too fast for a limiter over Redis: at most one permit per microsecond")
    return checked, us


def whole(number: Any, what: str, name: str, most: int | None = None) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or (most and number > most):
        bounds = "of at least 1" if most is None else f"from 1 to {most}"
        raise InvalidLimiter(f"the {what} of limiter {name!r} is a whole number {bounds}, not {short_repr(number)}")
    return int(number)


class Credits(Algorithm):
    """Prepaid permits, which no time brings."""

    script = "credits"
    number_count = 1
    suffix = b"credits"
    limit = MOST_PERMITS

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        return seen.numbers[0], NEVER_NS // 1000, NEVER_NS // 1000

    def decision(self, name: str, charge: Charge, seen: Seen) -> Decision:
        left = seen.numbers[0]
        return _decision(name, seen.allowed, left, left, 1, 1, 0 if seen.allowed else NEVER_NS, NEVER_NS)


class Gcra(Algorithm):
    """A token bucket with continuous refill, or a minimum interval."""

    script = "gcra"
    number_count = 1
    suffix = b"tat"  # a limiter of any rate can read this state
    burst_name: ClassVar[str] = "burst"

    def __init__(self, name: str, rate: str | Rate, burst: int | None) -> None:
        self.name = name
        self.rate, self.period_us = rate_us(rate)
        self.limit = whole(self.rate.limit if burst is None else burst, self.burst_name, name)
        unit_us = self.amount_us(1)
        self.tolerance_us = min(self.limit * unit_us, self.limit * self.period_us // self.rate.limit + unit_us - 1)
        if self.tolerance_us > MAX_AHEAD_US:
            raise InvalidLimiter(
                f"limiter {name!r} would take more than {MAX_AHEAD_US // (365 * 86_400 * US)} years to refill a "
                f"{self.burst_name} of {short_repr(burst)} at {self.rate}: lower the {self.burst_name} "
                f"or raise the rate"
            )
        self.rate_limit, self.period_ns = self.rate.limit, self.rate.period_ns
        self.unit_room_us = self.tolerance_us - unit_us
        self.due_us = self.tolerance_us
        """If a TAT is at most this far ahead of now, no booking is still waiting for its time."""

    def amount_us(self, cost: int) -> int:
        return -(-cost * self.period_us // self.rate.limit)

    def charge_for(self, cost: int) -> Charge:
        amount_us = self.amount_us(cost)
        return Charge(cost, (amount_us, self.tolerance_us - amount_us, self.due_us, self.rate_limit, self.period_us))

    def with_room(self, charge: Charge, room_us: int, max_wait_us: int = 0) -> Charge:
        amount_us, _, *others = charge.arguments
        return Charge(charge.cost, (amount_us, room_us, *others), max_wait_us)

    def tier(self, rate: str | Rate | None, burst: int | None, limiter: object) -> Algorithm:
        if rate is None:
            raise InvalidLimiter("a burst for one call needs a rate beside it: rate=..., burst=...")
        return self.sharing(Gcra(self.name, rate, burst))

    def sharing(self, tier: Gcra) -> Gcra:
        """A tier whose bookings wait on one state with the limiter's own: neither takes the other's time."""
        tier.due_us = min(tier.due_us, self.due_us)
        return tier

    def allow_wait(self, charge: Charge, max_wait_us: int) -> Charge:
        room_us = whole_numbers(charge)[1]
        return self.with_room(charge, room_us + min(max_wait_us, MAX_AHEAD_US - self.tolerance_us))

    def booked_delay_us(self, charge: Charge, seen: Seen) -> int:
        return max(seen.numbers[0] - seen.now_us - self.tolerance_us, 0)

    def refused_delay_us(self, charge: Charge, seen: Seen) -> int:
        return seen.numbers[0] - seen.now_us + whole_numbers(charge)[0] - self.tolerance_us

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        decision = self.decision(self.name, charge, seen)
        return decision.remaining, decision.retry_after_ns // 1000, decision.reset_after_ns // 1000

    def usual_decision(self, name: str, reply: Sequence[int]) -> Decision:
        verdict, now_us, _, tat_us = reply
        return self.decided(name, verdict != 0, self.unit_room_us, tat_us, now_us)

    def decision(self, name: str, charge: Charge, seen: Seen) -> Decision:
        return self.decided(name, seen.allowed, whole_numbers(charge)[1], seen.numbers[0], seen.now_us)

    def decided(self, name: str, allowed: bool, room_us: int, tat_us: int, now_us: int) -> Decision:
        """Counts what is left as time, so that the decision also knows when there is one permit more."""
        ahead_us = tat_us - now_us
        if ahead_us < 0:
            if tat_us < 0:
                # Not a time, but how many permits more than the burst there are.
                return _decision(name, allowed, self.limit, self.limit - tat_us, 1, 1, 0, 0)
            ahead_us = 0
        left_us = self.tolerance_us - ahead_us
        return _decision(
            name,
            allowed,
            self.limit,
            1000 * left_us if left_us > 0 else 0,
            self.rate_limit,
            self.period_ns,
            0 if allowed or ahead_us <= room_us else 1000 * (ahead_us - room_us),
            1000 * ahead_us,
        )


def whole_numbers(charge: Charge) -> tuple[int, ...]:
    return charge.arguments  # type: ignore[return-value]  # only a charge of Concurrency has a name among them


class SameBurst(Gcra):
    """GCRA whose calls may have any rate, all with the limiter's own burst."""

    def tier(self, rate: str | Rate | None, burst: int | None, limiter: object) -> Algorithm:
        if burst is not None:
            raise InvalidLimiter(f"{limiter!r} has no burst")
        return self.sharing(type(self)(self.name, rate or self.rate, self.limit))


class MinInterval(SameBurst):
    @classmethod
    def of(cls, name: str, interval: Any) -> MinInterval:
        return cls(name, Rate.per_ns(1, as_period_ns(interval)), 1)


class LeakyBucket(SameBurst):
    burst_name = "capacity"

    def __init__(self, name: str, rate: str | Rate, capacity: int | None) -> None:
        super().__init__(name, rate, capacity)
        # Every place in the queue is a booking.
        self.due_us = 0

    def allow_wait(self, charge: Charge, max_wait_us: int) -> Charge:
        """The queue never holds more than its capacity; for this request less, if it would wait too long."""
        return self.with_room(charge, min(whole_numbers(charge)[1], max_wait_us), max_wait_us)

    def booked_delay_us(self, charge: Charge, seen: Seen) -> int:
        return max(seen.numbers[0] - seen.now_us - whole_numbers(charge)[0], 0)

    def refused_delay_us(self, charge: Charge, seen: Seen) -> int:
        """The time until the departure, if that would be too late; else the time until there is room."""
        ahead_us = seen.numbers[0] - seen.now_us
        return ahead_us if ahead_us > charge.max_wait_us else ahead_us + whole_numbers(charge)[0] - self.tolerance_us


class IntervalBucket(Algorithm):
    script = "interval"
    number_count = 2

    def __init__(self, name: str, rate: str | Rate, burst: int | None) -> None:
        self.rate, self.period_us = rate_us(rate)
        self.limit = whole(self.rate.limit if burst is None else burst, "burst", name)
        self.suffix = f"intervals-{digest(self.rate.limit, self.period_us)}".encode()
        self.full_us = (self.refills(self.limit) + 1) * self.period_us
        if self.full_us > MAX_AHEAD_US:
            raise InvalidLimiter(
                f"limiter {name!r} would take too long to refill a burst of {short_repr(burst)} at {self.rate}: "
                "lower the burst or raise the rate"
            )

    def refills(self, permits: int) -> int:
        return -(-permits // self.rate.limit)

    def charge_for(self, cost: int) -> Charge:
        return self.charge_with(cost, 0)

    def charge_with(self, cost: int, max_wait_us: int) -> Charge:
        room = self.limit - cost
        return Charge(cost, (cost, room, max_wait_us, self.limit, self.rate.limit, self.period_us))

    def tier(self, rate: str | Rate | None, burst: int | None, limiter: object) -> Algorithm:
        raise InvalidLimiter(
            f"{limiter!r} has one limit for all calls: refill='continuous' takes another rate for each"
        )

    def allow_wait(self, charge: Charge, max_wait_us: int) -> Charge:
        return self.charge_with(charge.cost, min(max_wait_us, MAX_AHEAD_US - self.full_us))

    def cancellation(self, charge: Charge, seen: Seen) -> Charge:
        return Charge(charge.cost, (charge.cost, *seen.numbers, *charge.arguments[3:]))

    def missing(self, seen: Seen) -> int:
        period, missing = seen.numbers
        return max(missing - (seen.now_us // self.period_us - period) * self.rate.limit, 0) if missing else 0

    def delay_us(self, permits: int, now_us: int) -> int:
        """The time until `permits` permits have been refilled."""
        return self.refills(permits) * self.period_us - now_us % self.period_us if permits > 0 else 0

    def booked_delay_us(self, charge: Charge, seen: Seen) -> int:
        return self.delay_us(self.missing(seen) - self.limit, seen.now_us)

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        missing = self.missing(seen)
        return (
            max(self.limit - missing, 0),
            self.delay_us(missing + charge.cost - self.limit, seen.now_us),
            self.delay_us(missing, seen.now_us),
        )


class Window(Algorithm):
    """An algorithm that counts in windows of one period."""

    def __init__(self, rate: str | Rate) -> None:
        self.rate, self.period_us = rate_us(rate)
        self.limit = self.rate.limit

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.period_us))

    @abstractmethod
    def with_rate(self, rate: Rate) -> Window:
        """The same algorithm with the rate of one call."""

    def tier(self, rate: str | Rate | None, burst: int | None, limiter: object) -> Algorithm:
        if burst is not None or rate is None:
            raise InvalidLimiter(f"{limiter!r} has no burst")
        rate = as_rate(rate)
        if rate.period_ns != self.rate.period_ns:
            raise InvalidLimiter(
                f"{limiter!r} counts in windows of its own period, so the rate for one call must have the same, which "
                f"{rate} has not"
            )
        return self.with_rate(rate)


class FixedWindow(Window):
    script = "fixed"
    number_count = 2

    def __init__(self, rate: str | Rate, align: str) -> None:
        super().__init__(rate)
        self.align = align
        self.phase_us = -1 if align == "first" else 0
        self.suffix = f"window-{digest(align, self.period_us)}".encode()

    def with_rate(self, rate: Rate) -> Window:
        return FixedWindow(rate, self.align)

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.period_us, self.phase_us))

    def staggered(self, charge: Charge, fingerprint: bytes) -> Charge:
        """The charge of a key whose windows begin at a time of their own, by the key's fingerprint.

        The key's slot in a cluster doesn't determine that time.
        """
        phase_us = int(fingerprint, 16) % self.period_us
        return Charge(charge.cost, (*charge.arguments[:3], phase_us))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        end_us, count = seen.numbers
        left_us = end_us - seen.now_us
        return max(self.limit - count, 0), left_us, left_us if count else 0


class SlidingWindow(Window):
    script = "sliding"
    number_count = 3

    def __init__(self, rate: str | Rate, rounding: str | None = None) -> None:
        super().__init__(rate)
        self.rounding = "up" if rounds_up(rounding, self.limit) else "down"
        self.suffix = f"sliding-{digest(self.period_us)}".encode()  # either rounding

    def with_rate(self, rate: Rate) -> Window:
        return SlidingWindow(rate, self.rounding)

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.period_us, int(self.rounding == "up")))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        end_us, before, count = seen.numbers
        to_end_us = end_us - seen.now_us
        weighted = before * min(to_end_us, self.period_us)
        estimate = count + (-(-weighted // self.period_us) if self.rounding == "up" else weighted // self.period_us)

        def until_us(most: int) -> int:
            if count <= most:
                return to_end_us - min(self.left_us(before, most - count), to_end_us)
            return to_end_us + self.period_us - self.left_us(count, most)

        retry_us = until_us(max(self.limit - charge.cost, 0))
        return max(self.limit - estimate, 0), retry_us, until_us(0) if estimate else 0

    def left_us(self, before: int, most: int) -> int:
        """The longest rest of a window at which the weighted previous count is at most `most`."""
        if before <= most:
            return self.period_us
        if self.rounding == "up":
            return most * self.period_us // before
        return -(-(most + 1) * self.period_us // before) - 1


class BucketedWindow(Algorithm):
    script = "bucketed"
    number_count = 4

    def __init__(self, name: str, rate: str | Rate, buckets: int) -> None:
        self.rate, self.period_us = rate_us(rate)
        self.limit = self.rate.limit
        if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= MAX_REDIS_BUCKETS:
            raise InvalidLimiter(
                f"over Redis the buckets of limiter {name!r} are a whole number from 1 to {MAX_REDIS_BUCKETS}, as each "
                f"decision reads all of them; not {short_repr(buckets)}"
            )
        if buckets > self.period_us:
            raise InvalidLimiter(f"{buckets} buckets of limiter {name!r} would be shorter than a microsecond")
        self.buckets = int(buckets)
        self.bucket_us = -(-self.period_us // self.buckets)
        self.suffix = f"buckets-{digest(self.buckets, self.bucket_us)}".encode()

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.buckets, self.bucket_us))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        _, total, retry_at_us, reset_at_us = seen.numbers
        return max(self.limit - total, 0), max(retry_at_us - seen.now_us, 0), max(reset_at_us - seen.now_us, 0)


class SlidingLog(Algorithm):
    script = "log"
    number_count = 3

    def __init__(self, rate: str | Rate) -> None:
        self.rate, self.period_us = rate_us(rate)
        self.limit = self.rate.limit
        self.suffix = f"log-{digest(self.period_us)}".encode()

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.period_us))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        date_us, used, retry_at_us = seen.numbers
        reset_us = date_us + self.period_us - seen.now_us if used else 0
        return max(self.limit - used, 0), max(retry_at_us - seen.now_us, 0), reset_us


class Concurrency(Algorithm):
    script = "concurrency"
    number_count = 3
    may_free_early = True
    suffix = b"held"  # any limit, any lease

    def __init__(self, name: str, limit: int, lease: Any) -> None:
        self.limit = whole(limit, "limit", name, most=layout.MAX_CONCURRENCY_LIMIT)
        self.lease_us = period_us(as_period_ns(lease))

    def charge_for(self, cost: int) -> Charge:
        return Charge(cost, (cost, self.limit - cost, self.lease_us, b"h0"))

    def named(self, charge: Charge, name: bytes) -> Charge:
        """A charge whose permits have a unique name: two requests never share one."""
        return Charge(charge.cost, (*charge.arguments[:3], name))

    def times_us(self, charge: Charge, seen: Seen) -> tuple[int, int, int]:
        used, retry_at_us, reset_at_us = seen.numbers
        return max(self.limit - used, 0), max(retry_at_us - seen.now_us, 0), max(reset_at_us - seen.now_us, 0)


def delay_us(max_delay: Duration | None) -> int:
    """A longest delay in microseconds, rounded down, so that no booking is due later. None is no limit."""
    return 2**62 if max_delay is None else as_delay_ns(max_delay, "max_delay is None or") // 1000
