"""SIGKILL at random instructions: nothing is admitted twice, nothing is counted that wasn't, nobody waits."""

from __future__ import annotations

import os
import random
import time

import pytest
from process_helpers import (
    Crew,
    SharedNumbers,
    Worker,
    claim_count,
    kind_of,
    most_admitted,
    nanoseconds,
    path_of,
    read_cells,
    repeated_members,
    wait_until,
)

from penstock import Store, TokenBucket, layout
from penstock.testing import ManualClock

WORKERS = 4
KILLS = 300
HOT_KEYS = 4
HOT_RATE, HOT_BURST = "50_000/second", 100
FRESH_KEYS = 500_000
REFILLS_NOTHING = "10000/year"
NUMBERS = 5


class Slot:
    """Where the workers that follow each other in one place say what they got an answer to."""

    def __init__(self, numbers: SharedNumbers, index: int) -> None:
        self.numbers, self.base = numbers, index * NUMBERS

    def add(self, what: int, count: int = 1) -> None:
        self.numbers[self.base + what] += count

    def get(self, what: int) -> int:
        return self.numbers[self.base + what]


LOOPS, HOT_ADMITTED, HOT_DECIDED, FRESH_ADMITTED, POSITION = range(5)


def test_killed_processes_break_no_limit(crew: Crew, name: str) -> None:
    """Hot keys against the exact bound, fresh keys that every process asks for once, and counters in between."""
    end = time.monotonic() + 60
    draws = random.Random(5)
    numbers = SharedNumbers(WORKERS * NUMBERS)
    # How often each fresh key was admitted, one row per slot.
    answers = SharedNumbers(WORKERS * FRESH_KEYS // 8).values.cast("B")
    slots = [Slot(numbers, i) for i in range(WORKERS)]
    with Store(name, keys=2 * FRESH_KEYS) as store:
        begun_ns = nanoseconds()
        hot = TokenBucket(store, "hot", HOT_RATE, HOT_BURST)
        workers = [crew.start(_work, i, slots, name, answers) for i in range(WORKERS)]
        killed = 0
        last = store.stats().limiters["hot"]
        while killed < KILLS and time.monotonic() < end:
            victim = draws.randrange(WORKERS)
            loops = slots[victim].get(LOOPS)
            wait_until(lambda v=victim, n=loops: slots[v].get(LOOPS) > n + draws.randrange(20), "a worker's loop")
            for _ in range(draws.randrange(2000)):
                pass
            workers[victim].kill()
            killed += 1
            crew.workers.remove(workers[victim])
            workers[victim] = crew.start(_work, victim, slots, name, answers)
            if killed % 10 == 0:
                stats = store.stats().limiters["hot"]
                assert stats.allowed >= last.allowed
                assert stats.denied >= last.denied
                last = stats
        seen = [slot.get(LOOPS) for slot in slots]
        wait_until(lambda: all(s.get(LOOPS) > n for s, n in zip(slots, seen, strict=True)), "progress after the kills")
        for worker in workers:
            worker.kill()
        elapsed_ns = nanoseconds() - begun_ns
        stats = store.stats()

        bound = HOT_KEYS * most_admitted(HOT_RATE, HOT_BURST, elapsed_ns)
        answered = sum(slot.get(HOT_ADMITTED) for slot in slots)
        assert answered <= stats.limiters["hot"].allowed <= bound
        assert stats.limiters["hot"].denied > 0 < answered
        decided = sum(slot.get(HOT_DECIDED) for slot in slots)
        ended = killed + len(workers)
        # Each kill loses the answers of one loop at the most.
        assert decided <= stats.limiters["hot"].allowed + stats.limiters["hot"].denied <= decided + ended * HOT_LOOP
        assert hot.peek("0").limit == HOT_BURST

        fresh = stats.limiters["fresh"]
        per_key = [sum(column) for column in zip(*_rows(answers, max(s.get(POSITION) for s in slots)), strict=True)]
        assert max(per_key) == 1
        assert sum(slot.get(FRESH_ADMITTED) for slot in slots) <= fresh.allowed
        # A kill after a promotion and before its count leaves one more member than counted insertions.
        assert fresh.inserted <= stats.live_keys <= fresh.inserted + HOT_KEYS + ended * FRESH_LOOP
        assert fresh.evicted == fresh.full == 0
        assert repeated_members(path_of(name)) == []
        assert stats.total.cas_retries > 0, "the processes did not race"
        used = [line for line in _owned_lines(name) if line]
        assert len(used) <= 2 * (WORKERS + 2), "a dead process's counter lines were not reused"


HOT_LOOP = 50
FRESH_LOOP = 20


def _work(me: int, slots: list[Slot], name: str, answers: memoryview) -> None:
    slot, row = slots[me], me * FRESH_KEYS
    with Store(name, keys=2 * FRESH_KEYS) as store:
        hot = TokenBucket(store, "hot", HOT_RATE, HOT_BURST).allow
        fresh = TokenBucket(store, "fresh", REFILLS_NOTHING, 1).allow
        hot_keys = [str(key) for key in range(HOT_KEYS)]
        while True:
            admitted = sum([hot(hot_keys[i % HOT_KEYS]) for i in range(HOT_LOOP)])
            slot.add(HOT_ADMITTED, admitted)
            slot.add(HOT_DECIDED, HOT_LOOP)
            # From where the one furthest ahead is, so that they meet at the same fresh keys.
            first = max(other.get(POSITION) for other in slots)
            for key in range(first, min(first + FRESH_LOOP, FRESH_KEYS)):
                if fresh(key):
                    answers[row + key] += 1
                    slot.add(FRESH_ADMITTED)
                slot.numbers[slot.base + POSITION] = key + 1
            slot.add(LOOPS)


def _rows(answers: memoryview, length: int) -> list[memoryview]:
    return [answers[row * FRESH_KEYS : row * FRESH_KEYS + length] for row in range(WORKERS)]


def _owned_lines(name: str) -> list[int]:
    with open(path_of(name), "rb") as file:
        raw = os.pread(file.fileno(), layout.OWNED_COUNTER_LINES * layout.COUNTER_LINE.size, layout.COUNTERS_OFFSET)
    return [values[0] for values in layout.COUNTER_LINE.iter_unpack(raw)]


def test_claims_of_killed_processes_are_helped_or_given_up(crew: Crew, name: str) -> None:
    """Kills in the middle of insertions: each claim left behind is promoted by the next who asks for its key, or its
    cell is free again three seconds later."""
    draws = random.Random(7)
    progress = SharedNumbers(1)
    left_behind = promoted = 0
    clock = ManualClock(1000.0)
    with Store(name, keys=1, on_full="deny", clock=clock) as store:
        fresh = TokenBucket(store, "fresh", "1000/second", 1)
        cells = len(read_cells(path_of(name)))
        for turn in range(150):
            before = progress[0]
            worker = crew.start(_insert_only, name, turn, progress)
            wait_until(lambda before=before: progress[0] > before, "an insertion")
            for _ in range(draws.randrange(3000)):
                pass
            _kill(crew, worker)
            claims = [tag for tag, _ in read_cells(path_of(name)) if kind_of(tag) == layout.KIND_CLAIM]
            left_behind += len(claims)
            if claims and turn % 2:
                # The keys that it may have been busy with: whoever asks is not held up, and takes the claim over.
                fresh.allow_many([(turn, key) for key in range(40)])
                tags = {tag for tag, _ in read_cells(path_of(name))}
                promoted += sum(tag not in tags for tag in claims)
            clock.advance(4.0)
        clock.advance(4.0)
        assert left_behind >= 5, "no kill fell between a claim and its promotion"
        assert promoted >= 1, "no claim was taken over"
        assert store.stats().live_keys == 0
        # Every cell can be used.
        fresh.allow_many([("fill", key) for key in range(40 * cells)])
        assert store.stats().live_keys == cells
        assert claim_count(path_of(name)) == 0
        assert repeated_members(path_of(name)) == []


def _insert_only(name: str, turn: int, progress: SharedNumbers) -> None:
    with Store(name, keys=1, on_full="deny", clock=ManualClock()) as store:
        fresh = TokenBucket(store, "fresh", "1000/second", 1)
        keys = [(turn, key) for key in range(40)]
        while True:
            fresh.allow_many(keys)
            progress[0] += 1
            for key in keys:
                fresh.reset(key)


@pytest.mark.parametrize("kind", ["private", "named"])
def test_forked_workers_of_one_master_are_killed(crew: Crew, name: str, kind: str) -> None:
    """As a server does: the store is made before the fork and every worker is replaced again and again."""
    burst = 300_000
    numbers = SharedNumbers(WORKERS)
    draws = random.Random(11)
    with Store.private(keys=1000) if kind == "private" else Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, burst)
        assert bucket.allow("key")
        workers = [crew.start(_allow_and_count, bucket, numbers, i) for i in range(WORKERS)]
        for _ in range(100):
            victim = draws.randrange(WORKERS)
            for _ in range(draws.randrange(30_000)):
                pass
            _kill(crew, workers[victim])
            workers[victim] = crew.start(_allow_and_count, bucket, numbers, victim)
        wait_until(lambda: not bucket.peek("key"), "the end of the burst")
        for worker in workers:
            worker.kill()
        answered = sum(numbers) + 1
        stats = store.stats().limiters["api"]
        assert burst - 100 - WORKERS <= answered <= stats.allowed <= burst
        assert bucket.peek("key").remaining == 0


def _allow_and_count(bucket: TokenBucket, numbers: SharedNumbers, me: int) -> None:
    while True:
        if bucket.allow("key"):
            numbers[me] += 1


def _kill(crew: Crew, worker: Worker) -> None:
    worker.kill()
    crew.workers.remove(worker)
