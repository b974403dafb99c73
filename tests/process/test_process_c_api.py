"""Processes that are killed in calls of the C API: what they leave is what Python's calls leave."""

from __future__ import annotations

from typing import Any

import c_api
from c_api import API, HELD, Handle, array_of, request_of
from process_helpers import Crew, SharedNumbers, wait_until

from forebay import Concurrency, FixedWindow, Store
from forebay.testing import ManualClock

KEY = b"k"
MANY = 10**9
KILLS = 10


def start_and_kill(crew: Crew, work: Any, *arguments: Any) -> None:
    for _ in range(KILLS):
        turns = SharedNumbers(1)
        worker = crew.start(work, turns, *arguments)
        wait_until(lambda turns=turns, worker=worker: turns[0] > 100 or not worker.is_running(), "a hundred calls")
        assert worker.is_running()
        worker.kill()


def decide_on(turns: SharedNumbers, limiters: list[FixedWindow]) -> None:
    threads = array_of([Handle(limiter).attach() for limiter in limiters])
    requests = (c_api.Request * len(limiters))(*[request_of(KEY)] * len(limiters))
    while API.decide_all(threads, requests, len(limiters), None, None) == c_api.ALLOWED:
        turns[0] += 1


def test_a_killed_process_leaves_at_most_the_first_limits_charged(crew: Crew) -> None:
    store = Store.private(keys=100, clock=ManualClock(1000))
    limiters = [FixedWindow(store, name, f"{MANY}/day") for name in ("one", "two", "three")]
    start_and_kill(crew, decide_on, limiters)
    used = [MANY - limiter.peek("k").remaining for limiter in limiters]
    assert used == sorted(used, reverse=True)
    assert used[2] > 100 * KILLS
    assert used[0] - used[2] <= KILLS
    # A kill between a charge and its count loses that count.
    counts = store.stats().limiters
    for limiter, charged in zip(limiters, used, strict=True):
        assert charged - 2 * KILLS <= counts[limiter.name].allowed <= charged


def hold_and_release(turns: SharedNumbers, limiter: Concurrency) -> None:
    thread = Handle(limiter).attach()
    while True:
        allowed, lease = thread.acquire(KEY, 2)
        assert allowed
        assert thread.renew(lease) == thread.release(lease) == HELD
        turns[0] += 1


def test_a_killed_process_keeps_no_permit(crew: Crew) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", 3, lease=3600, keys=1)
    start_and_kill(crew, hold_and_release, limiter)
    with Handle(limiter) as handle:
        thread = handle.attach()
        wait_until(lambda: thread.acquire(KEY, 3)[0], "all permits")
        assert not limiter.acquire("k")
