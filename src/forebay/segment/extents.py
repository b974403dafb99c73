"""Extents: memory behind the table for limiters that need more than a cell per key.

An extent is a small table of its own and, behind it, so many words for each of its cells. Extents are appended to the
segment's file by one process at a time and never removed: whatever has one mapped may still use it.

*The lock* is a word of the header, `extents_maker`: 0, or the mark of the user that changes the list (see
``attachments``). A process puts its own there by a CAS, from 0 or from the mark of a user that is gone; who finds that
of another one waits. Nobody's mark comes back, so of several that find one gone, one CAS succeeds. A file lock would do
but for processes that may only read the file: by a shared lock they could keep all others from an exclusive one.

Who makes one does so in this order: the lock; a mapping of the place behind the file's end; bytes there; its blocked
cells; the limiter's number, as any limiter takes it; its entry in the list, and in that its identity last.

*The number* is never given back, so it is taken when nothing else can be refused, and before the identity, so that
whoever finds an extent finds its limiter in the list. Whether there is one to take is looked at before there are bytes
for it. Limiters without an extent take theirs without the lock: if the last ones go meanwhile, the bytes are left as a
killed creator leaves them. Who makes the same limiter at the same time gets the same number, here or there.

*Found.* Whoever looks for an identity takes no lock. It is stored by a release and loaded by an acquire, so who finds
it reads a whole entry, of bytes that are in place and of a limiter that has a name. No entry changes after that.

*Crash.* Killed under the lock, which the next one then takes over, the entry's identity is still 0: the next maker
overwrites whatever else stands in it, and appends behind the bytes that were left. Nobody finds those. After the
number, the name is that of a limiter that nobody has used yet. Killed after the identity: it is made.

*Damage.* An identity is a hash of all that says what an extent is for. What is found by it must say the same again, and
lie within the file, or it is refused.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Final

from forebay.core.table.segment_view import Extent, forks
from forebay.errors import (
    DamagedSegment,
    InvalidLimiter,
    SegmentBusy,
    SegmentError,
    SegmentSizeWarning,
    SegmentSpaceError,
    StoreClosed,
    shown,
)
from forebay.segment import attachments, free_space, layout
from forebay.segment.file import BYTES_PER_KEY, LOCK_TIMEOUT

if TYPE_CHECKING:
    from forebay.store import Store

__all__ = ["ExtentEntry", "ExtentShape", "Purpose", "open_extent"]

MAX_KEYS: Final = 2**32
LIST_BYTES: Final = layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size
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


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a limiter keeps in an extent, and the numbers that this is read with: an entry, from its algorithm on."""

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
        """What an extent's identity is the hash of."""
        entry = ExtentEntry(identity=0, offset=0, size=0, keys=0, limiter=0, purpose=self)
        return limiter + b"\0" + entry.pack()[layout.EXTENT_ENTRY_ALGORITHM :]


@dataclass(frozen=True, slots=True)
class ExtentEntry:
    """What the list has for an extent. It may say anything: see `lies_within`."""

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
        """Whether its length is that of its keys' cells and words."""
        return 1 <= self.keys <= MAX_KEYS and self.purpose.words_per_cell >= 1 and self.shape.bytes == self.size

    def lies_within(self, segment_size: int, file_size: int) -> bool:
        """Whether it is behind the table and within the file."""
        return (
            self.offset >= segment_size
            and self.offset % layout.EXTENT_ALIGNMENT == 0
            and self.offset + self.size <= file_size
        )


def open_extent(store: Store, limiter: str, purpose: Purpose, keys: int) -> Extent:
    """Map the extent of `limiter` for this purpose, which is made if there is none.

    One for another number of keys is used as it is. Raises ``SegmentSpaceError`` if there is no room, before any is
    taken.
    """
    segment = store._segment
    identity = segment.identity_of(purpose.identity_text(store._limiter_name(limiter)))
    with store._lock():
        fd = store._own_file(forks())
        if fd is None:
            raise (
                StoreClosed(f"{store!r} was closed")
                if store.closed
                else _refuse(
                    store,
                    SegmentError,
                    f"no right to open the segment again in this process, or its file closed by the program, to make "
                    f"room for limiter {limiter!r}",
                    "a process that may",
                    "make the limiter before the worker is forked, gives up its rights or closes its files",
                )
            )
        raw = segment.extent_entry(identity)
        if raw is None:
            raw = _append(store, fd, limiter, ExtentEntry(identity, 0, 0, keys, 0, purpose))
        entry = ExtentEntry.unpack(raw)
        number = store._limiter_number(limiter, purpose.algorithm, add=False)
        _check(store, entry, number, purpose, os.fstat(fd).st_size)
        if keys != entry.keys:
            warnings.warn(
                f"the memory of limiter {limiter!r} was made for {entry.keys} keys and is used as it is, not for the "
                f"{keys} asked for; to change that, stop its users and call Store.unlink",
                SegmentSizeWarning,
                stacklevel=3,
            )
        return _map(store, fd, entry.offset, entry.shape)


def _check(store: Store, entry: ExtentEntry, number: int, purpose: Purpose, file_size: int) -> None:
    found = expected = ""
    if not entry.is_whole or not entry.lies_within(store._segment.size, file_size):
        found = f"an extent of {entry.size} bytes for {entry.keys} keys at {entry.offset}"
        expected = f"one of {ExtentShape(entry.keys, purpose.words_per_cell).bytes} bytes within the file"
    if entry.limiter != number or entry.purpose != purpose:
        found = f"an extent of limiter {entry.limiter} ({entry.purpose})"
        expected = f"one of limiter {number} ({purpose})"
    if found:
        remedy = "stop its users and call Store.unlink to start with an empty one"
        raise _refuse(store, DamagedSegment, found, expected, remedy)


def _append(store: Store, fd: int, limiter: str, wanted: ExtentEntry) -> bytes:
    """Make an extent like that, wherever there is room. Its entry, or that of who was faster."""
    segment, shape = store._segment, wanted.shape
    if not _lock_list(store, fd):
        raise _refuse(
            store,
            SegmentBusy,
            f"a segment that another process has been changing for {LOCK_TIMEOUT:.0f} s",
            "a change that ends",
            "look for a stopped process that has the file open (fuser)",
        )
    try:
        raw = segment.extent_entry(wanted.identity)
        if raw is not None:
            return raw
        store._limiter_number(limiter, wanted.purpose.algorithm, add=False)  # or it is refused
        raw = segment.read(layout.EXTENTS_OFFSET, LIST_BYTES)
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
        # Mapped first: what can't be mapped must not be appended. Nobody touches it before it has its bytes.
        extent = _map(store, fd, offset, shape)
        _take_space(store, fd, limiter, offset, shape)
        extent.block_cells(shape.used_cells)
        number = store._limiter_number(limiter, wanted.purpose.algorithm)
        made = replace(wanted, offset=offset, size=shape.bytes, limiter=number).pack()
        segment.publish_extent(free[0], made)
        return made
    finally:
        _unlock_list(store)


def _lock_list(store: Store, fd: int) -> bool:
    """Become the one process that changes the list of extents. False if another one has been that for too long."""
    # Not time.monotonic, which may be frozen for a test.
    deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + LOCK_TIMEOUT
    while True:
        maker = store._segment.extents_maker()
        if not attachments.is_alive(fd, maker) and store._segment.replace_extents_maker(maker, store._mark):
            return True
        if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
            return False
        time.sleep(0.005)


def _unlock_list(store: Store) -> None:
    store._segment.replace_extents_maker(store._mark, 0)


def _take_space(store: Store, fd: int, limiter: str, offset: int, shape: ExtentShape) -> None:
    try:
        free_space.refuse_what_does_not_fit(fd, store.path, shape.bytes)
        os.posix_fallocate(fd, offset, shape.bytes)
    except OSError as error:
        if not free_space.is_shortage(error):
            raise
        or_else = "ask for fewer keys or a smaller limit"
        found, remedy = free_space.shortage(error, fd, store.path, shape.bytes, or_else=or_else)
        raise _refuse(
            store,
            SegmentSpaceError,
            found,
            f"{shape.bytes} bytes for the {shape.keys} keys of limiter {limiter!r}, {shape.words_per_key * 8} each",
            remedy,
        ) from None


def _map(store: Store, fd: int, offset: int, shape: ExtentShape) -> Extent:
    try:
        with attachments.opened_to_map(fd) as opened:
            return Extent(
                store._segment,
                opened,
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
