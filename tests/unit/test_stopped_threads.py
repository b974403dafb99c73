"""A thread is stopped before any one of its accesses to counter lines, thread slots and generations.

Meanwhile another thread closes the store, or draws a claim. So each order of one thread's steps and another thread's
whole call is tried, in the compiled code. stopped_thread.c beside this stops the thread.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import c_int, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final

import c_api
import pytest
from c_api import Handle, Thread
from process_helpers import counter_lines, path_of
from thread_helpers import HAS_GIL

from forebay import Store, StoreClosed, TokenBucket
from forebay.core.table import threads
from forebay.segment import layout, ofd_locks

MUCH: Final = "1000000/day"
SHORT_MS: Final = 50
"""A thread that counts delays a close, and goes on after this time."""
LONG_MS: Final = 10_000
FEWEST_ACCESSES: Final = 2

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="stopped_thread.c is written for x86-64")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("native") / "stopped_thread.so"
    source = str(Path(__file__).with_name("stopped_thread.c"))
    compiler = [os.environ.get("CC", "cc"), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*compiler, "-o", str(library), source], check=True)
    return library


def native_address(function: str) -> int:
    """What a C function of threads.pyx returns to the calling thread: an address."""
    ctypes.pythonapi.PyCapsule_GetName.restype = ctypes.c_char_p
    ctypes.pythonapi.PyCapsule_GetName.argtypes = (ctypes.py_object,)
    ctypes.pythonapi.PyCapsule_GetPointer.restype = c_void_p
    ctypes.pythonapi.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    capsule = threads.__pyx_capi__[function]  # type: ignore[attr-defined]
    name = ctypes.pythonapi.PyCapsule_GetName(capsule)
    address = ctypes.CFUNCTYPE(c_void_p)(ctypes.pythonapi.PyCapsule_GetPointer(capsule, name))()
    assert address is not None
    return int(address)


def line_address(name: str, line: int) -> int:
    """Where this process has mapped a counter line."""
    place = layout.COUNTERS_OFFSET + line * layout.COUNTER_LINE.size
    inode = os.stat(path_of(name)).st_ino
    for mapping in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, its_inode, *_ = mapping.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        if int(its_inode) == inode and int(offset, 16) <= place < int(offset, 16) + end - first:
            return first + place - int(offset, 16)
    raise AssertionError(f"{path_of(name)} is not mapped")


class Stop:
    """Runs `act` in a thread, which stops before its `access`-th access to the pages of what `watched` returns.

    It goes on at the end of the block, or after `most_ms`. Then `result` has what `act` returned, and `is_stopped` is
    whether there were so many accesses.
    """

    def __init__(
        self, library: Path, access: int, most_ms: int, watched: Callable[[], list[int]], act: Callable[[], Any]
    ) -> None:
        self._native = ctypes.CDLL(str(library))
        self._native.watch.argtypes = (ctypes.POINTER(c_void_p), c_int, c_uint64, c_uint64)
        self._access, self._most_ms, self._watched, self._act = access, most_ms, watched, act
        self._thread = threading.Thread(target=self._run)
        self.result: Any = None

    def _run(self) -> None:
        watched, act = self._watched(), self._act
        addresses = (c_void_p * len(watched))(*watched)
        self._native.watch(addresses, len(watched), self._access, self._most_ms)
        try:
            self.result = act()
        finally:
            self._native.unwatch()

    def _word(self, name: str) -> c_uint64:
        return c_uint64.in_dll(self._native, name)

    @property
    def is_stopped(self) -> bool:
        return self._word("is_stopped").value == 1

    def __enter__(self) -> None:
        self._word("is_stopped").value = self._word("may_go_on").value = 0
        self._thread.start()
        while self._thread.is_alive() and not self.is_stopped:
            time.sleep(0)

    def __exit__(self, *error: object) -> None:
        self._word("may_go_on").value = 1
        self._thread.join()


def all_stops(make: Callable[[int], Stop]) -> Iterator[Stop]:
    """A stop before each access."""
    for access in itertools.count(1):
        stop = make(access)
        yield stop
        if not stop.is_stopped:
            assert access > FEWEST_ACCESSES
            return


def owned_counts(name: str) -> list[dict[str, int]]:
    return counter_lines(path_of(name))[: layout.OWNED_COUNTER_LINES]


@pytest.mark.skipif(HAS_GIL, reason="with the GIL no thread closes a store while another one counts")
def test_no_thread_counts_in_its_line_after_a_close_has_returned(in_child: Any, library: Path, store_name: str) -> None:
    """From then on another process may count in it."""

    def run() -> int:
        def prepare() -> list[int]:
            bucket.allow("k")
            [line] = [number for number, counts in enumerate(owned_counts(store_name)) if counts["allowed"]]
            return [native_address("thread_here"), line_address(store_name, line)]

        def decide() -> bool:
            try:
                return bucket.allow("k")
            except StoreClosed:
                return False

        decided = 0
        for stop in all_stops(lambda access: Stop(library, access, SHORT_MS, prepare, decide)):
            with Store(store_name, keys=100) as other:
                store = Store(store_name, keys=100)
                bucket = TokenBucket(store, "api", MUCH)
                with stop:
                    store.close()
                    at_close = owned_counts(store_name)
                assert owned_counts(store_name) == at_close
                decided += 1 + stop.result
                assert other.stats().total.allowed == decided
        return decided

    assert in_child(run)


def test_a_native_thread_that_decides_beside_a_close_finds_the_store_closed(
    in_child: Any, library: Path, store_name: str
) -> None:
    def run() -> bool:
        attached: list[Thread] = []

        def stop_at(access: int) -> Stop:
            watched = [native_address("generation_counter")]
            return Stop(library, access, LONG_MS, lambda: watched, lambda: attached[-1].allow(b"k"))

        for stop in all_stops(stop_at):
            store = Store(store_name, keys=100)
            with Handle(TokenBucket(store, "api", MUCH)) as handle:
                attached.append(handle.attach())
                with stop:
                    store.close()
                assert stop.result in (c_api.ALLOWED, c_api.CLOSED)
                assert attached[-1].allow(b"k") == c_api.CLOSED
        return True

    assert in_child(run)


def test_threads_that_share_a_line_draw_different_claims(in_child: Any, library: Path, store_name: str) -> None:
    """Both are native threads, for which no line is free."""

    def run() -> bool:
        with Store(store_name, keys=1000) as store, open(path_of(store_name), "r+b") as file:
            owned_bytes = layout.OWNED_COUNTER_LINES * layout.COUNTER_LINE.size
            assert ofd_locks.try_lock(file.fileno(), layout.COUNTERS_OFFSET, owned_bytes)
            shared = layout.OWNED_COUNTER_LINES
            with Handle(TokenBucket(store, "api", MUCH)) as handle:
                first, second = handle.attach(), handle.attach()
                keys = (b"key %d" % number for number in itertools.count())
                watched, decided = [line_address(store_name, shared)], 0

                def stop_at(access: int) -> Stop:
                    return Stop(library, access, LONG_MS, lambda: watched, lambda: first.allow(next(keys)))

                for stop in all_stops(stop_at):
                    with stop:
                        assert second.allow(next(keys)) == c_api.ALLOWED
                    assert stop.result == c_api.ALLOWED
                    decided += 2
                    counts = counter_lines(path_of(store_name))[shared]
                    assert (counts["inserted"], counts["allowed"]) == (decided, decided)
                    assert counts["claims"] >= decided
        return True

    assert in_child(run)
