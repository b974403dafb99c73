"""Replaying requests through candidates, and the figures of each."""

from __future__ import annotations

import heapq
import itertools
import mmap
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from forebay.clock import ManualClock
from forebay.errors import ForebayError
from forebay.rate import Rate
from forebay.store import Store
from forebay.tuning.candidates import Candidate, candidates
from forebay.tuning.replay import Replay, demand, exact_log
from forebay.tuning.requests import REQUEST_BYTES, Keys

__all__ = ["Comparison", "Demand", "LeftOut", "Result", "Suggestion", "compare"]

BINS: Final = 200
RUN: Final = 2**18
MOST_DENIED_KEYS: Final = 10
POINTS: Final = 100
MOST_THREADS: Final = 4
"""Candidates that are replayed at a time, each with memory of its own."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Result:
    """The decisions of one candidate on the requests."""

    candidate: Candidate
    admitted: int
    denied: int
    users_hit: int
    """Keys of which at least one request was denied."""
    largest: int
    """The most requests of a key that were admitted in any period."""
    differing: int
    """Decisions that differ from those of an exact log."""
    wrongly_allowed: int
    """Admitted although the limiter itself had admitted the limit in the period up to then."""
    wrongly_denied: int
    """Denied although the limiter itself had admitted fewer than the limit in the period up to then."""
    evicted: int
    """Keys that were forgotten for want of room."""
    memory_bytes: int
    decision_ns: float
    """CPU time per decision, while other candidates are replayed by other threads."""
    most_denied: list[tuple[str, int]]
    """The keys with the most denied requests, and how many those are."""
    denied_by_bin: list[int]


@dataclass(frozen=True)
class LeftOut:
    """A candidate that can't be compared, and why."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Demand:
    """How many requests users send, by what they send at most in any period."""

    period_ns: int
    points: list[tuple[int, int]]
    """(limit, number of users whose requests exceed it in some period), the limit rising."""


@dataclass(frozen=True)
class Suggestion:
    """The least limit under which an exact log denies requests to at most this share of the users."""

    deny_at_most: float
    rate: Rate
    users_hit: int


@dataclass(frozen=True)
class Comparison:
    requests: int
    users: int
    first_ns: int
    last_ns: int
    bin_ns: int
    requests_by_bin: list[int]
    results: list[Result]
    left_out: list[LeftOut]
    demands: list[Demand]
    suggestions: list[Suggestion]


class _Requests:
    """Requests in a file, and what several candidates need of them."""

    def __init__(self, view: mmap.mmap, keys: Keys) -> None:
        self.view, self.keys = view, keys
        self.count = len(view) // REQUEST_BYTES
        self.first_ns, self.last_ns = self.time_ns(0), self.time_ns(self.count - 1)
        self.bin_ns = (self.last_ns - self.first_ns) // BINS + 1
        self._live: dict[int, int] = {}
        self._peaks: dict[int, array[int]] = {}

    def time_ns(self, index: int) -> int:
        return int.from_bytes(self.view[index * REQUEST_BYTES : index * REQUEST_BYTES + 8], "little")

    def peaks(self, span_ns: int) -> array[int]:
        """By key, the most requests in any such span."""
        if span_ns not in self._peaks:
            peaks = array("I", bytes(4 * self.keys.count))
            self._live[span_ns] = demand(self.view, span_ns, peaks)
            self._peaks[span_ns] = peaks
        return self._peaks[span_ns]

    def live(self, span_ns: int) -> int:
        """The most keys with a request in any such span."""
        if span_ns not in self._live:
            self._live[span_ns] = demand(self.view, span_ns, array("I", bytes(4 * self.keys.count)))
        return self._live[span_ns]

    def by_bin(self) -> list[int]:
        """The number of requests in each bin."""
        ends = [
            bisect_left(range(self.count), self.first_ns + number * self.bin_ns, key=self.time_ns)
            for number in range(BINS + 1)
        ]
        return [end - start for start, end in itertools.pairwise(ends)]


def compare(
    view: mmap.mmap,
    keys: Keys,
    rates: Sequence[Rate],
    algorithms: Sequence[str],
    bursts: Sequence[int] = (),
    *,
    deny_at_most: float | None = None,
    memory_bytes: int,
    progress: Progress = lambda done, total: None,
) -> Comparison:
    """Replay the requests in `view`, as ``Columns`` wrote them, through every candidate.

    With `deny_at_most`, a share of the users, it also finds a limit for each period of `rates`, and replays that. A
    candidate that needs more than `memory_bytes` is left out. `progress` gets the decisions made and their total, in
    several threads.
    """
    requests = _Requests(view, keys)
    periods_ns = dict.fromkeys(rate.period_ns for rate in rates)
    suggestions = []
    if deny_at_most is not None:
        suggestions = [_suggestion(requests.peaks(period_ns), period_ns, deny_at_most) for period_ns in periods_ns]
    chosen = list(candidates([*rates, *(one.rate for one in suggestions)], algorithms, bursts))
    outcomes: list[Result | LeftOut] = []
    done = [0] * len(chosen)

    def replayed(number: int, exact: bytearray, live: int) -> Result | LeftOut:
        def advance(count: int) -> None:
            done[number] = count
            progress(sum(done), len(chosen) * requests.count)

        return _replayed(requests, chosen[number], exact, live, memory_bytes, advance)

    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for rate in dict.fromkeys(candidate.rate for candidate in chosen):
            numbers = [number for number, candidate in enumerate(chosen) if candidate.rate == rate]
            exact = exact_log(view, keys.count, rate.limit, rate.period_ns)
            live = [requests.live(chosen[number].live_span_ns) for number in numbers]
            outcomes += pool.map(replayed, numbers, itertools.repeat(exact), live)
    return Comparison(
        requests=requests.count,
        users=keys.count,
        first_ns=requests.first_ns,
        last_ns=requests.last_ns,
        bin_ns=requests.bin_ns,
        requests_by_bin=requests.by_bin(),
        results=[outcome for outcome in outcomes if isinstance(outcome, Result)],
        left_out=[outcome for outcome in outcomes if isinstance(outcome, LeftOut)],
        demands=[_demand(requests.peaks(period_ns), period_ns) for period_ns in periods_ns],
        suggestions=suggestions,
    )


def _replayed(
    requests: _Requests,
    candidate: Candidate,
    exact: bytearray,
    live: int,
    memory_bytes: int,
    progress: Callable[[int], None],
) -> Result | LeftOut:
    """Replay all requests through a candidate, with room for `live` keys. `progress` gets the decisions made."""
    try:
        needed = candidate.bytes_needed(live)
        if needed > memory_bytes:
            return LeftOut(candidate, f"needs {needed:,} bytes for {live:,} live keys: give more --memory")
        clock = ManualClock()
        clock.set_ns(requests.first_ns)
        with Store.private(keys=candidate.store_keys(live), clock=clock) as store:
            replay = Replay(
                candidate.make(store, live),
                requests.view,
                requests.keys,
                exact,
                candidate.rate.limit,
                candidate.rate.period_ns,
                requests.bin_ns,
                BINS,
            )
            try:
                while left := replay.run(RUN):
                    progress(requests.count - left)
            finally:
                replay.close()
            stats = store.stats()
    except ForebayError as error:
        return LeftOut(candidate, str(error))
    progress(requests.count)
    denied = replay.denied_by_key
    worst = heapq.nlargest(MOST_DENIED_KEYS, range(len(denied)), key=denied.__getitem__)
    return Result(
        candidate=candidate,
        admitted=replay.admitted,
        denied=requests.count - replay.admitted,
        users_hit=len(denied) - denied.count(0),
        largest=replay.largest,
        differing=replay.differing,
        wrongly_allowed=replay.wrongly_allowed,
        wrongly_denied=replay.wrongly_denied,
        evicted=stats.total.evicted,
        memory_bytes=stats.bytes,
        decision_ns=replay.decision_ns / requests.count,
        most_denied=[(requests.keys.text(key), denied[key]) for key in worst if denied[key]],
        denied_by_bin=replay.denied_by_bin.tolist(),
    )


def _suggestion(peaks: array[int], period_ns: int, deny_at_most: float) -> Suggestion:
    ordered = sorted(peaks, reverse=True)
    # A user is denied something exactly if the limit is below the user's peak.
    limit = ordered[min(int(deny_at_most * len(ordered)), len(ordered) - 1)]
    return Suggestion(deny_at_most, Rate.per_ns(limit, period_ns), sum(peak > limit for peak in ordered))


def _demand(peaks: array[int], period_ns: int) -> Demand:
    ordered = sorted(peaks)
    limits = dict.fromkeys(round(ordered[-1] ** (point / POINTS)) for point in range(POINTS + 1))
    points = [(limit, len(ordered) - bisect_right(ordered, limit)) for limit in limits]
    return Demand(period_ns, points)
