"""The counts of a segment's limiters, summed over its counter lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from forebay.segment import layout
from forebay.segment.limiter_list import labels_of
from forebay.stats import LimiterStats

__all__ = ["COUNTERS_BYTES", "limiter_stats"]

COUNTERS_BYTES: Final = (layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY) * layout.COUNTER_LINE.size


def limiter_stats(counters: bytes, limiters: Mapping[int, tuple[str, str]]) -> dict[str, LimiterStats]:
    """The counts by label, as in ``StoreStats.limiters``. `limiters` has a name and an algorithm's name by number."""
    by_number: dict[int, LimiterStats] = {}
    for line, values in enumerate(layout.COUNTER_LINE.iter_unpack(counters)):
        limiter, _, _, *counts = values
        number = limiter - 1 if line < layout.OWNED_COUNTER_LINES else line - layout.OWNED_COUNTER_LINES
        by_number[number] = by_number.get(number, LimiterStats()) + LimiterStats(*counts)
    labels = labels_of(limiters.values())
    found: dict[str, LimiterStats] = {}
    for number, limiter in limiters.items():
        counted = replace(by_number[number], algorithm=limiter[1])
        label = labels[limiter]
        # Only in a damaged list does a limiter stand twice.
        found[label] = found[label] + counted if label in found else counted
    return found
