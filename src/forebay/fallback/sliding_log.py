"""Sliding log: the times of the newest permits, as many as the limit. See core/algorithms/sliding_log.pyx."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple, final

from forebay.core.limiter_arguments import log_bits, log_shape
from forebay.fallback.cell_limiter import CellAlgorithm, CellLimiter
from forebay.fallback.decision import Outlook
from forebay.fallback.memory import Charge, LimitParams, Memory, Tag, Verdict
from forebay.fallback.window import FRACTION_BITS, count_time
from forebay.rate import Rate, as_rate

__all__ = ["SlidingLog"]


class Entry(NamedTuple):
    """A permit: when it was allowed, and whether it was given back."""

    time_ns: int
    is_back: bool


class Log(NamedTuple):
    """The permits of a key, oldest first. There are at most as many as the limit; those before them have all left."""

    leaves_ns: int
    """When the newest leaves the window, rounded up to a quantum."""
    entries: tuple[Entry, ...]


class SlidingEntries(CellAlgorithm):
    """Any limit + 1 permits that are kept span more than a window."""

    fresh = Log(0, ())

    def __init__(self, memory: Memory, params: LimitParams) -> None:
        self._memory, self._params = memory, params

    def leaves_ns(self, time_ns: int) -> int:
        return count_time(time_ns + self._params.period_ns, self._params.low_bits) >> FRACTION_BITS

    def next_ns(self, entry: Entry) -> int:
        """The earliest date of a permit that takes this entry's place."""
        if entry.is_back:
            # Behind the quantum of its date: in the compiled core, another process may write any time within.
            return self.leaves_ns(entry.time_ns) - self._params.period_ns + 1
        return entry.time_ns + self._params.period_ns

    def past_ns(self, state: Log, now_ns: int) -> int:
        """The time by which to judge what has left: the reading, or the newest permit's, but only up to the clock."""
        newest_ns = newest_of(state)
        return now_ns if newest_ns <= now_ns else max(now_ns, min(newest_ns, self._memory.last_ns()))

    def counting(self, state: Log, past_ns: int) -> tuple[Entry, ...]:
        """The entries that count: the newest ones, as the oldest leave and are given back first."""

        def counts(entry: Entry) -> bool:
            return not entry.is_back and entry.time_ns + self._params.period_ns > past_ns

        return state.entries[bisect_right(state.entries, False, key=counts) :]

    def take(self, tag: Tag, state: Log, now_ns: int, charge: Charge) -> Log | None:
        params = self._params
        date_ns = max(now_ns, newest_of(state))
        if charge.amount > params.limit - len(self.counting(state, self.past_ns(state, now_ns))):
            return None
        kept = params.limit - charge.amount
        # Of those that the new entries replace, none left the window or was given back after that date.
        replaced = state.entries[: max(len(state.entries) - kept, 0)]
        date_ns = max([date_ns, *map(self.next_ns, replaced)])
        entries = state.entries[len(replaced) :] + (Entry(date_ns, False),) * charge.amount
        return Log(self.leaves_ns(date_ns), entries)

    def give_back(self, tag: Tag, state: Log, now_ns: int, charge: Charge) -> Log | None:
        """Give back the oldest entries that count."""
        if state.leaves_ns <= now_ns:
            return None
        if charge.charged_state is not None:
            quantum_ns = 1 << self._params.low_bits >> FRACTION_BITS
            if charge.charged_state.leaves_ns <= now_ns + quantum_ns:
                return None
        counting = self.counting(state, self.past_ns(state, now_ns))
        if not counting:
            return None
        gone = state.entries[: len(state.entries) - len(counting)]
        back = tuple(Entry(entry.time_ns, True) for entry in counting[: charge.amount])
        return Log(state.leaves_ns, gone + back + counting[charge.amount :])

    def expiry_ns(self, state: Log) -> int:
        return state.leaves_ns

    def used(self, state: Log, now_ns: int) -> int:
        return max(len(self.counting(state, now_ns)), 1) - 1

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        params, state, now_ns = self._params, verdict.state, verdict.now_ns
        counting = self.counting(state, self.past_ns(state, now_ns))
        available = params.limit - len(counting)
        retry_ns = reset_ns = 0
        if not verdict.allowed:
            last = counting[charge.amount - available - 1]
            retry_ns = max(last.time_ns + params.period_ns - now_ns, 0)
        if counting:
            reset_ns = max(newest_of(state) + params.period_ns - now_ns, 0)
        return Outlook(available, retry_after_ns=retry_ns, reset_after_ns=reset_ns)


def newest_of(state: Log) -> int:
    """The time of the newest permit."""
    return state.entries[-1].time_ns if state.entries else 0


@final
class SlidingLog(CellLimiter):
    """Never more permits than the rate allows in any span as long as the period: exact, at the price of memory.

    ``SlidingLog(store, "export", "10/hour", keys=10_000)``. `keys` is how many keys can be live at once. A refund gives
    back the oldest permits that still count; taken again, they are dated behind those: by a clock that stands still,
    some ns ahead of it. A limit above 2**23, or above the period in ns, is refused. A decision is O(limit).

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    rate: Rate
    keys: int

    def __init__(self, store: Any, name: str, rate: str | Rate, *, keys: int) -> None:
        self.begin(store, name)
        self.rate = as_rate(rate)
        shape = log_shape(self.rate, keys, name)
        limit, period_ns = self.rate.limit, self.rate.period_ns
        self.params = LimitParams(limit, limit, period_ns, low_bits=log_bits(self.rate))
        self.algorithm = SlidingEntries(self.memory, self.params)
        encoding = f"log {limit} {period_ns}"
        self.keys = self.open_extent(encoding, shape)
        self.register("SlidingLog", encoding, limit)

    @staticmethod
    def bytes_needed(rate: str | Rate, *, keys: int) -> int:
        """How many bytes a sliding log of this rate and number of keys takes with the compiled core."""
        return log_shape(as_rate(rate), keys, "").bytes

    def __repr__(self) -> str:
        return f"<SlidingLog {self.name!r} {self.rate}, keys={self.keys}>"

    def forget(self, tag: Tag, now_ns: int) -> None:
        # Its entries stay, given back: later ones are dated behind them.
        self.table.give_back(tag, now_ns, self.algorithm, Charge(self.params.limit, 0, self.params))
