"""Every limiter under many processes: never more than its definition allows, never less, whoever is killed."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import mmap
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import pytest
from oracle import Bucket, Oracle, Rule
from oracle_counts import BucketedWindow as BucketedRule
from oracle_counts import ClockWindow, FirstWindow, IntervalBucket, Log
from oracle_counts import SlidingWindow as SlidingRule
from process_helpers import (
    Crew,
    Meeting,
    SharedNumbers,
    Worker,
    extents,
    kind_of,
    most_admitted,
    nanoseconds,
    path_of,
    soak_seconds,
    until_raced,
    wait_until,
)

from penstock import (
    BucketedWindow,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
    layout,
)
from penstock.testing import ManualClock

MS: Final = 1_000_000
HOUR_MS: Final = 3_600_000
PROCESSES: Final = 4
BUCKETS: Final = 8
KEY: Final = "user:42"


@dataclass(frozen=True)
class Kind:
    """A limiter to try, and what is known of it. `limit` permits pass at once, and as many in each period."""

    make: Callable[[Store, str, int, int], Any]
    """With a name, the limit, and the period in ms."""
    rule: Callable[[int, int], Rule[Any]] | None
    """The same for the oracle, with the period in ns. None: its windows begin where they like."""
    spans: Callable[[int, int], Sequence[tuple[int, int]]] = lambda limit, period_ns: ()
    """Any span shorter than so many ns has at most so many permits."""
    windows: Callable[[int, int], Sequence[tuple[int, int, int]]] = lambda limit, period_ns: ()
    """Of the clock's windows of so many ns, any so many in a row have at most so many permits."""
    limit: int = 400
    """For the real clock."""


def _gcra_spans(limit: int, period_ns: int) -> list[tuple[int, int]]:
    rate = f"{limit} per {period_ns // MS} ms"
    return [(span_ns, most_admitted(rate, limit, span_ns)) for span_ns in (MS, period_ns, 5 * period_ns)]


def _windows_anywhere(limit: int, period_ns: int) -> list[tuple[int, int]]:
    return [(count * period_ns, (count + 1) * limit) for count in (1, 2, 5)]


KINDS: Final = {
    "token bucket": Kind(
        lambda store, name, limit, ms: TokenBucket(store, name, f"{limit} per {ms} ms", limit),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=_gcra_spans,
    ),
    "interval bucket": Kind(
        lambda store, name, limit, ms: TokenBucket(store, name, f"{limit} per {ms} ms", limit, refill="interval"),
        lambda limit, period_ns: IntervalBucket(limit, period_ns, limit),
        windows=lambda limit, period_ns: [(period_ns, count, count * limit) for count in (1, 2, 5)],
    ),
    "leaky bucket": Kind(
        lambda store, name, limit, ms: LeakyBucket(store, name, f"{limit} per {ms} ms", limit),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=_gcra_spans,
    ),
    "fixed window": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms"),
        ClockWindow,
        windows=lambda limit, period_ns: [(period_ns, 1, limit)],
    ),
    "fixed window, first": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms", align="first"),
        FirstWindow,
        spans=_windows_anywhere,
    ),
    "fixed window, stagger": Kind(
        lambda store, name, limit, ms: FixedWindow(store, name, f"{limit} per {ms} ms", align="stagger"),
        None,
        spans=_windows_anywhere,
    ),
    "sliding window": Kind(
        lambda store, name, limit, ms: SlidingWindow(store, name, f"{limit} per {ms} ms"),
        SlidingRule,
        windows=lambda limit, period_ns: [(period_ns, 1, limit)],
    ),
    "bucketed window": Kind(
        lambda store, name, limit, ms: BucketedWindow(store, name, f"{limit} per {ms} ms", BUCKETS, keys=64),
        lambda limit, period_ns: BucketedRule(limit, period_ns, BUCKETS),
        windows=lambda limit, period_ns: [(period_ns // BUCKETS, BUCKETS, limit)],
    ),
    "sliding log": Kind(
        lambda store, name, limit, ms: SlidingLog(store, name, f"{limit} per {ms} ms", keys=64),
        Log,
        spans=lambda limit, period_ns: [(period_ns, limit)],
    ),
    "minimum interval": Kind(
        lambda store, name, limit, ms: MinInterval(store, name, f"{ms} ms"),
        lambda limit, period_ns: Bucket(limit, period_ns, limit),
        spans=lambda limit, period_ns: [(period_ns, limit)],
        limit=1,
    ),
}

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_kind_with_a_limit = pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind.limit > 1], ids=[name for name in KINDS if KINDS[name].limit > 1]
)


# A clock that stands still.


@every_kind_with_a_limit
@pytest.mark.parametrize("processes", [4, 8])
def test_nobody_is_denied_what_is_there_and_nobody_gets_more(crew: Crew, name: str, kind: Kind, processes: int) -> None:
    """Together they ask for exactly the limit, and then for more."""
    limit, keys = 6000, 3
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        answers = crew.run(processes, _take_a_share, name, kind, limit, keys, Meeting(processes), processes)
        after = store.stats().total
        assert answers == [(limit // processes * keys, 0)] * processes
        assert after.allowed - before.allowed == limit * keys
        assert after.evicted == after.full == 0
        # The next turn meets the states of this one, expired.
        clock.advance(3 * 3600)
        return after.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        kind.make(store, "limiter", limit, HOUR_MS)
        until_raced(turn)


def _take_a_share(
    me: int, name: str, kind: Kind, limit: int, keys: int, meeting: Meeting, processes: int
) -> tuple[int, int]:
    with Store(name, keys=100, clock=ManualClock()) as store:
        allow = kind.make(store, "limiter", limit, HOUR_MS).allow
        meeting.wait(me)
        taken = sum([allow(key) for _ in range(limit // processes) for key in range(keys)])
        meeting.wait(me)
        return taken, sum([allow(key) for _ in range(50) for key in range(keys)])


@every_kind_with_a_limit
def test_mixed_costs_leave_less_than_the_smallest_of_them(crew: Crew, name: str, kind: Kind) -> None:
    limit = 15_000
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        admitted = sum(crew.run(PROCESSES, _spend, name, kind, limit, Meeting(PROCESSES)))
        assert limit - 2 < admitted <= limit
        assert sum([limiter.allow(KEY) for _ in range(3)]) == limit - admitted
        clock.advance(3 * 3600)
        return store.stats().total.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        limiter = kind.make(store, "limiter", limit, HOUR_MS)
        until_raced(turn)


def _spend(me: int, name: str, kind: Kind, limit: int, meeting: Meeting) -> int:
    draws = random.Random(me)
    with Store(name, keys=100, clock=ManualClock()) as store:
        hit = kind.make(store, "limiter", limit, HOUR_MS).hit
        admitted = denied = 0
        meeting.wait(me)
        while denied < 50:
            cost = draws.choice((2, 3, 5, 11))
            if hit(KEY, cost):
                admitted += cost
            else:
                denied += 1
        while hit(KEY, 2):
            admitted += 2
        return admitted


@every_kind
def test_a_limit_of_one(crew: Crew, name: str, kind: Kind) -> None:
    """Every key is asked for by all at the same moment, again and again after its permit has come back."""
    rounds, keys = 25, 40
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        meeting = Meeting(PROCESSES + 1)
        workers = [crew.start(_ask_once, i, name, kind, rounds, keys, meeting) for i in range(PROCESSES)]
        for _ in range(rounds):
            meeting.wait(PROCESSES)
            meeting.wait(PROCESSES)
            clock.advance(2 * 3600)
        answers = crew.results(workers)
        assert [sum(column) for column in zip(*answers, strict=True)] == [1] * rounds * keys
        return store.stats().total.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        kind.make(store, "limiter", 1, HOUR_MS)
        until_raced(turn)


def _ask_once(me: int, name: str, kind: Kind, rounds: int, keys: int, meeting: Meeting) -> list[bool]:
    answers = []
    with Store(name, keys=100, clock=ManualClock()) as store:
        allow = kind.make(store, "limiter", 1, HOUR_MS).allow
        for _ in range(rounds):
            meeting.wait(me)
            answers += [allow(key) for key in range(keys)]
            meeting.wait(me)
    return answers


@pytest.mark.parametrize("kind", [KINDS["token bucket"], KINDS["leaky bucket"]], ids=["token bucket", "leaky bucket"])
def test_reservations_are_evenly_apart(crew: Crew, name: str, kind: Kind) -> None:
    limit = 3600
    unit_ns = HOUR_MS * MS // limit
    clock = ManualClock(1_000_000)

    def turn(number: int) -> int:
        before = store.stats().total
        results = crew.run(PROCESSES, _reserve, name, kind, limit, Meeting(PROCESSES))
        now_ns = round(clock.now() * 1e9)
        dues = Counter(due_ns - now_ns for result in results for due_ns in result)
        if isinstance(limiter, LeakyBucket):
            assert dues == Counter(range(0, limit * unit_ns, unit_ns))
        else:
            # A whole burst now, the rest one by one.
            booked = PROCESSES * limit
            assert dues == Counter([0] * limit + [unit_ns * (i + 1) for i in range(booked - limit)])
        clock.advance(20 * 3600)
        return store.stats().total.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        limiter = kind.make(store, "limiter", limit, HOUR_MS)
        until_raced(turn)


def _reserve(me: int, name: str, kind: Kind, limit: int, meeting: Meeting) -> list[int]:
    with Store(name, keys=100, clock=ManualClock()) as store:
        reserve = kind.make(store, "limiter", limit, HOUR_MS).reserve
        meeting.wait(me)
        booked = [reserve(KEY) for _ in range(limit)]
        return [reservation.due_ns for reservation in booked if reservation]


# A clock that one process moves on.


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if kind.rule], ids=[name for name in KINDS if KINDS[name].rule]
)
@pytest.mark.parametrize("pace", ["anywhere", "boundaries"])
def test_the_total_is_the_oracles_while_the_clock_moves(crew: Crew, name: str, kind: Kind, pace: str) -> None:
    """The driver takes what is left before each step, so that the total is known to the permit."""
    limit = kind.limit if pace == "anywhere" else min(kind.limit, 4)
    steps = 120 if pace == "anywhere" else 2000
    assert kind.rule is not None
    rule = kind.rule(limit, 1000 * MS)
    draws = random.Random(3)
    clock = ManualClock(1000.0)

    def turn(number: int) -> int:
        before = store.stats().total
        oracle: Oracle[Any] = Oracle()
        stop = SharedNumbers(1)
        meeting = Meeting(PROCESSES + 1)
        workers = [crew.start(_hammer_until, i, name, kind, limit, number, meeting, stop) for i in range(PROCESSES)]
        meeting.wait(PROCESSES)
        admitted = expected = 0
        for _ in range(steps):
            while limiter.allow(number):
                admitted += 1
            expected += _take_the_rest(oracle, rule, number, round(clock.now() * 1e9))
            if pace == "anywhere":
                step_ns = draws.randrange(draws.choice((10**6, 10**8, 10**9)))
            else:
                step_ns = 1000 * MS // draws.choice((1, 1, BUCKETS))
            clock.advance(step_ns / 1e9)
        while limiter.allow(number):
            admitted += 1
        stop[0] = 1
        expected += _take_the_rest(oracle, rule, number, round(clock.now() * 1e9))
        assert admitted + sum(crew.results(workers)) == expected
        clock.advance(10)
        return store.stats().total.cas_retries - before.cas_retries

    with Store(name, keys=100, clock=clock) as store:
        limiter = kind.make(store, "limiter", limit, 1000)
        until_raced(turn)


def _take_the_rest(oracle: Oracle[Any], rule: Rule[Any], key: int, now_ns: int) -> int:
    left = oracle.peek(rule, key, 0, now_ns).remaining
    if left:
        assert oracle.hit(rule, key, left, now_ns)
    if isinstance(rule, BucketedRule):
        # It never forgets.
        oracle.states[key] = oracle.states[key][-BUCKETS:]
    return left


def _hammer_until(me: int, name: str, kind: Kind, limit: int, key: int, meeting: Meeting, stop: SharedNumbers) -> int:
    with Store(name, keys=100, clock=ManualClock()) as store:
        allow = kind.make(store, "limiter", limit, 1000).allow
        admitted = 0
        meeting.wait(me)
        while not stop[0]:
            admitted += sum([allow(key) for _ in range(20)])
        return admitted


# The real clock.


class Admission(NamedTuple):
    """Decided at some time from `before_ns` to `after_ns`."""

    before_ns: int
    after_ns: int
    permits: int


REAL_PERIOD_MS: Final = 20
REAL_PERIOD_NS: Final = REAL_PERIOD_MS * MS


def check_bounds(kind: Kind, admissions: Sequence[Admission], name: str) -> None:
    for span_ns, most in kind.spans(kind.limit, REAL_PERIOD_NS):
        assert _most_within(admissions, span_ns) <= most, f"in {span_ns} ns"
    offset_ns = _wall_offset_ns(name)
    for unit_ns, count, most in kind.windows(kind.limit, REAL_PERIOD_NS):
        units = [Admission((a[0] + offset_ns) // unit_ns, (a[1] + offset_ns) // unit_ns, a[2]) for a in admissions]
        assert _most_within(units, count) <= most, f"in {count} windows of {unit_ns} ns"


def _most_within(admissions: Sequence[Admission], length: int) -> int:
    """The most permits that were certainly given within a span less than that long."""
    begun, ended = sorted((a[0], a[2]) for a in admissions), sorted((a[1], a[2]) for a in admissions)
    begun_at, ended_at = [at for at, _ in begun], [at for at, _ in ended]
    begun_sum = [0, *itertools.accumulate(permits for _, permits in begun)]
    ended_sum = [0, *itertools.accumulate(permits for _, permits in ended)]
    # Those that had ended before the span's end, less those that had begun before it began.
    return max(
        ended_sum[bisect.bisect_left(ended_at, start + length)] - begun_sum[bisect.bisect_left(begun_at, start)]
        for start in begun_at
    )


def _wall_offset_ns(name: str) -> int:
    """What to add to a reading of the host's monotonic clock for that of the wall clock by which windows begin."""
    with open(path_of(name), "rb") as file:
        header = file.read(layout.HEADER.size)
    epoch_ns, wall_epoch_ns = struct.unpack_from("<qq", header, layout.HEADER_EPOCH_NS)
    return int(wall_epoch_ns - epoch_ns)


@every_kind
def test_the_bound_holds_by_the_real_clock(crew: Crew, name: str, kind: Kind) -> None:
    with Store(name, keys=100) as store:
        kind.make(store, "limiter", kind.limit, REAL_PERIOD_MS)
        seconds = soak_seconds() / len(KINDS) or 0.2

        def turn(number: int) -> int:
            before = store.stats().total
            results = crew.run(PROCESSES, _hammer_and_note, name, kind, seconds, Meeting(PROCESSES))
            after = store.stats().total
            for key in range(2):
                check_bounds(kind, [Admission(*a) for notes, _ in results for of, a in notes if of == key], name)
            assert sum(denied for _, denied in results) == after.denied - before.denied > 0
            # A single permit is seldom asked for by two at once; test_a_limit_of_one sees to that.
            return after.cas_retries - before.cas_retries or kind.limit == 1

        until_raced(turn)


def _hammer_and_note(
    me: int, name: str, kind: Kind, seconds: float, meeting: Meeting
) -> tuple[list[tuple[int, tuple[int, int, int]]], int]:
    draws = random.Random(me)
    notes, denied = [], 0
    with Store(name, keys=100) as store:
        hit = kind.make(store, "limiter", kind.limit, REAL_PERIOD_MS).hit
        costs = (1,) if kind.limit == 1 else (1, 1, 1, 2, 7, 50)
        meeting.wait(me)
        end_ns = nanoseconds() + round(seconds * 1e9)
        after_ns = turn = 0
        while after_ns < end_ns:
            turn += 1
            cost = draws.choice(costs)
            before_ns = nanoseconds()
            allowed = hit(turn % 2, cost).allowed
            after_ns = nanoseconds()
            if allowed:
                notes.append((turn % 2, (before_ns, after_ns, cost)))
            else:
                denied += 1
        return notes, denied


# Kills and stops at random instructions.


class Notebook:
    """What the processes that follow each other in one place were admitted, in memory that outlives them."""

    SIZE: Final = 100_000

    def __init__(self) -> None:
        self.numbers = SharedNumbers(2 + 3 * self.SIZE)

    def note(self, before_ns: int, after_ns: int, permits: int) -> None:
        numbers, count = self.numbers.values, self.numbers[1]
        if count < self.SIZE:
            numbers[2 + 3 * count], numbers[3 + 3 * count], numbers[4 + 3 * count] = before_ns, after_ns, permits
            numbers[1] = count + 1

    def tick(self) -> None:
        self.numbers[0] += 1

    @property
    def ticks(self) -> int:
        return self.numbers[0]

    @property
    def noted(self) -> int:
        return self.numbers[1]

    def admissions(self) -> list[Admission]:
        values = self.numbers.values.tolist()[2 : 2 + 3 * self.noted]
        return [Admission(*values[i : i + 3]) for i in range(0, len(values), 3)]


@every_kind
def test_processes_that_are_killed_or_stopped_break_no_bound_and_delay_nobody(
    crew: Crew, name: str, kind: Kind
) -> None:
    end = time.monotonic() + (soak_seconds() / len(KINDS) or 10)
    draws = random.Random(13)
    notebooks = [Notebook() for _ in range(PROCESSES)]
    killed = 0
    with Store(name, keys=100) as store:
        kind.make(store, "limiter", kind.limit, REAL_PERIOD_MS)
        workers = [crew.start(_note_for_ever, i, name, kind, notebooks[i]) for i in range(PROCESSES)]
        while killed < (sys.maxsize if soak_seconds() else 24) and time.monotonic() < end:
            # Attaching takes a lock, so none is stopped before it has attached.
            _wait_for_all("ticks", notebooks)
            stopped, victim = draws.sample(range(PROCESSES), 2)
            for _ in range(draws.randrange(20_000)):
                pass
            workers[stopped].pause()
            workers[victim].kill()
            killed += 1
            crew.workers.remove(workers[victim])
            # The others get on, and the key does: permits come back.
            others = [notebooks[i] for i in range(PROCESSES) if i not in (stopped, victim)]
            _wait_for_all("ticks", others)
            if killed % 6 == 0:
                _wait_for_any_admission(others)
            workers[stopped].resume()
            workers[victim] = crew.start(_note_for_ever, victim, name, kind, notebooks[victim])
        _wait_for_all("noted", notebooks)
        for worker in workers:
            worker.kill()
        admissions = [admission for notebook in notebooks for admission in notebook.admissions()]
        check_bounds(kind, admissions, name)
        stats = store.stats().limiters["limiter"]
        assert 0 < len(admissions) <= stats.allowed + killed + PROCESSES
    if soak_seconds():
        sys.stderr.write(f"\n{killed} kills, {len(admissions)} admissions, {stats.cas_retries} lost CASes\n")


def _wait_for_all(what: str, notebooks: Sequence[Notebook]) -> None:
    seen = [getattr(notebook, what) for notebook in notebooks]
    wait_until(
        lambda: all(
            getattr(notebook, what) > before or notebook.noted == Notebook.SIZE
            for notebook, before in zip(notebooks, seen, strict=True)
        ),
        f"more {what} of every process",
    )


def _wait_for_any_admission(notebooks: Sequence[Notebook]) -> None:
    seen = sum(notebook.noted for notebook in notebooks)
    wait_until(
        lambda: (
            sum(notebook.noted for notebook in notebooks) > seen
            or all(notebook.noted == Notebook.SIZE for notebook in notebooks)
        ),
        "an admission",
    )


def _note_for_ever(me: int, name: str, kind: Kind, notebook: Notebook) -> None:
    draws = random.Random()
    with Store(name, keys=100) as store:
        limiter = kind.make(store, "limiter", kind.limit, REAL_PERIOD_MS)
        costs = (1,) if kind.limit == 1 else (1, 1, 1, 1, 3, 17, 100)
        while True:
            for _ in range(20):
                cost = draws.choice(costs)
                before_ns = nanoseconds()
                if limiter.hit(KEY, cost):
                    notebook.note(before_ns, nanoseconds(), cost)
            notebook.tick()


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
        # Whoever helps knows the cost only to the next power of two.
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
        # What it took at 1000 has left the window, however late it wrote that.
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
def test_a_writer_of_an_evicted_key_is_none_of_its_successors_business(crew: Crew, name: str) -> None:
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
