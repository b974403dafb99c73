"""Permits held by several processes: never more than the limit, and none is lost, however a holder ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from functools import partial
from typing import Any

import pytest
from process_helpers import Crew, Meeting, SharedNumbers, Worker, extents, path_of, wait_until

from forebay import AllOf, Concurrency, FixedWindow, Store, TokenBucket
from forebay.segment.process_identity import BY_PIDFD, PID_BITS, this_process
from forebay.testing import ManualClock

KEY = "k"
LEASE = 3600


def hold_and_sleep(limiter: Concurrency, count: int, ready: SharedNumbers, who: int = 0) -> None:
    """Hold `count` permits until this process is ended."""
    for _ in range(count):
        if not limiter.acquire(KEY):
            raise AssertionError("there was no permit to hold")
    ready[who] = 1
    signal.pause()


def start_holder(crew: Crew, limiter: Concurrency, count: int) -> Worker:
    ready = SharedNumbers(1)
    worker = crew.start(hold_and_sleep, limiter, count, ready)
    wait_until(lambda: ready[0] or not worker.is_running(), "the permits were taken")
    assert ready[0]
    return worker


def acquire_soon(limiter: Concurrency, cost: int = 1) -> Any:
    """Ended processes are looked for no more than once in a tenth of a millisecond."""
    found = []

    def acquired() -> bool:
        lease = limiter.acquire(KEY, cost)
        if lease:
            found.append(lease)
        return bool(lease)

    wait_until(acquired, "a permit")
    return found[0]


def has_passed(numbers: SharedNumbers, who: int, number: int) -> bool:
    return numbers[who] > number


def acquirable(limiter: Concurrency) -> int:
    """How many permits can be had, which must be all that there are; gives them back."""
    lease = acquire_soon(limiter, limiter.limit)
    more = bool(limiter.acquire(KEY))
    lease.release()
    return limiter.limit + more


@pytest.mark.parametrize("limit", [1, 3, 200, 5000])
def test_a_killed_holder_gives_its_permits_back_at_once(crew: Crew, limit: int) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", limit, lease=LEASE, keys=1)
    holder = start_holder(crew, limiter, limit)
    assert not limiter.acquire(KEY)
    assert limiter.peek(KEY).remaining == 0
    holder.kill()
    assert acquire_soon(limiter, limit).release()
    assert acquirable(limiter) == limit


def test_a_dead_holder_gives_its_permits_back_before_its_parent_waits_for_it(crew: Crew) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", 2, lease=LEASE, keys=1)
    holder = start_holder(crew, limiter, 2)
    assert not limiter.acquire(KEY)
    os.kill(holder.pid, signal.SIGKILL)
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert acquire_soon(limiter, 2).release()


def test_a_killed_holder_gives_its_permit_back_to_several_limits(crew: Crew) -> None:
    store = Store.private(keys=1)
    limiter = Concurrency(store, "c", 2, lease=LEASE, keys=1)
    start_holder(crew, limiter, 2).kill()
    both = AllOf(limiter, FixedWindow(store, "window", "10/hour"))
    wait_until(lambda: both.allow(KEY), "a permit")
    assert both.allow(KEY)
    assert not both.allow(KEY)


def test_a_pid_that_was_used_again_is_another_process(crew: Crew, name: str) -> None:
    limiter = Concurrency(Store(name, keys=1), "c", 2, lease=LEASE, keys=1)
    holder = start_holder(crew, limiter, 2)
    assert not limiter.acquire(KEY)
    (extent,) = extents(path_of(name))
    with open(path_of(name), "r+b") as file:
        memory = bytearray(os.pread(file.fileno(), extent["bytes"], extent["offset"]))
        words = memoryview(memory).cast("Q")
        owned = [at for at in range(0, len(words), 2) if words[at] % 2**PID_BITS == holder.pid and words[at + 1]]
        assert len(owned) == 2
        # The live process of this pid did not begin when the owner of the first slot did.
        words[owned[0]] ^= 1 << PID_BITS
        os.pwrite(file.fileno(), memory, extent["offset"])
    assert acquire_soon(limiter)
    for _ in range(1000):
        assert not limiter.acquire(KEY)


def test_a_stopped_holder_loses_its_permit_at_the_end_of_the_lease(crew: Crew) -> None:
    clock = ManualClock(1000)
    limiter = Concurrency(Store.private(keys=1, clock=clock), "c", 1, lease=30, keys=1)
    go_on = Meeting(2)

    def hold() -> tuple[bool, bool]:
        lease = limiter.acquire(KEY)
        go_on.wait(1)
        go_on.wait(1)
        return lease.renew(), lease.release()

    holder = crew.start(hold)
    go_on.wait(0)
    holder.pause()
    clock.set_ns(1030 * 10**9 - 1)
    for _ in range(1000):
        assert not limiter.acquire(KEY)
    clock.set_ns(1030 * 10**9)
    mine = limiter.acquire(KEY)
    assert mine
    holder.resume()
    go_on.wait(0)
    assert holder.result() == (False, False)
    assert mine.release()


def test_a_holder_in_another_pid_namespace_is_never_taken_for_dead(as_root: None, name: str) -> None:
    limiter = Concurrency(Store(name, keys=1), "c", 1, lease=LEASE, keys=1)
    hold = (
        "import sys, forebay\n"
        f"limiter = forebay.Concurrency(forebay.Store({name!r}, keys=1), 'c', 1, lease={LEASE}, keys=1)\n"
        f"lease = limiter.acquire({KEY!r})\n"
        "print('held' if lease else 'denied', flush=True)\n"
        "input()\n"
        "print(lease.release())\n"
    )
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        for _ in range(20_000):
            assert not limiter.acquire(KEY)
        assert holder.communicate("\n", timeout=60)[0] == "True\n"
    assert limiter.acquire(KEY)


REUSE_PIDS = """
import ctypes, os, signal, sys
from pathlib import Path
import forebay

if ctypes.CDLL(None).mount(b"proc", b"/proc", b"proc", 0, None):
    raise OSError("mount")


def forked(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def ended(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def started(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def hold():
    limiter.allow("k")
    os.write(writing, b"held")
    signal.pause()


limiter = forebay.Concurrency(forebay.Store.private(keys=1), "c", 1, lease=3600, keys=1)
reading, writing = os.pipe()
for attempt in range(2000):
    limiter.reset("k")
    holder = forked(hold)
    os.read(reading, 4)
    began = started(holder)
    ended(holder)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(holder - 1))
    other = forked(signal.pause)
    if other == holder and started(other) == began:
        print(limiter.allow("k"))
        break
    ended(other)
"""


def test_a_pid_that_was_used_again_within_one_clock_tick_is_another_process(as_root: None) -> None:
    """Where the system numbers pidfds by process, Linux 6.9 and later; before that it is taken for the holder."""
    command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", sys.executable, "-c", REUSE_PIDS]
    answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    are_distinguished = this_process() >> PID_BITS & BY_PIDFD != 0
    assert answer.stdout == f"{are_distinguished}\n"


def test_owners_in_other_time_namespaces_are_distinguished(as_root: None, name: str) -> None:
    """A process that reads another one's start time there gets a different number."""
    limiter = Concurrency(Store(name, keys=1), "c", 1, lease=LEASE, keys=1)
    lease = limiter.acquire(KEY)
    ask = (
        "import forebay\n"
        f"limiter = forebay.Concurrency(forebay.Store({name!r}, keys=1), 'c', 1, lease={LEASE}, keys=1)\n"
        f"print(any([limiter.allow({KEY!r}) for _ in range(1000)]))\n"
    )
    command = ["unshare", "--time", "--boottime", "5000", "--fork", sys.executable, "-c", ask]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stdout == "False\n"
    assert lease.release()


def test_a_waiter_in_another_process_gets_the_permit(crew: Crew) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", 1, lease=LEASE, keys=1)
    lease = limiter.acquire(KEY)
    began = SharedNumbers(4)

    def wait(who: int) -> bool:
        began[who] = 1
        with limiter.hold(KEY, timeout=60) as held:
            return bool(held)

    workers = [crew.start(wait, who) for who in range(4)]
    wait_until(lambda: min(began) == 1, "the waiting")
    assert all(worker.is_running() for worker in workers)
    lease.release()
    assert crew.results(workers) == [True] * 4
    assert acquirable(limiter) == 1


def test_a_waiter_gets_the_permit_of_a_killed_process(crew: Crew) -> None:
    limiter = Concurrency(Store.private(keys=1), "c", 1, lease=LEASE, keys=1)
    holder = start_holder(crew, limiter, 1)
    threading.Timer(0.05, holder.kill).start()
    with limiter.hold(KEY, timeout=60) as lease:
        assert lease


def test_threads_of_several_processes(crew: Crew) -> None:
    """A denied request looks for ended processes; several threads may do so at once."""
    limiter = Concurrency(Store.private(keys=1), "c", 2, lease=LEASE, keys=1)
    start_holder(crew, limiter, 1)
    holder = start_holder(crew, limiter, 1)
    errors: list[BaseException] = []
    granted: list[object] = []

    def ask() -> None:
        try:
            granted.extend(1 for _ in range(3000) if limiter.allow(KEY))
        except BaseException as error:
            errors.append(error)

    def run() -> None:
        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        run()
        assert (errors, granted) == ([], [])
        holder.kill()
        while not (errors or granted):  # it is looked for now and then
            run()
    finally:
        sys.setswitchinterval(interval)
    assert (errors, granted) == ([], [1])


@pytest.mark.parametrize("seed", range(8))
def test_damage_of_any_bytes_ends_no_process(crew: Crew, name: str, seed: int) -> None:
    chance = random.Random(seed)
    limiter = Concurrency(Store(name, keys=1), "c", 70, lease=LEASE, keys=3)
    (extent,) = extents(path_of(name))
    with open(path_of(name), "r+b") as file:
        for _ in range(20):
            size = chance.choice([8, 64, 1024, extent["bytes"]])
            at = chance.randrange(0, extent["bytes"] - size + 1, 8)
            damage = chance.choice([chance.randbytes(size), b"\xff" * size, bytes(size)])
            os.pwrite(file.fileno(), damage, extent["offset"] + at)

            def use() -> None:
                for key in (KEY, "b", "c", "d", "e"):
                    lease = limiter.acquire(key, 2)
                    limiter.peek(key)
                    lease.renew()
                    lease.release()
                    limiter.hit(key)
                    limiter.refund(key)

            crew.start(use).result()


# --- several limits


def test_several_limits_admit_no_more_and_leave_nothing_behind(crew: Crew) -> None:
    store = Store.private(keys=10)
    window = FixedWindow(store, "window", "400/year")
    bucket = TokenBucket(store, "bucket", "300/year", burst=300)
    slots = Concurrency(store, "slots", 350, lease=LEASE, keys=1)
    limits = AllOf(window, bucket, slots)
    meeting = Meeting(4)

    def work(who: int) -> tuple[int, int]:
        chance = random.Random(who)
        admitted = refunded = 0
        meeting.wait(who)
        for _ in range(4000):
            cost = chance.choice([1, 1, 2, 5])
            if limits.hit(KEY, cost):
                if chance.random() < 0.5:
                    limits.refund(KEY, cost)
                    refunded += cost
                else:
                    admitted += cost
        while limits.allow(KEY):
            admitted += 1
        # The others may have denied what a request of this process took for a moment.
        meeting.wait(who)
        while who == 0 and limits.allow(KEY):
            admitted += 1
        meeting.wait(who)
        return admitted, refunded

    results = crew.run(4, work)
    admitted = sum(admitted for admitted, _ in results)
    assert sum(refunded for _, refunded in results) > 0
    assert admitted == 300
    assert window.peek(KEY).remaining == 100
    assert bucket.peek(KEY).remaining == 0
    # The holder of the slots has ended.
    assert acquirable(slots) == 350


def test_killed_between_several_limits_none_admits_more(crew: Crew) -> None:
    store = Store.private(keys=10)
    first = FixedWindow(store, "first", "100000000/year")
    second = FixedWindow(store, "second", "100000000/year")
    slots = Concurrency(store, "slots", 3, lease=LEASE, keys=1)
    limits = AllOf(first, slots, second)
    admitted = SharedNumbers(4)
    chance = random.Random(1)

    def work(who: int) -> None:
        while True:
            if limits.allow(KEY):
                admitted[who] += 1
                slots.refund(KEY)

    workers = [crew.start(work, who) for who in range(4)]
    kills = 30
    for _ in range(kills):
        who = chance.randrange(4)
        wait_until(partial(has_passed, admitted, who, admitted[who] + 20), "some requests")
        workers[who].kill()
        workers[who] = crew.start(work, who)
    for worker in workers:
        worker.kill()
    charged = [100_000_000 - window.peek(KEY).remaining for window in (first, second)]
    total = sum(admitted)
    # Limits are charged in order: the last limit's charges are all admissions, and those that a killed process hadn't
    # noted.
    assert total <= charged[1] <= charged[0] <= total + 2 * (kills + 4)
    assert acquirable(slots) == 3
