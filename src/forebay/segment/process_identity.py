"""Which process owns a slot of shared memory, and whether it is still there.

An owner is a 64-bit word: a pid, the number of the pid namespace that this pid is of, and the process's *birth*, which
tells the processes apart that have had one pid.

*Never is a live owner taken for dead.* An owner is taken for dead only by a process of the same pid namespace, and only
if that process finds one of these:

1. No process has the pid. The system says so (ESRCH), of the pid as it means it to both of them.
2. The process, or the thread, that has the pid now is another one than the owner: its birth is another.
3. The process has ended, but nobody has waited for it yet.

*The namespace* of a process never changes, and its number is exact: all that Linux may number it with fits into the
bits, so two namespaces that live at one time have two numbers. One is given again only after all processes of the
first have ended, and then they are rightly taken for dead. A process that can't find out its namespace, or finds a
number from outside that range, has the number 0, which is never taken for the same: its permits come back at the end of
the lease, as do those of other namespaces.

*A birth* is computed of the process by the owner and by whoever looks, and of one process it is always the same:

* Linux 6.9 and later number all pidfds of one process alike, and those of no other process since the system was
  started: a hash of that number.
* Before that, the start time in clock ticks. What a process reads there depends on its time namespace, so it counts
  only for owners and readers of the initial one.
* Elsewhere it is 0, which may be any process.

So births can err in one direction only. Of two processes that had one pid, they are the same with odds of 1 in 8192, or
by start times also if both began in one clock tick; then the second one is taken for the owner until the lease ends.

*Watching.* The end of a process is asked of a pidfd, opened once and checked against the birth then: it stays with that
very process. A program may close it, as daemons close all files, and open a pidfd of its own under its number: the
number of the pidfd itself tells them apart, but not before Linux 6.9. Where none can be had (no descriptor is left, an
old kernel, a sandbox that refuses), the process is looked for anew each time, by its pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from functools import cache
from typing import Final

__all__ = ["Owners", "this_process"]

PID_BITS: Final = 22  # of the largest pid that Linux gives
BIRTH_BITS: Final = 14  # below BY_PIDFD a start time, from there on a hash of a pidfd's number; 0 if neither is known
NAMESPACE_BITS: Final = 28
BY_PIDFD: Final = 1 << (BIRTH_BITS - 1)
# Linux numbers namespaces from 0xF0000000 to 0xFFFFFFFF; these two are there from the start, and have fixed numbers.
INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
INITIAL_TIME_NAMESPACE: Final = 0xEFFFFFFA


def this_process() -> int:
    """The calling process as an owner; never 0."""
    pid = os.getpid()
    birth = 0
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            birth = _pidfd_birth(pidfd) or 0
        finally:
            os.close(pidfd)
    return pid | (birth or _start_birth("self") or 0) << PID_BITS | _namespaces() << (PID_BITS + BIRTH_BITS)


def _namespaces() -> int:
    """The number of this process's pid namespace; 0 if that isn't known."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino - INITIAL_PID_NAMESPACE + 1
    except OSError:
        return 0
    return number if 0 < number < 2**NAMESPACE_BITS else 0


def _pidfd_birth(pidfd: int) -> int | None:
    """The birth of a pidfd's process; None if the system doesn't tell the pidfds of processes apart."""
    status = os.fstat(pidfd)
    try:
        if status.st_dev == _device_of_nameless_files():
            return None
    except OSError:  # no descriptor is left to find that out
        return None
    # By the high bits of a product: the numbers of processes that have had one pid differ by multiples, most often.
    return BY_PIDFD | status.st_ino * 0x9E3779B97F4A7C15 % 2**64 >> (64 - BIRTH_BITS + 1)


@cache
def _device_of_nameless_files() -> int:
    """Before Linux 6.9 pidfds are of this device too, with one number for all."""
    file = os.eventfd(0)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def _start_birth(process: int | str) -> int | None:
    """The birth of a process by its start time; None if that can't be found out, or differs from reader to reader."""
    try:
        if os.stat("/proc/self/ns/time").st_ino != INITIAL_TIME_NAMESPACE:
            return None
    except FileNotFoundError:
        pass  # before Linux 5.6 there are none
    except OSError:
        return None
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command may hold spaces and brackets; what follows it doesn't. The start time is field 22, this begins at 3.
    return 1 + int(stat.rpartition(b")")[2].split()[19]) % (BY_PIDFD - 1)


class Owners:
    """Processes whose end this process watches. Thread-safe; for one process: make another one after a fork."""

    def __init__(self) -> None:
        # First: `__del__` looks at it, also if what follows is interrupted. A pidfd and its number, by owner.
        self._pidfds: dict[int, tuple[int, int]] = {}
        self.me = this_process()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for pidfd, number in self._pidfds.values():
            _close(pidfd, number)

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
            for pidfd, _ in self._pidfds.values():
                poll.register(pidfd, select.POLLIN)
            ended = {pidfd for pidfd, event in poll.poll(0) if event & select.POLLIN}
            for owner, (pidfd, number) in list(self._pidfds.items()):
                if not _is_pidfd(pidfd, number):
                    # Closed by the program, and perhaps used again for something else.
                    del self._pidfds[owner]
                elif pidfd in ended:
                    dead.add(owner)
                    del self._pidfds[owner]
                    os.close(pidfd)
            return dead
        finally:
            if locked:
                self._lock.release()

    def _watch(self, owner: int) -> bool:
        """Whether the owner may be alive; if it can be watched, it is from now on."""
        if owner == self.me or owner in self._pidfds:
            return True
        namespace = owner >> (PID_BITS + BIRTH_BITS)
        if namespace == 0 or namespace != self.me >> (PID_BITS + BIRTH_BITS):
            return True
        try:
            pidfd = os.pidfd_open(owner % 2**PID_BITS)
        except ProcessLookupError:
            return False
        except OSError:  # none can be had, or the pid is a thread's by now, or 0 in a damaged slot
            return not _has_ended(owner)
        if not _may_be(owner, pidfd):
            os.close(pidfd)
            return False
        self._pidfds[owner] = pidfd, os.fstat(pidfd).st_ino
        return True


def _may_be(owner: int, pidfd: int | None) -> bool:
    """Whether the process that has the owner's pid now may be the owner: not if its birth is another."""
    birth = owner >> PID_BITS & (2**BIRTH_BITS - 1)
    seen = None
    if birth >= BY_PIDFD:
        seen = None if pidfd is None else _pidfd_birth(pidfd)
    elif birth and _sees_own_processes():
        seen = _start_birth(owner % 2**PID_BITS)
    return seen is None or seen == birth


def _has_ended(owner: int) -> bool:
    """Whether the owner has certainly ended, without a pidfd."""
    pid = owner % 2**PID_BITS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is there, but another user's
    if not _sees_own_processes():
        return False
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            status = dict(line.partition(b":\t")[::2] for line in file.read().splitlines())
    except OSError:  # no descriptor is left for that either, or this user may not see it
        return False
    # A process whose first thread has ended before the others looks like one that nobody has waited for.
    unreaped = status[b"State"][:1] in b"ZX" and status[b"Threads"] == b"1"
    return unreaped or status[b"Tgid"] != b"%d" % pid or not _may_be(owner, None)


def _sees_own_processes() -> bool:
    """Whether this /proc is of the process's own pid namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _is_pidfd(descriptor: int, number: int) -> bool:
    """Whether that is still the pidfd of that number."""
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except (ProcessLookupError, PermissionError):
        pass
    except OSError:
        return False
    return os.fstat(descriptor).st_ino == number


def _close(pidfd: int, number: int) -> None:
    with contextlib.suppress(OSError):
        if _is_pidfd(pidfd, number):
            os.close(pidfd)
