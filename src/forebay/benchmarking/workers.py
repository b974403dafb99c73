"""Processes or threads that decide at the same time, each on its own core, for a fixed time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

__all__ = ["Pace", "Prepare", "Task", "Workers", "started", "started_threads"]

START_DELAY_NS: Final = 10_000_000
SECONDS_TO_END: Final = 5

Task = tuple[Callable[[str], object], Sequence[str]]
"""A function that decides, and the keys that it is called with, again and again."""

Prepare = Callable[[int], Mapping[str, Task]]
"""The tasks of a worker by name. It is called in the worker, with the worker's number."""


@dataclass(frozen=True)
class Pace:
    """How fast one worker decided."""

    per_second: float
    waited_share: float
    """The share of the time in which the worker was ready and something else ran on its core."""


class Workers:
    """One worker per core; each waits for its next task."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self.connections = connections

    def run(self, task: str, numbers: Iterable[int], duration_ns: int) -> list[Pace]:
        """The paces of these workers, all at the task at the same time."""
        chosen = [self.connections[number] for number in numbers]
        start_ns = time.monotonic_ns() + START_DELAY_NS
        for connection in chosen:
            connection.send((task, start_ns, start_ns + duration_ns))
        return [_received(connection) for connection in chosen]


@contextmanager
def started(prepare: Prepare, cores: Sequence[int], method: Literal["fork", "spawn"]) -> Iterator[Workers]:
    """Worker processes, which end with the block or with this process, however it ends."""
    context: Any = multiprocessing.get_context(method)
    pipes = [context.Pipe() for _ in cores]
    ends = [end for pipe in pipes for end in pipe] if method == "fork" else []
    processes = [
        context.Process(
            target=_process,
            args=(theirs, core, number, prepare, [end for end in ends if end is not theirs]),
            daemon=True,
        )
        for number, (core, (_, theirs)) in enumerate(zip(cores, pipes, strict=True))
    ]
    try:
        with _interrupts_postponed():
            for process in processes:
                process.start()
        # Only the worker holds this end now: if it dies, the parent reads the end of file rather than waiting for ever.
        for _, theirs in pipes:
            theirs.close()
        yield _ready([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in processes:
            if process.pid is not None:
                process.join(SECONDS_TO_END)
                if process.is_alive():
                    process.terminate()
                    process.join()


@contextmanager
def started_threads(prepare: Prepare, cores: Sequence[int]) -> Iterator[Workers]:
    """Threads of this process."""
    pipes = [multiprocessing.Pipe() for _ in cores]
    threads = [
        threading.Thread(target=_work, args=(theirs, core, number, prepare), daemon=True)
        for number, (core, (_, theirs)) in enumerate(zip(cores, pipes, strict=True))
    ]
    for thread in threads:
        thread.start()
    try:
        yield _ready([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()
        for thread in threads:
            thread.join(SECONDS_TO_END)


@contextmanager
def _interrupts_postponed() -> Iterator[None]:
    """Python loses a ``KeyboardInterrupt`` in a function that it calls after a fork."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ready(connections: Sequence[Connection]) -> Workers:
    for connection in connections:
        _received(connection)
    return Workers(connections)


def _received(connection: Connection) -> Pace:
    try:
        received: Pace = connection.recv()
    except EOFError:
        raise OSError("a worker of the benchmark ended early: its error is above, or the kernel killed it") from None
    return received


def _process(connection: Connection, core: int, number: int, prepare: Prepare, others: Sequence[Connection]) -> None:
    # The parent ends the workers, also when a terminal interrupts all of them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A fork inherits the ends of other pipes: they would stay open after the parent's death.
    for other in others:
        other.close()
    _work(connection, core, number, prepare)


def _work(connection: Connection, core: int, number: int, prepare: Prepare) -> None:
    """For every (task, start, end) received, decide from start to end, and send the pace. Ends with the connection."""
    os.sched_setaffinity(0, {core})
    tasks = prepare(number)
    clock = time.monotonic_ns
    with connection, suppress(EOFError, ConnectionError):
        connection.send(Pace(0, 0))
        while True:
            task, start_ns, end_ns = connection.recv()
            function, keys = tasks[task]
            decisions = 0
            waited_ns = _waiting_for_a_core_ns()
            while clock() < start_ns:
                pass
            began_ns = now_ns = clock()
            while decisions == 0 or now_ns < end_ns:
                for key in keys:
                    function(key)
                decisions += len(keys)
                now_ns = clock()
            waited_ns = _waiting_for_a_core_ns() - waited_ns + began_ns - start_ns
            connection.send(Pace(decisions * 1e9 / (now_ns - began_ns), min(waited_ns / (now_ns - start_ns), 1.0)))


def _waiting_for_a_core_ns() -> int:
    """How long this thread was runnable while another ran on its core (Documentation/scheduler)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
