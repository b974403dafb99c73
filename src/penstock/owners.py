"""Which process owns a slot of shared memory, and whether it is still there.

A process is its pid, its start time and its namespaces, in one 64-bit word. Pids are used again, so a pid alone
says nothing; together with the start time it does. Whether a process has ended is asked of a pidfd, opened once and
checked against the start time then: it stays with that very process, and tells of its end even before anybody has
waited for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from typing import Final

__all__ = ["Owners", "this_process"]

PID_BITS: Final = 22  # of the largest pid that Linux gives
START_BITS: Final = 30  # of the start time in clock ticks: four months at the usual 100 per second, modulo that
NAMESPACE_BITS: Final = 12


def this_process() -> int:
    """The calling process as an owner; never 0."""
    return os.getpid() | (_start_ticks("self") or 0) << PID_BITS | _namespaces() << (PID_BITS + START_BITS)


def _start_ticks(process: int | str) -> int | None:
    """When the process started, modulo 2**START_BITS; None if that can't be found out."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command may hold spaces and brackets; what follows it doesn't. The start time is field 22, this begins at 3.
    return int(stat.rpartition(b")")[2].split()[19]) & ((1 << START_BITS) - 1)


def _namespaces() -> int:
    """A number that tells namespaces apart: another one's pids, or start times, mean nothing here."""
    numbers = []
    for name in ("pid", "time"):
        try:
            numbers.append(os.stat(f"/proc/self/ns/{name}").st_ino)
        except OSError:
            numbers.append(0)
    return ((numbers[0] * 0x9E3779B1 + numbers[1] * 0x85EBCA6B) >> 8) % 2**NAMESPACE_BITS


class Owners:
    """Processes whose end this process watches. Thread-safe; for one process: make another one after a fork."""

    def __init__(self) -> None:
        # First: `__del__` looks at it, also if what follows is interrupted.
        self._pidfds: dict[int, int] = {}
        self.me = this_process()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for pidfd in self._pidfds.values():
            _close(pidfd)

    def dead_among(self, owners: set[int]) -> set[int]:
        """Those that have certainly ended. Who can't be watched, as in another pid namespace, counts as alive.

        Nobody while another thread is looking.
        """
        locked = False
        try:
            locked = self._lock.acquire(blocking=False)
            if not locked:
                return set()
            dead = {owner for owner in owners if not self._watch(owner)}
            poll = select.poll()
            for pidfd in self._pidfds.values():
                poll.register(pidfd, select.POLLIN)
            ended = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}
            for owner, pidfd in list(self._pidfds.items()):
                if not _is_pidfd(pidfd):
                    # Closed by the program, and perhaps used again for something else.
                    del self._pidfds[owner]
                elif pidfd in ended:
                    dead.add(owner)
                    os.close(self._pidfds.pop(owner))
            return dead
        finally:
            if locked:
                self._lock.release()

    def _watch(self, owner: int) -> bool:
        """Whether the owner may be alive; if it can be watched, it is from now on."""
        if owner == self.me or owner in self._pidfds:
            return True
        if owner >> (PID_BITS + START_BITS) != self.me >> (PID_BITS + START_BITS):
            return True
        try:
            pidfd = os.pidfd_open(owner % 2**PID_BITS)
        except ProcessLookupError:
            return False
        except OSError:  # no more descriptors, or pid 0 in a damaged slot
            return _may_be(owner)
        if not _may_be(owner):
            os.close(pidfd)
            return False
        self._pidfds[owner] = pidfd
        return True


def _may_be(owner: int) -> bool:
    """Whether the process of the owner's pid may be the owner: not if it started at another time."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return True  # this /proc is of another pid namespace
    except OSError:
        return True
    ticks = _start_ticks(owner % 2**PID_BITS)
    return ticks is None or ticks == owner >> PID_BITS & (2**START_BITS - 1)


def _is_pidfd(descriptor: int) -> bool:
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except (ProcessLookupError, PermissionError):
        return True
    except OSError:
        return False
    return True


def _close(pidfd: int) -> None:
    if _is_pidfd(pidfd):
        with contextlib.suppress(OSError):
            os.close(pidfd)
