"""Locks on bytes of a file that end with the process that holds them, however it ends.

Open file description locks (Linux 3.15): unlike the older POSIX record locks they are not lost when some other
descriptor of the file is closed, and unlike a pid written into shared memory they need no guess at who is alive.
A child of a fork shares its parent's locks until it opens the file for itself. The bytes need not exist.

An exclusive lock takes the right to write the file, a shared one only the right to read it. So a process that may only
read a file can keep others from an exclusive lock, never from a shared one.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import time

__all__ = ["is_locked", "lock_within", "try_lock", "unlock"]

# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid. A length of 0 is everything from there on.
_FLOCK = struct.Struct("hhqqi4x")


def try_lock(fd: int, start: int, length: int, *, shared: bool = False) -> bool:
    """Take a lock on `length` bytes from `start`, or say at once that somebody else's is in the way."""
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, 0, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def is_locked(fd: int, start: int, length: int) -> bool:
    """Whether anybody else has a lock there, exclusive or shared."""
    question = _FLOCK.pack(fcntl.F_WRLCK, 0, start, length, 0)
    answer: bytes = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


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
