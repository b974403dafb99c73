"""Processes that are killed or stopped while they write what a key has besides its cell."""

from __future__ import annotations

import contextlib
import functools
import mmap
import struct
from collections.abc import Callable
from typing import Final

import pytest
from limiter_kinds import (
    KEY,
)
from process_helpers import (
    Crew,
    Worker,
    extents,
    kind_of,
    path_of,
    wait_until,
)

from forebay import (
    BucketedWindow,
    SlidingLog,
    Store,
)
from forebay.segment import layout
from forebay.testing import ManualClock

# A sliding log's process that is killed or stopped while it writes.

LARGE: Final = 4_000_000
"""Writing so many times takes longer than noticing that it has begun."""


class TooLate(Exception):
    """A process had ended before it could be stopped: the machine was busy."""


def until_caught(test: Callable[..., None]) -> Callable[..., None]:
    """Repeat a test until it has stopped a process where it wants to."""

    @functools.wraps(test)
    def repeated(crew: Crew, name: str, **arguments: object) -> None:
        for _ in range(100):
            try:
                return test(crew, name, **arguments)
            except TooLate:
                crew.end()
                Store.unlink(name)
        raise AssertionError("no process could be stopped in time")

    return repeated


def stop_before(worker: Worker, is_over: Callable[[], bool]) -> None:
    with contextlib.suppress(ChildProcessError):
        worker.pause()
    if is_over():
        raise TooLate


class Ring:
    """The memory of the only key of a store's only sliding log."""

    def __init__(self, name: str) -> None:
        [entry] = extents(path_of(name))
        with open(path_of(name), "rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        self._cell = entry["offset"]
        self._words = entry["offset"] + entry["bytes"] - LARGE * 8

    @property
    def cell(self) -> tuple[int, int]:
        tag, state = layout.CELL.unpack_from(self._memory, self._cell)
        return tag, state

    def __getitem__(self, position: int) -> int:
        [word] = struct.unpack_from("<Q", self._memory, self._words + 8 * position)
        return int(word)


def large_log(store: Store) -> SlidingLog:
    return SlidingLog(store, "log", f"{LARGE} per second", keys=1)


def stopped_while_hitting(crew: Crew, name: str, first: int, cost: int) -> Worker:
    """A process that was allowed `cost` permits, whose places begin at `first`, before it has written all times."""
    ring = Ring(name)
    cell, last = ring.cell, ring[first + cost - 1]
    worker = crew.start(_hit_large, name, cost)
    wait_until(lambda: ring.cell != cell and kind_of(ring.cell[0]) == layout.KIND_COUNT, "a claim")
    stop_before(worker, lambda: ring[first + cost - 1] != last)
    return worker


def _hit_large(name: str, cost: int) -> bool:
    with Store(name, keys=100, clock=ManualClock()) as store:
        return bool(large_log(store).hit(KEY, cost))


def take_all(log: SlidingLog, key: str = KEY) -> int:
    """How many permits are there, in costs of every size."""
    cost, taken = LARGE, 0
    while cost and taken <= LARGE:
        if log.hit(key, cost):
            taken += cost
        else:
            cost //= 2
    return taken


@pytest.mark.parametrize("cost", [1 << 21, 1_500_001, 3_999_999])
@until_caught
def test_a_writer_killed_half_way_neither_blocks_nor_gives_more(crew: Crew, name: str, cost: int) -> None:
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        stopped_while_hitting(crew, name, 0, cost).kill()
        taken = take_all(log)
        # A helper knows the cost only to the next power of two.
        assert LARGE - min(1 << (cost - 1).bit_length(), LARGE) <= taken <= LARGE - cost
        clock.set(1000.999)
        assert take_all(log) == 0
        clock.set(1002)
        assert take_all(log) == LARGE


@until_caught
def test_a_writer_that_goes_on_a_lap_later_undoes_nothing(crew: Crew, name: str) -> None:
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        worker = stopped_while_hitting(crew, name, 0, 1 << 21)
        clock.set(1000.5)
        assert take_all(log) == LARGE - (1 << 21)
        clock.set(1001.1)
        worker.resume()
        assert worker.result()
        # The permits that it took at 1000 have left the window, however late it wrote them.
        assert take_all(log) == 1 << 21
        clock.set(1001.4)
        assert take_all(log) == 0
        clock.set(1001.6)
        assert take_all(log) == LARGE - (1 << 21)


@pytest.mark.parametrize("later_ns", [0, 1000])
@until_caught
def test_permits_that_were_given_back_are_given_once_though_the_writer_is_killed(
    crew: Crew, name: str, later_ns: int
) -> None:
    cost = 1 << 21
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        assert log.hit(KEY, LARGE)
        log.refund(KEY, LARGE)
        clock.advance(later_ns / 1e9)
        stopped_while_hitting(crew, name, 0, cost).kill()
        assert take_all(log) <= LARGE - cost


@until_caught
def test_helping_lets_nothing_leave_the_window_early(crew: Crew, name: str) -> None:
    half = LARGE // 2
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        assert log.hit(KEY, half)
        clock.set(1000.00001)
        assert log.hit(KEY, half)
        clock.set(1001)
        stopped_while_hitting(crew, name, 0, half).kill()
        assert take_all(log) == 0
        clock.set(1001.000009)
        assert take_all(log) == 0
        clock.set(1001.1)
        assert take_all(log) == half


@until_caught
def test_a_writer_of_an_evicted_key_does_not_affect_its_successor(crew: Crew, name: str) -> None:
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        worker = stopped_while_hitting(crew, name, 0, 3_000_000)
        clock.set(1000.1)
        assert take_all(log, "another") == LARGE
        worker.resume()
        assert worker.result()
        clock.set(1001.09)
        assert take_all(log, "another") == 0
        clock.set(1001.2)
        assert take_all(log, "another") == LARGE
        assert store.stats().total.evicted == 1


@until_caught
def test_a_refund_that_was_stopped_gives_back_nothing_of_another_key(crew: Crew, name: str) -> None:
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        log = large_log(store)
        assert log.hit(KEY, LARGE)
        ring = Ring(name)
        before, last = ring[0], ring[LARGE - 1]
        worker = crew.start(_refund_large, name)
        wait_until(lambda: ring[0] != before, "a refund")
        stop_before(worker, lambda: ring[LARGE - 1] != last)
        clock.set(1000.1)
        assert take_all(log, "another") == LARGE
        worker.resume()
        worker.result()
        assert take_all(log, "another") == 0


def _refund_large(name: str) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        large_log(store).refund(KEY, LARGE)


# A bucketed window's refund that is stopped half-way.

MANY_BUCKETS: Final = 65_536
"""Of which each has something to give back: that takes longer than noticing that it has begun."""


@pytest.mark.parametrize("after", ["reset", "eviction", "time"])
@until_caught
def test_a_refund_over_many_buckets_that_was_stopped_breaks_no_bound(crew: Crew, name: str, after: str) -> None:
    clock = ManualClock(0)
    limit = 2 * MANY_BUCKETS
    with Store(name, keys=100, clock=clock) as store:
        window = many_buckets(store)
        for bucket in range(MANY_BUCKETS):
            clock.set(bucket)
            assert window.hit(KEY, 2 if bucket == MANY_BUCKETS - 1 else 1)
        [entry] = extents(path_of(name))
        with open(path_of(name), "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        marks = slice(entry["offset"] + entry["bytes"] - 8 * MANY_BUCKETS, entry["offset"] + entry["bytes"])
        newest = slice(marks.stop - 8, marks.stop)
        before, oldest = memory[newest], memory[marks][:8]
        worker = crew.start(_refund_many_buckets, name)
        wait_until(lambda: memory[newest] != before, "a refund")
        stop_before(worker, lambda: memory[marks][:8] != oldest)
        key, left = KEY, limit - MANY_BUCKETS - 1
        if after == "reset":
            window.reset(KEY)
            left = limit
        elif after == "eviction":
            assert window.allow("another")
            key, left = "another", limit - 1
        else:
            left += 2
        worker.resume()
        worker.result()
        # At once, and while what was there before leaves the window bit by bit.
        taken = 0
        for bucket in (MANY_BUCKETS - 1, MANY_BUCKETS, MANY_BUCKETS + 1, MANY_BUCKETS + 1000):
            clock.set(bucket)
            cost = limit
            while cost and taken <= 2 * limit:
                if window.hit(key, cost):
                    taken += cost
                else:
                    cost //= 2
            gone = bucket - MANY_BUCKETS + 1 if after == "time" else 0
            assert taken == left + gone


def many_buckets(store: Store) -> BucketedWindow:
    return BucketedWindow(store, "window", f"{2 * MANY_BUCKETS} per {MANY_BUCKETS} seconds", MANY_BUCKETS, keys=1)


def _refund_many_buckets(name: str) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        many_buckets(store).refund(KEY, 2)
