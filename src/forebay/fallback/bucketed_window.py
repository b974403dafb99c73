"""Bucketed window: the sum of the newest sub-windows. See core/algorithms/bucketed_window.pyx."""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay.core.limiter_arguments import bucket_bits, bucketed_shape
from forebay.fallback.cell_limiter import CellAlgorithm, CellLimiter
from forebay.fallback.decision import Outlook
from forebay.fallback.memory import Charge, LimitParams, Tag, Verdict
from forebay.rate import Rate, as_rate

__all__ = ["BucketedWindow"]


class Buckets(NamedTuple):
    """The counts of a key's buckets, oldest first; those that have none aren't there."""

    newest: int
    """The number of the bucket in which the key was last allowed a permit; -1 if there is none."""
    counts: tuple[tuple[int, int], ...]


class Summed(NamedTuple):
    """A state at a given time."""

    bucket: int
    counts: tuple[tuple[int, int], ...]
    """Those in the window that ends with that bucket."""
    sum: int


class Bucketed(CellAlgorithm):
    """The sum of a window's buckets is at most the limit."""

    fresh = Buckets(-1, ())

    def __init__(self, params: LimitParams) -> None:
        self._params = params

    def begin_ns(self, bucket: int) -> int:
        return bucket * self._params.period_ns - self._params.phase_ns

    def summed(self, state: Buckets, now_ns: int) -> Summed:
        # A clock reading from before the newest bucket counts as a reading in it: time never goes back.
        bucket = max((now_ns + self._params.phase_ns) // self._params.period_ns, state.newest)
        counts = tuple(entry for entry in state.counts if entry[0] > bucket - self._params.buckets)
        return Summed(bucket, counts, sum(count for _, count in counts))

    def take(self, tag: Tag, state: Buckets, now_ns: int, charge: Charge) -> Buckets | None:
        now = self.summed(state, now_ns)
        if now.sum > charge.room:
            return None
        before = [entry for entry in now.counts if entry[0] != now.bucket]
        return Buckets(now.bucket, (*before, (now.bucket, dict(now.counts).get(now.bucket, 0) + charge.amount)))

    def give_back(self, tag: Tag, state: Buckets, now_ns: int, charge: Charge) -> Buckets | None:
        """Give back at most what the newest bucket holds."""
        if self.expiry_ns(state) <= now_ns or not state.counts:
            return None
        if charge.charged_state is not None and charge.charged_state.newest != state.newest:
            return None
        *before, (bucket, count) = state.counts
        if bucket != state.newest:
            return None
        return Buckets(state.newest, (*before, (bucket, count - min(count, charge.amount))))

    def expiry_ns(self, state: Buckets) -> int:
        return self.begin_ns(state.newest + self._params.buckets)

    def used(self, state: Buckets, now_ns: int) -> int:
        return max(self.summed(state, now_ns).sum, 1) - 1

    def until_sum(self, now: Summed, now_ns: int, most: int) -> int:
        """The time until the window's sum is at most `most`, if nothing else is allowed."""
        total = 0
        for bucket, count in reversed(now.counts):
            total += count
            if total > most:
                return self.begin_ns(bucket + self._params.buckets) - now_ns
        return 0

    def describe(self, charge: Charge, verdict: Verdict) -> Outlook:
        now = self.summed(verdict.state, verdict.now_ns)
        return Outlook(
            max(charge.params.limit - now.sum, 0),
            retry_after_ns=0 if verdict.allowed else self.until_sum(now, verdict.now_ns, charge.room),
            reset_after_ns=self.until_sum(now, verdict.now_ns, 0),
        )


class BucketedWindow(CellLimiter):
    """At most as many permits as the rate allows, in the newest `buckets` sub-windows together.

    ``BucketedWindow(store, "api", "500/hour", buckets=60)``. A request is counted for the bucket it falls in, a
    period's `buckets`-th part (rounded up to the nanosecond) that begins at a multiple of its length by the wall
    clock. `keys` is how many keys can be live at once; by default as many as half a megabyte of the compiled core
    holds, but at least 64. A refund gives back at most what the newest bucket holds.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``.
    """

    rate: Rate
    buckets: int
    keys: int

    def __init__(self, store: Any, name: str, rate: str | Rate, buckets: int = 60, *, keys: int | None = None) -> None:
        self.begin(store, name)
        self.rate = as_rate(rate)
        shape = bucketed_shape(buckets, keys, name)
        self.buckets = buckets
        limit = self.rate.limit
        # The compiled core's bits for a running total: it refuses what they can't hold.
        period_ns, _ = bucket_bits(self.rate, buckets)
        phase_ns = self.memory.wall_epoch_ns % period_ns
        self.params = LimitParams(limit, limit, period_ns, phase_ns=phase_ns, buckets=buckets)
        self.algorithm = Bucketed(self.params)
        encoding = f"bucketed {period_ns} {buckets}"
        self.keys = self.open_extent(encoding, shape)
        self.register("BucketedWindow", encoding, limit)

    @staticmethod
    def bytes_needed(buckets: int = 60, *, keys: int | None = None) -> int:
        """How many bytes a bucketed window of so many buckets and keys takes with the compiled core."""
        return bucketed_shape(buckets, keys, "").bytes

    def __repr__(self) -> str:
        return f"<BucketedWindow {self.name!r} {self.rate}, buckets={self.buckets}, keys={self.keys}>"

    def forget(self, tag: Tag, now_ns: int) -> None:
        state = self.table.find(tag)
        if state is not None:
            # The newest bucket stays: time never goes back.
            self.table.put(tag, Buckets(state.newest, ()), self.algorithm)
