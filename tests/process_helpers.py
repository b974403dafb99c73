"""Forked processes for tests, and the number of requests that the algorithm admits to them.

A ``Crew`` forks every process, bounds each wait, and ends remaining processes by pid. Processes communicate through
``SharedNumbers``, which doesn't use the code under test.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import mmap
import os
import pickle
import select
import signal
import struct
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from forebay import Rate
from forebay.segment import layout

DEADLINE_S: Final = 120.0
"""A wait that takes longer fails the test."""

FREE_USER: Final = 65534
SHARED_GROUP: Final = 54321
"""A group that need not exist: the kernel handles only numbers."""

EXTENT_FIELDS: Final = (
    *("identity", "offset", "bytes", "keys", "limiter"),
    *("algorithm", "words_per_cell", "low_bits", "limit", "period_ns"),
)
COUNTER_FIELDS: Final = (
    *("limiter", "pad0", "claims", "allowed", "denied"),
    *("inserted", "evicted", "full", "cas_retries"),
)


class Hung(AssertionError):
    """An awaited event did not happen in time."""


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Yield the processor until `condition` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise Hung(f"{what} did not happen within {DEADLINE_S:.0f} s")
        os.sched_yield()


class SharedNumbers:
    """64-bit numbers in anonymous memory that forked processes share. Each should have one writer."""

    def __init__(self, count: int) -> None:
        self._memory = mmap.mmap(-1, max(8 * count, 1))
        self.values = memoryview(self._memory).cast("B").cast("Q")

    def __getitem__(self, index: int) -> int:
        return self.values[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.values[index] = value

    def __iter__(self) -> Iterator[int]:
        return iter(self.values)


class Meeting:
    """A barrier at which `size` processes wait for each other, any number of times, without sleeping."""

    def __init__(self, size: int) -> None:
        self._arrivals = SharedNumbers(size)

    def wait(self, index: int) -> None:
        arrivals = self._arrivals.values
        arrivals[index] += 1
        mine = arrivals[index]
        wait_until(lambda: min(arrivals) >= mine, f"meeting {mine} of {len(arrivals)} processes")


class Worker:
    """A forked process that runs `work(*arguments)` and returns its result to the parent."""

    def __init__(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._pipe, write_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _run(write_end, work, arguments)
        os.close(write_end)
        self._pid_fd = os.pidfd_open(self.pid)
        self._answer = bytearray()
        self.status: int | None = None
        self._reaping = threading.RLock()

    def kill(self) -> None:
        """SIGKILL the process, at any instruction."""
        # A timer of a test may kill it at the end of that test.
        with self._reaping:
            if self.status is None:
                os.kill(self.pid, signal.SIGKILL)
                self._reap()

    def pause(self) -> None:
        """SIGSTOP the process and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def wait_for_stop(self) -> None:
        """Wait until the process has stopped itself."""
        wait_until(lambda: os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None, "a stop")

    def is_running(self) -> bool:
        return self.status is None and not select.select([self._pid_fd], [], [], 0)[0]

    def result(self, deadline_s: float = DEADLINE_S) -> Any:
        """The return value of `work`; raises AssertionError with the traceback if it raised."""
        deadline = time.monotonic() + deadline_s
        while True:
            ready, _, _ = select.select([self._pipe, self._pid_fd], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                # pytest's fault handler prints where each of its threads is.
                os.kill(self.pid, signal.SIGABRT)
                raise Hung(f"process {self.pid} returned no result within {deadline_s:.0f} s")
            if self._pipe in ready:
                data = os.read(self._pipe, 1 << 20)
                self._answer += data
                if data and not self._has_answer():
                    continue
            break
        self._reap()
        if not self._has_answer():
            raise AssertionError(f"process {self.pid} ended without a result, {_described(self.status)}")
        succeeded, value = pickle.loads(self._answer[8:])
        if not succeeded:
            raise AssertionError(f"process {self.pid} failed:\n{value}")
        return value

    def _has_answer(self) -> bool:
        return len(self._answer) >= 8 and len(self._answer) - 8 >= int.from_bytes(self._answer[:8], "little")

    def _reap(self) -> None:
        with self._reaping:
            if self.status is None:
                self.status = os.waitpid(self.pid, 0)[1]
                os.close(self._pipe)
                os.close(self._pid_fd)


def _run(write_end: int, work: Callable[..., Any], arguments: Sequence[Any]) -> None:
    try:
        # This process ends even if its parent is killed.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(2 * DEADLINE_S))
        # From Python 3.12 on, a fork beside threads warns; some tests do that on purpose.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            answer = pickle.dumps((True, work(*arguments)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(len(answer).to_bytes(8, "little") + answer)
    finally:
        os._exit(0)


def _described(status: int | None) -> str:
    if status is not None and os.WIFSIGNALED(status):
        return f"by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"with status {status}"


class Crew:
    """The processes of one test."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    def start(self, work: Callable[..., Any], *arguments: Any) -> Worker:
        worker = Worker(work, *arguments)
        self.workers.append(worker)
        return worker

    def run(self, count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `work(0, ...)`, `work(1, ...)` and so on in `count` processes at the same time; return their results."""
        return self.results([self.start(work, i, *arguments) for i in range(count)])

    def results(self, workers: Iterable[Worker]) -> list[Any]:
        return [worker.result() for worker in workers]

    def end(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()


def nanoseconds() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def increment_ns(rate: str) -> int:
    parsed = Rate.parse(rate)
    return -(-parsed.period_ns // parsed.limit)


def most_admitted(rate: str, burst: int, elapsed_ns: int) -> int:
    """How many single requests GCRA admits in a span of time, with forebay's rounding.

    Each admission moves the arrival time on by at least one increment, from the span's start or later, and leaves it at
    most the tolerance ahead of its own clock reading.
    """
    parsed = Rate.parse(rate)
    unit_ns = increment_ns(rate)
    tolerance_ns = min(burst * unit_ns, burst * parsed.period_ns // parsed.limit + unit_ns - 1)
    return (tolerance_ns + elapsed_ns) // unit_ns


def as_user(uid: int, gid: int, groups: Iterable[int], work: Callable[..., Any], *arguments: Any) -> Any:
    """Give up root for good, then run `work` in this process."""
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    return work(*arguments)


def open_fds() -> dict[str, str]:
    """This process's open descriptors and their targets."""
    found = {}
    for entry in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    return found


def opened_since(before: dict[str, str]) -> set[tuple[str, str]]:
    """Descriptors that are open now and were not before. The garbage collector may have closed others meanwhile."""
    return open_fds().items() - before.items()


def read_cells(path: str) -> list[tuple[int, int]]:
    """Tag and state of every cell of a segment's file."""
    return list(layout.CELL.iter_unpack(Path(path).read_bytes()[layout.TABLE_OFFSET :]))


def kind_of(tag: int) -> int:
    return tag & (2**layout.KIND_BITS - 1)


def groups_of(tag: int, groups: int) -> set[int]:
    """The groups of cells in which a key may be, and the two after each. If two are equal, a key has the next."""
    mixed = [(tag & ~7) * factor % 2**64 for factor in (1, 0x9E3779B97F4A7C15, 0xD1342543DE82EF95)]
    return {((value * groups >> 64) + more) % groups for value in mixed for more in range(3)}


def repeated_members(path: str) -> list[int]:
    """Tags that stand in more than one cell: such a key has two limits."""
    counts = collections.Counter(tag for tag, _ in read_cells(path) if kind_of(tag) == layout.KIND_TAT)
    return [tag for tag, count in counts.items() if count > 1]


def extents(path: str) -> list[dict[str, int]]:
    """The entries in use of a segment's list of extents."""
    with open(path, "rb") as file:
        raw = os.pread(file.fileno(), layout.COUNTERS_OFFSET - layout.EXTENTS_OFFSET, layout.EXTENTS_OFFSET)
    entries = [dict(zip(EXTENT_FIELDS, e, strict=True)) for e in layout.EXTENT_ENTRY.iter_unpack(raw)]
    return [entry for entry in entries if entry["identity"]]


def counter_lines(path: str) -> list[dict[str, int]]:
    """Every counter line of a segment's file; the shared lines come last."""
    raw = Path(path).read_bytes()[layout.COUNTERS_OFFSET : layout.TABLE_OFFSET]
    return [dict(zip(COUNTER_FIELDS, values, strict=True)) for values in layout.COUNTER_LINE.iter_unpack(raw)]


def lock_bytes(fd: int, start: int, length: int) -> None:
    """Take an open file description lock, as forebay does."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, start, length, 0))


def path_of(name: str) -> str:
    return f"/dev/shm/forebay-{name}"


def files_of(name: str) -> list[str]:
    """The store's file, and files that an unfinished creation left beside it."""
    return sorted(map(str, Path(path_of(name)).parent.glob(f"forebay-{name}*")))


def until_raced(turn: Callable[[int], int]) -> None:
    """Repeat `turn(0)`, `turn(1)`, ... until one returns a number of lost CASes: a busy machine may not run processes
    at once."""
    end = time.monotonic() + DEADLINE_S / 2
    for number in itertools.count():
        if turn(number) > 0:
            return
        if time.monotonic() > end:
            raise AssertionError(f"the processes did not race in {number + 1} turns")
