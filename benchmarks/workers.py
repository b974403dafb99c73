"""Processes or threads that decide at the same time, each on its own core, for a fixed time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from baselines import DictBucket, LockedBucket
from conftest import GENEROUS

from forebay import Store, TokenBucket

CHUNK = 1000
START_DELAY_NS = 10_000_000
ATTEMPTS = 5
# The share of a worker's time that it may spend waiting for its core.
MOST_WAITING = 0.03


@dataclass(frozen=True)
class Workload:
    """A worker's task; it is pickled to another process."""

    kind: str
    store_name: str = ""
    locked: LockedBucket | None = None
    bucket: TokenBucket | None = None
    """One for all threads; processes make their own."""

    def prepare(self, number: int) -> tuple[Callable[[str], object], list[str]]:
        """The function that decides in worker `number`, and the keys for it."""
        own_keys = [f"worker:{number}:{i % 100}" for i in range(CHUNK)]
        # An object of this worker's own: without the GIL, threads that use one object take turns at counting its
        # references.
        one_key = ["".join(["user:42:", "abcdefg"])] * CHUNK
        if self.bucket is not None:
            return self.bucket.allow, own_keys if self.kind == "own" else one_key
        if self.kind == "control":
            return DictBucket(1000, GENEROUS["burst"]).allow, own_keys
        if self.kind == "locked":
            return self.locked.allow, one_key  # type: ignore[union-attr]
        store = Store(self.store_name, keys=100_000)
        if self.kind == "denied":
            bucket = TokenBucket(store, "strict", "1/day")
            bucket.allow(one_key[0])
            return bucket.allow, one_key
        return TokenBucket(store, "api", **GENEROUS).allow, own_keys if self.kind == "own" else one_key


def work(connection: Connection, core: int, number: int, workload: Workload) -> None:
    """For every (start, end) received, decide from start to end; send decisions per second and whether undisturbed."""
    os.sched_setaffinity(0, {core})
    function, keys = workload.prepare(number)
    clock = time.monotonic_ns
    connection.send("ready")
    while (span := connection.recv()) is not None:
        start_ns, end_ns = span
        decisions = 0
        waited_ns = waiting_for_a_core_ns()
        while clock() < start_ns:
            pass
        began_ns = now_ns = clock()
        while decisions == 0 or now_ns < end_ns:
            for key in keys:
                function(key)
            decisions += CHUNK
            now_ns = clock()
        waited_ns = waiting_for_a_core_ns() - waited_ns
        undisturbed = waited_ns + began_ns - start_ns < (end_ns - start_ns) * MOST_WAITING
        connection.send((decisions * 1e9 / (now_ns - began_ns), undisturbed))


def waiting_for_a_core_ns() -> int:
    """How long this thread was runnable while another ran on its core (Documentation/scheduler)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1])


class Workers:
    """One worker per core; each waits for its next task."""

    def __init__(self, connections: list[Connection]) -> None:
        self.connections = connections

    def rates(self, numbers: Iterable[int], duration_ns: int) -> list[float] | None:
        """Decisions per second of each of these workers, working at the same time.

        None if other processes of this host took a core in every attempt: such a figure would not show the workers'
        scaling.
        """
        chosen = [self.connections[number] for number in numbers]
        for _ in range(ATTEMPTS):
            start_ns = time.monotonic_ns() + START_DELAY_NS
            for connection in chosen:
                connection.send((start_ns, start_ns + duration_ns))
            answers = [connection.recv() for connection in chosen]
            if all(undisturbed for _, undisturbed in answers):
                return [rate for rate, _ in answers]
        return None


@contextlib.contextmanager
def started(workload: Workload, cores: list[int]) -> Iterator[Workers]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in cores]
    processes = [
        context.Process(target=work, args=(pipes[number][1], core, number, workload), daemon=True)
        for number, core in enumerate(cores)
    ]
    try:
        for process in processes:
            process.start()
        # Only the worker holds this end now: if it dies, the parent reads the end of file rather than waiting for ever.
        for _, theirs in pipes:
            theirs.close()
        for ours, _ in pipes:
            if ours.recv() != "ready":
                raise AssertionError("a worker did not start")
        yield Workers([ours for ours, _ in pipes])
        for ours, _ in pipes:
            ours.send(None)
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()


@contextlib.contextmanager
def started_threads(workload: Workload, cores: list[int]) -> Iterator[Workers]:
    pipes = [multiprocessing.Pipe() for _ in cores]
    threads = [
        threading.Thread(target=work, args=(pipes[number][1], core, number, workload), daemon=True)
        for number, core in enumerate(cores)
    ]
    for thread in threads:
        thread.start()
    for ours, _ in pipes:
        if ours.recv() != "ready":
            raise AssertionError("a worker did not start")
    try:
        yield Workers([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.send(None)
        for thread in threads:
            thread.join(5)
