"""Which process owns a slot of shared memory, and whether that process is still alive.

An owner is a 64-bit word: a pid, the number of the pid namespace that the pid belongs to, and the process's
*incarnation*, which distinguishes processes that had the same pid one after the other.

**Invariant.** No live owner is taken for dead. Only a process of the same pid namespace takes an owner for dead, and
only if it finds one of these:

1. No process has the pid. The system says so (ESRCH), and the pid means the same process to both.
2. Another process, or a thread, has the pid now: its incarnation differs.
3. The process has ended, but no parent has waited for it yet.

*The namespace* of a process never changes, and its number is exact: every number that Linux gives fits into the bits,
so two namespaces that live at one time have two numbers. Linux reuses a number only after all processes of the first
namespace have ended, and then they are rightly taken for dead. A process that can't find out its namespace, or finds a
number outside that range, has the number 0. It equals no other: permits of such a process come back at the end of the
lease, as do those of other namespaces.

*An incarnation* is computed by the owner itself and by the process that checks it, with the same result:

* Linux 6.9 and later give all pidfds of one process one number, and never give that number to another process until
  the next boot. The incarnation is a hash of it.
* Before that, it is the start time in clock ticks. The value depends on the reader's time namespace, so it counts only
  for owners and readers of the initial one.
* Elsewhere it is 0, which matches every process.

So an incarnation can err in one direction only. Two processes that had one pid have the same incarnation with odds of
1 in 8192; by start times, also if both began in one clock tick. Then the second process is taken for the owner until
the lease ends.

*Watching.* A pidfd reports the end of a process. It is opened once, checked against the incarnation, and then belongs
to that very process. A program may close it, as daemons close all files, and open a pidfd of its own with the same
descriptor. The pidfd's number distinguishes the two, except before Linux 6.9. Where no pidfd can be opened (no free
descriptor, an old kernel, a sandbox), each check looks the process up by its pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from functools import cache
from typing import Final

from forebay.segment.kernel_files import read_kernel_file

__all__ = ["Owners", "this_process"]

PID_BITS: Final = 22  # the largest pid that Linux gives
INCARNATION_BITS: Final = 14  # below BY_PIDFD a start time, else a hash of a pidfd's number; 0 if neither is known
NAMESPACE_BITS: Final = 28
BY_PIDFD: Final = 1 << (INCARNATION_BITS - 1)
# Linux numbers namespaces from 0xF0000000 to 0xFFFFFFFF; the two initial ones have fixed numbers.
INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC
INITIAL_TIME_NAMESPACE: Final = 0xEFFFFFFA


def this_process() -> int:
    """The owner word of the calling process; never 0."""
    pid = os.getpid()
    incarnation = 0
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            incarnation = _pidfd_incarnation(pidfd) or 0
        finally:
            os.close(pidfd)
    return (
        pid
        | (incarnation or _start_incarnation("self") or 0) << PID_BITS
        | _namespaces() << (PID_BITS + INCARNATION_BITS)
    )


def _namespaces() -> int:
    """The number of this process's pid namespace; 0 if that isn't known."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino - INITIAL_PID_NAMESPACE + 1
    except OSError:
        return 0
    return number if 0 < number < 2**NAMESPACE_BITS else 0


def _pidfd_incarnation(pidfd: int) -> int | None:
    """The incarnation of a pidfd's process; None if the system gives all pidfds one number."""
    status = os.fstat(pidfd)
    try:
        if status.st_dev == _device_of_nameless_files():
            return None
    except OSError:  # no free descriptor to find that out
        return None
    # The high bits of a product: numbers of processes with the same pid most often differ by multiples.
    return BY_PIDFD | status.st_ino * 0x9E3779B97F4A7C15 % 2**64 >> (64 - INCARNATION_BITS + 1)


@cache
def _device_of_nameless_files() -> int:
    """The device that pidfds belong to before Linux 6.9, with one number for all."""
    file = os.eventfd(0)
    try:
        return os.fstat(file).st_dev
    finally:
        os.close(file)


def _start_incarnation(process: int | str) -> int | None:
    """The incarnation of a process by its start time; None if unknown, or if readers would see different times."""
    try:
        if os.stat("/proc/self/ns/time").st_ino != INITIAL_TIME_NAMESPACE:
            return None
    except FileNotFoundError:
        pass  # before Linux 5.6 there are none
    except OSError:
        return None
    try:
        stat = read_kernel_file(f"/proc/{process}/stat")
    except OSError:
        return None
    # The command may contain spaces and brackets; the fields after it don't. They begin with 3; the start time is 22.
    return 1 + int(stat.rpartition(b")")[2].split()[19]) % (BY_PIDFD - 1)


class Owners:
    """Watches other processes for their end. Thread-safe, for one process: a forked child makes its own."""

    def __init__(self) -> None:
        # First, because `__del__` reads it even if the rest is interrupted. A pidfd and its number, by owner.
        self._pidfds: dict[int, tuple[int, int]] = {}
        self.me = this_process()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        for pidfd, number in self._pidfds.values():
            _close(pidfd, number)

    def dead_among(self, owners: set[int]) -> set[int]:
        """The owners that have certainly ended. One that can't be watched counts as alive, as in another namespace.

        Empty while another thread is in this method.
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
        """Whether the owner may be alive. Starts to watch it if possible."""
        if owner == self.me or owner in self._pidfds:
            return True
        namespace = owner >> (PID_BITS + INCARNATION_BITS)
        if namespace == 0 or namespace != self.me >> (PID_BITS + INCARNATION_BITS):
            return True
        try:
            pidfd = os.pidfd_open(owner % 2**PID_BITS)
        except ProcessLookupError:
            return False
        except OSError:  # none can be opened, or the pid is now a thread's, or it is 0 in a damaged slot
            return not _has_ended(owner)
        if not _may_be(owner, pidfd):
            os.close(pidfd)
            return False
        self._pidfds[owner] = pidfd, os.fstat(pidfd).st_ino
        return True


def _may_be(owner: int, pidfd: int | None) -> bool:
    """Whether the process that has the owner's pid now may be the owner: not if its incarnation differs."""
    incarnation = owner >> PID_BITS & (2**INCARNATION_BITS - 1)
    seen = None
    if incarnation >= BY_PIDFD:
        seen = None if pidfd is None else _pidfd_incarnation(pidfd)
    elif incarnation and _sees_own_processes():
        seen = _start_incarnation(owner % 2**PID_BITS)
    return seen is None or seen == incarnation


def _has_ended(owner: int) -> bool:
    """Whether the owner has certainly ended, checked without a pidfd."""
    pid = owner % 2**PID_BITS
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it exists, but belongs to another user
    if not _sees_own_processes():
        return False
    try:
        status = dict(line.partition(b":\t")[::2] for line in read_kernel_file(f"/proc/{pid}/status").splitlines())
    except OSError:  # no free descriptor for that either, or this user may not see it
        return False
    # A process whose first thread has ended before the others looks like a zombie.
    unreaped = status[b"State"][:1] in b"ZX" and status[b"Threads"] == b"1"
    return unreaped or status[b"Tgid"] != b"%d" % pid or not _may_be(owner, None)


def _sees_own_processes() -> bool:
    """Whether this /proc shows the process's own pid namespace."""
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return False


def _is_pidfd(descriptor: int, number: int) -> bool:
    """Whether the descriptor is still the pidfd of that number."""
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
