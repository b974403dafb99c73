"""The algorithms that count, as rules for the oracle: what is in use and the cost together are at most the limit."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeVar

from oracle import Rule

__all__ = ["BucketedWindow", "ClockWindow", "Counting", "FirstWindow", "IntervalBucket", "Log", "SlidingWindow"]

State = TypeVar("State")
Entries = tuple[tuple[int, int], ...]


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
    """`burst` permits, of which `limit` are put back at every whole `period_ns`: (period, permits missing in it).

    A clock that goes back, to before some of them were put back, finds those missing too.
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
        return (period + missing) * self.period_ns  # at the latest, with a permit per period


@dataclass(frozen=True)
class ClockWindow(Counting[tuple[int, int]]):
    """A count per window, windows beginning at `phase_ns` and every `period_ns` from there: (window, count)."""

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
class FirstWindow(Counting[tuple[int, int]]):
    """A count per window, a window beginning at the first request after the one before: (end, count)."""

    fresh = (0, 0)

    def used(self, state: tuple[int, int], now_ns: int) -> int:
        end_ns, count = state
        return count if now_ns < end_ns else 0

    def charged(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        end_ns, count = state
        return (end_ns, count + cost) if now_ns < end_ns else (now_ns + self.period_ns, cost)

    def refunded(self, state: tuple[int, int], now_ns: int, cost: int) -> tuple[int, int]:
        return state[0], state[1] - min(cost, self.used(state, now_ns))

    def over_ns(self, state: tuple[int, int]) -> int:
        return state[0]


@dataclass(frozen=True)
class SlidingWindow(Counting[tuple[int, int, int]]):
    """The count of this window, and of the one before as much as it overlaps: (window, count before, count).

    What is given back is taken from this window's count first.
    """

    fresh = (-1, 0, 0)

    def at(self, state: tuple[int, int, int], now_ns: int) -> tuple[int, int, int]:
        """The state as of the window of `now_ns`."""
        window, before, count = state
        passed = now_ns // self.period_ns - window
        if passed <= 0:
            return window, before, count
        return window + passed, count if passed == 1 else 0, 0

    def used(self, state: tuple[int, int, int], now_ns: int) -> int:
        window, before, count = self.at(state, now_ns)
        elapsed_ns = max(now_ns - window * self.period_ns, 0)
        return count + before * (self.period_ns - elapsed_ns) // self.period_ns

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
    """The sum of the newest `buckets` buckets: (bucket, count) of each, the newest last.

    What is given back is taken from the last bucket in which something was allowed, and not from those before it.
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
class Log(Counting[Entries]):
    """Every permit for `period_ns` after it was given: (time, permits) of each admission, the newest last.

    Those that are given back are the oldest that count.
    """

    fresh = ()

    def counting(self, state: Entries, now_ns: int) -> list[tuple[int, int]]:
        moment_ns = max([now_ns, *(time_ns for time_ns, _ in state)])
        return [entry for entry in state if entry[0] + self.period_ns > moment_ns]

    def used(self, state: Entries, now_ns: int) -> int:
        return sum(permits for _, permits in self.counting(state, now_ns))

    def charged(self, state: Entries, now_ns: int, cost: int) -> Entries:
        return *self.counting(state, now_ns), (max([now_ns, *(time_ns for time_ns, _ in state)]), cost)

    def refunded(self, state: Entries, now_ns: int, cost: int) -> Entries:
        counting = self.counting(state, now_ns)
        left = []
        for time_ns, permits in counting:
            taken = min(cost, permits)
            cost -= taken
            left.append((time_ns, permits - taken))
        return tuple(left) if counting else state

    def over_ns(self, state: Entries) -> int:
        return max((time_ns for time_ns, _ in state), default=0) + self.period_ns
