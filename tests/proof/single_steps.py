"""A forked process that is led through its instructions one by one, and killed between two of them: ptrace of Linux.

A step takes 25 microseconds. So a process that is to be killed is not counted through the thousands of them before
that: it runs to a breakpoint near by, and goes on from there in single steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

TRACEME, PEEKTEXT, PEEKUSER, POKETEXT, POKEUSER, CONT, SINGLESTEP = 0, 1, 3, 4, 6, 7, 9
RIP: Final = 16 * 8  # in struct user of x86-64
BREAKPOINT: Final = 0xCC
ARRIVAL_STEPS: Final = 3  # to run to a breakpoint once more takes as long as so many steps

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong]


def check_platform() -> None:
    assert platform.machine() == "x86_64", f"single steps are written for x86-64, not for {platform.machine()}"


def _ptrace(request: int, pid: int = 0, address: int = 0, data: int = 0) -> int:
    ctypes.set_errno(0)
    result = int(_libc.ptrace(request, pid, address, data))
    error = ctypes.get_errno()
    if result == -1 and error:
        raise OSError(error, f"ptrace request {request}: {os.strerror(error)}")
    return result & 2**64 - 1


class Stepped:
    """A forked process that has called `prepare` and stands before `act(what prepare returned)`."""

    def __init__(self, prepare: Callable[[], Any], act: Callable[[Any], object]) -> None:
        self.is_done = self.ended = False
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ready = prepare()
                _ptrace(TRACEME)
                os.kill(os.getpid(), signal.SIGSTOP)
                act(ready)
                os.kill(os.getpid(), signal.SIGSTOP)
            finally:
                os._exit(0)
        self._wait()
        self.is_done = False

    @property
    def address(self) -> int:
        """The address of the next instruction."""
        return _ptrace(PEEKUSER, self.pid, RIP)

    def step(self) -> bool:
        """One instruction; False if `work` is done."""
        _ptrace(SINGLESTEP, self.pid)
        return self._wait() == signal.SIGTRAP

    def run_to(self, address: int, arrivals: int) -> bool:
        """Until the instruction at an address comes next for that many times; False if `work` is done before."""
        word = _ptrace(PEEKTEXT, self.pid, address)
        for arrival in range(arrivals):
            if arrival and not self.step():
                return False
            _ptrace(POKETEXT, self.pid, address, word & ~0xFF | BREAKPOINT)
            _ptrace(CONT, self.pid)
            if self._wait() != signal.SIGTRAP:
                return False
            _ptrace(POKETEXT, self.pid, address, word)
            _ptrace(POKEUSER, self.pid, RIP, address)
        return True

    def finish(self) -> None:
        """Let it go on until `act` is done, which it may be if it went another way than it was to be led."""
        if not self.is_done:
            _ptrace(CONT, self.pid)
            assert self._wait() == signal.SIGSTOP

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        if not self.ended:
            os.waitpid(self.pid, 0)
            self.ended = True

    def _wait(self) -> int:
        """The signal that it has stopped at."""
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSTOPPED(status):
            self.ended = True
            raise AssertionError(f"the stepped process ended with status {status}")
        self.is_done = os.WSTOPSIG(status) == signal.SIGSTOP
        return os.WSTOPSIG(status)


class Modules:
    """Where the machine code of forebay's compiled modules is, in this process and those that it forks."""

    def __init__(self) -> None:
        self.ranges = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and "/forebay/core/" in fields[5]:
                begin, end = fields[0].split("-")
                self.ranges.append(range(int(begin, 16), int(end, 16)))
        assert self.ranges, "forebay's modules are not mapped"

    def __contains__(self, address: int) -> bool:
        return any(address in span for span in self.ranges)


class Walk:
    """The instructions of one process from its stop to its end, and after which of them memory was another one."""

    def __init__(self, process: Stepped, memory: Callable[[], bytes], modules: Modules) -> None:
        self.addresses: list[int] = []
        self.inside: list[int] = []
        """The places of those in forebay's modules."""
        self.changes: list[int] = []
        self.arrivals: list[int] = []
        """How often the walk had come to the address of each by then."""
        met: Counter[int] = Counter()
        before = memory()
        while True:
            place, address = len(self.addresses), process.address
            self.addresses.append(address)
            met[address] += 1
            self.arrivals.append(met[address])
            if not process.step():
                return
            if address in modules:
                self.inside.append(place)
                after = memory()
                if after != before:
                    self.changes.append(place)
                before = after

    def lead(self, process: Stepped, to: int) -> bool:
        """Lead another process to just before instruction `to`. False if it went another way."""
        # The instruction to run to, so that there are the fewest stops before and after it.
        start = min(range(to + 1), key=lambda place: ARRIVAL_STEPS * self.arrivals[place] + to - place)
        if start and not process.run_to(self.addresses[start], self.arrivals[start]):
            return False
        for _ in range(to - start):
            if not process.step():
                return False
        return process.address == self.addresses[to]
