"""File locks that show which processes have a segment attached.

Every attached process holds a shared lock on one byte far behind the end of the segment's file. The position of that
byte is its *attachment id*. The kernel drops the lock with the last descriptor of the open file description: when the
process closes its store, or ends in any way. A mapping holds the description, too, so the file is opened once more for
the mapping where that is possible. A forked child shares its parent's lock until it opens the file for itself and
takes a lock of its own. The locks answer three questions that no pid could, across all containers and users of a host:

*Is any process attached?* If none is, the whole range of ids can be locked exclusively, and while it is, none attaches.
Only then may a process give the segment of another boot this boot's clock.

*Is the process that wrote this attachment id still attached?* If no lock is held on that byte, it isn't.

*Is a segment that was removed from this path still attached?* An attachment id contains, beside a random number, a hash
of the path at which the process attached. The kernel lists the locks of all processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sys
import zlib
from collections.abc import Iterator
from typing import Final

from forebay.segment import ofd_locks

__all__ = [
    "attach",
    "attached_ids",
    "exclude_all",
    "is_any_attached",
    "is_attached",
    "is_removed_segment_attached",
    "opened_to_map",
    "place_of",
    "place_of_id",
    "prevent_resize",
    "removed_segments",
]

FIRST_ID: Final = 2**62  # where no file has bytes
RESIZE_BYTE: Final = FIRST_ID - 1
"""Locked exclusively by a process that moves the table, and shared by one that prevents that."""
PLACE_BITS: Final = 31
NUMBER_BITS: Final = 31
LOCKS: Final = "/proc/locks"


def place_of(path: str) -> int:
    """A segment's place as attachment ids contain it: a hash of the directory's inode and the file's name."""
    directory, name = os.path.split(path)
    return zlib.crc32(f"{os.stat(directory).st_ino}/{name}".encode(errors="surrogateescape")) >> (32 - PLACE_BITS)


def place_of_id(attachment_id: int) -> int:
    return (attachment_id - FIRST_ID) >> NUMBER_BITS


@contextlib.contextmanager
def opened_to_map(fd: int) -> Iterator[int]:
    """Open the file of `fd` once more: a mapping of that descriptor doesn't keep the locks of `fd` after its close.

    Yields `fd` itself if the file can't be opened again: this process gave up root meanwhile, or has no descriptor
    left. Then the locks of `fd` last as long as the mapping.
    """
    opened = None
    with contextlib.suppress(OSError):
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        opened = os.open(f"/proc/self/fd/{fd}", access | os.O_CLOEXEC)
    try:
        yield fd if opened is None else opened
    finally:
        if opened is not None:
            os.close(opened)


def attach(fd: int, place: int) -> int | None:
    """Lock a byte of the segment that `fd` has open. The attachment id, or None while a process excludes all."""
    attachment_id = FIRST_ID + (place << NUMBER_BITS) + secrets.randbelow(2**NUMBER_BITS)
    return attachment_id if ofd_locks.try_lock(fd, attachment_id, 1, shared=True) else None


def prevent_resize(fd: int) -> bool:
    """Prevent that a resize moves the table, if this interpreter has no GIL. False while one is under way.

    Without the GIL, threads share a view of the table: see core/table/moving.pxd.
    """
    return "t" not in sys.abiflags or ofd_locks.try_lock(fd, RESIZE_BYTE, 1, shared=True)


def exclude_all(fd: int) -> bool:
    """Prevent every attachment until `fd` is unlocked. False if a process is attached."""
    return ofd_locks.try_lock(fd, FIRST_ID, 0)


def is_any_attached(fd: int) -> bool:
    """Whether another process than the one that opened `fd` is attached. Needs only the right to read the file."""
    return ofd_locks.is_locked(fd, FIRST_ID, 0)


def is_attached(fd: int, attachment_id: int) -> bool:
    """Whether another process than the one that opened `fd` holds, or may hold, the lock of that id."""
    return FIRST_ID <= attachment_id < 2 * FIRST_ID and ofd_locks.is_locked(fd, attachment_id, 1)


def is_removed_segment_attached(fd: int, place: int) -> bool:
    """Whether a process has another file attached that had the path of `fd`. False if /proc doesn't show it."""
    return bool(removed_segments(os.fstat(fd), place))


def removed_segments(status: os.stat_result, place: int) -> set[int]:
    """The inodes of other files that processes have attached at the place of the file of that status."""
    return {inode for inode, start in _locks_on(status) if inode != status.st_ino and place_of_id(start) == place}


def attached_ids(status: os.stat_result) -> set[int]:
    """The ids of the processes that have the file of that status attached. Empty if /proc doesn't show them."""
    return {start for inode, start in _locks_on(status) if inode == status.st_ino and start > FIRST_ID}


def _locks_on(status: os.stat_result) -> Iterator[tuple[int, int]]:
    """The locks on files of the device of that status: an inode and the first byte that is locked."""
    here = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with contextlib.suppress(OSError), open(LOCKS, encoding="utf-8") as file:
        for line in file:
            *_, where, start, _ = line.split()
            device, _, inode = where.rpartition(":")
            if device == here:
                yield int(inode), int(start)
