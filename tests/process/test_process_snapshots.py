"""Snapshots of stores in use, and the copying process killed at any moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from process_helpers import Crew, SharedNumbers, wait_until

from forebay import BucketedWindow, FixedWindow, SlidingLog, Store, TokenBucket
from forebay.errors import SegmentBusy
from forebay.snapshots import resize, restore, snapshot
from forebay.verification import verify

WRITERS: Final = 3
KEYS: Final = 4
LIMIT: Final = 100_000
KINDS: Final[dict[str, Callable[[Store], Any]]] = {
    "bucket": lambda store: TokenBucket(store, "bucket", f"{LIMIT}/year"),
    "window": lambda store: FixedWindow(store, "window", f"{LIMIT}/day", align="first"),
    "log": lambda store: SlidingLog(store, "log", f"{LIMIT}/day", keys=KEYS),
    "buckets": lambda store: BucketedWindow(store, "buckets", f"{LIMIT}/day", 24, keys=KEYS),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "forebay-shop"


def _write(path: Path, writer: int, numbers: SharedNumbers, stop: SharedNumbers) -> None:
    """Spend permits. The writer's numbers are, for each limiter and key, requests begun and requests done."""
    with Store("a", keys=1000, path=path) as store:
        limiters = [make(store) for make in KINDS.values()]
        for step in itertools.count():
            if stop[0]:
                return
            for number, limiter in enumerate(limiters):
                at = ((writer * len(limiters) + number) * KEYS + step % KEYS) * 2
                numbers[at] += 1
                numbers[at + 1] += limiter.allow(step % KEYS)
            # Keys that come and go, and others that stay.
            limiters[0].allow(("new", writer, step % 200))
            limiters[0].reset(("new", writer, (step + 100) % 200))


def test_a_store_in_use(path: Path, tmp_path: Path, crew: Crew) -> None:
    """Each key's state is one that it had between the begin and the end of the snapshot."""
    numbers, stop = SharedNumbers(WRITERS * len(KINDS) * KEYS * 2), SharedNumbers(1)
    with Store("a", keys=1000, path=path) as store:
        for make in KINDS.values():
            make(store)
    writers = [crew.start(_write, path, writer, numbers, stop) for writer in range(WRITERS)]
    wait_until(lambda: all(numbers), "a request of each writer to each key")

    def total(number: int, key: int, which: int) -> int:
        return sum(numbers[((writer * len(KINDS) + number) * KEYS + key) * 2 + which] for writer in range(WRITERS))

    places = list(itertools.product(range(len(KINDS)), range(KEYS)))
    taken = []
    for round_number in range(5):
        file = tmp_path / f"{round_number}.snapshot"
        least = {place: total(*place, 1) for place in places}
        snapshot(path, file)
        taken.append((file, least, {place: total(*place, 0) for place in places}))
    stop[0] = 1
    crew.results(writers)
    for file, least, most in taken:
        for keys in (1000, 5000):
            target = tmp_path / "forebay-restored"
            restore(file, target, keys=keys, replace=True)
            assert verify(target).sound
            with Store("a", keys=keys, path=target) as store:
                limiters = [make(store) for make in KINDS.values()]
                for number, key in places:
                    used = LIMIT - limiters[number].peek(key).remaining
                    # A bucket refills a permit in five minutes.
                    slack = 5 if number == 0 else 0
                    assert least[number, key] - slack <= used <= most[number, key]


def _keep_copying(path: Path, file: Path) -> None:
    while True:
        snapshot(path, file)


def test_a_killed_snapshot_leaves_the_one_before(path: Path, tmp_path: Path, crew: Crew) -> None:
    file, dice = tmp_path / "shop.snapshot", random.Random(1)
    with Store("a", keys=50_000, path=path) as store:
        assert TokenBucket(store, "api", "10/day").allow_many(range(10_000)) is not None
    snapshot(path, file)
    for _ in range(15):
        worker = crew.start(_keep_copying, path, file)
        time.sleep(dice.uniform(0, 0.05))
        worker.kill()
        assert restore(file, tmp_path / "forebay-restored", replace=True).carried_keys == 10_000
        assert {one.name for one in tmp_path.iterdir()} <= {
            *("forebay-shop", "forebay-restored", "shop.snapshot", "shop.snapshot.partial"),
        }
    snapshot(path, file)
    assert not Path(f"{file}.partial").exists()


def _keep_resizing(path: Path) -> None:
    for keys in itertools.cycle((20_000, 30_000)):
        resize(path, keys)


def test_a_killed_resize_leaves_one_whole_store(path: Path, tmp_path: Path, crew: Crew) -> None:
    dice = random.Random(2)
    with Store("a", keys=20_000, path=path) as store:
        assert TokenBucket(store, "api", "10/day").allow_many(range(10_000)) is not None
        assert SlidingLog(store, "log", "10/day", keys=10).hit("key", 10)
    for _ in range(15):
        worker = crew.start(_keep_resizing, path)
        time.sleep(dice.uniform(0, 0.1))
        worker.kill()
        report = verify(path)
        assert report.sound
        assert (report.keys in (20_000, 30_000), report.live_keys) == (True, 10_000)
        assert {one.name for one in tmp_path.iterdir()} <= {"forebay-shop", ".forebay-shop.new"}
    resize(path, 40_000)
    assert os.listdir(tmp_path) == ["forebay-shop"]
    with Store("a", keys=40_000, path=path) as store:
        assert not SlidingLog(store, "log", "10/day", keys=10).allow("key")


def test_a_process_that_starts_during_a_resize_uses_the_new_store(path: Path, crew: Crew) -> None:
    """Nothing that it spends is lost."""

    def spend(writer: int) -> int:
        spent = 0
        for _ in range(50):
            with Store("a", keys=20_000, path=path) as store:
                spent += FixedWindow(store, "api", "100/day", align="first").allow("key")
        return spent

    with Store("a", keys=20_000, path=path) as store:
        FixedWindow(store, "api", "100/day", align="first").allow("another")
    workers = [crew.start(spend, writer) for writer in range(2)]
    resized = 0
    while any(worker.is_running() for worker in workers):
        with contextlib.suppress(SegmentBusy):
            resize(path, 20_000)
            resized += 1
    assert resized
    assert sum(crew.results(workers)) == 100
    with Store("a", keys=20_000, path=path) as store:
        assert FixedWindow(store, "api", "100/day", align="first").peek("key").remaining == 0


def test_a_process_that_attaches_meanwhile_waits(path: Path, crew: Crew) -> None:
    started = []

    def spend() -> bool:
        with Store("a", keys=2000, path=path) as store:
            return FixedWindow(store, "api", "100/day", align="first").allow("key")

    def begin(what: str) -> Callable[[int, int], None]:
        if what == "verifying":
            started.append(crew.start(spend))
            time.sleep(0.5)
        return lambda done, total: None

    with Store("a", keys=1000, path=path) as store:
        assert FixedWindow(store, "api", "100/day", align="first").allow("key")
    resize(path, 2000, progress=begin)
    assert crew.results(started) == [True]
    with Store("a", keys=2000, path=path) as store:
        assert FixedWindow(store, "api", "100/day", align="first").peek("key").remaining == 98
