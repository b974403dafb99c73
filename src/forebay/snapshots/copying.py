"""Copying a segment's keys while processes use it, without a lock.

**Copied.** Each cell is read at one moment, see ``copy_live``: its key's state is what a request of that moment
would have met. A cell is read between the beginning and the end of the copy, so what is admitted later is not in it.
A key whose cell was evicted, reset or expired meanwhile may have come to another cell. Then it is copied twice, and the
later copy counts; or not at all. In the latter case all that the key's new state has was admitted since the beginning.

**The order.** Counters before limiters, as a limiter is listed before it counts; the list of extents first, as the
limiter of an extent is listed before it. Live rules last: keys charged by former rules are found by newer ones.

**Rings that never stand still.** The ring of a sliding log is copied while the state stays. Where it doesn't, `_Ring`
takes a ring that was read between two states, with the later state.

**Not copied.** The permits of a ``Concurrency``: their holders are processes, and none of them uses the new
segment. What a load shedder has measured. Synced limiters: what Redis knows of this host may be more than this copy,
and then a report of the copy's counts would take the difference back from all hosts. The host learns its counts from
Redis again, as those of its former self.
"""

from __future__ import annotations

import stat
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Final

from forebay.core.audit import copy_live
from forebay.errors import ClockMismatch, DamagedSegment, SegmentBusy
from forebay.segment import host_clock, layout
from forebay.segment.counts import COUNTERS_BYTES
from forebay.segment.extents import ExtentEntry
from forebay.segment.limiter_list import LIST_BYTES
from forebay.segment.names import RULES_SECRET, rules_prefix
from forebay.segment.reading import LOOKS, PAUSE_S
from forebay.segment.sizes import CELLS_PER_GROUP
from forebay.segment.spec import START_AGAIN
from forebay.snapshots.document import COUNTERS, EXTENT, KEYS, LIMITERS, RULES, Frame, Head
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["CARRIED_EXTENTS", "Copy"]

CARRIED_EXTENTS: Final = (layout.ALGORITHM_SLIDING_LOG, layout.ALGORITHM_BUCKETED_WINDOW)
WORDS_AT_ONCE: Final = 2**17
MOST_RULES_BYTES: Final = 2**23
MOST_READS: Final = 1000
LAP_BIT: Final = 62


class Copy:
    """The copy of one segment."""

    def __init__(self, segment: MappedSegment, progress: Callable[[int, int], None]) -> None:
        """Raises ``ClockMismatch`` for a segment of an earlier boot that no process has used in this one."""
        if not segment.is_of_this_boot:
            raise ClockMismatch(
                segment.path,
                "a segment of an earlier boot",
                "one of this boot",
                "start a process that uses the store: its Store gives the segment this boot's clock",
            )
        self._segment, self._progress = segment, progress
        self._done = 0
        self._table = segment.table
        self.head: Final = self._head()
        self.keys = 0
        """Keys copied so far."""
        self._extents = list(self._carried_extents())
        segment.map_what_was_added()
        for entry in self._extents:
            if not entry.is_whole or not entry.lies_within(segment.header.segment_size, len(segment.memory)):
                raise DamagedSegment(
                    segment.path, f"{entry.size} bytes at {entry.offset} for an extent", "one within", START_AGAIN
                )
        self._total = self._table.bytes + sum(entry.size for entry in self._extents)
        segment.refuse_holes(self._total)

    def _head(self) -> Head:
        segment, status = self._segment, self._segment.status
        header = segment.header
        # In this order, so that the segment's time is not ahead of the others: see ``making.time_now``.
        segment_ns, host_ns = segment.now_and_host_ns()
        return Head(
            clock_kind=header.clock_kind,
            mode=stat.S_IMODE(status.st_mode) & 0o664,
            uid=status.st_uid,
            gid=status.st_gid,
            keys=self._table.keys,
            group_count=self._table.group_count,
            wall_epoch_ns=header.wall_epoch_ns,
            key0=header.hash_key[0],
            key1=header.hash_key[1],
            segment_ns=segment_ns,
            host_ns=host_ns,
            wall_ns=time.time_ns(),
            boot_id=host_clock.read_boot_id(),
            path=segment.path,
        )

    def _carried_extents(self) -> Iterator[ExtentEntry]:
        def read() -> dict[int, ExtentEntry]:
            raw = self._segment.records(layout.EXTENT_ENTRY.size, layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY)
            return {number: ExtentEntry.unpack(one) for number, one in raw}

        # An entry whose identity was there before it was read is whole.
        is_there = {number for number, entry in read().items() if entry.identity}
        for number, entry in read().items():
            if number in is_there and entry.purpose.algorithm in CARRIED_EXTENTS:
                yield entry

    def frames(self) -> Iterator[Frame]:
        """All frames behind the head."""
        memory, table = self._segment.memory, self._table
        yield from self._keys(table.offset, table.group_count, table.group_count * CELLS_PER_GROUP, None)
        for entry in self._extents:
            yield EXTENT, entry.pack()
            yield from self._keys(entry.offset, entry.shape.group_count, entry.shape.used_cells, entry)
        yield COUNTERS, memory[layout.COUNTERS_OFFSET : layout.COUNTERS_OFFSET + COUNTERS_BYTES]
        yield LIMITERS, b"".join(self._limiters())
        yield from self._rules()
        self._progress(self._total, self._total)

    def _keys(self, offset: int, group_count: int, used: int, entry: ExtentEntry | None) -> Iterator[Frame]:
        words = entry.purpose.words_per_cell if entry else 0
        is_log = entry is not None and entry.purpose.algorithm == layout.ALGORITHM_SLIDING_LOG
        at_once = max(1, WORDS_AT_ONCE // (3 + words))
        for first in range(0, used, at_once):
            copies, busy = copy_live(
                self._segment.memory,
                offset,
                group_count,
                first,
                first + at_once,
                used=used,
                word_count=words,
                # The marks of a bucketed window hold for any later total of the same newest bucket.
                free_bits=entry.purpose.low_bits if entry and not is_log else 0,
                now_ns=self.head.segment_ns,
            )
            if entry:
                copies += b"".join(self._busy(entry, index, is_log) for index in busy)
            if copies:
                self.keys += len(copies) // ((3 + words) * 8)
                yield KEYS, copies
            self._done += min(at_once, used - first) * (2 + words) * 8
            self._progress(self._done, self._total)

    def _busy(self, entry: ExtentEntry, index: int, is_log: bool) -> bytes:
        """The copy of a key that changed during every attempt of ``copy_live``. Empty if the key has gone."""
        words = entry.offset + entry.shape.group_count * layout.GROUP_BYTES + index * entry.purpose.words_per_cell * 8
        for _ in range(MOST_READS):
            before = self._cell(entry, index)
            ring = array("Q", self._segment.memory[words : words + entry.purpose.words_per_cell * 8])
            after = self._cell(entry, index)
            if after[0] & (2**layout.KIND_BITS - 1) != layout.KIND_COUNT:
                return b""
            if before == after or (is_log and before[0] == after[0] and settle(entry, before[1], after[1], ring)):
                return array("Q", (index, *after)).tobytes() + ring.tobytes()
            time.sleep(0)
        raise SegmentBusy(
            self._segment.path,
            f"a key of extent {entry.identity:#x} whose state changed during each of {MOST_READS} reads",
            "one that can be read",
            "try again when the key has fewer requests",
        )

    def _cell(self, entry: ExtentEntry, index: int) -> tuple[int, int]:
        """Tag and state, as of one moment."""
        at = entry.offset + index * layout.CELL.size
        seen = self._segment.memory[at : at + layout.CELL.size]
        while True:
            again = self._segment.memory[at : at + layout.CELL.size]
            if again == seen:
                tag, state = layout.CELL.unpack(seen)
                return tag, state
            seen = again

    def _limiters(self) -> Iterator[bytes]:
        """The list of limiters. One whose name is not in place yet keeps its number, and gets its name later."""
        raw = self._segment.memory[layout.LIMITERS_OFFSET : layout.LIMITERS_OFFSET + LIST_BYTES]
        for identity, name_bytes, algorithm, name in layout.LIMITER_ENTRY.iter_unpack(raw):
            whole = (name_bytes, algorithm, name) if name_bytes else (0, 0, b"")
            yield layout.LIMITER_ENTRY.pack(identity, *whole)

    def _rules(self) -> Iterator[Frame]:
        """The live rules in force. None if their file is missing: then the loader publishes them anew."""
        prefix = rules_prefix(self._segment.path, self._segment.secret(RULES_SECRET))
        for _ in range(LOOKS + 1):
            version = self._segment.u64(layout.HEADER_RULES_VERSION)
            if not version:
                return
            try:
                with open(f"{prefix}{version}", "rb") as file:
                    document = file.read(MOST_RULES_BYTES)
            except FileNotFoundError:
                time.sleep(PAUSE_S)  # another version has just replaced it
                continue
            yield RULES, version.to_bytes(8, "little") + document
            return


def settle(entry: ExtentEntry, before: int, after: int, ring: array[int]) -> bool:
    """Make a log's ring fit the state `after`, if it was read after the state `before` and before `after`.

    Requests that were admitted meanwhile may have written only a part of their entries. The oldest that is missing and
    all behind it get the date of the state, the latest that any of them can have. So no permit leaves the window
    earlier than by the real entries, and dates never fall along the ring, see sliding_log.pyx. False if a window or
    more has passed between the states: then an entry of two laps ago could not be told from one that is written.
    """
    low_bits, limit, window_ns = entry.purpose.low_bits, entry.purpose.limit, entry.purpose.period_ns
    leaves_ns = after >> low_bits << low_bits >> 2
    if leaves_ns - (before >> low_bits << low_bits >> 2) >= window_ns:
        return False
    position, lap = after % 2**low_bits >> 1, after & 1
    if position >= limit:
        return False
    date = max(0, leaves_ns - window_ns) + 1
    is_missing = False
    for place in (*range(position, limit), *range(position)):
        expected = lap ^ (place < position)
        is_missing = is_missing or ring[place] >> LAP_BIT & 1 != expected
        if is_missing:
            ring[place] = expected << LAP_BIT | date
    return True


assert sys.byteorder == "little"
