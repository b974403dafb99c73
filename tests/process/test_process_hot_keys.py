"""The record of hot keys with many processes: children of a fork note keys, and a kill leaves a whole record."""

from __future__ import annotations

import os
import random
import signal

from process_helpers import FREE_USER, Crew, SharedNumbers, as_user, path_of, wait_until

from forebay import HotKey, Store, TokenBucket
from forebay.core.limiter import hot_name_of
from forebay.segment.hot_keys import hot_digest
from forebay.testing import ManualClock

KEYS = [f"key {number}" for number in range(12)]


def _deny(bucket: TokenBucket, key: str, times: int) -> None:
    for _ in range(times):
        assert not bucket.allow(key)


def _digests(bucket: TokenBucket) -> dict[str, str]:
    return {hot_digest(hot_name_of(bucket, key)): key for key in KEYS}


def test_children_of_a_fork_note_keys_and_lose_hardly_one(crew: Crew, name: str, clock: ManualClock) -> None:
    with Store(name, keys=100, clock=clock, hot_keys=64) as store:
        bucket = TokenBucket(store, "api", "1/year")
        bucket.allow("key 0")
        crew.run(4, lambda me: _deny(bucket, "key 0", 500))
        # A note that loses four races is lost.
        assert 1000 <= sum(one.denied for one in store.hot_keys()) <= 2000


def _deny_for_ever(bucket: TokenBucket, begun: SharedNumbers, me: int) -> None:
    draw = random.Random(me)
    while True:
        key = draw.randrange(len(KEYS))
        begun[me * len(KEYS) + key] += 1
        bucket.allow(KEYS[key])


def test_a_killed_process_leaves_whole_notes(crew: Crew, name: str) -> None:
    draw = random.Random(22)
    begun = SharedNumbers(3 * len(KEYS))
    # Two lines for twelve keys: slots are taken and worn all the time.
    with Store(name, keys=100, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/year")
        for key in KEYS:
            bucket.allow(key)
        known = _digests(bucket)
        for _ in range(30):
            workers = [crew.start(_deny_for_ever, bucket, begun, me) for me in range(3)]
            goal = sum(begun) + draw.randrange(1, 3000)
            wait_until(lambda goal=goal: sum(begun) > goal, "denials")
            for worker in workers:
                worker.kill()
            found = store.hot_keys()
            assert found
            assert all(one.limiter == "api" for one in found)
            for one in found:
                number = KEYS.index(known[one.digest])
                assert one.denied <= sum(begun[me * len(KEYS) + number] for me in range(3))
            begun[0] += 1
            _deny(bucket, KEYS[0], 1)


def test_a_stopped_process_delays_no_note(crew: Crew, name: str) -> None:
    begun = SharedNumbers(len(KEYS))
    with Store(name, keys=100, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/year")
        for key in KEYS:
            bucket.allow(key)
        worker = crew.start(_deny_for_ever, bucket, begun, 0)
        wait_until(lambda: sum(begun) > 100, "denials")
        os.kill(worker.pid, signal.SIGSTOP)
        _deny(bucket, KEYS[1], 100)
        assert any(one.denied for one in store.hot_keys())
        worker.kill()


def _read_from_outside(name: str) -> list[HotKey]:
    with Store.attach(name) as store:
        return store.hot_keys()


def test_processes_that_may_only_read_see_the_record(crew: Crew, as_root: None, name: str, clock: ManualClock) -> None:
    """A worker that gave up root, and an operator."""
    with Store(name, keys=100, clock=clock, hot_keys=8) as store:
        bucket = TokenBucket(store, "api", "1/year")
        bucket.allow("key 0")
        _deny(bucket, "key 0", 7)
        found = store.hot_keys()
        assert [one.denied for one in found] == [7]
        assert crew.start(as_user, FREE_USER, FREE_USER, [], store.hot_keys).result() == found
        os.chmod(path_of(name), 0o644)
        assert crew.start(as_user, FREE_USER, FREE_USER, [], _read_from_outside, name).result() == found
