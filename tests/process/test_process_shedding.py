"""Load shedders in several processes: killed in the middle of a request, stopped, forked, all at once."""

from __future__ import annotations

import os
import random
import signal

import pytest
from process_helpers import Crew, SharedNumbers, Worker, wait_until

from forebay import Store
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, Gradient2, ReservedSlots, Shedder
from forebay.shedding.adaptive import SAMPLES
from forebay.shedding.samples import Samples
from forebay.testing import ManualClock

PRIORITIES = ["critical", "test"]


def hold_and_sleep(shedder: Shedder, count: int, ready: SharedNumbers, priority: str | None) -> None:
    """Handle `count` requests until this process is ended."""
    held = [shedder.admit(priority) for _ in range(count)]
    assert all(held)
    ready[0] = 1
    signal.pause()


def start_holder(crew: Crew, shedder: Shedder, count: int, priority: str | None = None) -> Worker:
    ready = SharedNumbers(1)
    worker = crew.start(hold_and_sleep, shedder, count, ready, priority)
    wait_until(lambda: ready[0] or not worker.is_running(), "the requests were admitted")
    assert ready[0]
    return worker


def test_a_killed_worker_leaves_the_reserved_slots_as_they_were(crew: Crew) -> None:
    fleet = ReservedSlots(Store.private(keys=1), "fleet", 10, {"critical": 2, "test": 0}, lease="1 hour")
    holder = start_holder(crew, fleet, 8, "test")
    assert not fleet.admit("test")
    assert fleet.admit("critical")
    holder.kill()
    wait_until(lambda: fleet.admit("test"), "a slot")
    assert fleet.admit("critical")


def test_a_killed_worker_is_not_busy(crew: Crew, clock: ManualClock) -> None:
    workers = BusyWorkers(Store.private(keys=1, clock=clock), "workers", 4, PRIORITIES, lease="1 hour", interval="1s")
    holder = start_holder(crew, workers, 4, "critical")
    for _ in range(5):
        clock.advance(1)
        workers.admit("critical").end()
    shed = workers.level
    assert shed > 0.3
    holder.kill()
    wait_until(lambda: workers.busy == 0, "the worker's end")
    for _ in range(6):
        clock.advance(1)
        workers.admit("critical").end()
    assert workers.level < shed - 0.3


def test_a_killed_workers_requests_give_no_sample(crew: Crew, clock: ManualClock) -> None:
    limit = AdaptiveLimit(Store.private(keys=1, clock=clock), "backend", Gradient2(), lease="1 hour")
    for _ in range(20):
        held = [limit.admit() for _ in range(15)]
        clock.advance(0.05)
        for one in held:
            one.end()
        clock.advance(1)
    before = limit.limit, limit.latency
    samples = Samples.of(limit.words.load(SAMPLES))
    holder = start_holder(crew, limit, 15)
    assert limit.in_flight == 15
    clock.advance(1000)
    holder.kill()
    wait_until(lambda: limit.in_flight == 0, "the worker's end")
    assert Samples.of(limit.words.load(SAMPLES)) == samples
    assert (limit.limit, limit.latency) == before


def test_processes_share_what_they_measure(crew: Crew, name: str, clock: ManualClock) -> None:
    """Each makes its own store of the name."""

    def work(number: int) -> None:
        with Store(name, keys=1, clock=ManualClock()) as store:
            limit = AdaptiveLimit(store, "backend", AIMD(initial=5))
            for _ in range(100):
                limit.admit().end()

    with Store(name, keys=1, clock=clock) as store:
        limit = AdaptiveLimit(store, "backend", AIMD(initial=5))
        crew.run(4, work)
        assert Samples.of(limit.words.load(SAMPLES)).samples == 400
        clock.advance(1)
        held = [limit.admit() for _ in range(5)]
        assert not limit.admit()
        held[0].end()
        assert limit.limit == 5  # one in flight of five is no load
        for one in held[1:]:
            one.end()


@pytest.mark.parametrize("kills", [0, 20])
def test_no_more_requests_are_in_flight_than_the_limit(crew: Crew, kills: int) -> None:
    """However many processes ask, and are killed meanwhile. Each process has a number that says what it holds."""
    size = 6
    limit = AdaptiveLimit(Store.private(keys=1), "backend", AIMD(initial=3, least=3, most=3), lease="1 hour")
    held, admitted, stop = SharedNumbers(size), SharedNumbers(size), SharedNumbers(1)

    def work(number: int) -> None:
        while not stop[0]:
            admission = limit.admit()
            if admission:
                held[number] = 1
                assert sum(held) <= 3
                admitted[number] += 1
                held[number] = 0
                admission.end()

    workers = [crew.start(work, number) for number in range(size)]
    draw = random.Random(25)
    for _ in range(kills):
        number = draw.randrange(size)
        before = sum(admitted)
        wait_until(lambda before=before: sum(admitted) > before + 20, "some requests were admitted")
        workers[number].pause()
        # A killed process holds nothing: its number says so before others can take its slot.
        held[number] = 0
        workers[number].kill()
        workers[number] = crew.start(work, number)
    before = sum(admitted)
    wait_until(lambda: sum(admitted) > before + 500, "more requests were admitted")
    stop[0] = 1
    crew.results(workers)
    wait_until(lambda: limit.in_flight == 0, "the end of all requests")


def test_a_shedder_that_was_made_before_a_fork_works_on_both_sides(crew: Crew, clock: ManualClock) -> None:
    store = Store.private(keys=1, clock=clock)
    fleet = ReservedSlots(store, "fleet", 3, {"critical": 1, "test": 0})
    workers = BusyWorkers(store, "workers", 2, PRIORITIES, interval="1s")
    limit = AdaptiveLimit(store, "backend")
    mine, sampled = fleet.admit("test"), limit.admit()

    def child() -> tuple[bool, bool, int]:
        # The child does not hold its parent's slots, and can't give them back.
        mine.end()
        sampled.end()
        other = fleet.admit("test")
        full = not fleet.admit("test")
        busy = workers.admit("critical")
        count = workers.busy
        busy.end()
        other.end()
        return bool(other), full, count

    assert crew.start(child).result() == (True, True, 1)
    assert limit.in_flight == 1
    assert Samples.of(limit.words.load(SAMPLES)).samples == 0
    assert workers.busy == 0
    assert fleet.admit("test")
    assert not fleet.admit("test")
    mine.end()
    assert fleet.admit("test")


def test_a_worker_that_stops_in_the_middle_of_its_steps_holds_none_up(crew: Crew, clock: ManualClock) -> None:
    """Stopped after it has read the word, and before its CAS: another process counts the tick, and its CAS fails."""
    store = Store.private(keys=1, clock=clock)
    workers = BusyWorkers(store, "workers", 1, PRIORITIES, interval="1s")
    workers.admit("critical")
    clock.advance(1)
    shared = SharedNumbers(1)

    def stop_before_the_cas() -> float:
        replace = workers.words.replace

        def stopping(number: int, seen: int, value: int) -> bool:
            os.kill(os.getpid(), signal.SIGSTOP)
            shared[0] = 1 + replace(number, seen, value)
            return shared[0] == 2

        workers.words.replace = stopping
        return workers.level

    stopped = crew.start(stop_before_the_cas)
    stopped.wait_for_stop()
    for _ in range(3):
        clock.advance(1)
        workers.admit("critical")
    level = workers.level
    # Two seconds without a decision count once.
    assert level == pytest.approx(0.3, abs=0.02)
    stopped.resume()
    stopped.result()
    assert shared[0] == 1
    assert workers.level == level
