"""Load shedders by themselves: reserved slots, and priorities by how busy the workers are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from forebay import Concurrency, InvalidLimiter, LimitExceeded, Store
from forebay.shedding import AdaptiveLimit, Admission, BusyWorkers, ReservedSlots, Shedder
from forebay.shedding.level import TICKS, UNIT, LevelState, Thresholds, after
from forebay.testing import ManualClock

PRIORITIES = ["critical", "default", "test"]
NINE_TENTHS = Thresholds(above=230, below=179, step=26, highest=2 * UNIT)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


def admit(shedder: Shedder, count: int, priority: str | None = None) -> list[Admission]:
    return [shedder.admit(priority) for _ in range(count)]


def test_less_important_requests_leave_the_reserved_slots(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 10, {"critical": 2, "default": 3, "test": 0})
    assert [bool(one) for one in admit(fleet, 6, "test")] == [True] * 5 + [False]
    assert [bool(one) for one in admit(fleet, 4, "default")] == [True] * 3 + [False]
    assert [bool(one) for one in admit(fleet, 3, "critical")] == [True] * 2 + [False]


def test_important_requests_may_take_all_slots(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 10, {"critical": "20%", "default": 0})
    held = admit(fleet, 10, "critical")
    assert all(held)
    assert not fleet.admit("critical")
    assert not fleet.admit("default")
    held[0].end()
    assert fleet.admit("default")
    assert not fleet.admit("critical")


def test_a_request_that_is_denied_gives_back_what_it_took(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 4, {"critical": 1, "default": 0})
    held = admit(fleet, 4, "critical")
    assert not any(admit(fleet, 3, "default"))
    below, whole = fleet.limiters
    assert below.peek("all").remaining == 3
    for one in held:
        one.end()
    assert whole.peek("all").remaining == 4


def test_a_denied_request_takes_no_slot_that_is_reserved(store: Store) -> None:
    """The smaller limiter is asked first: in the other order this denial would hold the last slot for a moment."""
    fleet = ReservedSlots(store, "fleet", 4, {"critical": 1, "default": 0})
    below, whole = fleet.limiters
    assert all(admit(fleet, 3, "default"))
    counted = store.stats().limiters[whole.name].allowed
    assert not fleet.admit("default")
    assert store.stats().limiters[whole.name].allowed == counted
    assert store.stats().limiters[below.name].denied == 1


def test_per_cent_of_slots_are_rounded_up(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 9, {"critical": "20 %", "default": 0})
    assert [limiter.limit for limiter in fleet.limiters] == [7, 9]


def test_an_admission_ends_once_and_with_its_block(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0})
    with fleet.admit("default") as held:
        assert not fleet.admit("default")
        with pytest.raises(LimitExceeded, match="'fleet' had no permit"), fleet.admit("default"):
            raise AssertionError
    assert fleet.limiters[1].peek("all").remaining == 2
    held.end()
    with pytest.raises(ValueError, match='an outcome is "done", "dropped" or "ignored", not \'fine\''):
        held.end("fine")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="a bug"), fleet.admit("default"):
        raise RuntimeError("a bug")
    assert fleet.limiters[1].peek("all").remaining == 2


def test_a_slot_comes_back_at_the_end_of_its_lease_unless_it_is_renewed(store: Store, clock: ManualClock) -> None:
    fleet = ReservedSlots(store, "fleet", 2, {"critical": 1, "default": 0}, lease="10s")
    held = fleet.admit("default")
    clock.advance(9)
    held.renew()
    clock.advance(9)
    assert not fleet.admit("default")
    clock.advance(1)
    assert fleet.admit("default")


@pytest.mark.parametrize(
    ("reserved", "message"),
    [
        ({"critical": 1}, "from 2 to 8 priorities"),
        ([("critical", 1)], "reserved has the slots of each priority"),
        ({"critical": 11, "default": 0}, "a number from 0 to 10 or per cent"),
        ({"critical": "20", "default": 0}, "a number from 0 to 10 or per cent"),
        ({"critical": True, "default": 0}, "a number from 0 to 10 or per cent"),
        ({"critical": 1, "default": 1}, "no request is less important than 'default', so it keeps 0"),
        ({"critical": "100%", "default": 0}, "10 of the 10 slots of 'fleet' are reserved"),
        ({1: 1, "default": 0}, "from 2 to 8 priorities"),
    ],
)
def test_reserved_slots_that_make_no_sense_are_refused(store: Store, reserved: Any, message: str) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        ReservedSlots(store, "fleet", 10, reserved)


def test_reserved_slots_are_a_whole_number(store: Store) -> None:
    for wrong in (0, True, 2.5):
        with pytest.raises(InvalidLimiter, match=f"slots of ReservedSlots is a whole number .*, not {wrong}"):
            ReservedSlots(store, "fleet", wrong, {"critical": 1, "default": 0})  # type: ignore[arg-type]


def test_a_priority_that_is_not_known_is_refused(store: Store) -> None:
    fleet = ReservedSlots(store, "fleet", 10, {"critical": 1, "default": 0})
    for wrong in ("crticial", None, 3, []):
        with pytest.raises(InvalidLimiter, match="for shedder 'fleet' one of 'critical', 'default', not "):
            fleet.admit(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match="for shedder 'search' None: it has no others, not 'critical'"):
        AdaptiveLimit(store, "search").admit("critical")


def test_a_shedder_is_for_a_store_of_a_host(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match=r"a shedder counts the requests of one host, .* BusyWorkers"):
        BusyWorkers(None, "workers", 4, PRIORITIES)  # type: ignore[arg-type]
    with pytest.raises(InvalidLimiter, match='the name of a shedder is text such as "web", not 3'):
        AdaptiveLimit(store, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"above": 0.5}, "below is less than above, 0.5, not 0.7"),
        ({"above": 1.5}, "above is a part above 0, up to 1"),
        ({"step": 0}, "step is a part above 0"),
        ({"interval": "1ms"}, "an interval is 10 ms or more, not '1ms'"),
        ({"priorities": ["one"]}, "from 2 to 16 priorities"),
        ({"priorities": "ab"}, "from 2 to 16 priorities"),
        ({"priorities": ["a", "a"]}, "each once and the most important first"),
        ({"workers": 0}, "workers of BusyWorkers is a whole number of requests from 1 to 16777216, not 0"),
        ({"workers": "4"}, "workers of BusyWorkers is a whole number .*, not '4'"),
    ],
)
def test_busy_workers_that_make_no_sense_are_refused(store: Store, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        BusyWorkers(store, "workers", **{"workers": 4, "priorities": PRIORITIES, **options})


# The level


def run(word: int, ticks: int, busy: int, first: int = 1) -> int:
    """The word after so many ticks, one by one."""
    for tick in range(first, first + ticks):
        word = after(word, tick, busy, NINE_TENTHS)
    return word


def test_the_level_moves_one_step_an_interval() -> None:
    word = run(LevelState(8, 0, 0).word, 4 * TICKS, UNIT, first=9)
    assert LevelState.of(word) == (40, 0, 4 * 26)
    word = run(word, 2 * TICKS, 0, first=41)
    assert LevelState.of(word).level == 2 * 26


def test_the_level_stays_between_the_thresholds() -> None:
    start = LevelState(8, 0, 100).word
    for busy in (180, 200, 229):
        assert LevelState.of(run(start, 5 * TICKS, busy, first=9)).level == 100
    assert LevelState.of(run(start, TICKS, 230, first=9)).level == 126
    assert LevelState.of(run(start, TICKS, 179, first=9)).level == 74


def test_the_level_has_ends() -> None:
    assert LevelState.of(run(LevelState(8, 0, 0).word, 100 * TICKS, UNIT, first=9)).level == 2 * UNIT
    assert LevelState.of(run(LevelState(8, 0, 60).word, 100 * TICKS, 0, first=9)).level == 0


def test_many_ticks_at_once_are_as_one_by_one() -> None:
    """Downwards. Upwards, a pause without requests counts as one interval."""
    draw = random.Random(20)
    for _ in range(2000):
        first, ticks, busy = draw.randrange(8, 30), draw.randrange(1, 60), draw.randrange(179)
        word = LevelState(first, draw.randrange(1 + (first % TICKS) * UNIT), draw.randrange(2 * UNIT)).word
        assert after(word, first + ticks, busy, NINE_TENTHS) == run(word, ticks, busy, first + 1)
    word = LevelState(8, 0, 0).word
    assert LevelState.of(after(word, 8 + 50 * TICKS, UNIT, NINE_TENTHS)) == (8 + 50 * TICKS, 0, 26)


def test_any_word_is_a_state_and_the_next_is_of_now() -> None:
    draw = random.Random(21)
    for _ in range(2000):
        word, tick = draw.getrandbits(64), draw.randrange(1000, 2**40)
        state = LevelState.of(after(word, tick, draw.randrange(UNIT + 1), NINE_TENTHS))
        assert state.level <= 2 * UNIT
        assert state.total <= TICKS * UNIT
        assert (state.tick - tick) % 2**40 <= TICKS


def test_a_clock_that_goes_back_keeps_the_level() -> None:
    word = LevelState(1000, 0, 77).word
    assert after(word, 995, UNIT, NINE_TENTHS) == word
    assert LevelState.of(after(word, 500, UNIT, NINE_TENTHS)) == (500, 0, 77)


# Busy workers


def test_nothing_is_shed_before_the_first_interval_has_ended(store: Store, clock: ManualClock) -> None:
    workers = BusyWorkers(store, "workers", 4, PRIORITIES, interval="1s")
    held = admit(workers, 4, "test")
    assert all(held)
    assert workers.busy == 4
    # More than there are workers: they aren't counted, nor denied.
    assert all(admit(workers, 3, "critical"))
    clock.advance(0.99)
    assert workers.level == 0


def test_workers_that_are_busy_for_long_are_seen_by_the_next_request(store: Store, clock: ManualClock) -> None:
    workers = BusyWorkers(store, "workers", 4, PRIORITIES, interval="1s")
    for _ in range(4):
        workers.admit("critical")
    clock.advance(10)
    workers.admit("critical")
    # Nothing has been decided for ten seconds, so it has not shed more.
    assert workers.level == pytest.approx(0.1, abs=0.01)


def test_busy_time_counts_and_not_the_number_of_requests(store: Store, clock: ManualClock) -> None:
    """Half of the time all workers are busy, in which nothing else happens; then a thousand requests come to idle
    workers, and each finds none of them busy.
    """
    workers = BusyWorkers(store, "workers", 1, PRIORITIES, above=0.6, below=0.4, interval="1s")
    for _ in range(40):
        with workers.admit("critical"):
            clock.advance(0.5)
        for _ in range(20):
            with workers.admit("critical"):
                clock.advance(0)
        clock.advance(0.5)
    assert workers.level == 0
    for _ in range(3):
        with workers.admit("critical"):
            clock.advance(0.75)
        clock.advance(0.25)
    assert workers.level == pytest.approx(0.3, abs=0.01)


def test_a_level_is_the_part_that_is_shed(store: Store, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = BusyWorkers(store, "workers", 1, PRIORITIES, step=0.25, interval="1s")
    draw = random.Random(22)
    monkeypatch.setattr(random, "random", draw.random)
    workers.admit("critical")
    for second in range(1, 7):
        clock.advance(1)
        admitted = [sum(map(bool, admit(workers, 400, priority))) / 400 for priority in PRIORITIES]
        assert admitted == pytest.approx([1, 1 - max(0, second - 4) / 4, 1 - min(1, second / 4)], abs=0.08)


@pytest.mark.parametrize(("workers", "busy"), [(100, 57), (3, 2), (10, 9)])
def test_exactly_above_is_above(store: Store, clock: ManualClock, workers: int, busy: int) -> None:
    shedder = BusyWorkers(store, "workers", workers, PRIORITIES, above=busy / workers, below=0.1)
    held = admit(shedder, busy - 1, "critical")
    clock.advance(5)
    assert shedder.level == 0
    held += admit(shedder, 1, "critical")
    clock.advance(5)
    assert shedder.level > 0
    assert all(held)


def test_nothing_is_shed_while_nobody_is_busy(store: Store, clock: ManualClock) -> None:
    shedder = BusyWorkers(store, "workers", 4, PRIORITIES, above=0.001, below=0.0005)
    for _ in range(20):
        clock.advance(0.5)
        assert shedder.level == 0


@pytest.mark.parametrize("outcome", ["done", "dropped", "ignored"])
def test_an_admission_outlives_the_store(clock: ManualClock, outcome: Any) -> None:
    with Store.private(keys=100, clock=clock) as opened:
        shedders = [
            BusyWorkers(opened, "workers", 4, PRIORITIES),
            AdaptiveLimit(opened, "search"),
            ReservedSlots(opened, "fleet", 10, {"critical": 2, "default": 0}),
        ]
        held = [shedder.admit(shedder.priorities[0] if shedder.priorities else None) for shedder in shedders]
    clock.advance(5)
    for one in held:
        assert one
        one.begin()
        one.end(outcome)
        one.end(outcome)


def test_stores_of_one_name_share_the_level(make_name: Any, clock: ManualClock) -> None:
    name = make_name()
    with Store(name, keys=100, clock=clock) as one, Store(name, keys=100, clock=clock) as other:
        here = BusyWorkers(one, "workers", 2, PRIORITIES, interval="1s")
        there = BusyWorkers(other, "workers", 2, PRIORITIES, interval="1s")
        assert here.admit("critical")
        assert there.admit("critical")
        for _ in range(5):
            clock.advance(1)
            here.admit("critical")
        assert there.level == here.level == pytest.approx(0.5, abs=0.01)


def test_shedders_show_what_they_are(store: Store) -> None:
    assert repr(ReservedSlots(store, "fleet", 10, {"a": 1, "b": 0})) == "<ReservedSlots 'fleet' 10>"
    assert repr(BusyWorkers(store, "workers", 4, PRIORITIES, interval="1s")) == "<BusyWorkers 'workers' 4>"
    assert repr(AdaptiveLimit(store, "search")) == "<AdaptiveLimit 'search' Gradient2, up to 200>"
    for shedder in (BusyWorkers(store, "workers", 4, PRIORITIES, interval="1s"), AdaptiveLimit(store, "search")):
        [limiter] = shedder.limiters
        assert isinstance(limiter, Concurrency)
        assert limiter.name == shedder.name
