"""The adaptive limit: its arithmetic, its samples in all orders of their steps, and the limit itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from schedules import Schedules, StepWords

from forebay import InvalidLimiter, InvalidRate, Store
from forebay.shedding import AIMD, AdaptiveLimit, Admission, Gradient2
from forebay.shedding.adaptive import LIMIT, LONG, SAMPLES
from forebay.shedding.estimates import LongLatency, Window
from forebay.shedding.samples import LEAST_SAMPLES, MOST_SAMPLES, MOST_US, Samples, add_sample
from forebay.testing import ManualClock

USUAL = LongLatency(10_000.0, 10)


@pytest.fixture
def store(clock: ManualClock) -> Iterator[Store]:
    with Store.private(keys=100, clock=clock) as opened:
        yield opened


# The algorithms


def test_gradient_lets_the_limit_grow_while_the_latency_is_usual() -> None:
    algorithm = Gradient2()
    limit, long = algorithm.after(20.0, USUAL, Window(10_000.0, True, False))
    assert limit == pytest.approx(20 + 0.2 * 4)
    assert long == USUAL
    # Up to the tolerance.
    assert algorithm.after(20.0, USUAL, Window(14_900.0, True, False)).limit == pytest.approx(20.8)


def test_gradient_lowers_the_limit_as_the_latency_rises() -> None:
    algorithm = Gradient2(long_windows=10**6)
    # 1.5 * 10 ms / 20 ms = 0.75
    assert algorithm.after(20.0, USUAL, Window(20_000.0, True, False)).limit == pytest.approx(
        0.8 * 20 + 0.2 * (0.75 * 20 + 4), rel=1e-4
    )
    # At least a half, however long requests take.
    for latency_us in (40_000.0, 4_000_000.0):
        assert algorithm.after(20.0, USUAL, Window(latency_us, True, False)).limit == pytest.approx(
            0.8 * 20 + 0.2 * (0.5 * 20 + 4), rel=1e-4
        )


def test_gradient_learns_from_the_first_ten_windows_and_then_slowly() -> None:
    algorithm, long = Gradient2(), LongLatency()
    for latency_us in range(1000, 11_000, 1000):
        long = algorithm.after(20.0, long, Window(float(latency_us), True, False)).long
    assert long == pytest.approx((5500.0, 10))
    long = algorithm.after(20.0, long, Window(5500.0 + 601, True, False)).long
    assert long.latency_us == pytest.approx(5502.0)


def test_gradient_forgets_an_overload_faster_than_its_windows() -> None:
    long = Gradient2().after(20.0, LongLatency(100_000.0, 10), Window(10_000.0, False, False)).long
    assert long.latency_us == pytest.approx((100_000 - 90_000 * 2 / 601) * 0.95)


@pytest.mark.parametrize("algorithm", [Gradient2(), AIMD()])
def test_a_limit_that_is_not_used_does_not_grow(algorithm: Gradient2 | AIMD) -> None:
    assert algorithm.after(20.0, USUAL, Window(10_000.0, False, False)).limit == 20


@pytest.mark.parametrize("algorithm", [Gradient2(initial=5, least=4, most=6), AIMD(initial=5, least=4, most=6)])
def test_a_limit_stays_between_its_ends(algorithm: Gradient2 | AIMD) -> None:
    limit, long = 5.0, USUAL
    for _ in range(30):
        limit, long = algorithm.after(limit, long, Window(10_000.0, True, False))
    assert limit == 6
    for _ in range(300):
        limit, long = algorithm.after(limit, USUAL, Window(9_000_000.0, True, True))
    assert limit == (4 if isinstance(algorithm, AIMD) else pytest.approx(6, abs=2))


def test_aimd_adds_one_and_takes_a_tenth() -> None:
    algorithm = AIMD(timeout="1s")
    assert algorithm.after(20.0, LongLatency(), Window(999_000.0, True, False)).limit == 21
    assert algorithm.after(20.0, LongLatency(), Window(1_001_000.0, True, False)).limit == 18
    assert algorithm.after(20.0, LongLatency(), Window(1.0, False, True)).limit == 18


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Gradient2(initial=0), InvalidLimiter, "initial of Gradient2 is a whole number of requests from 1"),
        (lambda: Gradient2(most=10), InvalidLimiter, "begins at initial=20, which is not from least=1 to most=10"),
        (lambda: Gradient2(tolerance=0.5), InvalidLimiter, "tolerance of Gradient2 is a number from 1 to 1000"),
        (lambda: Gradient2(smoothing=2), InvalidLimiter, "smoothing of Gradient2 is a number from 0.001 to 1"),
        (lambda: AIMD(backoff=1), InvalidLimiter, "backoff of AIMD is a number from 0.5 to 0.999"),
        (lambda: AIMD(timeout="soon"), InvalidRate, "soon"),
    ],
)
def test_algorithms_that_make_no_sense_are_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_an_algorithm_is_one_of_the_two(store: Store) -> None:
    with pytest.raises(InvalidLimiter, match="algorithm is a Gradient2 or an AIMD, not 'vegas'"):
        AdaptiveLimit(store, "search", "vegas")  # type: ignore[arg-type]


# The samples


def sample(window: int, latency_us: int = 1000, *, is_used: bool = True, is_dropped: bool = False) -> Samples:
    return Samples.first(window, latency_us, is_used, is_dropped)


def test_a_word_holds_its_fields() -> None:
    draw = random.Random(23)
    for _ in range(1000):
        word = draw.getrandbits(64)
        assert Samples.of(word).word == word


def test_a_window_is_closed_by_the_first_sample_after_it() -> None:
    words = StepWords()
    for number in range(LEAST_SAMPLES):
        assert add_sample(words, 0, sample(7, 1000 * number)) is None
    assert add_sample(words, 0, sample(8, 50)) == (4500.0, True, False)
    assert Samples.of(words.values[0]) == (8, 1, 50, True, False)


def test_a_window_lasts_until_it_has_ten_samples_or_a_drop() -> None:
    words = StepWords()
    for window in range(LEAST_SAMPLES):
        assert add_sample(words, 0, sample(window)) is None
    assert add_sample(words, 0, sample(100)) is not None
    assert add_sample(words, 0, sample(101, is_dropped=True)) is None
    assert add_sample(words, 0, sample(102)) == (1000.0, True, True)


def test_a_window_without_room_is_closed_early() -> None:
    words = StepWords()
    assert add_sample(words, 0, sample(7, MOST_US + 5)) is None
    assert add_sample(words, 0, sample(7, 1)) == (float(MOST_US), True, False)
    words.values[0] = Samples(7, MOST_SAMPLES, MOST_SAMPLES, False, False).word
    assert add_sample(words, 0, sample(7, 1)) == (1.0, False, False)


class BlindWords(StepWords):
    """A planted bug: a word is replaced whatever it is by now."""

    def matches(self, number: int, seen: int) -> bool:
        return True


def lost_samples(words_class: type[StepWords], record: Callable[[str, object], None]) -> int:
    """Walk all schedules in which processes add samples, the second of each in a new window."""
    lost = walked = 0
    for processes, windows in ((3, [2]), (2, [1, 2])):

        def program(words: StepWords, windows: list[int] = windows) -> list[float]:
            closed = [add_sample(words, 0, sample(window, 1000)) for window in windows]
            return [one.latency_us for one in closed if one is not None]

        before = LEAST_SAMPLES - len(windows) + 1
        full = Samples(1, before, before * 1000, False, False).word
        schedules = Schedules(words_class, [full], [program] * processes)
        for words, results in schedules:
            # Each latency is 1 ms, so the mean of a window is, too: what is missing shows in the counts.
            assert all(mean_us == 1000 for result in results for mean_us in result)
            counted = Samples.of(words.values[0]).samples + sum(words.closed_counts)
            lost += counted != before + processes * len(windows)
        walked += schedules.walked
    record("schedules of processes that add samples", walked)
    return lost


def test_no_schedule_loses_a_sample_or_counts_it_twice(record: Callable[[str, object], None]) -> None:
    assert lost_samples(StepWords, record) == 0


def test_the_walk_finds_a_replacement_that_compares_nothing(record: Callable[[str, object], None]) -> None:
    assert lost_samples(BlindWords, record) > 0


# The limit


def admit(limit: AdaptiveLimit, count: int) -> list[Admission]:
    return [one for one in (limit.admit() for _ in range(count)) if one]


def window(limit: AdaptiveLimit, clock: ManualClock, latency_s: float, count: int = 1000) -> int:
    """A window in which requests of this latency come, up to `count` at a time. How many were admitted."""
    held = admit(limit, count)
    clock.advance(latency_s)
    for one in held:
        one.end()
    clock.advance(1)
    return len(held)


def test_no_more_are_admitted_than_the_limit(store: Store) -> None:
    limit = AdaptiveLimit(store, "search")
    held = admit(limit, 30)
    assert len(held) == limit.limit == limit.in_flight == 20
    held[0].end()
    assert len(admit(limit, 3)) == 1


def test_a_denied_request_takes_no_slot(store: Store) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(initial=1))
    with limit.admit():
        for _ in range(5):
            assert not limit.admit()
    assert store.stats().limiters["search"].allowed == 1


class OvertakenSlots:
    """The slots of a limit, before each of which another request takes one."""

    def __init__(self, slots: Any, overtake: Callable[[], Any]) -> None:
        self._slots, self._overtake = slots, overtake
        self.peek = slots.peek

    def acquire(self, key: str) -> Any:
        self._overtake()
        return self._slots.acquire(key)


def test_a_request_that_another_one_overtakes_is_denied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have found room for one. The later one counts again after it has taken its slot, and gives it back."""
    limit, other = (AdaptiveLimit(store, "search", AIMD(initial=1)) for _ in range(2))
    taken: list[Admission] = []
    monkeypatch.setattr(limit, "_slots", OvertakenSlots(limit.limiters[0], lambda: taken.append(other.admit())))
    assert not limit.admit()
    assert [bool(one) for one in taken] == [True]
    assert other.in_flight == 1


def test_an_interrupted_request_gives_its_slot_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = AdaptiveLimit(store, "search")

    def now_ns() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "now_ns", now_ns)
    with pytest.raises(KeyboardInterrupt):
        limit.admit()
    assert limit.in_flight == 0


def test_the_limit_grows_with_the_usual_latency_and_shrinks_above_it(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search")
    for _ in range(20):
        window(limit, clock, 0.05)
    grown = limit.limit
    assert grown > 30
    assert limit.latency == pytest.approx(0.05, rel=1e-3)
    for _ in range(20):
        window(limit, clock, 0.5)
    assert limit.limit < grown / 2


def test_a_limit_without_load_stays(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search")
    for _ in range(200):
        window(limit, clock, 0.05, count=2)
    assert limit.limit == 20


def test_aimd_shrinks_when_requests_are_dropped(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search", AIMD())
    for _ in range(11):
        window(limit, clock, 0.05)
    assert limit.limit == 30
    limit.admit().end("dropped")
    clock.advance(1)
    limit.admit().end()
    assert limit.limit == 27
    assert limit.latency == 0


def test_what_is_ignored_gives_no_sample(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search", Gradient2(long_windows=20))
    for _ in range(20):
        window(limit, clock, 0.05)
    before = limit.limit, limit.latency
    for _ in range(100):
        held = admit(limit, 100)
        clock.advance(5)
        for one in held:
            one.end("ignored")
    assert (limit.limit, limit.latency) == before


def test_a_request_that_has_lost_its_slot_gives_no_sample(store: Store, clock: ManualClock) -> None:
    """As a process that was stopped for longer than its lease."""
    limit = AdaptiveLimit(store, "search", lease="10s")
    for _ in range(20):
        window(limit, clock, 0.05)
    before = limit.limit, limit.latency
    for _ in range(20):
        window(limit, clock, 11)
    assert (limit.limit, limit.latency) == before


def test_a_renewed_request_keeps_its_slot(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(initial=1, most=1), lease="10s")
    held = limit.admit()
    for _ in range(5):
        clock.advance(6)
        held.renew()
    assert not limit.admit()
    held.end()
    assert limit.admit()


def test_latency_counts_from_when_the_work_begins(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search")
    for _ in range(2):
        held = admit(limit, 20)
        clock.advance(30)
        for one in held:
            one.begin()
        clock.advance(0.05)
        for one in held:
            one.end()
        clock.advance(1)
    assert limit.latency == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("algorithm", [Gradient2(), AIMD()])
def test_any_words_are_states(store: Store, clock: ManualClock, algorithm: Gradient2 | AIMD) -> None:
    """A damaged segment neither stops requests nor lets more of them through than the algorithm's most."""
    limit = AdaptiveLimit(store, "search", algorithm)
    words: Any = limit.words
    draw = random.Random(24)
    for _ in range(200):
        for number in (LIMIT, LONG, SAMPLES):
            assert words.replace(number, words.load(number), draw.getrandbits(64))
        assert 1 <= limit.limit <= 200
        assert 1 <= window(limit, clock, 0.05) <= 200


def test_the_walk_takes_each_schedule_once() -> None:
    """Two programs of three steps have 20 schedules."""

    def program(words: StepWords) -> None:
        for _ in range(3):
            words.load(0)

    schedules = Schedules(StepWords, [0], [program, program])
    assert sum(1 for _ in schedules) == schedules.walked == 20


def test_less_important_requests_leave_a_part_of_the_limit(store: Store, clock: ManualClock) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(), reserved={"critical": "20%", "default": "30%", "test": "0%"})
    assert limit.priorities == ("critical", "default", "test")
    assert [bool(limit.admit("test")) for _ in range(11)] == [True] * 10 + [False]
    assert [bool(limit.admit("default")) for _ in range(7)] == [True] * 6 + [False]
    assert [bool(limit.admit("critical")) for _ in range(5)] == [True] * 4 + [False]
    # The parts are those of the limit as it is.
    limit.words.replace(LIMIT, limit.words.load(LIMIT), 40 * 256)
    assert [bool(limit.admit("test")) for _ in range(2)] == [False, False]
    assert [bool(limit.admit("default")) for _ in range(13)] == [True] * 12 + [False]


def test_a_limit_of_one_admits_any_request_if_nothing_is_in_flight(store: Store) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(initial=1), reserved={"critical": "99%", "default": "0%"})
    held = limit.admit("default")
    assert held
    assert not limit.admit("critical")
    held.end()
    assert limit.admit("critical")


@pytest.mark.parametrize(
    ("reserved", "message"),
    [
        ([("critical", "20%")], "reserved has the part of each priority"),
        ({"critical": "20%"}, "AdaptiveLimit has from 2 to 16 priorities"),
        ({"critical": 20, "default": "0%"}, "'critical' keeps a part of the limit .* not 20"),
        ({"critical": "60%", "default": "40%", "test": "0%"}, "'default' keeps a part .* more than 0 %; not '40%'"),
    ],
)
def test_parts_that_make_no_sense_are_refused(store: Store, reserved: Any, message: str) -> None:
    with pytest.raises(InvalidLimiter, match=message):
        AdaptiveLimit(store, "search", reserved=reserved)
