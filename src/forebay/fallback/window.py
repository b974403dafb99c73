"""Fixed and sliding windows. See core/algorithms/window.pyx, whose states are these: a time above, counts below."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, final

from forebay.calendars import Calendar, calendar_of
from forebay.core.arguments import kept
from forebay.core.limiter_arguments import check_align, fixed_bits, rounds_up, sliding_bits
from forebay.errors import InvalidLimiter, short_repr
from forebay.fallback.cell_limiter import CellAlgorithm, CellLimiter
from forebay.fallback.decision import Outlook
from forebay.fallback.keys import Key
from forebay.fallback.memory import Charge, LimitParams, Memory, Tag, Verdict
from forebay.rate import Rate, as_rate

__all__ = ["FixedWindow", "SlidingWindow", "WindowLimiter", "count_time", "low_mask"]

# Each as in the compiled core.
FRACTION_BITS: Final = 2
MOST_USED: Final = 7
CALENDAR_WINDOWS: Final = 64


def low_mask(low_bits: int) -> int:
    return (1 << low_bits) - 1


def count_time(time_ns: int, low_bits: int) -> int:
    """The upper part of a state: the time in quarters of a ns, rounded up to a quantum."""
    return ((time_ns << FRACTION_BITS) + low_mask(low_bits)) & ~low_mask(low_bits)


def time_of(state: int, low_bits: int) -> int:
    """The time in ns, less than a quantum later than the time that `count_time` got."""
    return (state & ~low_mask(low_bits)) >> FRACTION_BITS


def last_step_ns(params: LimitParams, time_ns: int) -> int:
    """The last moment up to `time_ns` at which a window that begins with a request may begin or end."""
    into_ns = time_ns % params.period_ns
    step = into_ns * params.steps // params.period_ns
    return time_ns - into_ns - (-step * params.period_ns // params.steps)


def steps_for(period_ns: int, low_bits: int) -> int:
    """The number of steps in a period. See `steps_for` in core/algorithms/counts.pxd."""
    quantum_ns = (low_mask(low_bits) >> FRACTION_BITS) + 1
    power = step_ns = 1
    while step_ns < quantum_ns:
        if step_ns == power:
            step_ns = 2 * power
        elif step_ns == 2 * power:
            step_ns = 5 * power
        else:
            step_ns = power = 10 * power
    if period_ns % step_ns == 0 and step_ns < period_ns:
        return period_ns // step_ns
    return period_ns // quantum_ns


@dataclass(slots=True)
class Counted:
    """A state, decoded at a given time."""

    count: int
    previous: int
    time: int
    """The upper part of a state of that window."""
    end_ns: int
    left_ns: int
    """The time from now to the end of the window."""


class Fixed(CellAlgorithm):
    """Windows by the clock. A subclass has others."""

    def end_ns(self, params: LimitParams, tag: Tag, now_ns: int) -> int:
        """The end of the window that contains now."""
        return now_ns + params.period_ns - (now_ns + params.phase_ns) % params.period_ns

    def later_end_ns(self, params: LimitParams, end_ns: int, time_ns: int) -> int:
        """The end of a window that is later than the one that ends at `end_ns`, by its state's time."""
        return end_ns + (time_ns - end_ns) // params.period_ns * params.period_ns

    def counted(self, params: LimitParams, tag: Tag, state: int, now_ns: int) -> Counted:
        time = state & ~low_mask(params.low_bits)
        end_ns = self.end_ns(params, tag, now_ns)
        own_time = count_time(end_ns, params.low_bits)
        count = 0
        if time >= own_time:
            count = (state & low_mask(params.low_bits)) >> params.used_bits
            if time > own_time:
                own_time = time
                end_ns = self.later_end_ns(params, end_ns, time_of(state, params.low_bits))
        return Counted(count, 0, own_time, end_ns, end_ns - now_ns)

    def state_of(self, params: LimitParams, counted: Counted, count: int) -> int:
        level = min(MOST_USED, count.bit_length()) & low_mask(params.used_bits)
        return counted.time | count << params.used_bits | level

    def empty(self, params: LimitParams, counted: Counted) -> int:
        """The state of a window whose whole count was given back."""
        return 0

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        counted = self.counted(charge.params, tag, state, now_ns)
        if counted.count > charge.room:
            return None
        return self.state_of(charge.params, counted, counted.count + charge.amount)

    def convert(
        self, tag: Tag, state: int, now_ns: int, old: LimitParams, new: LimitParams, keep: str, most: int
    ) -> int | None:
        """The state under another limit; None if the key has used nothing. `most` is what it can count."""
        counted = self.counted(new, tag, state, now_ns)
        if counted.count == 0:
            return None
        return self.state_of(new, counted, converted(old, new, keep, counted.count, most))

    def give_back(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        params = charge.params
        counted = self.counted(params, tag, state, now_ns)
        if was_charged_before(charge, state) or counted.count == 0:
            return None
        left = counted.count - min(counted.count, charge.amount)
        return self.state_of(params, counted, left) if left else self.empty(params, counted)

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        counted = self.counted(charge.params, verdict.tag, verdict.state, verdict.now_ns)
        return Outlook(
            max(charge.params.limit - counted.count, 0),
            retry_after_ns=0 if verdict.allowed else counted.left_ns,
            reset_after_ns=counted.left_ns if counted.count else 0,
        )


class Staggered(Fixed):
    """Each key's windows begin at an offset of its own."""

    def __init__(self, memory: Memory, tells_use: bool) -> None:
        self._secret = memory.secret(b"stagger")
        self._tells_use = tells_use

    def end_ns(self, params: LimitParams, tag: Tag, now_ns: int) -> int:
        digest = blake2b(repr(tag).encode(errors="surrogatepass"), key=self._secret, digest_size=8).digest()
        phase_ns = params.phase_ns + int.from_bytes(digest) * params.period_ns // 2**64
        return now_ns + params.period_ns - (now_ns + phase_ns) % params.period_ns

    def used(self, state: int, now_ns: int) -> int | None:
        return state & MOST_USED if self._tells_use else None


class First(Staggered):
    """A key's window begins with its first request."""

    def counted(self, params: LimitParams, tag: Tag, state: int, now_ns: int) -> Counted:
        rounded_ns = time_of(state, params.low_bits)
        # The time in the state is less than a quantum later than the window's end.
        if rounded_ns > now_ns and last_step_ns(params, rounded_ns) > now_ns:
            end_ns = last_step_ns(params, rounded_ns)
            time = state & ~low_mask(params.low_bits)
            count = (state & low_mask(params.low_bits)) >> params.used_bits
        else:
            end_ns = last_step_ns(params, now_ns) + params.period_ns
            time = count_time(end_ns, params.low_bits)
            count = 0
        return Counted(count, 0, time, end_ns, end_ns - now_ns)

    def empty(self, params: LimitParams, counted: Counted) -> int:
        # The window stays, even with a count of 0: earlier decisions have reported its end.
        return self.state_of(params, counted, 0)


class ByCalendar(Fixed):
    """Windows of a calendar."""

    def __init__(self, memory: Memory, calendar: Calendar) -> None:
        self._wall_ns, self._calendar = memory.wall_epoch_ns, calendar
        self._edges = self._edges_from(memory.now_ns())

    def _edges_from(self, now_ns: int) -> list[int]:
        edges_ns = self._calendar.edges_ns(now_ns + self._wall_ns, CALENDAR_WINDOWS)
        return [edge_ns - self._wall_ns for edge_ns in edges_ns]

    def end_ns(self, params: LimitParams, tag: Tag, now_ns: int) -> int:
        if not self._edges[0] <= now_ns < self._edges[CALENDAR_WINDOWS // 2]:
            self._edges = self._edges_from(now_ns)
        return next(edge_ns for edge_ns in self._edges if edge_ns > now_ns)

    def later_end_ns(self, params: LimitParams, end_ns: int, time_ns: int) -> int:
        # If the clock was set back by more windows than are known, this is late by less than a quantum.
        if time_ns >= self._edges[CALENDAR_WINDOWS]:
            return time_ns
        return max(edge_ns for edge_ns in self._edges if edge_ns <= time_ns)


def was_charged_before(charge: Charge, state: int) -> bool:
    """Whether the charge to be given back belongs to another window than the state."""
    charged = charge.charged_state
    return charged is not None and (charged ^ state) & ~low_mask(charge.params.low_bits) != 0


class Sliding(CellAlgorithm):
    """The count of a window, and the previous one's. The state's time is the end of the window after it."""

    def counted(self, params: LimitParams, state: int, now_ns: int) -> Counted:
        time = state & ~low_mask(params.low_bits)
        count_bits = params.low_bits - params.previous_bits
        count = state & low_mask(count_bits)
        end_ns = now_ns + params.period_ns - (now_ns + params.phase_ns) % params.period_ns
        counted = Counted(0, 0, count_time(end_ns + params.period_ns, params.low_bits), end_ns, end_ns - now_ns)
        if time == count_time(end_ns, params.low_bits):
            # The state belongs to the window before ours.
            counted.previous = shifted(params, count)
        elif time >= counted.time:
            counted.count = count
            counted.previous = (state & low_mask(params.low_bits)) >> count_bits
            if time > counted.time:
                # The state's window is later than ours. None of it has passed: now counts as its beginning.
                counted.time = time
                windows = (time_of(state, params.low_bits) - end_ns) // params.period_ns - 1
                counted.end_ns += windows * params.period_ns
                counted.left_ns = params.period_ns
        return counted

    def state_of(self, params: LimitParams, counted: Counted) -> int:
        return counted.time | counted.previous << (params.low_bits - params.previous_bits) | counted.count

    def take(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        counted = self.counted(charge.params, state, now_ns)
        if estimate(charge.params, counted) > charge.room:
            return None
        counted.count += charge.amount
        return self.state_of(charge.params, counted)

    def convert(
        self, tag: Tag, state: int, now_ns: int, old: LimitParams, new: LimitParams, keep: str, most: int
    ) -> int | None:
        """The state under another limit; None if the key has used nothing. `most` is what it can count."""
        counted = self.counted(new, state, now_ns)
        used = estimate(new, counted)
        if used == 0:
            return None
        if keep == "share":
            counted.count = converted(old, new, keep, counted.count, most)
            counted.previous = converted(old, new, keep, counted.previous, low_mask(new.previous_bits))
        else:
            part, used = used - counted.count, converted(old, new, keep, used, most)
            counted.count = max(used - part, 0)
            if part > used:
                # The most of the previous window whose part now is `used`.
                if new.rounds_up:
                    whole = used * new.period_ns // counted.left_ns
                else:
                    whole = -(-(used + 1) * new.period_ns // counted.left_ns) - 1
                counted.previous = min(counted.previous, shifted(new, whole))
        return self.state_of(new, counted)

    def give_back(self, tag: Tag, state: int, now_ns: int, charge: Charge) -> int | None:
        params = charge.params
        counted = self.counted(params, state, now_ns)
        from_count = min(counted.count, charge.amount)
        from_previous = min(counted.previous, (charge.amount - from_count) >> params.previous_shift)
        if was_charged_before(charge, state) or not (from_count or from_previous):
            return None
        counted.count -= from_count
        counted.previous -= from_previous
        return self.state_of(params, counted)

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        params = charge.params
        counted = self.counted(params, verdict.state, verdict.now_ns)
        # If the state's window is later than ours, the time before that window adds to the wait.
        to_end_ns = counted.end_ns - verdict.now_ns
        used = estimate(params, counted)
        return Outlook(
            max(params.limit - used, 0),
            retry_after_ns=0 if verdict.allowed else until_estimate(params, counted, to_end_ns, charge.room),
            reset_after_ns=until_estimate(params, counted, to_end_ns, 0) if used else 0,
        )


def converted(old: LimitParams, new: LimitParams, keep: str, used: int, most: int) -> int:
    """How much of the new limit a key has used that has used so much of the old one."""
    if keep == "used":
        return used
    if keep == "share":
        return min(-(-used * new.limit // old.limit), most)
    return new.limit - min(max(old.limit - used, 0), new.limit)


def shifted(params: LimitParams, count: int) -> int:
    """A previous count in its unit, rounded up."""
    return (count + low_mask(params.previous_shift)) >> params.previous_shift


def estimate(params: LimitParams, counted: Counted) -> int:
    """The permits of the last period."""
    weighted = (counted.previous << params.previous_shift) * counted.left_ns
    share = -(-weighted // params.period_ns) if params.rounds_up else weighted // params.period_ns
    return counted.count + share


def until_estimate(params: LimitParams, counted: Counted, to_end_ns: int, most: int) -> int:
    """The time until the estimate is at most `most`, if nothing else is counted. The window ends after `to_end_ns`."""
    if counted.count <= most:
        left_ns = left_for(params, counted.previous, most - counted.count)
        if left_ns:
            return to_end_ns - min(left_ns, to_end_ns)
        # Only after the window's end. Then its count is the previous one, which may be rounded above `most`.
    return to_end_ns + params.period_ns - left_for(params, shifted(params, counted.count), most)


def left_for(params: LimitParams, previous: int, most: int) -> int:
    """The most time that may be left of a window for the previous count's part to be at most `most`."""
    whole = previous << params.previous_shift
    if whole <= most:
        return params.period_ns
    if params.rounds_up:
        return most * params.period_ns // whole
    return -(-(most + 1) * params.period_ns // whole) - 1


class WindowLimiter(CellLimiter):
    """Base class of the limiters that count in windows; not used by itself."""

    rate: Rate
    algorithm: Fixed | Sliding
    most: int
    """The largest limit that fits into its states."""

    def count_by(self, rate: Rate, period_ns: int) -> LimitParams:
        self.rate = rate
        return LimitParams(rate.limit, rate.limit, period_ns, phase_ns=self.memory.wall_epoch_ns % period_ns)

    def rate_of_call(self, rate: Any) -> Rate:
        """The rate that was given for one call, checked."""
        rate_of_call = as_rate(rate)
        if rate_of_call.period_ns != self.params.period_ns:
            raise InvalidLimiter(
                f"{self!r} counts in windows of its own period, so the rate for one call must have the same, which "
                f"{rate_of_call} has not"
            )
        return rate_of_call

    def params_for_call(self, rate: Any, burst: Any) -> LimitParams:
        if burst is not None:
            raise InvalidLimiter(f"{self!r} has no burst")
        if rate is None:
            return self.params
        rate = self.rate_of_call(rate)
        if rate.limit > self.most:
            raise InvalidLimiter(
                f"{self!r} can count up to {self.most}, not to {rate.limit}: make it with the largest of its rates"
            )
        return replace(self.params, limit=rate.limit, rate_limit=rate.limit)

    def convert(self, key: Key, old_rate: str | Rate, *, rate: str | Rate | None = None, keep: str = "used") -> int:
        """Carry what `key` has used of its window over to another limit. Returns how many permits remain under it.

        The new limit is the limiter's own, or that of `rate`, as in ``hit``. `keep` is what stays the same:
        ``"permits"``, the number that remain, at most the new limit; ``"share"``, their share of the limit, rounded
        against the key; ``"used"``, the number that were used. A key that has used nothing is as a new one.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``.
        """
        tag = self.tag_of(key)
        kept(keep)
        old: Any = old_rate
        if old is None:
            as_rate(old)  # type: ignore[arg-type]  # which raises
        old, new = self.params_for_call(old, None), self.params_for_call(rate, None)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            state = self.table.find(tag)
            left = None if state is None else self.algorithm.convert(tag, state, now_ns, old, new, keep, self.most)
            if left is not None:
                self.table.put(tag, left, self.algorithm)
            return self.peek(key, rate=rate).remaining


@final
class FixedWindow(WindowLimiter):
    """At most as many permits in each window as the rate allows per period.

    ``FixedWindow(store, "login", "5/minute")``. Windows begin at multiples of the period by the wall clock. With
    ``align="first"`` a key's window begins with its first request after the last window ended (up to 10 ns earlier for
    each permit of the limit). With ``align="stagger"`` each key's windows begin at an offset of its own. With
    ``align="calendar", timezone="Europe/Berlin"`` windows are the days, weeks, months or years of the calendar.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    align: str
    timezone: Any

    def __init__(
        self, store: Any, name: str, rate: str | Rate, align: str = "clock", *, timezone: str | None = None
    ) -> None:
        self.begin(store, name)
        check_align(align, timezone)
        self.align, self.timezone = align, timezone
        self._calendar: Calendar | None = None
        if align == "calendar":
            calendar, limit = calendar_of(rate, timezone)
            self._calendar = calendar
            params = self.count_by(calendar.rate(limit), calendar.shortest_ns)
            self.algorithm = ByCalendar(self.memory, calendar)
            windows = f"{calendar.unit} {timezone}"
        else:
            rate = as_rate(rate)
            params = self.count_by(rate, rate.period_ns)
            windows = str(params.period_ns)
        low_bits, used_bits = fixed_bits(params.limit, params.period_ns, align)
        steps = steps_for(params.period_ns, low_bits) if align == "first" else 0
        self.params = replace(params, low_bits=low_bits, used_bits=used_bits, steps=steps)
        self.most = low_mask(low_bits - used_bits)
        if align == "first":
            self.algorithm = First(self.memory, bool(used_bits))
        elif align == "stagger":
            self.algorithm = Staggered(self.memory, bool(used_bits))
        elif align == "clock":
            self.algorithm = Fixed()
        self.register("FixedWindow", f"fixed {align} {windows} {low_bits} {steps}", self.params.limit)

    def __repr__(self) -> str:
        align = "" if self.align == "clock" else f" align={self.align!r}"
        if self._calendar is None:
            return f"<FixedWindow {self.name!r} {self.rate}{align}>"
        return (
            f"<FixedWindow {self.name!r} {self.params.limit} per {self._calendar.unit}{align} "
            f"timezone={self.timezone!r}>"
        )

    def rate_of_call(self, rate: Any) -> Rate:
        if self._calendar is None:
            return super().rate_of_call(rate)
        calendar, limit = calendar_of(rate, self.timezone)
        if calendar.unit != self._calendar.unit:
            raise InvalidLimiter(
                f"{self!r} counts in windows of its own unit, so the rate for one call must have the same, which "
                f"{short_repr(rate)} has not"
            )
        return calendar.rate(limit)


@final
class SlidingWindow(WindowLimiter):
    """At most as many permits as the rate allows, in an estimate of the period up to now.

    ``SlidingWindow(store, "api", "1000/hour")``. The estimate is the current window's count, plus the previous window's
    count times the share of that window that the last period still covers. `rounding` (``"up"`` or ``"down"``) rounds
    the previous window's part; the default is up for limits to 5, down for larger ones.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    def __init__(self, store: Any, name: str, rate: str | Rate, *, rounding: str | None = None) -> None:
        self.begin(store, name)
        rate = as_rate(rate)
        params = self.count_by(rate, rate.period_ns)
        up, bits = rounds_up(rounding, params.limit), sliding_bits(rate)
        self.params = replace(
            params,
            rounds_up=up,
            low_bits=bits.low_bits,
            previous_bits=bits.previous_bits,
            previous_shift=bits.previous_shift,
        )
        # A previous count that is rounded up must not overflow its bits.
        self.most = low_mask(bits.low_bits - bits.previous_bits) if bits.previous_shift == 0 else params.limit
        self.algorithm = Sliding()
        self.register("SlidingWindow", f"sliding {params.period_ns} {' '.join(map(str, bits))}", params.limit)

    @property
    def rounding(self) -> str:
        return "up" if self.params.rounds_up else "down"

    def __repr__(self) -> str:
        rounding = "" if self.params.rounds_up == rounds_up(None, self.params.limit) else f" rounding={self.rounding!r}"
        return f"<SlidingWindow {self.name!r} {self.rate}{rounding}>"
