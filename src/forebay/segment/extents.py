"""Extents: memory behind the table for limiters that need more than a cell per key.

An extent is a small table of its own, followed by a fixed number of words for each of its cells. Processes append
extents to the segment's file one at a time and never remove one: a process that has an extent mapped may still use it.

**State.** A list of entries in the header's part of the segment; an entry is published when its identity isn't 0. The
list's lock is a word of the header, `extents_maker`: 0, or the attachment id of the process that changes the list (see
``attachment_locks``). A process takes it by a CAS from 0, or from the id of a process that is no longer attached; while
another process holds it, it waits. No attachment id comes back, so if several processes find a holder gone, one CAS
succeeds. A file lock would do except for processes that may only read the file: with a shared lock they could prevent
the exclusive lock of all others.

**Transitions.** A process appends an extent in these steps:

1. take the lock
2. map the bytes behind the file's end, then allocate them
3. block the cells that hold no keys
4. take the limiter's number, as every limiter does
5. write the entry, its identity last

*The number* is never given back. So a process takes it when nothing else can fail, and before the identity, so that the
limiter of every published extent is in the list of limiters. Before it takes bytes, it checks that a number is free.
Limiters without an extent take theirs without the lock. If they take the last numbers in between, the bytes stay unused
as after a crash. Processes that make the same limiter at the same time get the same number, by this path or another.

*Finding an extent* takes no lock. A release stores the identity and an acquire loads it. So a process that finds it
reads a whole entry, whose bytes are in place and whose limiter has a name. No entry changes after that.

**Crash and stall.** If the holder of the lock is killed, the next process takes the lock over. If the entry's identity
is still 0, the next process overwrites the rest of the entry, and appends behind the bytes that are left; no process
finds those. If the killed process had taken the number, that limiter has a name and no use yet. After the identity, the
extent is complete. If the holder is stopped, others wait for ``ofd_locks.TIMEOUT_S``, then raise ``SegmentBusy``.

**Damage.** An identity is a hash of everything that an extent is for. An entry that is found by it must agree with
that, and lie within the file, or the extent is refused.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import Final

from forebay.errors import (
    DamagedSegment,
    SegmentBusy,
    SegmentError,
    SegmentSizeWarning,
    SegmentSpaceError,
)
from forebay.segment import attachment_locks, free_space, layout, ofd_locks
from forebay.segment.attachment import Attachment, MappedExtent
from forebay.segment.limiter_list import encode_limiter_name
from forebay.segment.sizes import CELLS_PER_GROUP, MAX_KEYS, ExtentShape
from forebay.segment.spec import START_AGAIN
from forebay.segment.table_place import TablePlace

__all__ = ["ExtentEntry", "ExtentShape", "Purpose", "append_table", "give_back_table", "open_extent"]

LIST_BYTES: Final = layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size


@dataclass(frozen=True, slots=True)
class Purpose:
    """The use of an extent's words, and how to read them: the fields of an entry from its algorithm on."""

    algorithm: int
    words_per_cell: int
    low_bits: int
    limit: int
    period_ns: int

    def __str__(self) -> str:
        return (
            f"algorithm {self.algorithm}, {self.words_per_cell} words per cell, {self.low_bits} low bits, limit "
            f"{self.limit}, period {self.period_ns} ns"
        )

    def identity_text(self, limiter: bytes) -> bytes:
        """The text whose hash is the extent's identity."""
        entry = ExtentEntry(identity=0, offset=0, size=0, keys=0, limiter=0, purpose=self)
        return limiter + b"\0" + entry.pack()[layout.EXTENT_ENTRY_ALGORITHM :]


@dataclass(frozen=True, slots=True)
class ExtentEntry:
    """An entry of the list of extents. Its values may be damaged: see `is_whole` and `lies_within`."""

    identity: int
    offset: int
    size: int
    keys: int
    limiter: int
    purpose: Purpose

    @classmethod
    def unpack(cls, raw: memoryview | bytes) -> ExtentEntry:
        identity, offset, size, keys, limiter, *purpose = layout.EXTENT_ENTRY.unpack(raw)
        return cls(identity, offset, size, keys, limiter, Purpose(*purpose))

    def pack(self) -> bytes:
        whose = (self.identity, self.offset, self.size, self.keys, self.limiter)
        return layout.EXTENT_ENTRY.pack(*whose, *astuple(self.purpose))

    @property
    def shape(self) -> ExtentShape:
        return ExtentShape(self.keys, self.purpose.words_per_cell)

    @property
    def is_whole(self) -> bool:
        """Whether its length fits its keys' cells and words."""
        return 1 <= self.keys <= MAX_KEYS and self.purpose.words_per_cell >= 1 and self.shape.bytes == self.size

    def lies_within(self, segment_size: int, file_size: int) -> bool:
        """Whether it is behind the table and within the file."""
        return (
            self.offset >= segment_size
            and self.offset % layout.EXTENT_ALIGNMENT == 0
            and self.offset + self.size <= file_size
        )


def open_extent(attachment: Attachment, limiter: str, purpose: Purpose, keys: int) -> MappedExtent:
    """Map the extent of `limiter` for this purpose. Appends one if there is none.

    An extent that was made for another number of keys keeps its size. Raises ``SegmentSpaceError`` if there is no
    space, before it takes any.
    """
    segment = attachment.segment
    identity = segment.identity_of(purpose.identity_text(encode_limiter_name(limiter)))
    with attachment.lock():
        remedy = "make the limiter before the worker is forked, gives up its rights or closes its files"
        fd = _file_of(attachment, f"memory for limiter {limiter!r}", remedy)
        attachment.check_writable()
        raw = segment.extent_entry(identity)
        if raw is None:
            attachment.refuse_growth(f"no memory for limiter {limiter!r} with these parameters")
            raw = _append(attachment, fd, limiter, ExtentEntry(identity, 0, 0, keys, 0, purpose))
        entry = ExtentEntry.unpack(raw)
        number = attachment.limiter_number(limiter, purpose.algorithm, add=False)
        _check(attachment, entry, number, purpose, os.fstat(fd).st_size)
        if keys != entry.keys:
            warnings.warn(
                f"the memory of limiter {limiter!r} was made for {entry.keys} keys and keeps that size, although this "
                f"limiter has keys={keys}; to change it, stop its users and call Store.unlink",
                SegmentSizeWarning,
                stacklevel=3,
            )
        return _map_extent(attachment, fd, entry.offset, entry.shape)


def append_table(attachment: Attachment, keys: int) -> tuple[TablePlace, MappedExtent]:
    """Append room for a table of so many keys to the segment's file. It is in no list: no other process uses it.

    Raises ``SegmentSpaceError`` if there is no space, before it takes any.
    """
    with attachment.lock(), _listing(attachment) as fd:
        place = TablePlace.behind(os.fstat(fd).st_size, keys)
        cells = place.group_count * CELLS_PER_GROUP
        mapped = _map(attachment, fd, place.offset, place.keys, place.group_count, cells, 0, place.bytes)
        _take_space(attachment, fd, place.offset, place.bytes, f"a table of {keys} keys", "ask for fewer keys")
        return place, mapped


def give_back_table(attachment: Attachment, place: TablePlace) -> None:
    """Give back the memory of a table that no process has used. The file keeps its length: others may have it mapped,
    and would be killed if they read behind its end.
    """
    with attachment.lock():
        fd = attachment.own_file()
        if fd is not None:
            # Some file systems can't. Then the bytes stay, as after a crash.
            with contextlib.suppress(OSError), mmap.mmap(fd, place.bytes, offset=place.offset) as memory:
                memory.madvise(mmap.MADV_REMOVE)


@contextlib.contextmanager
def _listing(attachment: Attachment) -> Iterator[int]:
    """The segment's file, while this process has the lock of the list."""
    fd = _file_of(attachment, "another table", "run as the file's owner or as root")
    _take_list(attachment, fd)
    try:
        yield fd
    finally:
        _unlock_list(attachment)


def _file_of(attachment: Attachment, what: str, remedy: str) -> int:
    """The segment's file, open. Raises ``SegmentError`` with a remedy if this process can't open it."""
    fd = attachment.own_file()
    if fd is None:
        attachment.check_open()
        raise _refuse(
            attachment,
            SegmentError,
            f"a process that may not open the segment again, or that closed its file, and so can't make {what}",
            "a process that has the file open, or may open it",
            remedy,
        )
    return fd


def _check(attachment: Attachment, entry: ExtentEntry, number: int, purpose: Purpose, file_size: int) -> None:
    found = expected = ""
    if not entry.is_whole or not entry.lies_within(attachment.segment.size, file_size):
        found = f"an extent of {entry.size} bytes for {entry.keys} keys at {entry.offset}"
        expected = f"one of {ExtentShape(entry.keys, purpose.words_per_cell).bytes} bytes within the file"
    if entry.limiter != number or entry.purpose != purpose:
        found = f"an extent of limiter {entry.limiter} ({entry.purpose})"
        expected = f"one of limiter {number} ({purpose})"
    if found:
        raise _refuse(attachment, DamagedSegment, found, expected, START_AGAIN)


def _append(attachment: Attachment, fd: int, limiter: str, wanted: ExtentEntry) -> bytes:
    """Append an extent as `wanted`. Returns its entry, or the entry of a process that was faster."""
    segment, shape = attachment.segment, wanted.shape
    _take_list(attachment, fd)
    try:
        raw = segment.extent_entry(wanted.identity)
        if raw is not None:
            return raw
        attachment.limiter_number(limiter, wanted.purpose.algorithm, add=False)  # raises if there is no number for it
        raw = segment.read(layout.EXTENTS_OFFSET, LIST_BYTES)
        free = [number for number, entry in enumerate(layout.EXTENT_ENTRY.iter_unpack(raw)) if entry[0] == 0]
        if not free:
            raise _refuse(
                attachment,
                SegmentSpaceError,
                f"all {layout.EXTENT_CAPACITY} extents taken",
                f"one for limiter {limiter!r}",
                "tell users apart by keys instead of limiters, or make a second store; Store.unlink frees those of "
                "limiters with former parameters",
            )
        # Behind the bytes that a killed process may have left: they may not be zero.
        end = os.fstat(fd).st_size
        offset = -(-end // layout.EXTENT_ALIGNMENT) * layout.EXTENT_ALIGNMENT
        # Mapped first: what can't be mapped must not be appended. No memory is touched before the file has the bytes.
        extent = _map_extent(attachment, fd, offset, shape)
        what = f"the {shape.keys} keys of limiter {limiter!r}, {shape.words_per_key * 8} each"
        _take_space(attachment, fd, offset, shape.bytes, what, "ask for fewer keys or a smaller limit")
        extent.block_cells(shape.used_cells)
        number = attachment.limiter_number(limiter, wanted.purpose.algorithm)
        made = replace(wanted, offset=offset, size=shape.bytes, limiter=number).pack()
        segment.publish_extent(free[0], made)
        return made
    finally:
        _unlock_list(attachment)


def _take_list(attachment: Attachment, fd: int) -> None:
    if not _lock_list(attachment, fd):
        raise _refuse(
            attachment,
            SegmentBusy,
            f"a segment that another process has been changing for {ofd_locks.TIMEOUT_S:.0f} s",
            "a change that ends",
            "look for a stopped process that has the file open (fuser)",
        )


def _lock_list(attachment: Attachment, fd: int) -> bool:
    """Take the lock of the list. False if another process holds it for too long."""

    def take_lock() -> bool:
        maker = attachment.segment.extents_maker()
        is_held = attachment_locks.is_attached(fd, maker)
        return not is_held and attachment.segment.replace_extents_maker(maker, attachment.id)

    return ofd_locks.succeeds_in_time(take_lock)


def _unlock_list(attachment: Attachment) -> None:
    attachment.segment.replace_extents_maker(attachment.id, 0)


def _take_space(attachment: Attachment, fd: int, offset: int, size: int, what: str, or_else: str) -> None:
    try:
        free_space.refuse_what_does_not_fit(fd, attachment.path, size)
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        if not free_space.is_shortage(error):
            raise
        found, remedy = free_space.shortage(error, fd, attachment.path, size, or_else=or_else)
        raise _refuse(attachment, SegmentSpaceError, found, f"{size} bytes for {what}", remedy) from None


def _map_extent(attachment: Attachment, fd: int, offset: int, shape: ExtentShape) -> MappedExtent:
    words = shape.used_cells * shape.words_per_key
    return _map(attachment, fd, offset, shape.keys, shape.group_count, shape.used_cells, words, shape.bytes)


def _map(
    attachment: Attachment, fd: int, offset: int, keys: int, group_count: int, used_cells: int, words: int, size: int
) -> MappedExtent:
    try:
        with attachment_locks.opened_to_map(fd) as opened:
            return attachment.segment.map_extent(
                opened,
                offset=offset,
                keys=keys,
                group_count=group_count,
                used_cells=used_cells,
                word_count=words,
            )
    except OSError as error:
        raise _refuse(
            attachment,
            SegmentSpaceError,
            f"no room in this process's address space ({os.strerror(error.errno or 0)})",
            f"room to map {size} bytes",
            "raise the process's limits (ulimit -v) or ask for fewer keys",
        ) from None


def _refuse(attachment: Attachment, kind: type[SegmentError], found: str, expected: str, remedy: str) -> SegmentError:
    return kind(attachment.label, found, expected, remedy)
