"""Extents under many processes: made once, by the first process; used by all; small, damaged, full, gone."""

from __future__ import annotations

import functools
import itertools
import os
import random
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pytest
from process_helpers import (
    EXTENT_FIELDS,
    FREE_USER,
    SHARED_GROUP,
    Crew,
    Meeting,
    SharedNumbers,
    as_user,
    extents,
    path_of,
    wait_until,
)

import forebay.segment.extents
from forebay import BucketedWindow, Concurrency, SlidingLog, Store, TokenBucket
from forebay.errors import (
    DamagedSegment,
    ForebayError,
    InvalidLimiter,
    SegmentBusy,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSizeWarning,
    SegmentSpaceError,
    TooManyLimiters,
)
from forebay.segment import attachment_locks, layout, ofd_locks
from forebay.testing import ManualClock
from forebay.verification import verify

LIMIT: Final = 2000
PROCESSES: Final = 4

Limiter = SlidingLog | BucketedWindow
Make = Callable[[Store, str, int, int], Limiter]


def _log(store: Store, name: str, limit: int, keys: int) -> SlidingLog:
    return SlidingLog(store, name, f"{limit}/hour", keys=keys)


def _bucketed(store: Store, name: str, limit: int, keys: int) -> BucketedWindow:
    return BucketedWindow(store, name, f"{limit}/hour", 60, keys=keys)


both = pytest.mark.parametrize("make", [_log, _bucketed], ids=["sliding log", "bucketed window"])


def take(limiter: Limiter, key: int | str, most: int = LIMIT) -> int:
    """How many single permits it gives, up to one more than `most`."""
    return sum(itertools.takewhile(bool, (limiter.allow(key) for _ in range(most + 1))))


# Making them.


@both
def test_many_processes_make_one_at_once(crew: Crew, name: str, make: Make) -> None:
    turns, processes = 15, 8
    clock = ManualClock(10**6)
    with Store(name, keys=100, clock=clock) as store:
        answers = crew.run(processes, _make_and_use, name, make, turns, Meeting(processes))
        assert [sum(column) for column in zip(*answers, strict=True)] == [LIMIT] * turns
        found = extents(path_of(name))
        assert len(found) == turns
        assert len({entry["identity"] for entry in found}) == turns
        _check_places(name)
        assert store.stats().total.allowed == LIMIT * turns


def _make_and_use(me: int, name: str, make: Make, turns: int, meeting: Meeting) -> list[int]:
    answers = []
    with Store(name, keys=100, clock=ManualClock()) as store:
        for turn in range(turns):
            meeting.wait(me)
            limiter = make(store, f"limiter {turn}", LIMIT, 20)
            answers.append(take(limiter, "key"))
    return answers


def _check_places(name: str) -> None:
    """No two share a byte, and all are in the file."""
    end = layout.TABLE_OFFSET
    for entry in sorted(extents(path_of(name)), key=lambda entry: entry["offset"]):
        assert entry["offset"] >= end
        assert entry["offset"] % layout.EXTENT_ALIGNMENT == 0
        end = entry["offset"] + entry["bytes"]
    assert end <= os.stat(path_of(name)).st_size


@both
def test_creators_that_are_killed_leave_nothing_that_blocks(crew: Crew, name: str, make: Make) -> None:
    """At random moments; and so that some do fall into a creation on any machine, before each of its steps too."""
    draws = random.Random(17)
    begun = SharedNumbers(1)
    half_way = turn = 0
    with Store(name, keys=100, clock=ManualClock(10**6)) as store, open(path_of(name), "r+b") as file:
        while turn < 40 + len(STEPS):
            step = STEPS[turn - 40] if turn >= 40 else None
            worker = crew.start(_make_one, name, make, turn, begun, step)
            if step:
                worker.wait_for_stop()
                assert _is_being_changed(file.fileno()), step
            else:
                wait_until(functools.partial(_is_above, begun, turn), "its begin")
                for _ in range(draws.randrange(8000)):
                    pass
                worker.pause()
            half_way += _is_being_changed(file.fileno())
            worker.kill()
            crew.workers.remove(worker)
            if step:
                # It is found when it is whole and not before, as is its limiter's name.
                assert len(extents(path_of(name))) == turn + (step[1] == "_unlock_list"), step
                assert (f"limiter {turn}" in store.stats().limiters) == (step[1] in ("replace", "_unlock_list")), step
            # The next process is not held up, and gets an empty extent.
            limiter = make(store, f"limiter {turn}", LIMIT, MANY_KEYS[make])
            assert take(limiter, "key") == LIMIT
            turn += 1
            assert len(extents(path_of(name))) == turn
        _check_places(name)
    assert half_way >= len(STEPS)


def _is_above(numbers: SharedNumbers, value: int) -> bool:
    return numbers[0] > value


def _is_being_changed(fd: int) -> bool:
    return attachment_locks.is_attached(fd, int.from_bytes(os.pread(fd, 8, layout.HEADER_EXTENTS_MAKER), "little"))


# About a megabyte.
MANY_KEYS: Final[dict[Make, int]] = {_log: 64, _bucketed: 2000}


# The steps of a creation under its lock: a module's function before which the creator stops.
STEPS: Final = [
    (forebay.segment.extents, "_take_space"),
    (os, "posix_fallocate"),
    (forebay.segment.extents, "_map"),
    (forebay.segment.extents, "replace"),
    (forebay.segment.extents, "_unlock_list"),
]


def _make_one(
    name: str, make: Make, turn: int, begun: SharedNumbers, step: tuple[ModuleType, str] | None = None
) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        begun[0] = turn + 1
        if step:
            setattr(*step, lambda *arguments, **options: os.kill(os.getpid(), signal.SIGSTOP))
        make(store, f"limiter {turn}", LIMIT, MANY_KEYS[make])
        wait_until(lambda: False, "the end")


@both
def test_a_creator_that_is_stopped_delays_no_decision(
    crew: Crew, name: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only making another extent has to wait; after its timeout it raises SegmentBusy."""
    monkeypatch.setattr(ofd_locks, "TIMEOUT_S", 0.05)
    held = SharedNumbers(1)
    clock = ManualClock(10**6)
    with Store(name, keys=100, clock=clock) as store, Store(name, keys=100, clock=clock) as again:
        limiter = make(store, "first", LIMIT, 20)
        worker = crew.start(_hold_the_lock, name, held)
        wait_until(lambda: held[0], "the lock")
        worker.pause()
        assert take(limiter, "key") == LIMIT
        assert take(make(again, "first", LIMIT, 20), "key") == 0
        with pytest.raises(SegmentBusy, match="has been changing"):
            make(again, "second", LIMIT, 20)
        worker.kill()
        assert take(make(store, "second", LIMIT, 20), "key") == LIMIT


def _hold_the_lock(name: str, held: SharedNumbers) -> None:
    with Store(name, keys=100, clock=ManualClock()) as store:
        fd = store.attachment.own_file()
        assert fd is not None
        assert forebay.segment.extents._lock_list(store.attachment, fd)
        held[0] = 1
        wait_until(lambda: False, "the end")


@both
def test_another_number_of_keys_warns_and_is_shared(crew: Crew, name: str, make: Make) -> None:
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        first = make(store, "limiter", LIMIT, 20)
        with pytest.warns(SegmentSizeWarning, match=r"made for 20 keys .* limiter has keys=500;"):
            second = make(store, "limiter", LIMIT, 500)
        assert first.keys == second.keys == 20
        assert take(first, "key", 9) == 10
        assert take(second, "key") == LIMIT - 10
        assert crew.start(_warned, name, make).result() == (True, 20, 0)
        assert len(extents(path_of(name))) == 1


@pytest.mark.parametrize("first", [3, 500])
@pytest.mark.parametrize(
    "make_any",
    [
        lambda store, keys: _log(store, "limiter", 10, keys),
        lambda store, keys: _bucketed(store, "limiter", 10, keys),
        lambda store, keys: Concurrency(store, "limiter", 10, lease="1 hour", keys=keys),
    ],
    ids=["sliding log", "bucketed window", "concurrency"],
)
def test_a_limiter_for_another_number_of_keys_finds_each_keys_record(
    name: str, make_any: Callable[[Store, int], Limiter | Concurrency], first: int
) -> None:
    """A limiter made for fewer keys than the extent had used the last key's record for all other keys."""
    with Store(name, keys=100, on_full="deny", clock=ManualClock(10**6)) as store:
        made = make_any(store, first)
        with pytest.warns(SegmentSizeWarning):
            found = make_any(store, 503 - first)
        for key in range(min(first, 60)):
            assert [(made if i % 3 else found).allow(key) for i in range(11)] == [True] * 10 + [False]
        assert verify(name).findings == ()


def _warned(name: str, make: Make) -> tuple[bool, int, int]:
    with warnings.catch_warnings(record=True) as caught, Store(name, keys=100, clock=ManualClock()) as store:
        warnings.simplefilter("always")
        limiter = make(store, "limiter", LIMIT, 3)
    with Store(name, keys=100, clock=ManualClock()) as store:
        return (
            [w.category for w in caught] == [SegmentSizeWarning],
            limiter.keys,
            take(make(store, "limiter", LIMIT, 20), "key"),
        )


@both
def test_children_of_a_private_store_make_it_after_the_fork(crew: Crew, make: Make) -> None:
    with Store.private(keys=100, clock=ManualClock(10**6)) as store:
        meeting = Meeting(PROCESSES)
        workers = [crew.start(_make_in_a_child, i, store, make, meeting) for i in range(PROCESSES)]
        taken = crew.results(workers)
        assert sum(taken) == LIMIT
        # The parent, which never made one, finds it too.
        assert take(make(store, "limiter", LIMIT, 20), "key") == 0
        assert take(make(store, "limiter", LIMIT, 20), "another") == LIMIT


def _make_in_a_child(me: int, store: Store, make: Make, meeting: Meeting) -> int:
    meeting.wait(me)
    limiter = make(store, "limiter", LIMIT, 20)
    return take(limiter, "key")


@both
def test_a_worker_that_gave_up_root(crew: Crew, as_root: None, name: str, make: Make) -> None:
    """An extent that was made before is used as it was. Making one needs the right to open the segment."""
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        limiter = make(store, "limiter", LIMIT, 20)
        assert take(limiter, "key", 9) == 10
        worker = crew.start(as_user, FREE_USER, FREE_USER, [], _use_and_try_to_make, store, limiter, make)
        assert worker.result() == (LIMIT - 10, "a process that may not open the se")
        assert take(limiter, "key") == 0
        assert len(extents(path_of(name))) == 1


def _use_and_try_to_make(store: Store, limiter: Limiter, make: Make) -> tuple[int, str]:
    taken = take(limiter, "key")
    with pytest.raises(SegmentError) as caught:
        make(store, "another", LIMIT, 20)
    assert "before the worker is forked" in caught.value.remedy
    return taken, caught.value.found[:34]


@both
def test_a_process_that_gave_up_root_itself_makes_one(crew: Crew, as_root: None, name: str, make: Make) -> None:
    """It has the segment open since before, and may not open it again. One that was made it may use as well."""
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        assert crew.start(_make_after_giving_up_root, name, make).result() == LIMIT
        assert take(make(store, "limiter", LIMIT, 20), "key") == 0


def _make_after_giving_up_root(name: str, make: Make) -> int:
    store = Store(name, keys=100, clock=ManualClock())
    return as_user(FREE_USER, FREE_USER, [], _make_one_again, store, make)


def _make_one_again(store: Store, make: Make) -> int:
    return take(make(store, "limiter", LIMIT, 20), "key") + take(make(store, "limiter", LIMIT, 20), "key")


@both
def test_a_worker_of_the_stores_group_makes_one(crew: Crew, as_root: None, name: str, make: Make) -> None:
    with Store(name, keys=100, clock=ManualClock(10**6), mode=0o660, group=SHARED_GROUP) as store:
        worker = crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _make_in_a_child, 0, store, make, Meeting(1))
        assert worker.result() == LIMIT
        assert take(make(store, "limiter", LIMIT, 20), "key") == 0


# Room.


@both
def test_no_room_names_the_bytes_and_leaves_the_store_as_it_was(small_disk: Path, crew: Crew, make: Make) -> None:
    path = small_disk / "segment"
    with Store("a", keys=100, path=path, clock=ManualClock(10**6)) as store:
        bucket = TokenBucket(store, "bucket", "10/hour")
        assert bucket.allow("key")
        before, free = path.stat().st_size, os.statvfs(small_disk).f_bavail
        for _ in range(3):
            with pytest.raises(SegmentSpaceError) as caught:
                make(store, "limiter", LIMIT, 100_000)
            assert int(caught.value.expected.split()[0]) > 100_000 * 60 * 8
            assert "100000 keys of limiter 'limiter'" in caught.value.expected
            assert int(caught.value.found.split()[0]) <= free * 4096
            assert "fewer keys" in caught.value.remedy
        assert bucket.allow("key")
        assert extents(str(path)) == []
        assert path.stat().st_size == before
        assert os.statvfs(small_disk).f_bavail == free
        # The space left is enough for a smaller extent, from any process.
        assert crew.start(_make_there, path, make).result() == LIMIT


def _make_there(path: Path, make: Make) -> int:
    with Store("a", keys=100, path=path, clock=ManualClock()) as store:
        return take(make(store, "limiter", LIMIT, 10), "key")


@both
def test_limits_of_file_size_and_address_space(crew: Crew, name: str, make: Make) -> None:
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        for what, text in ((resource.RLIMIT_FSIZE, "ulimit -f"), (resource.RLIMIT_AS, "address space")):
            before = os.stat(path_of(name))
            for _ in range(2):
                assert text in crew.start(_make_within, name, make, what).result()
            after = os.stat(path_of(name))
            assert (after.st_size, after.st_blocks) == (before.st_size, before.st_blocks)
            limiter = make(store, "limiter", LIMIT, 20)
            assert take(limiter, what) == LIMIT


def _make_within(name: str, make: Make, what: int) -> str:
    with Store(name, keys=100, clock=ManualClock()) as store:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + (4 << 20) if what == resource.RLIMIT_AS else os.stat(path_of(name)).st_size
        resource.setrlimit(what, (most, resource.RLIM_INFINITY))
        with pytest.raises(SegmentSpaceError) as caught:
            make(store, f"large {what}", LIMIT, 40_000)
        resource.setrlimit(what, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return str(caught.value)


@both
def test_limiters_that_do_not_fit_take_no_numbers(small_disk: Path, make: Make) -> None:
    path = small_disk / "segment"
    with Store("a", keys=100, path=path, clock=ManualClock(10**6)) as store:
        for number in range(layout.LIMITER_CAPACITY + 1):
            with pytest.raises(SegmentSpaceError):
                make(store, f"limiter {number}", LIMIT, 100_000)
        with pytest.raises(SegmentSpaceError):
            Concurrency(store, "limiter", LIMIT, keys=1_000_000)
        assert store.stats().limiters == {}
        assert take(make(store, "limiter", LIMIT, 10), "key") == LIMIT
        assert set(store.stats().limiters) == {"limiter"}


@both
def test_the_last_number_goes_to_another_one_meanwhile(name: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        for number in range(layout.LIMITER_CAPACITY - 1):
            TokenBucket(store, f"bucket {number}", "10/hour")
        algorithm = layout.ALGORITHM_SLIDING_LOG if make is _log else layout.ALGORITHM_BUCKETED_WINDOW
        take_space = forebay.segment.extents._take_space

        def take_space_and_the_last_number(*arguments: Any) -> None:
            take_space(*arguments)
            store.attachment.limiter_number("last", algorithm)

        monkeypatch.setattr(forebay.segment.extents, "_take_space", take_space_and_the_last_number)
        with pytest.raises(TooManyLimiters):
            make(store, "limiter", LIMIT, 20)
        assert extents(path_of(name)) == []
        # A limiter that is in the list already finds room behind what was left.
        assert take(make(store, "last", LIMIT, 20), "key") == LIMIT
        assert verify(name).sound


@both
def test_a_limiter_without_a_free_number_takes_no_space(name: str, make: Make) -> None:
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        for number in range(layout.LIMITER_CAPACITY):
            TokenBucket(store, f"bucket {number}", "10/hour")
        size = os.stat(path_of(name)).st_size
        with pytest.raises(TooManyLimiters):
            make(store, "limiter", LIMIT, 20)
        assert os.stat(path_of(name)).st_size == size
        assert extents(path_of(name)) == []


@both
def test_no_more_than_the_list_holds(name: str, make: Make) -> None:
    """The same limiter with other parameters takes another extent."""
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        for number in range(layout.EXTENT_CAPACITY):
            SlidingLog(store, "limiter", f"{number + 1}/hour", keys=1)
        with pytest.raises(SegmentSpaceError, match="all 256 extents taken") as caught:
            make(store, "limiter", LIMIT, 1)
        assert "Store.unlink" in caught.value.remedy
        with pytest.raises(SegmentSpaceError, match="all 256 extents taken"):
            make(store, "another", LIMIT, 1)
        assert set(store.stats().limiters) == {"limiter"}
        assert len(extents(path_of(name))) == layout.EXTENT_CAPACITY
        _check_places(name)
        assert take(SlidingLog(store, "limiter", "256/hour", keys=1), "key") == 256


@both
def test_unlink_and_make_again(crew: Crew, name: str, make: Make) -> None:
    clock = ManualClock(10**6)
    with Store(name, keys=100, clock=clock) as store:
        limiter = make(store, "limiter", LIMIT, 20)
        assert take(limiter, "key", 99) == 100
        Store.unlink(name)
        with pytest.warns(SegmentRemovedWarning):
            successor = Store(name, keys=100, clock=ManualClock(10**6))
        with successor:
            assert take(make(successor, "limiter", LIMIT, 50), "key") == LIMIT
            assert crew.start(_make_elsewhere, name, make).result() == 0
        assert take(limiter, "key") == LIMIT - 100
        # Those attached to the old one can go on making some.
        assert take(make(store, "another", LIMIT, 20), "key") == LIMIT


def _make_elsewhere(name: str, make: Make) -> int:
    with Store(name, keys=100, clock=ManualClock()) as store:
        return take(make(store, "limiter", LIMIT, 50), "key")


# Full.

SIZES: Final = (1, 2, 4, 5, 8, 9, 16, 17, 40, 48, 64)


@both
@pytest.mark.parametrize("on_full", ["deny", "allow"])
def test_a_full_extent_keeps_its_keys(crew: Crew, name: str, make: Make, on_full: str) -> None:
    limit = 40
    for size in SIZES:
        with Store(name, keys=1000, on_full=on_full, clock=ManualClock(10**6)) as store:  # type: ignore[arg-type]
            make(store, "limiter", limit, size)
            answers = crew.run(PROCESSES, _use_all_keys, name, make, limit, size, on_full, Meeting(PROCESSES))
            sums = [sum(column) for column in zip(*answers, strict=True)]
            held = sums.count(limit)
            # Every key has the whole limit for itself, or there was no room for it.
            if on_full == "deny":
                assert set(sums) <= {limit, 0}
                assert held == size if size <= 48 else held >= size
            else:
                # While other keys were about to move in, a request may have been allowed without being counted.
                assert min(sums) == limit
                assert max(sums) <= PROCESSES * (limit + 1)
            stats = store.stats().total
            assert stats.evicted == 0 < stats.full
        Store.unlink(name)


def _use_all_keys(me: int, name: str, make: Make, limit: int, size: int, on_full: str, meeting: Meeting) -> list[int]:
    with Store(name, keys=1000, on_full=on_full, clock=ManualClock()) as store:  # type: ignore[arg-type]
        limiter = make(store, "limiter", limit, size)
        answers = [0] * (2 * size + 60)
        meeting.wait(me)
        for _ in range(limit + 1):
            for key in range(len(answers)):
                answers[key] += limiter.allow(key)
        return answers


@both
def test_a_key_that_evicts_another_starts_afresh(name: str, make: Make) -> None:
    limit = 30
    draws = random.Random(19)
    for size in SIZES:
        clock = ManualClock(10**6)
        with Store(name, keys=1000, clock=clock) as store:
            limiter = make(store, "limiter", limit, size)
            for turn in range(4 * size + 60):
                # With single permits or many at once, at one moment or later.
                cost = draws.choice((1, 1, 7, limit))
                taken = 0
                while limiter.hit(turn, cost):
                    taken += cost
                assert taken == limit // cost * cost
                clock.advance(draws.choice((0, 1e-9, 1, 60, 100)))
            assert store.stats().total.evicted > 0
        Store.unlink(name)


@both
@pytest.mark.parametrize("size", [1, 3, 20, 64])
def test_eviction_by_many_processes_locks_no_key_out(crew: Crew, name: str, make: Make, size: int) -> None:
    """Evictions that race admit no key more than its limit, and after a window each key has its whole limit."""
    limit = 250
    clock = ManualClock(10**6)
    draws = random.Random(23)
    stop, progress = SharedNumbers(1), SharedNumbers(PROCESSES)
    with Store(name, keys=1000, clock=clock) as store:
        limiter = make(store, "limiter", limit, size)
        workers = [crew.start(_evict_each_other, i, limiter, limit, size, progress, stop) for i in range(PROCESSES)]
        wait_until(lambda: min(progress.values), "the first decisions")
        seen = list(progress)
        for _ in range(100):
            clock.advance(draws.choice((0, 0.1, 60, 200)))
            victim = draws.randrange(PROCESSES)
            workers[victim].pause()
            for _ in range(draws.randrange(3000)):
                pass
            workers[victim].resume()
        wait_until(functools.partial(_has_grown, progress, seen), "progress")
        wait_until(lambda: store.stats().total.cas_retries, "a race")
        stop[0] = 1
        crew.results(workers)
        assert store.stats().total.evicted > 0
        for key in range(2 * size):
            assert take(limiter, key, limit) <= limit
            # A window, and what a log's dates may be ahead of the clock.
            assert limiter.peek(key).reset_after < 3600 + 60
        clock.advance(2 * 3600)
        for key in range(2 * size):
            taken = take(limiter, key, limit)
            assert taken == limit, f"{taken} for key {key}: {limiter.hit(key)}, {store.stats()}, {verify(name)}"


def _evict_each_other(
    me: int, limiter: Any, limit: int, size: int, progress: SharedNumbers, stop: SharedNumbers
) -> None:
    draws = random.Random(me)
    while not stop[0]:
        for _ in range(100):
            key = draws.randrange(2 * size)
            limiter.hit(key, draws.choice((1, 3, 7)))
            if draws.random() < 0.1:
                limiter.refund(key, draws.choice((1, 3)))
            if draws.random() < 0.05:
                limiter.reset(key)
        progress[me] += 1


# Damage.

SHORT_FIELDS: Final = ("limiter", "algorithm", "words_per_cell", "low_bits")


def _write(name: str, offset: int, data: bytes) -> None:
    with open(path_of(name), "r+b", buffering=0) as file:
        file.seek(offset)
        file.write(data)


@both
@pytest.mark.parametrize("field", EXTENT_FIELDS)
def test_a_damaged_entry_is_refused_or_passed_over(crew: Crew, name: str, make: Make, field: str) -> None:
    draws = random.Random(29)
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        limiter = make(store, "limiter", LIMIT, 20)
        [entry] = extents(path_of(name))
        whole = layout.EXTENT_ENTRY.pack(*entry.values())
        values = [
            0,
            1,
            2,
            3,
            7,
            entry[field] - 1,
            entry[field] + 1,
            entry[field] + 4096,
            entry[field] * 2,
            2**32,
            2**63,
        ]
        values += [2**64 - 1, 2**64 - 4096, 2**64 - entry["bytes"], *(draws.getrandbits(64) for _ in range(10))]
        below = 2**32 if field in SHORT_FIELDS else 2**64
        for value in sorted({value % below for value in values} - {entry[field]}):
            damaged = layout.EXTENT_ENTRY.pack(*{**entry, field: value}.values())
            _write(name, layout.EXTENTS_OFFSET, damaged + bytes(layout.EXTENT_ENTRY.size))
            refused = crew.start(_use_damaged, name, make).result(deadline_s=20)
            # With another identity it is another limiter's.
            assert refused == (field != "identity"), value
        # A process that has it mapped goes on, and once it is mended all do.
        _write(name, layout.EXTENTS_OFFSET, whole)
        assert take(limiter, "key") == LIMIT
        assert take(make(store, "limiter", LIMIT, 20), "key") == 0


def _use_damaged(name: str, make: Make) -> bool:
    with Store(name, keys=100, clock=ManualClock()) as store:
        try:
            limiter = make(store, "limiter", LIMIT, 20)
        except DamagedSegment as error:
            return "Store.unlink" in error.remedy
        assert take(limiter, "any") == LIMIT
        return False


@both
@pytest.mark.parametrize("size", [1, 20, 64])
@pytest.mark.parametrize("on_full", ["evict", "deny"])
def test_damaged_cells_and_words(crew: Crew, name: str, make: Make, size: int, on_full: str) -> None:
    """Whatever stands there, everything that a limiter can do comes to an end, in its own memory."""
    draws = random.Random(31)
    progress, stop = SharedNumbers(2), SharedNumbers(1)
    with Store(name, keys=100, clock=ManualClock(10**6), on_full=on_full) as store:  # type: ignore[arg-type]
        limiter = make(store, "limiter", 50, size)
        [entry] = extents(path_of(name))
        words_per_key = 50 if make is _log else 60
        words = limiter.keys * words_per_key * 8
        workers = [
            crew.start(_use_everything, i, name, make, size, on_full, progress, stop)
            for i in range(len(progress.values))
        ]
        wait_until(lambda: min(progress.values), "the first decisions")
        for turn in range(3000):
            place = entry["offset"] + draws.choice(
                (16 * draws.randrange((entry["bytes"] - words) // 16), 8 * draws.randrange(entry["bytes"] // 8))
            )
            _write(name, place, _garbage(draws))
            if turn % 500 == 0:
                # All at once, of one sort.
                _write(name, entry["offset"], draws.choice((b"\xff", b"\0", b"\x80", b"\x03")) * entry["bytes"])
            if turn % 300 == 0:
                seen = list(progress)
                wait_until(functools.partial(_has_grown, progress, seen), "progress")
        stop[0] = 1
        crew.results(workers)
        store.stats()


def _has_grown(progress: SharedNumbers, seen: list[int]) -> bool:
    return all(now > then for now, then in zip(progress, seen, strict=True))


def _garbage(draws: random.Random) -> bytes:
    return draws.choice(
        (
            draws.randbytes(8),
            draws.randbytes(16),
            bytes([draws.choice((0xFF, 0, 0x80, 0x7F, 1, 3, 7))]) * draws.choice((8, 16)),
            # A member with a state of any time.
            draws.getrandbits(61).to_bytes(8, "little")
            + (draws.getrandbits(64) >> draws.randrange(64)).to_bytes(8, "little"),
        )
    )


def _use_everything(
    me: int, name: str, make: Make, size: int, on_full: str, progress: SharedNumbers, stop: SharedNumbers
) -> None:
    draws = random.Random(me)
    clock = ManualClock()
    with Store(name, keys=100, clock=clock, on_full=on_full) as store:  # type: ignore[arg-type]
        limiter = make(store, "limiter", 50, size)
        while not stop[0]:
            for _ in range(20):
                key = draws.randrange(2 * size)
                limiter.allow(key)
                decision = limiter.hit(key, draws.choice((1, 2, 50)))
                assert 0 <= decision.remaining <= 50
                repr(decision)
                repr(limiter.peek(key, 3))
                limiter.refund(key, draws.choice((1, 50)))
                limiter.reserve(key).cancel()
                limiter.allow_many([*range(2 * size), key], [draws.choice((0, 1, 50)) for _ in range(2 * size + 1)])
                limiter.reset(key)
            if me == 0:
                clock.advance(draws.choice((0.001, 1, 100)))
            progress[me] += 1


@both
@pytest.mark.parametrize("size", [1, 17])
def test_a_blocked_cell_that_looks_free_leads_nowhere(crew: Crew, name: str, make: Make, size: int) -> None:
    """There are no words behind a cell that is never used: it must not be taken for one that has some."""
    with Store(name, keys=100, clock=ManualClock(10**6)) as store:
        make(store, "limiter", LIMIT, size)
        [entry] = extents(path_of(name))
        cells = -(-size // 16) * 16
        _write(name, entry["offset"], bytes(16 * cells))
        assert crew.start(_use_every_cell, name, make, size).result(deadline_s=20) > 0


def _use_every_cell(name: str, make: Make, size: int) -> int:
    with Store(name, keys=100, clock=ManualClock()) as store:
        limiter = make(store, "limiter", LIMIT, size)
        return sum([limiter.allow(key) for key in range(400) for _ in range(20)])


def test_parameters_that_have_no_memory_are_refused_before_any_is_taken(name: str) -> None:
    with Store(name, keys=100) as store:
        before = os.stat(path_of(name)).st_size
        for keys in (0, -1, 2**32 + 1, 1.0, True, "5"):
            with pytest.raises(InvalidLimiter):
                SlidingLog(store, "log", "5/second", keys=keys)  # type: ignore[arg-type]
            with pytest.raises(InvalidLimiter):
                BucketedWindow(store, "bucketed", "5/second", keys=keys)  # type: ignore[arg-type]
        with pytest.raises(ForebayError):
            SlidingLog(store, "log", "5/second", keys=2**32)
        assert os.stat(path_of(name)).st_size == before
        assert extents(path_of(name)) == []
