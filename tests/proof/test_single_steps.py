"""A process is killed after each instruction of a decision: the survivors decide rightly, and the segment is sound."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
from process_helpers import DEADLINE_S, Hung, path_of
from single_steps import Modules, Stepped, Walk, check_platform

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.errors import CostExceedsLimit
from forebay.testing import ManualClock
from forebay.verification import verify

LIMIT: Final = 3
PERIOD_S: Final = 60
RATE: Final = f"{LIMIT} per {PERIOD_S} seconds"
ROUND_S: Final = 10 * PERIOD_S
"""After so long every key is forgotten, and a window begins."""
KEYS: Final = 4
"""The keys of an extent."""
NS: Final = 10**9
QUICK_KILLS: Final = 25
"""Of one case, beside those where the shared memory changes. In between, a kill leaves the same."""
ABOUT_A_CHANGE: Final = 10
FULL_SAMPLE: Final = 7
"""With ``--full``: so many instructions before and after each change, and each so manieth of the others."""


class Survivor:
    """A forked process that runs calls, or is found to hang."""

    def __init__(self, limiters: dict[str, Any]) -> None:
        self._orders_read, self._orders_write = os.pipe()
        self._answers_read, self._answers_write = os.pipe()
        self.limiters = limiters
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.alarm(24 * 3600)
                with os.fdopen(self._orders_read, "rb") as orders:
                    while True:
                        os.write(self._answers_write, pickle.dumps(self._obey(*pickle.load(orders))))
            finally:
                os._exit(0)

    def ask(self, order: str, limiter: str, arguments: tuple[Any, ...], options: dict[str, Any] | None = None) -> Any:
        os.write(self._orders_write, pickle.dumps((order, limiter, arguments, options or {})))
        if not select.select([self._answers_read], [], [], DEADLINE_S)[0]:
            raise Hung(f"a survivor got no decision within {DEADLINE_S:.0f} s")
        answer = pickle.loads(os.read(self._answers_read, 1 << 16))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _obey(self, order: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        limiter = self.limiters[name]
        try:
            if order == "take":
                key, most = arguments
                taken = 0
                with contextlib.suppress(CostExceedsLimit):
                    # It has to wait for two, and looks at no more than it must.
                    taken = 2 if most >= 2 and limiter.hit(key, 2) else 0
                while taken < most and limiter.allow(key):
                    taken += 1
                return taken
            answer = getattr(limiter, order)(*arguments, **options)
        except Exception as error:
            return error
        return answer if answer is None else bool(answer)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for fd in (self._orders_read, self._orders_write, self._answers_read, self._answers_write):
            os.close(fd)


class Stage:
    """A store, the limiters of one test, and two survivors that have them too."""

    def __init__(self, name: str, make: Callable[[Store], dict[str, Any]]) -> None:
        self.clock = ManualClock(ROUND_S)
        self.store = Store(name, keys=1, clock=self.clock)
        self.limiters = make(self.store)
        self.survivors = [Survivor(self.limiters), Survivor(self.limiters)]
        self.now_ns = ROUND_S * NS
        self.key = 0
        self.path = path_of(name)
        with open(self.path, "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def advance(self, seconds: float) -> None:
        self.now_ns += round(seconds * NS)
        self.clock.set_ns(self.now_ns)

    def begin(self, still: bool) -> None:
        """Take a key that has not been requested."""
        self.key += 1
        if not still:
            self.now_ns = (self.now_ns // (ROUND_S * NS) + 1) * ROUND_S * NS
            self.clock.set_ns(self.now_ns)

    def ask(self, order: str, *arguments: Any, **options: Any) -> Any:
        """The first survivor."""
        return self.survivors[0].ask(order, next(iter(self.limiters)), arguments, options)

    def take_all(self) -> tuple[int, ...]:
        """The permits that the survivors get from each limiter, in turn, before it denies."""
        taken = []
        for name, limiter in self.limiters.items():
            if isinstance(limiter, AllOf):
                continue
            counts = [survivor.ask("take", name, (self.key, most)) for survivor, most in zip(
                (*self.survivors, *self.survivors), (1, 9, 9, 9), strict=True)]  # fmt: skip
            if isinstance(limiter, Concurrency):
                for survivor, count in zip((*self.survivors, *self.survivors), counts, strict=True):
                    survivor.ask("refund", name, (self.key, count))
            taken.append(sum(counts))
        return tuple(taken)

    def check(self) -> None:
        report = verify(self.path)
        assert report.sound, "\n".join(map(str, report.damage))

    def end(self) -> None:
        for survivor in self.survivors:
            survivor.end()
        self.store.close()


@dataclass(frozen=True)
class Case:
    """The operation in which a process is killed, and the permits that may remain for others."""

    what: str
    act: Callable[[Any, Any], object]
    """With the limiter, or what `prepare` returned; and the key."""
    left: set[tuple[int, ...]]
    before: Callable[[Stage], object] = lambda stage: None
    prepare: Callable[[Any, Any], Any] = lambda limiter, key: limiter
    still: bool = False
    """The clock stands still from one kill to the next."""
    gives: int = 0
    """Permits that it gives back."""


def left(*permits: int) -> set[tuple[int, ...]]:
    return {(each,) for each in permits}


def charge(permits: int, advance_s: float = 0) -> Callable[[Stage], None]:
    def before(stage: Stage) -> None:
        if permits:
            assert stage.ask("hit", stage.key, permits)
        stage.advance(advance_s)

    return before


def others(stage: Stage) -> None:
    """Live keys in all cells of an extent."""
    for i in range(KEYS):
        assert stage.ask("hit", ("other", stage.key, i))


def others_at_their_limit(stage: Stage) -> None:
    for i in range(KEYS):
        assert stage.ask("hit", ("other", stage.key, i), LIMIT)


COMMON: Final = [
    Case("allow", lambda limiter, key: limiter.allow(key), left(2, 1), charge(1)),
    Case("first request", lambda limiter, key: limiter.allow(key), left(3, 2)),
    Case("hit of two", lambda limiter, key: limiter.hit(key, 2), left(2, 0), charge(1)),
    Case("denial", lambda limiter, key: limiter.hit(key), left(0), charge(3)),
    Case("refund", lambda limiter, key: limiter.refund(key), left(1, 2), charge(2), gives=1),
    Case("refund of two", lambda limiter, key: limiter.refund(key, 2), left(0, 1, 2), charge(3), gives=2),
    Case("reserve and cancel", lambda limiter, key: limiter.reserve(key).cancel(), left(2, 1), charge(1), gives=1),
    Case("request id", lambda limiter, key: limiter.hit(key, request_id="r"), left(2, 1), charge(1)),
    Case("batch", lambda limiter, key: limiter.allow_many([key, ("other", key), key]), left(2, 1, 0), charge(1)),
    Case("reset", lambda limiter, key: limiter.reset(key), left(1, 2, 3), charge(2), gives=LIMIT),
]
ADDITION: Final = Case("addition", lambda limiter, key: limiter.add(key, 2), left(0, 2), charge(3), gives=2)
CROSSING: Final = Case("new window", lambda limiter, key: limiter.allow(key), left(3, 2), charge(2, PERIOD_S))
EVICTION: Final = Case("eviction", lambda limiter, key: limiter.allow(key), left(3, 2), others)
# The evicted key's permits count until they are cleared.
LOG_EVICTION: Final = replace(EVICTION, left=left(0, 1, 2, 3))


def fill_table(stage: Stage) -> None:
    """Once: keys that outlive the test in every cell."""
    if stage.key == 1:
        stage.limiters["filler"].allow_many([("filler", i) for i in range(60_000)])
    live = stage.store.stats().live_keys
    assert live == verify(stage.path).parts[0].live_keys == sum(verify(stage.path).cells.values())


FULL_TABLE: Final = replace(EVICTION, what="eviction from a full table", before=fill_table, still=True)


def make_filler(store: Store) -> TokenBucket:
    return TokenBucket(store, "filler", "1/year", 1)


LIMITERS: Final[dict[str, tuple[Callable[[Store], Any], list[Case]]]] = {
    "token bucket": (lambda store: TokenBucket(store, "it", RATE, LIMIT), [*COMMON, ADDITION, CROSSING, FULL_TABLE]),
    "interval bucket": (
        lambda store: TokenBucket(store, "it", RATE, LIMIT, refill="interval"),
        [*COMMON, CROSSING, FULL_TABLE],
    ),
    "leaky bucket": (lambda store: LeakyBucket(store, "it", RATE, LIMIT), [*COMMON, CROSSING]),
    "minimum interval": (
        lambda store: MinInterval(store, "it", PERIOD_S),
        [
            Case("first request", lambda limiter, key: limiter.allow(key), left(1, 0)),
            Case("allow", lambda limiter, key: limiter.allow(key), left(1, 0), charge(1, PERIOD_S)),
            Case("denial", lambda limiter, key: limiter.allow(key), left(0), charge(1)),
            Case("refund", lambda limiter, key: limiter.refund(key), left(0, 1), charge(1), gives=1),
            Case("reserve and cancel", lambda limiter, key: limiter.reserve(key).cancel(), left(1, 0), gives=1),
        ],
    ),
    "fixed window": (lambda store: FixedWindow(store, "it", RATE), [*COMMON, CROSSING, FULL_TABLE]),
    "fixed window, first": (lambda store: FixedWindow(store, "it", RATE, align="first"), [*COMMON, CROSSING]),
    "fixed window, stagger": (lambda store: FixedWindow(store, "it", RATE, align="stagger"), [*COMMON, CROSSING]),
    "sliding window": (
        lambda store: SlidingWindow(store, "it", RATE),
        # At the boundary, all permits of the window before count.
        [*COMMON, replace(CROSSING, left=left(1, 0))],
    ),
    "bucketed window": (
        lambda store: BucketedWindow(store, "it", RATE, 3, keys=KEYS),
        [
            *COMMON,
            CROSSING,
            Case("next bucket", lambda limiter, key: limiter.allow(key), left(2, 1), charge(1, PERIOD_S / 3)),
            EVICTION,
        ],
    ),
    "sliding log": (
        lambda store: SlidingLog(store, "it", RATE, keys=KEYS),
        [
            *COMMON,
            CROSSING,
            Case("once round", lambda limiter, key: limiter.hit(key, 2), left(3, 1), charge(3, PERIOD_S)),
            LOG_EVICTION,
            replace(LOG_EVICTION, what="eviction of keys at their limit", before=others_at_their_limit),
        ],
    ),
}


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage collection would come in another place in each process."""
    check_platform()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


COUNTED = {"kills": 0, "stalls": 0, "instructions walked": 0, "strayed in forebay": 0, "strayed in Python": 0}


class Steps:
    """The steps of a case, at each of which a process can be killed or stopped."""

    def __init__(self, stage: Stage, case: Case, full: bool) -> None:
        self.stage, self.case, self.full = stage, case, full
        self.limiter = next(iter(stage.limiters.values()))
        # Here first: what Python and the linker do once is not in the way of the children then.
        case.act(self._prepare(), stage.key)
        process = self._start()
        try:
            self.way = Walk(process, lambda: stage.memory[:], Modules())
        finally:
            process.kill()
        self.inside = set(self.way.inside)
        assert self.inside
        COUNTED["instructions walked"] += len(self.way.addresses)

    def _prepare(self) -> Any:
        # A process takes its counters once.
        for limiter in self.stage.limiters.values():
            limiter.peek("warm")
        return self.case.prepare(self.limiter, self.stage.key)

    def _start(self) -> Stepped:
        self.stage.begin(self.case.still)
        self.case.before(self.stage)
        key = self.stage.key
        return Stepped(self._prepare, lambda ready: self.case.act(ready, key))

    def kill(self, settled: Callable[[], None]) -> None:
        """`settled` is called after each kill: it calls the survivors, and returns if their decisions are right."""
        way = self.way
        about = range(-ABOUT_A_CHANGE, ABOUT_A_CHANGE) if self.full else range(2)
        near = {place + off for place in way.changes for off in about if 0 <= place + off < len(way.addresses)}
        sample = set(way.inside[:: FULL_SAMPLE if self.full else max(1, len(way.inside) // QUICK_KILLS)])
        for place in sorted(near | sample):
            self._lead(place, lambda process: None, settled)
            COUNTED["kills"] += 1

    def stall(self, stalled: Callable[[], None], settled: Callable[[], None]) -> None:
        """`stalled` is called while the process is stopped, `settled` when it has gone on to its end."""

        def wait(process: Stepped) -> None:
            stalled()
            process.finish()

        # To be stopped elsewhere is to be stopped after the last change.
        after = [place + 1 for place in self.way.changes]
        for place in sorted({*after, *self.way.inside[::FULL_SAMPLE]}) if self.full else after:
            self._lead(place, wait, settled)
            COUNTED["stalls"] += 1

    def _lead(self, place: int, meanwhile: Callable[[Stepped], None], settled: Callable[[], None]) -> None:
        process = self._start()
        try:
            if not self.way.lead(process, place):
                # Python itself goes different ways, by where its objects happen to lie.
                COUNTED["strayed in forebay" if place in self.inside else "strayed in Python"] += 1
            meanwhile(process)
            process.kill()
            self.stage.check()
            settled()
            self.stage.check()
        except AssertionError as error:
            error.add_note(f"before instruction {place} of {len(self.way.addresses)}; changes at {self.way.changes}")
            raise
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "case"),
    [pytest.param(kind, case, id=f"{kind}: {case.what}") for kind, (_, cases) in LIMITERS.items() for case in cases],
)
def test_a_process_is_killed_or_stopped_after_any_step(
    name: str, full: bool, no_collection: None, kind: str, case: Case
) -> None:
    make, _ = LIMITERS[kind]
    stage = Stage(name, lambda store: {"it": make(store), **({"filler": make_filler(store)} if case.still else {})})
    most = 1 if kind == "minimum interval" else LIMIT
    again = 0

    def killed() -> None:
        taken = stage.take_all()[:1]
        assert taken in case.left
        if case.still:
            return
        if kind == "sliding log":
            # Not one more within a period.
            stage.advance(PERIOD_S - 1e-9)
            assert stage.take_all() == (0,)
        # And nothing is lost for good.
        stage.advance(ROUND_S)
        assert stage.take_all() == (most,)

    def stopped() -> None:
        """Others use the key up, and a period later again."""
        nonlocal again
        (taken,) = stage.take_all()
        assert taken <= max(permits for (permits,) in case.left)
        stage.advance(PERIOD_S + 1)
        (again,) = stage.take_all()
        assert again <= most

    def went_on() -> None:
        (more,) = stage.take_all()
        assert again + more <= most + case.gives
        stage.advance(ROUND_S)
        assert stage.take_all() == (most,)

    try:
        steps = Steps(stage, case, full)
        steps.kill(killed)
        if not case.still:
            steps.stall(stopped, went_on)
    finally:
        stage.end()


def held(permits: int) -> Callable[[Stage], None]:
    def before(stage: Stage) -> None:
        assert stage.ask("hit", stage.key, permits)

    return before


def lapsed(stage: Stage) -> None:
    assert stage.ask("hit", stage.key, LIMIT)
    stage.advance(PERIOD_S)


def others_hold(stage: Stage) -> None:
    for i in range(KEYS):
        assert stage.ask("hit", ("other", stage.key, i))


def acquired(limiter: Concurrency, key: int) -> Any:
    lease = limiter.acquire(key)
    assert lease
    return lease


def allowed(limiter: Concurrency, key: int) -> Concurrency:
    assert limiter.allow(key)
    return limiter


CONCURRENCY: Final = [
    Case("acquire", lambda limiter, key: limiter.acquire(key), left(2), held(1)),
    Case("first acquire", lambda limiter, key: limiter.acquire(key), left(3)),
    Case("acquire two", lambda limiter, key: limiter.acquire(key, 2), left(2), held(1)),
    Case("acquire two of one", lambda limiter, key: limiter.acquire(key, 2), left(1), held(2)),
    Case("denial", lambda limiter, key: limiter.acquire(key), left(0), held(3)),
    Case("release", lambda lease, key: lease.release(), left(2), held(1), acquired),
    Case("renew", lambda lease, key: lease.renew(), left(2), held(1), acquired),
    Case("allow", lambda limiter, key: limiter.allow(key), left(2), held(1)),
    Case("refund", lambda limiter, key: limiter.refund(key), left(2), held(1), allowed),
    Case("leases that have ended", lambda limiter, key: limiter.acquire(key, 2), left(3), lapsed),
    # The evicted key's permits are still held.
    Case("eviction", lambda limiter, key: limiter.acquire(key), left(2), others_hold),
]


@pytest.mark.parametrize("case", CONCURRENCY, ids=lambda case: case.what)
def test_the_permits_of_a_killed_process_come_back(name: str, full: bool, no_collection: None, case: Case) -> None:
    """Its permits come back at the next look for ended processes. A killed process never holds more than it took."""
    stage = Stage(name, lambda store: {"it": Concurrency(store, "it", LIMIT, lease=PERIOD_S, keys=KEYS)})
    [(free,)] = case.left

    def settled() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (taken := stage.take_all()) != (free,):
            # Ended processes are looked for no more than once in a tenth of a millisecond.
            assert taken < (free,)
            assert time.monotonic() < deadline, f"only {taken} of {free} permits came back"
        stage.advance(ROUND_S)
        assert stage.take_all() == (LIMIT,)

    try:
        Steps(stage, case, full).kill(settled)
    finally:
        stage.end()


def several(store: Store) -> dict[str, Any]:
    parts = {
        "bucket": TokenBucket(store, "bucket", RATE, LIMIT),
        "window": FixedWindow(store, "window", RATE),
        "log": SlidingLog(store, "log", RATE, keys=KEYS),
    }
    return {"it": AllOf(*parts.values()), **parts}


ALL_OF: Final = [
    # Charged in order, so those that are come before those that are not.
    Case("allow", lambda limit, key: limit.allow(key), {(2, 2, 2), (1, 2, 2), (1, 1, 2), (1, 1, 1)}, charge(1)),
    Case("first request", lambda limit, key: limit.allow(key), {(3, 3, 3), (2, 3, 3), (2, 2, 3), (2, 2, 2)}),
    Case("hit of two", lambda limit, key: limit.hit(key, 2), {(2, 2, 2), (0, 2, 2), (0, 0, 2), (0, 0, 0)}, charge(1)),
    Case("refund", lambda limit, key: limit.refund(key), {(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)}, charge(2)),
    Case("denial", lambda limit, key: limit.hit(key), {(0, 0, 0)}, charge(3)),
]


@pytest.mark.parametrize("case", ALL_OF, ids=lambda case: case.what)
def test_several_limits_are_charged_in_order(name: str, full: bool, no_collection: None, case: Case) -> None:
    stage = Stage(name, several)

    def settled() -> None:
        assert stage.take_all() in case.left
        stage.advance(ROUND_S)
        assert stage.take_all() == (LIMIT, LIMIT, LIMIT)

    try:
        Steps(stage, case, full).kill(settled)
    finally:
        stage.end()


def test_a_request_that_is_repeated_after_a_kill_is_charged_at_least_once(
    name: str, full: bool, no_collection: None
) -> None:
    """And twice at the most, if the process was killed between charging and remembering."""
    stage = Stage(name, lambda store: {"it": TokenBucket(store, "it", RATE, LIMIT)})
    case = Case("", lambda limiter, key: limiter.hit(key, request_id="r"), left(2, 1))
    charged = set()

    def settled() -> None:
        for _ in range(2):
            assert stage.ask("hit", stage.key, request_id="r")
        taken = stage.take_all()
        assert taken in case.left
        charged.add(LIMIT - taken[0])

    try:
        Steps(stage, case, full).kill(settled)
    finally:
        stage.end()
    assert charged == {1, 2}


def test_figures(record: Callable[[str, object], None]) -> None:
    assert COUNTED["kills"]
    for what, count in COUNTED.items():
        record(f"single steps: {what}", count)
