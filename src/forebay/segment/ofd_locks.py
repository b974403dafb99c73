"""Open file description (OFD) locks: locks on bytes of a file that end with the process that holds them.

They exist since Linux 3.15. Unlike POSIX record locks, they are not lost when another descriptor of the file is closed.
Unlike a pid in shared memory, they need no guess whether a process is alive. A forked child shares its parent's locks
until it opens the file for itself. The locked bytes need not exist.

An exclusive lock needs the right to write the file, a shared lock only the right to read it. So a process that may only
read a file can prevent exclusive locks of others, but no shared ones.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import time
from collections.abc import Callable
from typing import Final

__all__ = ["TIMEOUT_S", "is_locked", "succeeds_in_time", "try_lock", "unlock"]

TIMEOUT_S: Final = 30.0
"""How long a process waits for another one that creates or changes a segment. It may be stopped and never finish."""

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid. A length of 0 means all bytes from there on.
_FLOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Lock `length` bytes from `start`. False at once if another lock conflicts."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, start: int, length: int) -> bool:
    """Whether another open file has a lock there, exclusive or shared."""
    question = _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0)
    answer: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def unlock(fd: int, start: int, length: int) -> None:
    """Release what ``try_lock`` locked."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, start, length, 0))


def succeeds_in_time(attempt: Callable[[], bool]) -> bool:
    """Repeat `attempt` until it returns True. False after ``TIMEOUT_S``: the holder of a lock may be stopped."""
    # Not time.monotonic, which may be frozen for a test.
    deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + TIMEOUT_S
    while not attempt():
        if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
            return False
        time.sleep(0.005)
    return True
