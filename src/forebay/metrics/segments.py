"""What a store's segment shows, read from its file without attaching."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Final

from forebay.metrics.readings import Latencies, Memory, Observed, Shed
from forebay.rate import NS
from forebay.segment import attachment_locks, layout
from forebay.segment.counts import COUNTERS_BYTES, counts_of
from forebay.segment.extents import ExtentEntry
from forebay.segment.hot_keys import keys_in, record_among
from forebay.segment.limiter_list import LIST_BYTES, listed_limiters
from forebay.shedding.adaptive import LIMIT_UNIT
from forebay.shedding.level import UNIT, LevelState
from forebay.stats import HotKey, LimiterStats
from forebay.verification.cells import CellChecks
from forebay.verification.extent_list import Extents, KnownExtent
from forebay.verification.findings import Findings
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["attached_processes", "hot_keys_of", "limiters_of", "live_keys_of", "observed_in", "occupancy_of"]

LATENCIES: Final = struct.Struct(f"<{layout.LATENCY_BUCKETS + 1}Q")
MEASURED: Final = ", measured"
"""The end of the name under which a shedder keeps its measurements."""


def observed_in(segment: MappedSegment, *, has_path: bool = True) -> Observed:
    """Everything that metrics need. O(bytes of the segment): some milliseconds per million keys."""
    limiters = limiters_of(segment)
    live_keys, memories, shedders = occupancy_of(segment)
    return Observed(
        keys=segment.table.keys,
        live_keys=live_keys,
        bytes=segment.status.st_size,
        limiters=limiters,
        memories=memories,
        shedders=shedders,
        attached=attached_processes(segment),
        removed=_removed_segments(segment) if has_path else None,
        rules_version=segment.u64(layout.HEADER_RULES_VERSION),
        decision_latency=_latencies(segment, layout.HEADER_DECISION_LATENCY),
        redis_latency=_latencies(segment, layout.HEADER_REDIS_LATENCY),
    )


def _latencies(segment: MappedSegment, offset: int) -> Latencies:
    *counts, sum_ns = LATENCIES.unpack_from(segment.memory, offset)
    return Latencies(tuple(counts), sum_ns / NS)


def limiters_of(segment: MappedSegment) -> dict[tuple[str, str], LimiterStats]:
    """The counts of each limiter, by name and algorithm's name. Quick: it reads no cells."""
    # The counts first: a limiter has its name before it counts.
    counters = segment.memory[layout.COUNTERS_OFFSET : layout.COUNTERS_OFFSET + COUNTERS_BYTES]
    return counts_of(counters, _names_of(segment))


def _names_of(segment: MappedSegment) -> Mapping[int, tuple[str, str]]:
    return _names_in(segment.memory[layout.LIMITERS_OFFSET : layout.LIMITERS_OFFSET + LIST_BYTES])


@lru_cache(8)
def _names_in(raw: bytes) -> Mapping[int, tuple[str, str]]:
    """A name and an algorithm's name by number. The list seldom changes, and a live view reads it often."""
    return {
        number: (limiter.name.decode(errors="replace"), limiter.algorithm_name)
        for number, limiter in listed_limiters(raw)
    }


def hot_keys_of(segment: MappedSegment) -> list[HotKey] | None:
    """The record of hot keys, the most denied first; None if no process has made one."""
    segment.map_what_was_added()
    raw = segment.records(layout.EXTENT_ENTRY.size, layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY)
    record = record_among((ExtentEntry.unpack(entry) for _, entry in raw), segment.header.segment_size)
    if record is None:
        return None
    memory = segment.memory
    return keys_in(record, lambda at, size: memory[at : at + size], _names_of(segment), segment.now_ns())


def live_keys_of(segment: MappedSegment) -> int:
    """The live keys of the table."""
    return CellChecks(segment, Findings(), lambda done, total: None, []).parts()[0].live_keys


def occupancy_of(segment: MappedSegment) -> tuple[int, tuple[Memory, ...], tuple[Shed, ...]]:
    """The live keys of the table; the extents of limiters; and what shedders keep in theirs."""
    findings, extents = Findings(), Extents(segment)
    findings.lasting(extents.look)
    table, *parts = CellChecks(segment, findings, lambda done, total: None, extents.sound).parts()
    memories = tuple(
        Memory(part.name, part.algorithm, extent.entry.keys, part.live_keys, part.held, extent.entry.size)
        for extent, part in zip(extents.sound, parts, strict=True)
    )
    return table.live_keys, memories, tuple(_sheds(segment, extents.sound))


def _is_of_a_shedder(extent: KnownExtent) -> bool:
    return extent.purpose is not None and extent.purpose.algorithm == layout.ALGORITHM_SHEDDER


def _sheds(segment: MappedSegment, extents: list[KnownExtent]) -> Iterator[Shed]:
    for extent in filter(_is_of_a_shedder, extents):
        assert extent.purpose is not None
        name = extent.limiter.removesuffix(MEASURED)
        word = segment.u64(extent.entry.offset + extent.entry.shape.group_count * layout.GROUP_BYTES)
        if extent.purpose.low_bits == 0:
            yield Shed(name, level=LevelState.of(word).level / UNIT)
        elif word:  # it has measured
            yield Shed(name, limit=min(word // LIMIT_UNIT, extent.purpose.limit))


def attached_processes(segment: MappedSegment) -> int:
    """Processes that have the segment attached; with children that they forked and that have not used it, one."""
    return len(attachment_locks.attached_ids(segment.status)) or int(segment.is_any_attached())


def _removed_segments(segment: MappedSegment) -> int:
    """Segments that were removed from the path, and that processes still use: this one, perhaps."""
    status = segment.status
    try:
        removed = attachment_locks.removed_segments(status, attachment_locks.place_of(segment.path))
    except OSError:  # its directory is gone
        return 0
    try:
        current = os.stat(segment.path, follow_symlinks=False).st_ino
    except OSError:
        current = 0
    return len((removed | {status.st_ino}) - {current})
