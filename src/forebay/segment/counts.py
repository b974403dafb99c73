"""The counts of a segment's limiters, summed over its counter lines."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Final

from forebay.segment import layout
from forebay.segment.limiter_list import labels_of
from forebay.stats import LimiterStats

__all__ = ["COUNTERS_BYTES", "counts_of", "limiter_stats"]

LINE_BYTES: Final = layout.COUNTER_LINE.size
COUNTERS_BYTES: Final = (layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY) * LINE_BYTES


def counts_of(counters: bytes, limiters: Mapping[int, tuple[str, str]]) -> dict[tuple[str, str], LimiterStats]:
    """The counts of each limiter. `limiters` has a name and an algorithm's name by number.

    Counts only go up, whichever processes come and go: a line's next owner continues its counts.
    """
    # Only in a damaged list does a limiter stand twice.
    sums = {limiter: [0] * 6 for limiter in limiters.values()}
    # The first field of each line, without a step of Python for each: most lines were never used.
    numbers = memoryview(counters).cast("I")[layout.COUNTER_LINE_LIMITER // 4 :: LINE_BYTES // 4].tolist()
    owned = layout.OWNED_COUNTER_LINES
    used = compress(range(owned), numbers)
    for line in (*used, *(owned + number for number in limiters)):
        number = numbers[line] - 1 if line < owned else line - owned
        if number in limiters:
            _, _, _, *counts = layout.COUNTER_LINE.unpack_from(counters, line * LINE_BYTES)
            limiter = limiters[number]
            sums[limiter] = [total + count for total, count in zip(sums[limiter], counts, strict=True)]
    return {limiter: LimiterStats(*counts, algorithm=limiter[1]) for limiter, counts in sums.items()}


def limiter_stats(counters: bytes, limiters: Mapping[int, tuple[str, str]]) -> dict[str, LimiterStats]:
    """As ``counts_of``, by label as in ``StoreStats.limiters``."""
    labels = labels_of(limiters.values())
    return {labels[limiter]: counts for limiter, counts in counts_of(counters, limiters).items()}
