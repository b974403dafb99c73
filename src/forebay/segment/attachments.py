"""Who has a segment attached: its users.

Every user holds a shared lock on one byte far behind the end of the segment's file, its *mark*. The kernel drops the
lock with the last descriptor of what was opened, so when the user closes its store or ends, however it ends. (And with
the last mapping, but what is mapped was opened by itself where it can be.) A child of a fork has its parent's mark
until it opens the file for itself and takes one of its own. So three questions have an answer that no pid could give,
over all containers and users of a host:

*Is anybody attached?* If nobody is, the whole range of marks can be locked exclusively, and while it is, nobody becomes
a user. Only then may a segment of another boot be given this boot's clock.

*Is the user that wrote its mark here still there?* If nobody has a lock on that byte, it isn't.

*Does anybody use a segment that was removed from here?* A mark says, beside a random number, where its segment's name
was when it was attached; the kernel lists the locks of all processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import zlib
from collections.abc import Iterator
from typing import Final

from forebay.segment import ofd_locks

__all__ = ["exclude", "is_alive", "join", "opened_to_map", "place_of", "place_of_mark", "use_removed"]

FIRST_MARK: Final = 2**62  # where no file has bytes
PLACE_BITS: Final = 31
NUMBER_BITS: Final = 31
LOCKS: Final = "/proc/locks"


def place_of(path: str) -> int:
    """Where a segment's name is, as marks have it: a hash of the directory's inode and the file's name."""
    directory, name = os.path.split(path)
    return zlib.crc32(f"{os.stat(directory).st_ino}/{name}".encode(errors="surrogateescape")) >> (32 - PLACE_BITS)


def place_of_mark(mark: int) -> int:
    return (mark - FIRST_MARK) >> NUMBER_BITS


@contextlib.contextmanager
def opened_to_map(fd: int) -> Iterator[int]:
    """The file of `fd`, opened once more: a mapping of that keeps no lock of `fd`, which may be closed before it.

    It is `fd` itself where it can't be opened again: this process gave up root meanwhile, or has no descriptor left.
    Then the locks of `fd` last as long as what is mapped.
    """
    opened = None
    with contextlib.suppress(OSError):
        opened = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield fd if opened is None else opened
    finally:
        if opened is not None:
            os.close(opened)


def join(fd: int, place: int) -> int | None:
    """Become a user of the segment that `fd` has open. The mark, or None while somebody excludes all users."""
    mark = FIRST_MARK + (place << NUMBER_BITS) + secrets.randbelow(2**NUMBER_BITS)
    return mark if ofd_locks.try_lock(fd, mark, 1, shared=True) else None


def exclude(fd: int) -> bool:
    """Keep everybody from becoming a user, until `fd` is unlocked. False if there is one."""
    return ofd_locks.try_lock(fd, FIRST_MARK, 0)


def is_alive(fd: int, mark: int) -> bool:
    """Whether that is the mark of a user, or may be: one other than who has opened `fd`."""
    return FIRST_MARK <= mark < 2 * FIRST_MARK and ofd_locks.is_locked(fd, mark, 1)


def use_removed(fd: int, place: int) -> bool:
    """Whether anybody uses a segment that had its name where `fd` has its own now. False if that can't be seen."""
    status = os.fstat(fd)
    here = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with contextlib.suppress(OSError), open(LOCKS, encoding="utf-8") as file:
        for line in file:
            *_, where, start, _ = line.split()
            device, _, inode = where.rpartition(":")
            if device == here and int(inode) != status.st_ino and place_of_mark(int(start)) == place:
                return True
    return False
