"""Waiting among processes: Ctrl-C, forks, gevent, and one limit for all."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from process_helpers import DEADLINE_S, Crew, SharedNumbers, wait_until

from forebay import LeakyBucket, SlidingLog, Store, TokenBucket, waiting

REFILLS_NOTHING = "10000/year"


def _in_line() -> int:
    # A copy, because without the GIL a waiter may join while this counts.
    return sum(map(len, list(waiting._queues.values())))


def _is_asleep(pid: int) -> bool:
    """Whether the process, which has one thread, waits for something."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _booking(store: Store) -> Any:
    return TokenBucket(store, "booking", "1/hour", burst=1)


def _charging(store: Store) -> Any:
    return SlidingLog(store, "charging", "1/hour", keys=8)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("make", [_booking, _charging])
def test_ctrl_c_in_the_sleep_gives_the_permit_back(
    crew: Crew, name: str, make: Callable[[Store], Any], kind: str
) -> None:
    with Store(name, keys=100) as store:
        limiter = make(store)
        assert limiter.hit("k")
        begun = SharedNumbers(1)
        worker = crew.start(_wait_for_ctrl_c, name, make, kind, begun)
        wait_until(lambda: begun[0] and _is_asleep(worker.pid), "the wait")
        # Booked for an hour from now, or not charged at all.
        booked = make is _booking
        assert (limiter.peek("k").reset_after > 3600) == booked
        os.kill(worker.pid, signal.SIGINT)
        assert worker.result() == "interrupted"
        assert limiter.peek("k").reset_after <= 3600


def _wait_for_ctrl_c(name: str, make: Callable[[Store], Any], kind: str, begun: SharedNumbers) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Store(name, keys=100) as store:
        limiter = make(store)

        async def main() -> None:
            begun[0] = 1
            await limiter.wait_async("k")

        try:
            if kind == "async":
                asyncio.run(main())
            else:
                begun[0] = 1
                limiter.wait("k")
        except KeyboardInterrupt:
            assert waiting._queues == {}
            return "interrupted"
    return "no interrupt"


@pytest.mark.parametrize("kind", ["bucket", "log"])
def test_interrupts_at_any_time_lose_no_permit(crew: Crew, name: str, kind: str) -> None:
    """The charges are exactly the calls that returned True, however often Ctrl-C comes in between."""
    with Store(name, keys=100):
        interrupts = 0
        while interrupts < 500:
            interrupts += crew.start(_wait_under_fire, name, kind).result()


def _wait_under_fire(name: str, kind: str) -> int:
    armed = False

    def interrupt(*_: object) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    interrupts = 0
    results: list[bool] = []
    with Store(name, keys=100) as store:
        key = f"{os.getpid()}"
        limiter: Any = (
            TokenBucket(store, "bucket", REFILLS_NOTHING, burst=10_000)
            if kind == "bucket"
            else SlidingLog(store, "log", REFILLS_NOTHING, keys=8)
        )
        # The first decision opens files, which takes longer than the interrupts below leave it.
        assert limiter.wait(key, cost=0)
        while len(results) < 2000:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 60e-6))
                # No result is lost between a return and what follows.
                results.extend(map(limiter.wait, (key,)))
                armed = False
            except KeyboardInterrupt:
                interrupts += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert all(results)
        assert waiting._queues == {}
        assert limiter.peek(key).remaining == 10_000 - len(results)
    return interrupts


def test_a_child_has_no_lines_and_no_locks_of_its_parent(crew: Crew, name: str) -> None:
    assert crew.start(_fork_with_a_line, name).result() == ["denied", "served"]


def _fork_with_a_line(name: str) -> list[str]:
    with Store(name, keys=100) as store:
        limiter = SlidingLog(store, "api", "1/hour", keys=8)
        assert limiter.allow("k")
        for _ in range(2):
            threading.Thread(target=limiter.wait, args=("k",), daemon=True).start()
        wait_until(lambda: _in_line() == 2, "a line")
        taken, done = threading.Event(), threading.Event()

        def hold_lock() -> None:
            with waiting._lock:
                taken.set()
                done.wait(DEADLINE_S)

        holder = threading.Thread(target=hold_lock)
        holder.start()
        taken.wait(DEADLINE_S)
        answers = Crew()
        try:
            child = answers.start(_ask_in_child, limiter)
            return child.result(30)  # type: ignore[no-any-return]
        finally:
            answers.end()
            done.set()
            holder.join()
            assert _in_line() == 2


def _ask_in_child(limiter: SlidingLog) -> list[str]:
    assert waiting._queues == {}
    # Denied by the limit, not by the parent's line: once the limit allows it, it goes at once.
    answers = ["served" if limiter.wait("k", timeout=0) else "denied"]
    limiter.reset("k")
    answers.append("served" if limiter.wait("k", timeout=0) else "denied")
    assert waiting._lock.acquire(blocking=False)
    return answers


def test_a_wait_in_which_a_signal_handler_forks_goes_on_in_the_child(crew: Crew, name: str) -> None:
    assert crew.start(_fork_in_a_line, name).result() == 0


def _fork_in_a_line(name: str) -> int:
    """How the child ends that is forked while this thread stands in line behind another one."""
    with Store(name, keys=100) as store:
        limiter = SlidingLog(store, "api", "1/hour", keys=8)
        assert limiter.allow("k")
        threading.Thread(target=limiter.wait, args=("k",), daemon=True).start()
        wait_until(lambda: _in_line() == 1, "a line")
        parent = os.getpid()
        handled: list[int] = []

        def fork(number: int, frame: object) -> None:
            if handled:
                return
            handled.append(number)
            if child := os.fork():
                raise Forked(child)
            limiter.reset("k")

        signal.signal(signal.SIGUSR1, fork)

        def interrupt() -> None:
            wait_until(lambda: _in_line() == 2, "a line of two")
            # Without the GIL, a signal that comes just before a thread blocks on a lock doesn't end that wait.
            while not handled:
                os.kill(parent, signal.SIGUSR1)
                time.sleep(0.01)

        threading.Thread(target=interrupt).start()
        try:
            served = limiter.wait("k", timeout=DEADLINE_S)
            os._exit(0 if served and waiting._queues == {} else 1)
        except Forked as forked:
            return os.waitstatus_to_exitcode(os.waitpid(forked.child, 0)[1])


class Forked(Exception):
    def __init__(self, child: int) -> None:
        self.child = child


@pytest.mark.parametrize("make", [lambda store: SlidingLog(store, "api", "10 per 20 ms", keys=8), None])
def test_waiters_of_several_processes_are_all_served(
    crew: Crew, name: str, make: Callable[[Store], Any] | None
) -> None:
    def limiter_of(store: Store) -> Any:
        return make(store) if make else LeakyBucket(store, "api", "1000/second", capacity=5)

    def work(who: int) -> list[bool]:
        with Store(name, keys=100) as store:
            limiter = limiter_of(store)
            results: list[bool] = []

            async def tasks() -> None:
                async def one() -> None:
                    results.append(await limiter.wait_async("k", jitter=0.1))

                await asyncio.gather(*(one() for _ in range(10)))

            threads = [threading.Thread(target=lambda: results.append(limiter.wait("k"))) for _ in range(10)]
            threads.append(threading.Thread(target=lambda: asyncio.run(tasks())))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
            assert waiting._queues == {}
            return results

    with Store(name, keys=100) as store:
        limiter_of(store)
        assert crew.run(4, work) == [[True] * 20] * 4
        assert store.stats().limiters["api"].allowed == 80


def test_greenlets_wait_beside_each_other(name: str) -> None:
    """In a process that gevent has patched, with the module imported before and after."""
    for first, then in ("from forebay import waiting", "monkey.patch_all()"), ("monkey.patch_all()", ""):
        done = subprocess.run(
            [sys.executable, "-c", GREENLETS.format(name=name, first=first, then=then)],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "served in order\n"


GREENLETS = """
from gevent import monkey
{first}
{then}
import gevent
import gevent.hub
from forebay import SlidingLog, Store, TokenBucket, waiting

with Store("{name}", keys=100) as store:
    for limiter in SlidingLog(store, "log", "1 per 5 ms", keys=8), TokenBucket(store, "bucket", "200/second", burst=1):
        limiter.reset("k")
        assert limiter.allow("k")
        begun, order = [], []

        def work(who):
            begun.append(who)
            assert limiter.wait("k")
            order.append(who)

        asleep = []

        def tick():
            while len(order) < 10:
                asleep.append(len(begun) - len(order))
                gevent.sleep(0.0001)

        def give_up():
            limiter.wait("k")
            raise AssertionError("this one was killed")

        ticker = gevent.spawn(tick)
        greenlets = [gevent.spawn(work, who) for who in range(5)]
        gevent.sleep(0)
        killed = gevent.spawn(give_up)
        gevent.sleep(0)
        greenlets += [gevent.spawn(work, who) for who in range(5, 10)]
        gevent.sleep(0)
        killed.kill()
        gevent.joinall(greenlets, raise_error=True)
        ticker.join()
        assert order == list(range(10)), order
        # Another greenlet ran while several slept.
        assert max(asleep) > 1, asleep
        assert waiting._queues == {{}}
print("served in order")
"""
