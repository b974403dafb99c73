"""The record of hot keys: the extent that has it, and its keys as a reader sees them. core/table/hot_keys.pxd has the
protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from forebay.segment import layout
from forebay.segment.attachment import Attachment, MappedExtent
from forebay.segment.extents import ExtentEntry, Purpose, open_extent
from forebay.segment.limiter_list import encode_limiter_name
from forebay.stats import HotKey

__all__ = ["Read", "find_record", "hot_digest", "keys_in", "open_record", "record_among"]

NAME: Final = "forebay.hot keys"
"""The limiter in whose name the segment has the extent."""
PURPOSE: Final = Purpose(layout.ALGORITHM_HOT_KEYS, layout.HOT_WORDS_PER_CELL, low_bits=0, limit=0, period_ns=0)
UNIT_NS: Final = 1 << layout.HOT_TIME_SHIFT
ALLOWED_PER_NOTE: Final = 61
NAME_BYTES: Final = encode_limiter_name(NAME)
COUNT_MASK: Final = (1 << layout.HOT_COUNT_BITS) - 1
LIMITER_MASK: Final = (1 << layout.HOT_LIMITER_BITS) - 1
SLOT: Final = struct.Struct("<QQ")
Read: TypeAlias = Callable[[int, int], bytes]
"""Returns bytes of the segment's file, given their offset and their number."""


def hot_digest(name: int) -> str:
    """The part of a name in the record that stands for the key."""
    return f"{name >> layout.HOT_LIMITER_BITS:014x}"


def open_record(attachment: Attachment, keys: int) -> MappedExtent:
    """Map the record of hot keys, and append it if there is none. Raises as ``open_extent``."""
    return open_extent(attachment, NAME, PURPOSE, keys)


def find_record(attachment: Attachment) -> ExtentEntry | None:
    """The record of hot keys, if a process has made one."""
    raw = attachment.segment.extent_entry(attachment.segment.identity_of(PURPOSE.identity_text(NAME_BYTES)))
    return None if raw is None else record_among([ExtentEntry.unpack(raw)], attachment.segment.size)


def record_among(entries: Iterable[ExtentEntry], segment_size: int) -> ExtentEntry | None:
    """The record of hot keys among the extents. None also for one that is being published, or is damaged."""
    for entry in entries:
        # A reader gets fewer bytes of an extent that doesn't lie within the file.
        if entry.identity and entry.purpose == PURPOSE and entry.is_whole and entry.offset >= segment_size:
            return entry
    return None


def keys_in(record: ExtentEntry, read: Read, limiters: Mapping[int, tuple[str, str]], now_ns: int) -> list[HotKey]:
    """The keys of a record, the most denied first. `limiters` are names and algorithms' names by number."""
    used = record.shape.used_cells
    first = record.offset + record.shape.group_count * layout.GROUP_BYTES
    denied = _added_up(_slots(read, first, used), now_ns)
    allowed = _added_up(_slots(read, first + used * SLOT.size, used), now_ns)
    found = []
    for name in {**denied, **allowed}:
        limiter = limiters.get(name & LIMITER_MASK)
        if limiter is None:
            continue  # damage
        denials, admissions = denied.get(name), allowed.get(name)
        found.append(
            HotKey(
                *limiter,
                digest=hot_digest(name),
                denied=denials.value if denials else 0,
                denied_ago=max(now_ns - denials.time * UNIT_NS, 0) / 1e9 if denials else None,
                allowed=admissions.value * ALLOWED_PER_NOTE if admissions else 0,
            )
        )
    return sorted(found, key=lambda one: (-one.denied, -one.allowed, one.denied_ago or 0))


class _Noted(NamedTuple):
    """A key of one of the two records."""

    value: int
    """Of its count, now. It may have come to 0."""
    time: int
    """The time of the latest note, in units of `UNIT_NS`."""


def _added_up(slots: Iterable[tuple[int, int]], now_ns: int) -> dict[int, _Noted]:
    """The keys by their names in the record."""
    now = now_ns >> layout.HOT_TIME_SHIFT
    found: dict[int, _Noted] = {}
    for name, state in slots:
        time = state >> layout.HOT_COUNT_BITS
        # A time that is further ahead than a reading of the clock can be is damage. A free slot has only zeros.
        if state and (time - now) >> layout.HOT_HALVING_BITS <= 0:
            halvings = (now >> layout.HOT_HALVING_BITS) - (time >> layout.HOT_HALVING_BITS)
            other = found.get(name, _Noted(0, 0))
            found[name] = _Noted(other.value + ((state & COUNT_MASK) >> max(halvings, 0)), max(other.time, time))
    return found


def _slots(read: Read, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Name and state of each slot, where two readings in a row have found one name.

    A slot's state may change with every denial, so no two readings of it need agree. A name changes seldom. If it does
    between the two words of the latest reading, the state is that of a key which has just come, and its count is 1.
    """
    before, after = read(first, count * SLOT.size), read(first, count * SLOT.size)
    for at in range(0, min(len(before), len(after)) // SLOT.size * SLOT.size, SLOT.size):
        seen, again = before[at : at + SLOT.size], after[at : at + SLOT.size]
        while seen[:8] != again[:8]:
            seen, again = again, read(first + at, SLOT.size)
        yield SLOT.unpack(again)
