"""Kinds of limiters for tests with many processes, and the bounds of each in any span of the real clock."""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pytest
from oracle import Bucket, Rule
from oracle_counts import BucketedWindow as BucketedRule
from oracle_counts import ClockWindow, IntervalBucket, Log, first_window_in_memory
from oracle_counts import SlidingWindow as SlidingRule
from process_helpers import (
    SharedNumbers,
    most_admitted,
    path_of,
)

from forebay import (
    BucketedWindow,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.segment import layout

MS: Final = 1_000_000
HOUR_MS: Final = 3_600_000
BUCKETS: Final = 8
KEY: Final = "user:42"


@dataclass(frozen=True)
class Kind:
    """A limiter and its bounds. `limit` permits pass at once, and as many in each period."""

    make: Callable[[Store, str, int, int], Any]
    """Arguments: a store, a name, the limit, and the period in ms."""
    rule: Callable[[int, int], Rule[Any]] | None
    """The oracle's rule, by limit and period in ns. None: the windows' phase is unknown."""
    spans: Callable[[int, int], Sequence[tuple[int, int]]] = lambda limit, period_ns: ()
    """(ns, permits): any span shorter than this many ns has at most this many permits."""
    windows: Callable[[int, int], Sequence[tuple[int, int, int]]] = lambda limit, period_ns: ()
    """(ns, count, permits): `count` consecutive windows of the clock of this many ns have at most `permits`."""
    limit: int = 400
    """The limit of runs with the real clock."""


def _gcra_spans(limit: int, period_ns: int) -> list[tuple[int, int]]:
    rate = f"{limit} per {period_ns // MS} ms"
    return [(span_ns, most_admitted(rate, limit, span_ns)) for span_ns in (MS, period_ns, 5 * period_ns)]


def _windows_anywhere(limit: int, period_ns: int) -> list[tuple[int, int]]:
    return [(count * period_ns, (count + 1) * limit) for count in (1, 2, 5)]


KINDS: Final = {
    "token bucket": Kind(
        lambda store, name, limit, ms: TokenBucket(store, name, f"{limit} per {ms} ms", limit),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=_gcra_spans,
    ),
    "interval bucket": Kind(
        lambda store, name, limit, ms: TokenBucket(store, name, f"{limit} per {ms} ms", limit, refill="interval"),
        lambda limit, period_ns: IntervalBucket(limit, period_ns, limit),
        windows=lambda limit, period_ns: [(period_ns, count, count * limit) for count in (1, 2, 5)],
    ),
    "leaky bucket": Kind(
        lambda store, name, limit, ms: LeakyBucket(store, name, f"{limit} per {ms} ms", limit),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=_gcra_spans,
    ),
    "fixed window": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms"),
        ClockWindow,
        windows=lambda limit, period_ns: [(period_ns, 1, limit)],
    ),
    "fixed window, first": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms", align="first"),
        first_window_in_memory,
        spans=_windows_anywhere,
    ),
    "fixed window, stagger": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms", align="stagger"),
        None,
        spans=_windows_anywhere,
    ),
    "sliding window": Kind(
        lambda store, name, limit, ms: SlidingWindow(store, name, f"{limit} per {ms} ms"),
        SlidingRule,
        windows=lambda limit, period_ns: [(period_ns, 1, limit)],
    ),
    "bucketed window": Kind(
        lambda store, name, limit, ms: BucketedWindow(store, name, f"{limit} per {ms} ms", BUCKETS, keys=128),
        lambda limit, period_ns: BucketedRule(limit, period_ns, BUCKETS),
        windows=lambda limit, period_ns: [(period_ns // BUCKETS, BUCKETS, limit)],
    ),
    "sliding log": Kind(
        lambda store, name, limit, ms: SlidingLog(store, name, f"{limit} per {ms} ms", keys=128),
        Log,
        spans=lambda limit, period_ns: [(period_ns, limit)],
    ),
    "minimum interval": Kind(
        lambda store, name, limit, ms: MinInterval(store, name, f"{ms} ms"),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=lambda limit, period_ns: [(period_ns, limit)],
        limit=1,
    ),
}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_kind_with_a_limit = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind.limit > 1], ids=[name for name in KINDS if KINDS[name].limit > 1]
)


class Admission(NamedTuple):
    """Permits that were granted at some time from `before_ns` to `after_ns`."""

    before_ns: int
    after_ns: int
    permits: int


REAL_PERIOD_MS: Final = 20
REAL_PERIOD_NS: Final = REAL_PERIOD_MS * MS


def check_bounds(kind: Kind, admissions: Sequence[Admission], name: str) -> None:
    for span_ns, most in kind.spans(kind.limit, REAL_PERIOD_NS):
        assert _most_within(admissions, span_ns) <= most, f"in {span_ns} ns"
    offset_ns = _wall_offset_ns(name)
    for unit_ns, count, most in kind.windows(kind.limit, REAL_PERIOD_NS):
        units = [Admission((a[0] + offset_ns) // unit_ns, (a[1] + offset_ns) // unit_ns, a[2]) for a in admissions]
        assert _most_within(units, count) <= most, f"in {count} windows of {unit_ns} ns"


def _most_within(admissions: Sequence[Admission], length: int) -> int:
    """The most permits that were certainly granted within a span shorter than `length`."""
    begun, ended = sorted((a[0], a[2]) for a in admissions), sorted((a[1], a[2]) for a in admissions)
    begun_at, ended_at = [at for at, _ in begun], [at for at, _ in ended]
    begun_sum = [0, *itertools.accumulate(permits for _, permits in begun)]
    ended_sum = [0, *itertools.accumulate(permits for _, permits in ended)]
    # Admissions that ended before the span's end, less those that began before the span did.
    return max(
        ended_sum[bisect.bisect_left(ended_at, start + length)] - begun_sum[bisect.bisect_left(begun_at, start)]
        for start in begun_at
    )


def _wall_offset_ns(name: str) -> int:
    """Add this to the host's monotonic clock to get the wall clock by which windows begin."""
    with open(path_of(name), "rb") as file:
        header = file.read(layout.HEADER.size)
    epoch_ns, wall_epoch_ns = struct.unpack_from("<qq", header, layout.HEADER_EPOCH_NS)
    return int(wall_epoch_ns - epoch_ns)


class Notebook:
    """Admissions of consecutive processes of one place, in shared memory that outlives each process."""

    SIZE: Final = 100_000

    def __init__(self) -> None:
        self.numbers = SharedNumbers(1 + 3 * self.SIZE)

    def note(self, before_ns: int, after_ns: int, permits: int) -> None:
        numbers, count = self.numbers.values, self.numbers[0]
        if count < self.SIZE:
            numbers[1 + 3 * count], numbers[2 + 3 * count], numbers[3 + 3 * count] = before_ns, after_ns, permits
            numbers[0] = count + 1

    @property
    def noted(self) -> int:
        return self.numbers[0]

    def admissions(self) -> list[Admission]:
        values = self.numbers.values.tolist()[1 : 1 + 3 * self.noted]
        return [Admission(*values[i : i + 3]) for i in range(0, len(values), 3)]
