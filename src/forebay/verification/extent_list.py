"""Checks of the list of extents, and of the bytes that belong to no extent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from forebay.core.audit import keyed_hash
from forebay.core.limiter_arguments import words_for
from forebay.rate import MAX_PERIOD_NS
from forebay.segment import layout
from forebay.segment.extents import ExtentEntry, Purpose
from forebay.segment.limiter_list import ListedLimiter
from forebay.verification.findings import Finding, damage, note
from forebay.verification.lists import limiters_in_place
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["Extents", "KnownExtent"]


@dataclass(frozen=True, slots=True)
class KnownExtent:
    """An extent whose place in the file is valid."""

    number: int
    entry: ExtentEntry
    limiter: str = ""
    purpose: Purpose | None = None
    """None if the purpose in the entry is impossible."""

    @property
    def where(self) -> str:
        return f"extent {self.number}" + (f", limiter {self.limiter!r}" if self.purpose else "")

    @property
    def end(self) -> int:
        return self.entry.offset + self.entry.size


class Extents:
    """The list of extents, and the bytes around them."""

    def __init__(self, segment: MappedSegment) -> None:
        self._segment = segment
        self.sound: list[KnownExtent] = []
        """The extents whose cells can be checked, by the latest check and in the file's order."""

    def look_around(self) -> list[Finding]:
        """Check the list, and the bytes behind and between the extents. O(these bytes)."""
        # With a damaged list, bytes of an extent may seem to belong to none.
        return self.look() or list(self._unused())

    def look(self) -> list[Finding]:
        """Check the list."""
        segment = self._segment
        entries = list(segment.records(layout.EXTENT_ENTRY.size, layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY))
        # After the list: its extents are in the file by now, and their limiters have names.
        segment.map_what_was_added()
        limiters = limiters_in_place(segment)
        self.sound, found = [], []
        identities = set()
        used = 0
        for number, raw in entries:
            entry = ExtentEntry.unpack(raw)
            if not entry.identity:
                # The process that appends it was killed before the last step, or is about to take it.
                continue
            used += 1
            where = f"extent {number}"
            if used != number + 1:
                found.append(damage(where, "a free entry before it", "none: entries are taken in order"))
            if entry.identity in identities:
                found.append(damage(where, f"identity {entry.identity:#x} for the second time", "one of its own"))
            identities.add(entry.identity)
            found += self._add(number, entry, limiters.get(entry.limiter))
        self.sound.sort(key=lambda extent: extent.entry.offset)
        for before, after in itertools.pairwise(self.sound):
            if before.end > after.entry.offset:
                found.append(damage(after.where, f"that it begins within {before.where}", "bytes of its own"))
        return found

    def _add(self, number: int, entry: ExtentEntry, limiter: ListedLimiter | None) -> Iterator[Finding]:
        where, segment, purpose = f"extent {number}", self._segment, entry.purpose
        if not entry.is_whole:
            yield damage(
                where,
                f"{entry.size} bytes for {entry.keys} keys of {purpose.words_per_cell} words",
                "cells and words for each of them",
            )
            return
        if not entry.lies_within(segment.header.segment_size, len(segment.memory)):
            yield damage(
                where,
                f"{entry.size} bytes at {entry.offset}",
                f"a multiple of {layout.EXTENT_ALIGNMENT} behind the table and within the file's "
                f"{len(segment.memory)} bytes",
            )
            return
        known = KnownExtent(number, entry)
        if not _is_possible(purpose):
            yield damage(where, str(purpose), "numbers that fit each other: its words were not checked")
        elif limiter is None:
            yield damage(where, f"an extent of limiter {entry.limiter}", "one that is in the list of limiters")
        elif keyed_hash(segment.header.hash_key, purpose.identity_text(limiter.name)) != entry.identity:
            name = limiter.name.decode(errors="replace")
            yield damage(
                where,
                f"identity {entry.identity:#x}",
                f"that of limiter {name!r} and {purpose}: its words were not checked",
            )
        else:
            if limiter.algorithm != purpose.algorithm:
                yield damage(
                    where,
                    f"algorithm {purpose.algorithm} for limiter {entry.limiter}",
                    f"that of the limiter, {limiter.algorithm}",
                )
            known = KnownExtent(number, entry, limiter.name.decode(errors="replace"), purpose)
        self.sound.append(known)

    def _unused(self) -> Iterator[Finding]:
        """Bytes that no extent owns: damage if they are not zero, a note if an extent could begin there."""
        end, where = self._segment.header.segment_size, "behind the table"
        for extent in self.sound:
            size = extent.entry.offset - end
            # With less, no extent can begin there.
            yield from self._unowned(end, extent.entry.offset, where, size >= layout.EXTENT_ALIGNMENT)
            end, where = extent.end, f"behind {extent.where}"
        yield from self._unowned(end, len(self._segment.memory), where, True)

    def _unowned(self, first: int, last: int, where: str, is_noted: bool) -> Iterator[Finding]:
        if first == last:
            return
        blocked, used = self._segment.look_at_unused(first, last)
        size = f"{last - first} bytes {where}"
        if used >= 0 and self._segment.u64(layout.HEADER_RESIZE_PROGRESS):
            yield note("the file", f"{size} of former tables", "`forebay resize` without users to free them")
        elif used >= 0:
            yield damage(
                "the file",
                f"{self._segment.memory[used : used + 8].hex()} at {used}, in {size} that are in no list",
                "zeros: no process writes to an extent that is not in the list",
            )
        elif is_noted:
            found = f"{size} that are in no list, all zero" + (f" except {blocked} blocked cells" if blocked else "")
            yield note("the file", found, "none: a process makes an extent, or was killed while it made one")


def _is_possible(purpose: Purpose) -> bool:
    """Whether a limiter can have this purpose."""
    limit, period_ns, words = purpose.limit, purpose.period_ns, purpose.words_per_cell
    match purpose.algorithm:
        case layout.ALGORITHM_SLIDING_LOG:
            return (
                1 <= limit <= layout.MAX_LOG_LIMIT
                and words == limit
                and 1 <= period_ns <= MAX_PERIOD_NS
                and purpose.low_bits == 1 + (limit - 1).bit_length() <= period_ns.bit_length()
            )
        case layout.ALGORITHM_BUCKETED_WINDOW:
            return (
                limit == 0
                and 1 <= words <= layout.MAX_BUCKETS
                and 1 <= period_ns <= MAX_PERIOD_NS
                and purpose.low_bits == min(period_ns.bit_length(), layout.MAX_KEPT_BITS)
            )
        case layout.ALGORITHM_CONCURRENCY:
            return (
                1 <= limit <= layout.MAX_CONCURRENCY_LIMIT
                and words == words_for(limit)
                and period_ns == purpose.low_bits == 0
            )
        case layout.ALGORITHM_SYNCED_FIXED_WINDOW | layout.ALGORITHM_SYNCED_SLIDING_WINDOW:
            return (
                limit == 0
                and words == layout.SYNCED_WORDS_PER_CELL
                and 1 <= period_ns <= MAX_PERIOD_NS
                and 1 <= purpose.low_bits <= period_ns.bit_length()
            )
        case layout.ALGORITHM_SYNCED_TOKEN_BUCKET:
            return words == layout.SYNCED_WORDS_PER_CELL and limit == period_ns == purpose.low_bits == 0
        case layout.ALGORITHM_SHEDDER:
            return (
                words == layout.SHEDDER_WORDS
                and 1 <= limit <= layout.MAX_CONCURRENCY_LIMIT
                and 1 <= period_ns <= MAX_PERIOD_NS
                and purpose.low_bits in (0, 1)
            )
        case layout.ALGORITHM_HOT_KEYS:
            return words == layout.HOT_WORDS_PER_CELL and limit == period_ns == purpose.low_bits == 0
        case _:
            return False
