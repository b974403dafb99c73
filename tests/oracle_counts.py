"""The counting algorithms as rules for the oracle: the permits in use plus the cost are at most the limit."""

from __future__ import annotations

import datetime as dt
from abc import abstractmethod
from dataclasses import dataclass
from typing import Final, TypeVar
from zoneinfo import ZoneInfo

from oracle import Rule

__all__ = [
    "BucketedWindow",
    "CalendarWindow",
    "ClockWindow",
    "Counting",
    "FirstWindow",
    "Held",
    "IntervalBucket",
    "Log",
    "SlidingWindow",
    "SortedLog",
    "first_window_in_memory",
]

NS: Final = 1_000_000_000
State = TypeVar("State")
Entries = tuple[tuple[int, int], ...]
Written = tuple[tuple[int, int, bool], ...]
Ends = tuple[int, ...]


@dataclass(frozen=True)
class Counting(Rule[State]):
    limit: int
    period_ns: int

    @property
    def most(self) -> int:
        return self.limit

    @abstractmethod
    def used(self, state: State, now_ns: int) -> int: ...

    def allows(self, state: State, now_ns: int, cost: int) -> bool:
        return self.used(state, now_ns) + cost <= self.most


@dataclass(frozen=True)
class IntervalBucket(Counting[tuple[int, int]]):
    """`burst` permits; `limit` of them are put back at every multiple of `period_ns`. State: (period, permits missing).

    A clock that goes back to before a refill finds the refilled permits missing again.
    """

    burst: int
    fresh = (0, 0)

    @property
    def most(self) -> int:
        return self.burst

    def used(self, state: tuple[int, int], now_ns: int) -> int:
        period, missing = state
        if missing == 0:
            return 0
        return max(missing - (now_ns // self.period_ns - period) * self.limit, 0)

    def charged(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        return now_ns // self.period_ns, self.used(state, now_ns) + cost

    def refunded(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        used = self.used(state, now_ns)
        return self.charged(state, now_ns, -min(cost, used)) if used else state

    def has_place(self, state: tuple[int, int], now_ns: int, cost: int) -> bool:
        return True

    def delay_ns(self, state: tuple[int, int], now_ns: int, cost: int) -> int:
        return self.retry_after_ns(state, now_ns, cost)

    def over_ns(self, state: tuple[int, int]) -> int:
        period, missing = state
        return (period + missing) * self.period_ns  # the latest possible end: one permit per period


@dataclass(frozen=True)
class ClockWindow(Counting[tuple[int, int]]):
    """A count per window; windows begin at `phase_ns` plus multiples of `period_ns`. State: (window, count)."""

    phase_ns: int = 0
    fresh = (-1, 0)

    def window(self, now_ns: int) -> int:
        return (now_ns - self.phase_ns) // self.period_ns

    def used(self, state: tuple[int, int], now_ns: int) -> int:
        window, count = state
        return count if window >= self.window(now_ns) else 0

    def charged(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        return max(state[0], self.window(now_ns)), self.used(state, now_ns) + cost

    def refunded(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        used = self.used(state, now_ns)
        if used:
            return (state[0], used - cost) if used > cost else self.fresh
        return state

    def over_ns(self, state: tuple[int, int]) -> int:
        return (state[0] + 1) * self.period_ns + self.phase_ns


@dataclass(frozen=True)
class CalendarWindow(ClockWindow):
    """Days, weeks from Monday, months or years of a time zone in which every day has one midnight."""

    unit: str = "day"
    timezone: str = "UTC"

    def window(self, now_ns: int) -> int:
        local = dt.datetime.fromtimestamp(now_ns // NS, ZoneInfo(self.timezone))
        if self.unit in ("day", "week"):
            return local.toordinal() if self.unit == "day" else (local.toordinal() - 1) // 7
        return 12 * local.year + local.month if self.unit == "month" else local.year

    def over_ns(self, state: tuple[int, int]) -> int:
        following = state[0] + 1
        if state == self.fresh:
            return 0
        if self.unit in ("day", "week"):
            first = dt.date.fromordinal(following if self.unit == "day" else 7 * following + 1)
        elif self.unit == "month":
            first = dt.date((following - 1) // 12, (following - 1) % 12 + 1, 1)
        else:
            first = dt.date(following, 1, 1)
        midnight = dt.datetime(first.year, first.month, first.day, tzinfo=ZoneInfo(self.timezone))
        return int(midnight.timestamp()) * NS


@dataclass(frozen=True)
class FirstWindow(Counting[tuple[int, int]]):
    """A count per window; the first request after a window's end begins the next. State: (end, count).

    A window can begin at `steps` moments of a period, spaced as evenly as possible: it begins at the latest that is
    not in the future. With 0 steps it begins at any time.
    """

    steps: int = 0
    fresh = (0, 0)

    def used(self, state: tuple[int, int], now_ns: int) -> int:
        end_ns, count = state
        return count if now_ns < end_ns else 0

    def charged(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        end_ns, count = state
        return (end_ns, count + cost) if now_ns < end_ns else (self.begin_ns(now_ns) + self.period_ns, cost)

    def begin_ns(self, now_ns: int) -> int:
        steps = self.steps or self.period_ns
        return -(-(now_ns * steps // self.period_ns) * self.period_ns // steps)

    def refunded(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        return state[0], state[1] - min(cost, self.used(state, now_ns))

    def over_ns(self, state: tuple[int, int]) -> int:
        return state[0]


def first_window_in_memory(limit: int, period_ns: int) -> FirstWindow:
    """In memory: the larger the limit, the fewer bits a state has for its end, so the coarser the windows' begins.

    Three bits tell eviction how much is used, if they fit.
    """
    bits = limit.bit_length()
    if bits + 3 <= period_ns.bit_length():
        bits += 3
    apart_ns = 1 << max(bits - 2, 0)
    round_ns = next(step * 10**power for power in range(19) for step in (1, 2, 5) if step * 10**power >= apart_ns)
    divides = period_ns % round_ns == 0 and round_ns < period_ns
    return FirstWindow(limit, period_ns, period_ns // (round_ns if divides else apart_ns))


@dataclass(frozen=True)
class SlidingWindow(Counting[tuple[int, int, int]]):
    """This window's count plus the overlapping part of the previous count. State: (window, previous count, count).

    The overlapping part is rounded up or down; by default up for limits up to 5, else down. A refund reduces this
    window's count first.
    """

    rounding: str | None = None
    fresh = (-1, 0, 0)

    @property
    def rounds_up(self) -> bool:
        return self.limit <= 5 if self.rounding is None else self.rounding == "up"

    def at(self, state: tuple[int, int, int], now_ns: int) -> tuple[int, int, int]:
        """The state as seen from the window of `now_ns`."""
        window, before, count = state
        passed = now_ns // self.period_ns - window
        if passed <= 0:
            return window, before, count
        return window + passed, count if passed == 1 else 0, 0

    def used(self, state: tuple[int, int, int], now_ns: int) -> int:
        window, before, count = self.at(state, now_ns)
        elapsed_ns = max(now_ns - window * self.period_ns, 0)
        overlapping = before * (self.period_ns - elapsed_ns)
        return count + (-(-overlapping // self.period_ns) if self.rounds_up else overlapping // self.period_ns)

    def charged(self, state: tuple[int, int, int], now_ns: int, cost: int) -> tuple[int, int, int]:
        window, before, count = self.at(state, now_ns)
        return window, before, count + cost

    def refunded(self, state: tuple[int, int, int], now_ns: int, cost: int) -> tuple[int, int, int]:
        window, before, count = self.at(state, now_ns)
        from_count = min(cost, count)
        from_before = min(cost - from_count, before)
        return (window, before - from_before, count - from_count) if from_count or from_before else state

    def over_ns(self, state: tuple[int, int, int]) -> int:
        return (state[0] + 2) * self.period_ns


@dataclass(frozen=True)
class BucketedWindow(Counting[Entries]):
    """The sum of the newest `buckets` buckets. State: (bucket, count) pairs, the newest last.

    A refund reduces the last bucket in which a request was allowed, and no bucket before it.
    """

    buckets: int
    fresh = ()

    @property
    def bucket_ns(self) -> int:
        return -(-self.period_ns // self.buckets)

    def newest(self, state: Entries, now_ns: int) -> int:
        return max([now_ns // self.bucket_ns, *(bucket for bucket, _ in state)])

    def used(self, state: Entries, now_ns: int) -> int:
        newest = self.newest(state, now_ns)
        return sum(count for bucket, count in state if bucket > newest - self.buckets)

    def charged(self, state: Entries, now_ns: int, cost: int) -> Entries:
        return *state, (self.newest(state, now_ns), cost)

    def refunded(self, state: Entries, now_ns: int, cost: int) -> Entries:
        if not state:
            return state
        last = max(bucket for bucket, _ in state)
        given = sum(count for bucket, count in state if bucket == last)
        return *(entry for entry in state if entry[0] != last), (last, given - min(cost, given))

    def over_ns(self, state: Entries) -> int:
        return (self.newest(state, 0) + self.buckets) * self.bucket_ns


@dataclass(frozen=True)
class Log(Counting[Written]):
    """Every permit counts for `period_ns` after its date. State: (date, permits, refunded) of each admission in order.

    A refund marks the oldest permits that count. An admission that reuses their places is dated later than they were,
    past the end of their quantum: the low bits of a state hold a place in the ring and a lap.

    With `readings_differ`, a clock reading may be older than another process's; the newest reading decides which
    permits have expired.
    """

    readings_differ: bool = False
    fresh = ()

    def past_ns(self, state: Written, now_ns: int) -> int:
        return max(now_ns, newest_ns(state)) if self.readings_differ else now_ns

    def used(self, state: Written, now_ns: int) -> int:
        past_ns = self.past_ns(state, now_ns)
        return sum(permits for date_ns, permits, back in state if not back and date_ns + self.period_ns > past_ns)

    def charged(self, state: Written, now_ns: int, cost: int) -> Written:
        date_ns = max(now_ns, newest_ns(state))
        free = cost - (self.limit - sum(permits for _, permits, _ in state))
        taken, left = cut(state, max(free, 0))
        for entry_ns, _, back in taken:
            date_ns = max(date_ns, self.rounded_ns(entry_ns) + 1 if back else entry_ns + self.period_ns)
        return (*left, (date_ns, cost, False))

    def refunded(self, state: Written, now_ns: int, cost: int) -> Written:
        past_ns = self.past_ns(state, now_ns)
        after: Written = ()
        for entry in state:
            counts = not entry[2] and entry[0] + self.period_ns > past_ns
            back, kept = cut((entry,), cost if counts else 0)
            cost -= sum(permits for _, permits, _ in back)
            after += tuple((date_ns, permits, True) for date_ns, permits, _ in back) + kept
        return after

    def forgotten(self, state: Written, now_ns: int) -> Written:
        return self.refunded(state, now_ns, self.limit)

    def over_ns(self, state: Written) -> int:
        return newest_ns(state) + self.period_ns

    def rounded_ns(self, date_ns: int) -> int:
        quarters = 2 << (self.limit - 1).bit_length()
        return -(-4 * (date_ns + self.period_ns) // quarters) * quarters // 4 - self.period_ns


@dataclass(frozen=True)
class SortedLog(Counting[Entries]):
    """Every permit counts for `period_ns` after its date. State: (date, permits) of each admission, without a ring."""

    fresh = ()

    def past(self, state: Entries, now_ns: int) -> int:
        return max([now_ns, *(date for date, _ in state)])

    def live(self, state: Entries, now_ns: int) -> Entries:
        past = self.past(state, now_ns)
        return tuple((date, permits) for date, permits in state if date + self.period_ns > past)

    def used(self, state: Entries, now_ns: int) -> int:
        return sum(permits for _, permits in self.live(state, now_ns))

    def charged(self, state: Entries, now_ns: int, cost: int) -> Entries:
        return *self.live(state, now_ns), (self.past(state, now_ns), cost)

    def refunded(self, state: Entries, now_ns: int, cost: int) -> Entries:
        kept = []
        for date, permits in self.live(state, now_ns):
            back = min(cost, permits)
            cost -= back
            if permits > back:
                kept.append((date, permits - back))
        return tuple(kept) or self.fresh

    def over_ns(self, state: Entries) -> int:
        return state[-1][0] + self.period_ns if state else 0


@dataclass(frozen=True)
class Held(Counting[Ends]):
    """Permits held until their leases end; `period_ns` is the lease. A refund gives back those that end first."""

    fresh = ()

    def live(self, state: Ends, now_ns: int) -> Ends:
        return tuple(end for end in state if end > now_ns)

    def used(self, state: Ends, now_ns: int) -> int:
        return len(self.live(state, now_ns))

    def charged(self, state: Ends, now_ns: int, cost: int) -> Ends:
        return tuple(sorted((*self.live(state, now_ns), *[now_ns + self.period_ns] * cost)))

    def refunded(self, state: Ends, now_ns: int, cost: int) -> Ends:
        return self.live(state, now_ns)[cost:]

    def released(self, state: Ends, now_ns: int, cost: int) -> Ends:
        """The state without the permits that were taken just now."""
        kept = state[: len(state) - cost]
        assert state == (*kept, *[now_ns + self.period_ns] * cost)
        return kept

    def over_ns(self, state: Ends) -> int:
        return max(state, default=0)


def newest_ns(state: Written) -> int:
    return state[-1][0] if state else 0


def cut(state: Written, count: int) -> tuple[Written, Written]:
    """Split the state into the `count` oldest permits and the others."""
    first: Written = ()
    rest: Written = ()
    for date_ns, permits, back in state:
        taken = min(count, permits)
        count -= taken
        if taken:
            first += ((date_ns, taken, back),)
        if permits > taken:
            rest += ((date_ns, permits - taken, back),)
    return first, rest
