"""SIGKILL at random instructions, thousands of times, on every limiter and every way to call it."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
from limiter_kinds import (
    KEY,
    REAL_PERIOD_MS,
    Kind,
    Notebook,
    check_bounds,
    every_kind,
)
from process_helpers import Crew, SharedNumbers, Worker, nanoseconds, path_of, wait_until

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.testing import ManualClock
from forebay.verification import verify

WORKERS: Final = 4
PROGRESS_EVERY: Final = 25
LIMIT: Final = 1000
MOST_COST: Final = 7
PERIOD: Final = "10 years"
"""In which the clock that the tests move comes nowhere."""
CLAIM_LIFE_S: Final = 3.0

COUNTED = {"kills": 0, "segments verified": 0, "lost CASes": 0}


class Campaign:
    """Workers that are killed and replaced. Each counts its progress in `ticks`."""

    def __init__(self, crew: Crew, name: str, bounds: Bounds) -> None:
        self.crew, self.path, self.bounds = crew, path_of(name), bounds
        self.ticks = SharedNumbers(WORKERS)
        self.draws = random.Random(17)
        self.workers: list[Worker] = []
        self.killed = 0

    def run(
        self,
        work: Callable[[int], None],
        *,
        between: Callable[[], None] = lambda: None,
        died: Callable[[int, int], None] = lambda place, before_ns: None,
    ) -> None:
        """`between` is called now and then. Each time all living workers make progress, and the segment is sound.
        `died` gets the place of a killed worker, and a time before the kill.
        """
        end = time.monotonic() + self.bounds.seconds
        self.workers = [self.crew.start(work, place) for place in range(WORKERS)]
        while self.killed < self.bounds.kills and time.monotonic() < end:
            stopped, place = self.draws.sample(range(WORKERS), 2)
            self._spin()
            self.workers[stopped].pause()
            # Gets on beside the one that is stopped.
            self._wait_for([place])
            self._spin()
            self._kill(place, died)
            self.workers[place] = self.crew.start(work, place)
            self.workers[stopped].resume()
            if self.killed % PROGRESS_EVERY == 0:
                self._wait_for(range(WORKERS))
                self.check()
                between()
        # The others go on each time, the last one without a helper.
        for place in range(WORKERS):
            self._wait_for(range(place, WORKERS))
            self._kill(place, died)
        self.check()

    def _spin(self) -> None:
        for _ in range(self.draws.randrange(1000)):
            pass

    def _kill(self, place: int, died: Callable[[int, int], None]) -> None:
        before_ns = nanoseconds()
        self.workers[place].kill()
        self.crew.workers.remove(self.workers[place])
        died(place, before_ns)
        self.killed += 1
        COUNTED["kills"] += 1

    def _wait_for(self, places: Iterable[int]) -> None:
        seen = {place: self.ticks[place] for place in places}
        wait_until(
            lambda: all(self.ticks[place] > before + 1 for place, before in seen.items()),
            "the next decision of every survivor",
        )

    def check(self) -> None:
        report = verify(self.path)
        assert report.sound, "\n".join(map(str, report.damage))
        COUNTED["segments verified"] += 1


@dataclass(frozen=True)
class Bounds:
    kills: int
    seconds: float


@pytest.fixture
def bounds(full: bool) -> Bounds:
    """Of one campaign."""
    return Bounds(1500, 600) if full else Bounds(150, 2.0)


# By the real clock: the bounds of the algorithms.


@every_kind
def test_no_bound_is_broken(crew: Crew, name: str, kind: Kind, bounds: Bounds) -> None:
    notebooks = [Notebook() for _ in range(WORKERS)]
    with Store(name, keys=100) as store:
        limiter = kind.make(store, "limiter", kind.limit, REAL_PERIOD_MS)
        campaign = Campaign(crew, name, bounds)
        campaign.run(lambda place: note_for_ever(limiter, kind.limit, notebooks[place], campaign.ticks, place))
        admissions = [admission for notebook in notebooks for admission in notebook.admissions()]
        check_bounds(kind, admissions, name)
        assert 0 < len(admissions) <= store.stats().total.allowed + campaign.killed


def note_for_ever(limiter: Any, limit: int, notebook: Notebook, ticks: SharedNumbers, place: int) -> None:
    draws = random.Random()
    costs = (1,) if limit == 1 else (1, 1, 1, 3, 17, 100)
    while True:
        cost, request = draws.choice(costs), draws.randrange(3)
        before_ns = nanoseconds()
        if request == 0:
            permits = int(limiter.allow(KEY))
        elif request == 1:
            permits = cost if limiter.hit(KEY, cost) else 0
        else:
            permits = sum(limiter.allow_many([KEY] * 5))
        if permits:
            notebook.note(before_ns, nanoseconds(), permits)
        ticks[place] += 1


# By a clock that all but stands still: what is taken and given back adds up.

TAKEN, REFUNDING, REFUNDED, CANCELLING, FILLERS, NUMBERS = range(6)


@dataclass(frozen=True)
class Sums:
    """The notes of the workers of one place, in memory that outlives them."""

    numbers: SharedNumbers
    place: int

    def add(self, what: int, count: int = 1) -> None:
        self.numbers[self.place * NUMBERS + what] += count

    def __getitem__(self, what: int) -> int:
        return self.numbers[self.place * NUMBERS + what]


def several(store: Store) -> AllOf:
    return AllOf(
        TokenBucket(store, "bucket", f"{LIMIT} per {PERIOD}"),
        FixedWindow(store, "window", f"{LIMIT} per {PERIOD}"),
        SlidingLog(store, "log", f"{LIMIT} per {PERIOD}", keys=8),
    )


SUBJECTS: Final[dict[str, Callable[[Store], Any]]] = {
    "token bucket": lambda store: TokenBucket(store, "it", f"{LIMIT} per {PERIOD}"),
    "interval bucket": lambda store: TokenBucket(store, "it", f"{LIMIT} per {PERIOD}", refill="interval"),
    "leaky bucket": lambda store: LeakyBucket(store, "it", f"{LIMIT} per {PERIOD}", LIMIT),
    "fixed window": lambda store: FixedWindow(store, "it", f"{LIMIT} per {PERIOD}"),
    "fixed window, first": lambda store: FixedWindow(store, "it", f"{LIMIT} per {PERIOD}", align="first"),
    "fixed window, stagger": lambda store: FixedWindow(store, "it", f"{LIMIT} per {PERIOD}", align="stagger"),
    "sliding window": lambda store: SlidingWindow(store, "it", f"{LIMIT} per {PERIOD}"),
    "bucketed window": lambda store: BucketedWindow(store, "it", f"{LIMIT} per {PERIOD}", 8, keys=8),
    "sliding log": lambda store: SlidingLog(store, "it", f"{LIMIT} per {PERIOD}", keys=8),
    "several limits": several,
}
SUBJECTS_PERIOD_S: Final = 10 * 31_536_000


@pytest.mark.parametrize("subject", SUBJECTS)
def test_taken_and_refunded_permits_add_up(crew: Crew, name: str, subject: str, bounds: Bounds) -> None:
    """Every kind of request, over a table that is full all the time."""
    clock = ManualClock(1_000_000)
    numbers = SharedNumbers(WORKERS * NUMBERS)
    sums = [Sums(numbers, place) for place in range(WORKERS)]
    ids = SharedNumbers(1)
    allowed_ids = SharedNumbers(4 * LIMIT)
    with Store(name, keys=2000, clock=clock) as store:
        limiter = SUBJECTS[subject](store)
        # A filler doesn't evict a key that has used as much and lives longer.
        filler = FixedWindow(store, "filler", "1000/hour", align="first")
        for key in (KEY, "ids"):
            assert limiter.hit(key, 100)
        filler.allow_many([-key for key in range(1, 100_000)])

        campaign = Campaign(crew, name, bounds)
        campaign.run(
            lambda place: ask_for_ever(limiter, filler, sums, campaign.ticks, place, ids, allowed_ids),
            # Claims that killed processes left behind become free.
            between=lambda: clock.advance(CLAIM_LIFE_S),
        )

        taken = 100 + sum(each[TAKEN] for each in sums)
        refunding = sum(each[REFUNDING] for each in sums)
        refunded = sum(each[REFUNDED] for each in sums)
        cancelling = sum(each[CANCELLING] for each in sums)
        refilled = int((clock.now() - 1_000_000) * LIMIT / SUBJECTS_PERIOD_S) + 1
        most_lost = MOST_COST * campaign.killed
        parts: Sequence[Any] = limiter.limiters if isinstance(limiter, AllOf) else [limiter]
        for part in parts:
            remaining = 0
            while remaining < 2 * LIMIT and part.allow(KEY):
                remaining += 1
            assert taken + remaining <= LIMIT + refunding + cancelling + refilled, part
            # A killed worker may have taken permits that it could not note; a cancellation gives back those that still
            # count.
            assert taken + remaining >= LIMIT + refunded - most_lost, part
        assert taken > LIMIT < refunded
        # Never is a request let through that was charged under no id.
        assert sum(allowed_ids) + 100 <= LIMIT + refilled
        assert sum(allowed_ids) > 0 or isinstance(limiter, AllOf)
        stats = store.stats()
        assert stats.limiters["filler"].evicted > 0
        assert stats.total.cas_retries > 0, "the processes did not race"
        COUNTED["lost CASes"] += stats.total.cas_retries
        campaign.check()


def ask_for_ever(
    limiter: Any,
    filler: FixedWindow,
    everybody: list[Sums],
    ticks: SharedNumbers,
    place: int,
    ids: SharedNumbers,
    allowed_ids: SharedNumbers,
) -> None:
    draws = random.Random()
    sums = everybody[place]
    while True:
        request = draws.randrange(7)
        cost = draws.choice((1, 1, 1, 2, MOST_COST))
        if request == 0:
            sums.add(TAKEN, int(limiter.allow(KEY)))
        elif request == 1:
            if limiter.hit(KEY, cost):
                sums.add(TAKEN, cost)
        elif request == 2:
            sums.add(TAKEN, sum(limiter.allow_many([KEY] * 5)))
        elif request == 3:
            if sums[TAKEN] - sums[REFUNDING] - sums[CANCELLING] >= cost:
                sums.add(REFUNDING, cost)
                limiter.refund(KEY, cost)
                sums.add(REFUNDED, cost)
        elif request == 4:
            reservation = limiter.reserve(KEY, 1, 0)
            if reservation:
                sums.add(TAKEN)
                sums.add(CANCELLING)
                reservation.cancel()
        elif request == 5 and not isinstance(limiter, AllOf):
            # Others send the same ids, before and after.
            number = max(0, ids[0] - draws.randrange(20))
            if number < len(allowed_ids.values) and limiter.hit("ids", request_id=number, request_ttl="1 day"):
                allowed_ids[number] = 1
            ids[0] = max(ids[0], number + draws.randrange(2))
        else:
            # From where the one furthest ahead is, so that they meet at the same new keys.
            first = max(other[FILLERS] for other in everybody)
            for number in range(first, first + 10):
                filler.allow(number)
                sums.numbers[sums.place * NUMBERS + FILLERS] = number + 1
            filler.allow_many(range(first, first + 20))
        ticks[place] += 1


# Permits that are held.

HELD: Final = 6


class Holds:
    """The permits that the workers of one place held, and the time that they held them at least; in memory that
    outlives them.
    """

    SIZE: Final = 200_000

    def __init__(self) -> None:
        self.numbers = SharedNumbers(3 + 3 * self.SIZE)

    def begin(self, permits: int) -> None:
        self.numbers[1], self.numbers[2] = nanoseconds(), permits
        self.numbers[0] += 1

    def end(self, end_ns: int) -> None:
        """Called before the permits are given back, or the holder is killed."""
        count = self.numbers[0]
        if count % 2 and count < 2 * self.SIZE:
            place = 3 + count // 2 * 3
            self.numbers[place], self.numbers[place + 1], self.numbers[place + 2] = (
                self.numbers[1],
                end_ns,
                self.numbers[2],
            )
        self.numbers[0] += count % 2

    def spans(self) -> Iterator[tuple[int, int, int]]:
        values = self.numbers.values.tolist()
        for place in range(3, 3 + min(self.numbers[0] // 2, self.SIZE) * 3, 3):
            yield values[place], values[place + 1], values[place + 2]


@pytest.mark.parametrize("alone", [True, False], ids=["concurrency", "concurrency and a window"])
def test_never_are_more_permits_held_and_those_of_the_dead_come_back(
    crew: Crew, name: str, alone: bool, bounds: Bounds
) -> None:
    holds = [Holds() for _ in range(WORKERS)]
    with Store(name, keys=100) as store:
        limiter = Concurrency(store, "it", HELD, lease="1 hour", keys=3)
        other = FixedWindow(store, "window", "1000000000/hour")
        both = AllOf(limiter, other)

        def hold_for_ever(place: int) -> None:
            draws = random.Random()
            while True:
                permits = draws.choice((1, 1, 2, 3))
                lease = None
                if alone:
                    lease = limiter.acquire(KEY, permits)
                if lease or (not alone and both.hit(KEY, permits)):
                    holds[place].begin(permits)
                    if lease and draws.randrange(4) == 0:
                        lease.renew()
                    holds[place].end(nanoseconds())
                    if lease:
                        lease.release()
                    else:
                        limiter.refund(KEY, permits)
                    campaign.ticks[place] += 1

        campaign = Campaign(crew, name, bounds)
        campaign.run(hold_for_ever, died=lambda place, before_ns: holds[place].end(before_ns))
        changes = sorted(
            change
            for each in holds
            for begin_ns, end_ns, permits in each.spans()
            if begin_ns < end_ns
            for change in ((begin_ns, permits), (end_ns, -permits))
        )
        assert HELD // 2 < max(itertools.accumulate(permits for _, permits in changes)) <= HELD
        wait_until(lambda: bool(limiter.acquire(KEY, HELD)), "the return of all permits")
        campaign.check()


# New keys, which all processes request at once.

NEW_KEYS: Final = 300_000


@pytest.mark.parametrize("kind", ["token bucket", "sliding log"])
def test_a_new_key_is_admitted_once(crew: Crew, name: str, kind: str, bounds: Bounds) -> None:
    """And has one cell: none makes room for another, so the segment keeps each mistake until it is verified."""
    positions = SharedNumbers(WORKERS)
    answers = SharedNumbers(WORKERS * NEW_KEYS // 8).values.cast("B")
    with Store(name, keys=2 * NEW_KEYS if kind == "token bucket" else 1) as store:
        limiter: Any = (
            TokenBucket(store, "it", "1/year")
            if kind == "token bucket"
            else SlidingLog(store, "it", "1/year", keys=2 * NEW_KEYS)
        )

        def ask(place: int) -> None:
            mine = answers[place * NEW_KEYS : (place + 1) * NEW_KEYS]
            while True:
                # From where the one furthest ahead is, so that they meet.
                first = max(positions)
                keys = range(first, min(first + 10, NEW_KEYS))
                if first % 3:
                    for key in keys:
                        if limiter.allow(key):
                            mine[key] += 1
                        positions[place] = key + 1
                else:
                    for key, allowed in zip(keys, limiter.allow_many(keys), strict=True):
                        mine[key] += allowed
                    positions[place] = keys.stop
                campaign.ticks[place] += 1

        campaign = Campaign(crew, name, bounds)
        campaign.run(ask)
        counts = Counter(
            map(sum, zip(*(answers[i * NEW_KEYS : (i + 1) * NEW_KEYS] for i in range(WORKERS)), strict=True))
        )
        assert max(counts) == 1
        assert counts[1] > 1000
        stats = store.stats().limiters["it"]
        assert stats.evicted == stats.full == 0
        assert stats.cas_retries > 0, "the processes did not race"
        COUNTED["lost CASes"] += stats.cas_retries


# Keys that push each other out.

EVICTED_LIMIT: Final = 20
"""As many permits as the workers can request within one step of the clock."""


@pytest.mark.parametrize("kind", ["token bucket", "sliding log", "bucketed window", "concurrency"])
def test_kills_while_keys_evict_each_other(crew: Crew, name: str, kind: str, bounds: Bounds) -> None:
    """An evicted key is forgotten, so there is no bound to break. But all workers make progress, and the segment is
    sound.
    """
    clock = ManualClock(1000)
    with Store(name, keys=1, clock=clock) as store:
        makers: dict[str, Callable[[], Any]] = {
            "token bucket": lambda: TokenBucket(store, "it", f"{EVICTED_LIMIT}/hour"),
            "sliding log": lambda: SlidingLog(store, "it", f"{EVICTED_LIMIT}/hour", keys=20),
            "bucketed window": lambda: BucketedWindow(store, "it", f"{EVICTED_LIMIT}/hour", 4, keys=20),
            "concurrency": lambda: Concurrency(store, "it", EVICTED_LIMIT, lease="1 hour", keys=20),
        }
        limiter = makers[kind]()
        keys = 5000 if kind == "token bucket" else 60

        def ask(place: int) -> None:
            draws = random.Random()
            while True:
                key = draws.randrange(keys)
                limiter.hit(key, draws.choice((1, 1, 2, 5)))
                limiter.allow_many([draws.randrange(keys) for _ in range(5)])
                limiter.refund(key)
                campaign.ticks[place] += 1

        campaign = Campaign(crew, name, bounds)
        campaign.run(ask, between=lambda: clock.advance(CLAIM_LIFE_S * campaign.draws.choice((1, 1, 500))))
        assert store.stats().limiters["it"].evicted > 0
        # Whatever was left behind, after some time every key is a fresh one.
        clock.advance(3 * 3600)
        for key in range(10):
            assert [bool(limiter.hit(("new", key), cost)) for cost in (EVICTED_LIMIT, 1)] == [True, False]
        campaign.check()


def test_figures(record: Callable[[str, object], None]) -> None:
    assert COUNTED["kills"]
    for what, count in COUNTED.items():
        record(f"random kills: {what}", count)
