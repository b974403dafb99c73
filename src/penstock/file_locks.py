"""Locks on bytes of a file that end with the process that holds them, however it ends.

Open file description locks (Linux 3.15): unlike the older POSIX record locks they are not lost when some other
descriptor of the file is closed, and unlike a pid written into shared memory they need no guess at who is alive.
A child of a fork shares its parent's locks until it opens the file for itself.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import time

__all__ = ["lock_within", "try_lock", "unlock"]

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, start: int, length: int) -> bool:
    """Take an exclusive lock on `length` bytes from `start`, or say at once that somebody else has one."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, start: int, length: int) -> None:
    """Give back what ``try_lock`` took."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, 0, start, length, 0))


def lock_within(fd: int, start: int, length: int, timeout: float) -> bool:
    """Like ``try_lock``, but try for `timeout` seconds: a holder may be stopped and never give it back."""
    # Not time.monotonic, which may be frozen for a test.
    deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + timeout
    while not try_lock(fd, start, length):
        if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
            return False
        time.sleep(0.005)
    return True
