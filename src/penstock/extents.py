"""Extents: memory behind the table for limiters that need more than a cell per key.

An extent is a small table of its own and, behind it, so many words for each of its cells. Extents are appended to the
segment's file under a lock on the list of extents and never removed: whatever has one mapped may still use it.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock import file_locks, layout, room
from penstock.core.segment import Extent, Segment, forks
from penstock.errors import (
    DamagedSegment,
    InvalidLimiter,
    SegmentBusy,
    SegmentError,
    SegmentSizeWarning,
    SegmentSpaceError,
    StoreClosed,
    shown,
)
from penstock.segment_file import BYTES_PER_KEY, LOCK_TIMEOUT

if TYPE_CHECKING:
    from penstock.store import Store

__all__ = ["ExtentShape", "open_extent"]

MAX_KEYS: Final = 2**32
# Not the header's: who attaches need not wait for who makes an extent.
LOCKED_BYTES: Final = layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size
CELLS_PER_GROUP: Final = layout.CELLS_PER_LINE * layout.LINES_PER_GROUP


@dataclass(frozen=True, slots=True)
class ExtentShape:
    """`keys` live keys with `words_per_key` words each."""

    keys: int
    words_per_key: int

    @classmethod
    def checked(cls, keys: int, words_per_key: int, limiter: str) -> ExtentShape:
        """Refuses a number of keys that is none."""
        if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
            raise InvalidLimiter(
                f"the keys of limiter {limiter!r} are a whole number from 1 to 2**32, not {shown(keys)}"
            )
        return cls(keys, words_per_key)

    @property
    def group_count(self) -> int:
        # So few keys that a probe set holds them all need no room between them.
        if self.keys <= layout.GROUPS_PER_KEY * CELLS_PER_GROUP:
            return -(-self.keys // CELLS_PER_GROUP)
        return -(-self.keys * BYTES_PER_KEY // layout.GROUP_BYTES)

    @property
    def used_cells(self) -> int:
        """Cells that keys may live in, and that have words."""
        if self.keys <= layout.GROUPS_PER_KEY * CELLS_PER_GROUP:
            return self.keys
        return self.group_count * CELLS_PER_GROUP

    @property
    def bytes(self) -> int:
        return self.group_count * layout.GROUP_BYTES + self.used_cells * self.words_per_key * 8


def open_extent(store: Store, limiter: str, encoding: bytes, wanted: ExtentShape) -> Extent:
    """Map the extent of `limiter`, which is made if there is none.

    `encoding` tells it from the limiter's extents of another shape. One for another number of keys than `wanted` is
    used as it is. Raises ``SegmentSpaceError`` if there is no room, before anything is taken.
    """
    segment = store._segment
    identity = segment.extent_identity(store._limiter_name(limiter) + b"\0" + encoding)
    with store._lock():
        fd = store._own_file(forks())
        if fd is None:
            raise (
                StoreClosed(f"{store!r} was closed")
                if store.closed
                else _refuse(
                    store,
                    SegmentError,
                    f"no right to open the segment again in this process, to make room for limiter {limiter!r}",
                    "a process that may",
                    "make the limiter before the worker is forked, or before it gives up its rights",
                )
            )
        entry = _find(segment, identity)
        if entry is None:
            entry = _append(store, fd, limiter, identity, wanted)
        _, offset, size, keys = entry
        shape = ExtentShape(keys, wanted.words_per_key)
        if (
            not 1 <= keys <= MAX_KEYS
            or shape.bytes != size
            or offset < segment.size
            or offset % layout.EXTENT_ALIGNMENT
            or offset + size > os.fstat(fd).st_size
        ):
            raise _refuse(
                store,
                DamagedSegment,
                f"an extent of {size} bytes for {keys} keys at {offset}",
                f"one of {shape.bytes} bytes within the file",
                "stop its users and call Store.unlink to start with an empty one",
            )
        if keys != wanted.keys:
            warnings.warn(
                f"the memory of limiter {limiter!r} was made for {keys} keys and is used as it is, not for the "
                f"{wanted.keys} asked for; to change that, stop its users and call Store.unlink",
                SegmentSizeWarning,
                stacklevel=3,
            )
        return _map(store, fd, offset, shape)


def _find(segment: Segment, identity: int) -> tuple[int, int, int, int] | None:
    raw = segment.read(layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size)
    return next((entry for entry in layout.EXTENT_ENTRY.iter_unpack(raw) if entry[0] == identity), None)


def _append(store: Store, fd: int, limiter: str, identity: int, shape: ExtentShape) -> tuple[int, int, int, int]:
    segment = store._segment
    if not file_locks.lock_within(fd, layout.EXTENTS_OFFSET, LOCKED_BYTES, LOCK_TIMEOUT):
        raise _refuse(
            store,
            SegmentBusy,
            f"a segment that another process has been changing for {LOCK_TIMEOUT:.0f} s",
            "a change that ends",
            "look for a stopped process that has the file open (fuser)",
        )
    try:
        entry = _find(segment, identity)
        if entry is not None:
            return entry
        raw = segment.read(layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size)
        free = [number for number, entry in enumerate(layout.EXTENT_ENTRY.iter_unpack(raw)) if entry[0] == 0]
        if not free:
            raise _refuse(
                store,
                SegmentSpaceError,
                f"all {layout.EXTENT_CAPACITY} extents taken",
                f"one for limiter {limiter!r}",
                "use keys instead of limiters to tell users apart, or a second store; what limiters of former "
                "parameters took is free after Store.unlink",
            )
        # Behind whatever a killed creator has left: its bytes may not be zero.
        end = os.fstat(fd).st_size
        offset = -(-end // layout.EXTENT_ALIGNMENT) * layout.EXTENT_ALIGNMENT
        _take_space(store, fd, limiter, offset, shape)
        _map(store, fd, offset, shape).block_cells(shape.used_cells)
        segment.publish_extent(free[0], identity, offset, shape.bytes, shape.keys)
        return identity, offset, shape.bytes, shape.keys
    finally:
        file_locks.unlock(fd, layout.EXTENTS_OFFSET, LOCKED_BYTES)


def _take_space(store: Store, fd: int, limiter: str, offset: int, shape: ExtentShape) -> None:
    try:
        room.refuse_what_does_not_fit(fd, store.path, shape.bytes)
        os.posix_fallocate(fd, offset, shape.bytes)
    except OSError as error:
        if not room.is_shortage(error):
            raise
        or_else = "ask for fewer keys or a smaller limit"
        found, remedy = room.shortage(error, fd, store.path, shape.bytes, or_else=or_else)
        raise _refuse(
            store,
            SegmentSpaceError,
            found,
            f"{shape.bytes} bytes for the {shape.keys} keys of limiter {limiter!r}, {shape.words_per_key * 8} each",
            remedy,
        ) from None


def _map(store: Store, fd: int, offset: int, shape: ExtentShape) -> Extent:
    try:
        return Extent(
            store._segment,
            fd,
            offset=offset,
            keys=shape.keys,
            group_count=shape.group_count,
            used_cells=shape.used_cells,
            word_count=shape.used_cells * shape.words_per_key,
        )
    except OSError as error:
        raise _refuse(
            store,
            SegmentSpaceError,
            f"no room in this process's address space ({os.strerror(error.errno or 0)})",
            f"room to map {shape.bytes} bytes",
            "raise the process's limits (ulimit -v) or ask for fewer keys",
        ) from None


def _refuse(store: Store, kind: type[SegmentError], found: str, expected: str, remedy: str) -> SegmentError:
    return kind(store.path or store.name, found, expected, remedy)
