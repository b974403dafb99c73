"""Hundreds of millions of decisions over all cores, on shared keys, against the exact bound of each algorithm.

Three workers and a driver request the same keys at once: by ``allow_many`` that releases the GIL, by ``allow``, and by
``hit`` with costs of all sizes. Beside that, keys that come once make the table full: cells are reused, and evicted.

*The clock that the driver moves*: before each step it takes all remaining permits. So the oracle knows the exact number
of admissions: not one more, not one less. The keys that are counted are never evicted, because whatever comes once
expires before them.

*The real clock*: what may be admitted follows from how long it took. Everything expires by itself here.

None of this may go by unraced: each run must have lost CASes, inserted, reused cells and, where the clock stands
still, evicted.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest
from limiter_kinds import BUCKETS, KINDS, Kind
from oracle import Oracle, Rule
from oracle_counts import BucketedWindow as BucketedRule
from oracle_counts import ClockWindow, Log
from process_helpers import (
    DEADLINE_S,
    Crew,
    Meeting,
    SharedNumbers,
    extents,
    most_admitted,
    nanoseconds,
    path_of,
    wait_until,
)

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    LimiterStats,
    SlidingLog,
    Store,
    TokenBucket,
)
from forebay.segment import layout
from forebay.testing import ManualClock

Record = Callable[[str, object], None]

MS: Final = 1_000_000
CELLS: Final = 1024  # of the smallest table
WORKERS: Final = 3
KEYS: Final = 64
REPEATED: Final = 48
"""How often a batch requests each key: more than 1024 requests, so that it releases the GIL."""
LIMIT: Final = 5000
DRAINS_PER_ERA: Final = 40
PERIOD_MS: Final = 1000
PERIOD_NS: Final = PERIOD_MS * MS
REAL_LIMIT: Final = 500
REAL_PERIOD_MS: Final = 10
DECISIONS_PER_REAL_ERA: Final = 1_000_000
SLOTS: Final = 100
QUICK_DECISIONS: Final = 12_000_000
FULL_DECISIONS: Final = 300_000_000
COSTS: Final = (1, 1, 2, 3, 17, 400)


def _windows(limit: int, period_ns: int, span_ns: int) -> int:
    """Of any that don't overlap and are a period long, a span touches at most so many."""
    return limit * (span_ns // period_ns + 2)


def _bucket(limit: int, period_ns: int, span_ns: int) -> int:
    return most_admitted(_rate(limit, period_ns // MS), limit, span_ns)


def _log(limit: int, period_ns: int, span_ns: int) -> int:
    return limit * (span_ns // period_ns + 1)


def _rate(limit: int, ms: int) -> str:
    return f"{limit} per {ms} ms"


ALL_OF_TWO: Final = Kind(
    lambda store, name, limit, ms: AllOf(
        TokenBucket(store, name, _rate(limit, ms), limit),
        FixedWindow(store, "also counted", _rate(2 * limit, 2 * ms)),
    ),
    # After whole periods both give what the first one does.
    KINDS["token bucket"].rule,
)


@dataclass(frozen=True)
class Subject:
    """A limiter to try, and how."""

    name: str
    most_in: Callable[[int, int, int], int] = _windows
    """The most permits that a key may get in a span, from limit, period and span in ns."""
    whole_periods: bool = False
    """The oracle's rule doesn't give the exact number of permits after a part of a period."""
    to_the_instant: bool = True
    """False: a permit may leave up to a quantum late, as the process that helps a stopped writer dates its entry."""
    share: int = 1
    """Slower than others: called that many times less often."""

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.name, ALL_OF_TWO)

    @property
    def limit(self) -> int:
        return LIMIT if self.kind.limit > 1 else 1

    def make(self, store: Store, limit: int, ms: int) -> Any:
        return self.kind.make(store, "counted", limit, ms)

    def rule(self) -> Rule[Any]:
        return (self.kind.rule or ClockWindow)(self.limit, PERIOD_NS)

    def decisions(self, full: bool) -> int:
        """For each of the two clocks."""
        return (FULL_DECISIONS if full else QUICK_DECISIONS) // self.share


SUBJECTS: Final = (
    Subject("token bucket", _bucket),
    Subject("interval bucket"),
    Subject("leaky bucket", _bucket),
    Subject("fixed window"),
    Subject("fixed window, first"),
    Subject("fixed window, stagger", whole_periods=True),
    Subject("sliding window"),
    Subject("bucketed window"),
    Subject("sliding log", _log, to_the_instant=False),
    Subject("minimum interval", _bucket),
    Subject("all of two", _bucket, whole_periods=True, share=5),
)

every_subject = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)


class Board:
    """The numbers that driver and workers share."""

    def __init__(self) -> None:
        self._numbers = SharedNumbers(2 + 2 * WORKERS)
        self.meeting = Meeting(WORKERS + 1)

    @property
    def era(self) -> int:
        """The era that has begun last; the workers go home after era 0."""
        return self._numbers[0]

    def begin(self, era: int) -> None:
        self._numbers[0] = era
        self.meeting.wait(WORKERS)

    def end(self, era: int) -> None:
        self._numbers[1] = era
        self.meeting.wait(WORKERS)

    def has_ended(self, era: int) -> bool:
        return self._numbers[1] == era

    def add(self, worker: int, decisions: int, admitted: int) -> None:
        self._numbers[2 + 2 * worker] += decisions
        self._numbers[3 + 2 * worker] += admitted

    @property
    def decisions(self) -> int:
        return sum(self._numbers.values[2::2])

    @property
    def admitted(self) -> int:
        return sum(self._numbers.values[3::2])


def _live_on() -> None:
    """A process of a crew ends by itself when its time is over, which here is that of an era."""
    signal.alarm(round(2 * DEADLINE_S))


def _names(era: int) -> list[str]:
    """New keys in each era: they move into the cells of those before."""
    return [f"{era}:{number}" for number in range(KEYS)]


def _work(me: int, name: str, subject: Subject, limit: int, ms: int, clock: Any, board: Board) -> None:
    draws = random.Random(me)
    newcomer = me
    with Store(name, keys=1, on_full="evict", clock=clock) as store:
        limiter = subject.make(store, limit, ms)
        # Each is gone a nanosecond later; with a clock that stands still, when it moves.
        crowd = TokenBucket(store, "crowd", "1_000_000_000/second", 1)
        costs = [cost for cost in COSTS if cost <= limit]
        while True:
            board.meeting.wait(me)
            era = board.era
            if era == 0:
                return
            _live_on()
            names = _names(era)
            draws.shuffle(names)
            batch = names * REPEATED
            while not board.has_ended(era):
                board.add(me, 4 * len(batch), sum([limiter.allow_many(batch).count(True) for _ in range(4)]))
                board.add(me, KEYS, sum([limiter.allow(key) for key in names]))
                asked = [(key, draws.choice(costs)) for key in names]
                board.add(me, KEYS, sum([cost for key, cost in asked if limiter.hit(key, cost)]))
                crowd.allow_many(range(newcomer, newcomer + 300 * WORKERS, WORKERS))
                newcomer += 300 * WORKERS
            board.meeting.wait(me)


def _drain(limiter: Any, names: list[str]) -> int:
    """Take the remaining permits of all keys. No limiter gives a key more than twice the limit at one time."""
    drained = 0
    while admitted := limiter.allow_many(names).count(True):
        drained += admitted
        assert drained <= 2 * LIMIT * len(names), "there is no end to it: keys at their limit were evicted"
    return drained


def _owed(oracle: Oracle[Any], rule: Rule[Any], now_ns: int) -> int:
    """The remaining permits of a key. The oracle takes them, too."""
    left = oracle.peek(rule, 0, 0, now_ns).remaining
    if left:
        assert oracle.hit(rule, 0, left, now_ns)
    if isinstance(rule, BucketedRule | Log):
        # It never forgets.
        oracle.states[0] = oracle.states[0][-BUCKETS * DRAINS_PER_ERA :]
    return left


def _record_run(record: Record, what: str, admitted: str, stats: dict[str, LimiterStats]) -> None:
    total = sum(stats.values(), LimiterStats())
    reused = max(total.inserted - total.evicted - CELLS, 0)
    decisions = stats["counted"].allowed + stats["counted"].denied
    record(
        f"long run, {what}",
        f"{decisions:,} decisions, {admitted}, {total.cas_retries:,} CASes lost, "
        f"{total.inserted:,} insertions, {reused:,} of them into expired cells, {total.evicted:,} by eviction",
    )


def _evicted_of_crowd(store: Store) -> int:
    crowd = store.stats().limiters.get("crowd")
    return crowd.evicted if crowd else 0


@every_subject
def test_the_total_is_exact_while_a_driver_moves_the_clock(
    crew: Crew, name: str, subject: Subject, full: bool, record: Record
) -> None:
    rule = subject.rule()
    draws = random.Random(4)
    clock = ManualClock(1000.0)
    board = Board()
    expected = drained = era = 0
    with Store(name, keys=1, on_full="evict", clock=clock) as store:
        limiter = subject.make(store, subject.limit, PERIOD_MS)
        workers = [
            crew.start(_work, i, name, subject, subject.limit, PERIOD_MS, ManualClock(), board) for i in range(WORKERS)
        ]
        while _goes_on(board, subject.decisions(full), store):
            era += 1
            names = _names(era)
            oracle: Oracle[Any] = Oracle()
            board.begin(era)
            if era == 1:
                # However fast the clock moves beside them afterwards.
                wait_until(lambda: _evicted_of_crowd(store), "an eviction")
            for _ in range(DRAINS_PER_ERA):
                drained += _drain(limiter, names)
                expected += KEYS * _owed(oracle, rule, round(clock.now() * 1e9))
                if subject.whole_periods:
                    clock.advance(2 * PERIOD_MS / 1000)
                else:
                    # No state of a counted key is about to expire: only keys that come once are evicted.
                    steps_ns = (draws.randrange(PERIOD_NS // 50, PERIOD_NS // 3), 3 * PERIOD_NS)
                    if subject.to_the_instant:
                        steps_ns += (PERIOD_NS // BUCKETS, PERIOD_NS)
                    clock.advance(draws.choice(steps_ns) / 1e9)
            drained += _drain(limiter, names)
            expected += KEYS * _owed(oracle, rule, round(clock.now() * 1e9))
            board.end(era)
            assert drained + board.admitted == expected, f"in era {era}"
            # The keys of the next era come into the expired cells of this one's.
            clock.advance(5 * PERIOD_MS / 1000)
        board.begin(0)
        crew.results(workers)
        stats = store.stats().limiters
        assert stats["counted"].evicted == stats["counted"].full == 0
        assert stats["counted"].inserted >= KEYS * era
        assert stats["crowd"].evicted > 0
        assert stats["crowd"].inserted - stats["crowd"].evicted > 2 * CELLS, "no expired cell was used again"
    _record_run(record, subject.name, f"{expected:,} permits, all that there were", stats)


@every_subject
def test_the_total_is_within_the_bound_of_the_real_clock(
    crew: Crew, name: str, subject: Subject, full: bool, record: Record
) -> None:
    limit = min(subject.limit, REAL_LIMIT)
    board = Board()
    admitted = most = era = 0
    with Store(name, keys=1, on_full="evict") as store:
        limiter = subject.make(store, limit, REAL_PERIOD_MS)
        workers = [
            crew.start(_work, i, name, subject, limit, REAL_PERIOD_MS, "monotonic", board) for i in range(WORKERS)
        ]
        while _goes_on(board, subject.decisions(full), store):
            era += 1
            batch = _names(era) * REPEATED
            drained, before, until = 0, board.admitted, board.decisions + DECISIONS_PER_REAL_ERA
            evicted = store.stats().total.evicted
            begun_ns = nanoseconds()
            board.begin(era)
            while board.decisions < until:
                drained += limiter.allow_many(batch).count(True)
            board.end(era)
            bound = KEYS * subject.most_in(limit, REAL_PERIOD_MS * MS, nanoseconds() - begun_ns)
            # At the worst it was counted keys that had to go.
            bound += limit * (store.stats().total.evicted - evicted)
            assert 0 < drained + board.admitted - before <= bound, f"in era {era}"
            admitted += drained + board.admitted - before
            most += bound
        board.begin(0)
        crew.results(workers)
        stats = store.stats().limiters
    assert stats["crowd"].inserted > 2 * CELLS, "no expired cell was used again"
    _record_run(
        record, f"{subject.name}, real clock", f"{admitted:,} permits, {admitted / most:.0%} of the bound", stats
    )


def _goes_on(board: Board, decisions: int, store: Store) -> bool:
    """Until there were so many; and until CASes were lost, if it takes ten times as many."""
    if board.decisions < decisions:
        return True
    raced = store.stats().limiters["counted"].cas_retries > 0
    assert raced or board.decisions < 10 * decisions, "the processes did not race"
    return not raced


def test_no_slot_is_held_twice(crew: Crew, name: str, full: bool, record: Record) -> None:
    """After taking and giving back at random, all together hold exactly the limit of each key."""
    board = Board()
    held = era = 0
    clock = ManualClock(1000.0)
    with Store(name, keys=1, on_full="evict", clock=clock) as store:
        limiter = _slots(store)
        workers = [crew.start(_hold, i, name, board) for i in range(WORKERS)]
        while board.decisions < (FULL_DECISIONS if full else QUICK_DECISIONS) // 20:
            era += 1
            board.begin(era)
            board.end(era)
            mine = _take_all(limiter, _names(era))
            board.meeting.wait(WORKERS)
            assert mine.total() + board.admitted - held == KEYS * SLOTS
            held = board.admitted
            _give_back(limiter, mine)
            board.meeting.wait(WORKERS)
            # The next keys come into the cells of these, which are forgotten after two leases.
            clock.advance(60)
        board.begin(0)
        crew.results(workers)
        stats = store.stats().limiters
        assert stats["counted"].evicted == stats["counted"].full == 0
        assert stats["counted"].inserted == KEYS * era
    _record_run(record, "concurrency", f"{stats['counted'].allowed:,} permits", stats)


def _slots(store: Store) -> Concurrency:
    return Concurrency(store, "counted", SLOTS, lease="20s", keys=2 * KEYS)


def _hold(me: int, name: str, board: Board) -> None:
    draws = random.Random(me)
    with Store(name, keys=1, on_full="evict", clock=ManualClock()) as store:
        limiter = _slots(store)
        while True:
            board.meeting.wait(me)
            if board.era == 0:
                return
            _live_on()
            names = _names(board.era)
            draws.shuffle(names)
            held: Counter[str] = Counter()
            for _ in range(40):
                for _ in range(draws.randrange(20)):
                    held.update(itertools.compress(names, limiter.allow_many(names)))
                    board.add(me, KEYS, 0)
                back = Counter({key: draws.randrange(count + 1) for key, count in held.items()})
                _give_back(limiter, back)
                held -= back
            board.meeting.wait(me)
            held += _take_all(limiter, names)
            board.add(me, 0, held.total())
            board.meeting.wait(me)
            _give_back(limiter, held)
            board.meeting.wait(me)


def _take_all(limiter: Concurrency, names: list[str]) -> Counter[str]:
    held: Counter[str] = Counter()
    while taken := list(itertools.compress(names, limiter.allow_many(names))):
        held.update(taken)
    return held


def _give_back(limiter: Concurrency, held: Counter[str]) -> None:
    for key, count in held.items():
        limiter.refund(key, count)


def test_a_writer_that_is_stopped_is_helped(crew: Crew, name: str, full: bool, record: Record) -> None:
    """A sliding log's request claims its entries by one CAS and then writes them. The file shows that it was stopped in
    between.

    The next request must find them unwritten, and write them before it decides; and there are as many permits as ever.
    """
    helped = stops = 0
    clock = ManualClock(1000.0)
    with Store(name, keys=1, on_full="evict", clock=clock) as store:
        limiter = _long_log(store)
        while helped < (60 if full else 12):
            stops += 1
            assert stops < 5000, f"only {helped} of {stops} stops met a write under way"
            admitted, done = SharedNumbers(1), SharedNumbers(1)
            writer = crew.start(_write, name, admitted, done)
            wait_until(functools.partial(admitted.__getitem__, 0), "an admission")
            writer.pause()
            missing = _unwritten(path_of(name))
            # The request in which it was stopped may not have returned, but it counts.
            mine = _count_all(limiter)
            unreported = LOG_LIMIT - mine - admitted[0]
            assert unreported == LOG_COST if missing else unreported in (0, LOG_COST)
            assert _unwritten(path_of(name)) == 0
            helped += missing > 0
            # It finds its entries written, changes none, and is denied from then on.
            done[0] = 1
            writer.resume()
            assert writer.result() == LOG_LIMIT - mine
            assert _unwritten(path_of(name)) == 0
            assert not limiter.allow("log")
            # Its entries, written by a helper, are dated late, by less than a quantum: 16 microseconds.
            clock.advance(3600.00002)
            assert limiter.peek("log").remaining == LOG_LIMIT
    record("long run, sliding log, writers stopped between claim and last entry, and helped", f"{helped} of {stops}")


LOG_LIMIT: Final = 24_000
LOG_COST: Final = 1500


def _long_log(store: Store) -> SlidingLog:
    return SlidingLog(store, "log", _rate(LOG_LIMIT, 3_600_000), keys=1)


def _count_all(limiter: SlidingLog) -> int:
    """Take the remaining permits, and count them."""
    taken = 0
    for cost in (LOG_COST // 3, 1):
        while limiter.hit("log", cost):
            taken += cost
    return taken


def _write(name: str, admitted: SharedNumbers, done: SharedNumbers) -> int:
    with Store(name, keys=1, on_full="evict", clock=ManualClock()) as store:
        hit = _long_log(store).hit
        while not done[0]:
            if hit("log", LOG_COST):
                admitted[0] += LOG_COST
        return admitted[0]


def _unwritten(path: str) -> int:
    """How many entries of the only key are claimed but not written: see docs/segment-format.md."""
    (extent,) = extents(path)
    with open(path, "rb") as file:
        raw = os.pread(file.fileno(), extent["bytes"], extent["offset"])
    _, state = layout.CELL.unpack_from(raw)
    ring = memoryview(raw)[layout.GROUP_BYTES :].cast("Q")
    position = state % (1 << 1 + (LOG_LIMIT - 1).bit_length()) >> 1
    lap_of_state = state & 1

    return sum(entry >> 62 & 1 != lap_of_state ^ (place < position) for place, entry in enumerate(ring))
