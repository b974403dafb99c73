"""Which process owns a slot of shared memory, and whether it is still there.

A process is its pid, its start time and its pid namespace, in one 64-bit word. Pids are used again, so a pid alone
says nothing; together with the start time it does. Whether a process has ended is asked of a pidfd, opened once and
checked against the start time then: it stays with that very process, and tells of its end even before anybody has
waited for it.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import Final

__all__ = ["Owners", "this_process"]

PID_BITS: Final = 22  # of the largest pid that Linux gives
START_BITS: Final = 30  # of the start time in clock ticks: half a year at the usual 100 per second, modulo that
NAMESPACE_BITS: Final = 12


def this_process() -> int:
    """The calling process as an owner; never 0."""
    pid = os.getpid()
    return pid | (_start_ticks(pid) or 0) << PID_BITS | _namespace() << (PID_BITS + START_BITS)


def _start_ticks(pid: int) -> int | None:
    """When the process started, modulo 2**START_BITS; None if that can't be found out."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command may hold spaces and brackets; what follows it doesn't. The start time is field 22, this begins at 3.
    return int(stat.rpartition(b")")[2].split()[19]) & ((1 << START_BITS) - 1)


def _namespace() -> int:
    """A number that tells pid namespaces apart: another one's pids mean nothing here."""
    try:
        return (os.stat("/proc/self/ns/pid").st_ino * 0x9E3779B1 >> 8) % 2**NAMESPACE_BITS
    except OSError:
        return 0


class Owners:
    """Processes whose end this process watches. Not thread-safe; for one process: make another one after a fork."""

    def __init__(self) -> None:
        self.me = this_process()
        self._pidfds: dict[int, int] = {}
        self._poll = select.poll()

    def close(self) -> None:
        """Stop watching."""
        for pidfd in self._pidfds.values():
            with contextlib.suppress(OSError):
                os.close(pidfd)
        self._pidfds.clear()

    def __del__(self) -> None:
        self.close()

    def dead_among(self, owners: set[int]) -> set[int]:
        """Those that have certainly ended. Who can't be watched, as in another pid namespace, counts as alive."""
        dead = {owner for owner in owners if not self._watch(owner)}
        if self._pidfds:
            ended = {pidfd for pidfd, _ in self._poll.poll(0)}
            for owner, pidfd in list(self._pidfds.items()):
                if pidfd in ended:
                    dead.add(owner)
                    self._poll.unregister(pidfd)
                    os.close(self._pidfds.pop(owner))
        return dead

    def _watch(self, owner: int) -> bool:
        """Whether the owner may be alive; if it can be watched, it is from now on."""
        if owner == self.me or owner in self._pidfds:
            return True
        if owner >> (PID_BITS + START_BITS) != self.me >> (PID_BITS + START_BITS):
            return True
        pid = owner % 2**PID_BITS
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        except OSError:  # no more descriptors, or pid 0 in a damaged slot
            return _may_be(owner)
        if not _may_be(owner):
            os.close(pidfd)
            return False
        self._pidfds[owner] = pidfd
        self._poll.register(pidfd, select.POLLIN)
        return True


def _may_be(owner: int) -> bool:
    """Whether the process of the owner's pid may be the owner: not if it started at another time."""
    ticks = _start_ticks(owner % 2**PID_BITS)
    return ticks is None or ticks == owner >> PID_BITS & (2**START_BITS - 1)
