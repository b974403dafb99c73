"""Load shedders in several threads at once: a request ends once, and no sample is lost."""

from __future__ import annotations

from typing import Final

from thread_helpers import often, race

from forebay import Store
from forebay.shedding import AIMD, AdaptiveLimit, Admission, BusyWorkers
from forebay.shedding.adaptive import SAMPLES
from forebay.shedding.samples import Samples
from forebay.testing import ManualClock

ROUNDS: Final = often(400)


def test_a_request_that_two_threads_end_is_one_sample(store: Store) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(initial=1, least=1, most=1))
    for rounds, _ in enumerate(race(ROUNDS, limit.admit, Admission.end, Admission.end), 1):
        assert Samples.of(limit.words.load(SAMPLES)).samples == rounds
        assert limit.in_flight == 0


def test_requests_that_end_at_once_are_all_samples(store: Store) -> None:
    limit = AdaptiveLimit(store, "search", AIMD(initial=2, least=2, most=2))

    def end(number: int) -> None:
        held[number].end()

    def admit() -> int:
        held[:] = [limit.admit(), limit.admit()]
        return 0

    held: list[Admission] = []
    for rounds, _ in enumerate(race(ROUNDS, admit, end, lambda number: end(1 - number)), 1):
        assert Samples.of(limit.words.load(SAMPLES)).samples == 2 * rounds
        assert limit.in_flight == 0


def test_threads_that_count_the_same_ticks_move_the_level_once(store: Store, clock: ManualClock) -> None:
    workers = BusyWorkers(store, "workers", 1, ["critical", "test"], step=0.01, interval="1s")
    workers.admit("critical")

    def wait() -> BusyWorkers:
        clock.advance(1)
        return workers

    looks = [lambda shedder: shedder.level] * 2
    for steps, (_, levels) in enumerate(race(min(ROUNDS, 50), wait, *looks), 1):
        # 0.01 of a priority is 3/256.
        assert levels == [steps * 3 / 256] * 2
