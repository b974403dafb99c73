"""Bad bytes in a segment that is in use: no crash, no hang, no foreign exception; what wasn't hit stays exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from process_helpers import (
    Crew,
    Meeting,
    SharedNumbers,
    counter_lines,
    kind_of,
    path_of,
    read_cells,
    wait_until,
)

from forebay import Store, StoreStats, TokenBucket
from forebay.errors import DamagedSegment, ForebayError
from forebay.segment import layout
from forebay.testing import ManualClock

REFILLS_NOTHING = "10000/year"
KEYS = 2000


class Vandal:
    """Writes to a segment's file what doesn't belong there."""

    def __init__(self, name: str, seed: int) -> None:
        self.draws = random.Random(seed)
        self.path = Path(path_of(name))
        self.size = self.path.stat().st_size

    def write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            file.write(data)

    def garbage(self, size: int) -> bytes:
        if self.draws.random() < 0.5:
            return self.draws.randbytes(size)
        return bytes([self.draws.choice((0xFF, 0x00, 0x80, 0x7F, 0x01))]) * size

    def hit_table(self) -> None:
        cell = self.draws.randrange((self.size - layout.TABLE_OFFSET) // layout.CELL.size)
        start, size = self.draws.choice(((0, 8), (8, 8), (0, 16), (3, 1), (12, 4)))
        self.write(layout.TABLE_OFFSET + cell * layout.CELL.size + start, self.garbage(size))

    def hit_counters(self) -> None:
        line = self.draws.choice((self.draws.randrange(8), self.draws.randrange(1024)))
        self.write(layout.COUNTERS_OFFSET + line * layout.COUNTER_LINE.size, self.garbage(64))

    def hit_limiters(self) -> None:
        entry = self.draws.choice((self.draws.randrange(4), self.draws.randrange(layout.LIMITER_CAPACITY)))
        self.write(layout.LIMITERS_OFFSET + entry * layout.LIMITER_ENTRY.size, self.garbage(64))

    def hit_header(self) -> None:
        """Attached processes have read the header already, except a manual clock's time."""
        self.write(self.draws.randrange(96, 4096 - 16), self.garbage(16))


@pytest.mark.parametrize("on_full", ["evict", "deny", "allow"])
@pytest.mark.parametrize("clock", ["monotonic", "manual"])
def test_random_damage_everywhere_under_load(crew: Crew, name: str, clock: str, on_full: str) -> None:
    stop = SharedNumbers(1)
    progress = SharedNumbers(4)
    with _store(name, clock, on_full) as store:
        vandal = Vandal(name, 23)
        workers = [crew.start(_use_everything, i, name, clock, on_full, progress, stop) for i in range(4)]
        wait_until(lambda: min(progress.values), "the first decisions")
        for turn in range(3000):
            vandal.hit_table()
            if turn % 4 == 0:
                vandal.hit_counters()
            if turn % 40 == 0:
                vandal.hit_limiters()
            if turn % 40 == 20:
                vandal.hit_header()
            if turn % 400 == 0:
                _stats(store)
        seen = list(progress)
        wait_until(lambda: all(p > s + 3 for p, s in zip(progress, seen, strict=True)), "progress after the damage")
        stop[0] = 1
        crew.results(workers)
        _stats(store)


def _store(name: str, clock: str, on_full: str) -> Store:
    return Store(
        name,
        keys=1,
        on_full=on_full,  # type: ignore[arg-type]
        clock=ManualClock(1000.0) if clock == "manual" else "monotonic",
    )


def _stats(store: Store) -> StoreStats | None:
    try:
        stats = store.stats()
    except DamagedSegment:
        return None
    assert 0 <= stats.live_keys <= 1024
    assert all(isinstance(limiter, str) for limiter in stats.limiters)
    return stats


def _use_everything(me: int, name: str, clock: str, on_full: str, progress: SharedNumbers, stop: SharedNumbers) -> None:
    """Everything a limiter can do; nothing here can raise anything but ForebayError."""
    draws = random.Random(me)
    turn = 0
    while not stop[0]:
        with _store(name, clock, on_full) as store:
            try:
                buckets = [TokenBucket(store, f"limiter {draws.randrange(20)}", "1000/second", 5) for _ in range(2)]
            except ForebayError:
                # The damage took all places in the list of limiters.
                progress[me] += 1
                continue
            for _ in range(10):
                for bucket in buckets:
                    keys = [draws.randrange(400) for _ in range(200)]
                    for key in keys:
                        bucket.allow(key)
                    for key in keys[:20]:
                        decision = bucket.hit(key, 2)
                        assert 0 <= decision.remaining <= decision.limit == 5
                        repr(decision)
                        bucket.peek(key)
                        bucket.refund(key)
                        bucket.reset(key)
                    bucket.allow_many(keys * 8)
                progress[me] += 1
            turn += 1
            if turn % 5 == 0:
                _stats(store)


def test_keys_that_damage_did_not_hit_stay_exact(crew: Crew, name: str) -> None:
    """Damage falls on cells of other keys, and on free cells, while all keys are hammered."""
    burst = 300
    with Store(name, keys=4 * KEYS) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, burst)
        # Find out where each key lives.
        cell_of = {}
        before = [tag for tag, _ in read_cells(path_of(name))]
        for key in range(KEYS):
            assert bucket.allow(key)
            if key % 100 == 99:
                after = [tag for tag, _ in read_cells(path_of(name))]
                for cell, (old, new) in enumerate(zip(before, after, strict=True)):
                    if old != new:
                        cell_of[cell] = key
                before = after
        # By hundreds, so the damage leaves the first half of them out.
        spared = {cell for cell, last in cell_of.items() if last < KEYS // 2}
        targets = [cell for cell in range(len(before)) if cell not in spared]
        vandal = Vandal(name, 29)
        stop = SharedNumbers(1)
        meeting = Meeting(4)
        workers = [crew.start(_hammer_keys, i, meeting, name, burst, stop) for i in range(3)]
        meeting.wait(3)
        for _ in range(20_000):
            cell = vandal.draws.choice(targets)
            # A tag of a random key is not one of ours, at odds of 2**50.
            vandal.write(layout.TABLE_OFFSET + cell * layout.CELL.size, vandal.draws.randbytes(16))
        stop[0] = 1
        answers = crew.results(workers)
        admitted = [1 + sum(counts) for counts in zip(*answers, strict=True)]
        assert admitted[: KEYS // 2] == [burst] * (KEYS // 2)


def _hammer_keys(me: int, meeting: Meeting, name: str, burst: int, stop: SharedNumbers) -> list[int]:
    admitted = [0] * KEYS
    with Store(name, keys=4 * KEYS) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, burst)
        keys = list(range(KEYS))
        meeting.wait(me)
        for _ in range(burst + 1):
            for key, allowed in enumerate(bucket.allow_many(keys)):
                admitted[key] += allowed
        wait_until(lambda: stop[0], "the end of the damage")
        for key, allowed in enumerate(bucket.allow_many(keys)):
            admitted[key] += allowed
    return admitted


@pytest.mark.parametrize("state", [2**64 - 1, 2**63, 2**62, 2**62 + 2**48, 2**63 + 12345])
@pytest.mark.parametrize("ask", ["allow", "hit", "allow_many"])
def test_a_state_later_than_any_can_be_heals(name: str, ask: str, state: int) -> None:
    decide: dict[str, Callable[[TokenBucket], bool]] = {
        "allow": lambda bucket: bucket.allow("key"),
        "hit": lambda bucket: bool(bucket.hit("key")),
        "allow_many": lambda bucket: bucket.allow_many(["key"])[0],
    }
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 3)
        assert bucket.allow("key")
        [cell] = [index for index, (tag, _) in enumerate(read_cells(path_of(name))) if kind_of(tag) == layout.KIND_TAT]
        Vandal(name, 0).write(layout.TABLE_OFFSET + cell * layout.CELL.size + 8, state.to_bytes(8, "little"))
        assert store.stats().live_keys == 0
        peeked = bucket.peek("key")
        assert (peeked.allowed, peeked.remaining) == (True, 3)
        assert [decide[ask](bucket) for _ in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("damage", ["refund", "reset"])
def test_amending_a_damaged_state_does_no_harm(name: str, damage: str) -> None:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 3)
        assert bucket.allow("key")
        [cell] = [index for index, (tag, _) in enumerate(read_cells(path_of(name))) if kind_of(tag) == layout.KIND_TAT]
        for state in (2**62, 2**64 - 1):
            Vandal(name, 0).write(layout.TABLE_OFFSET + cell * layout.CELL.size + 8, state.to_bytes(8, "little"))
            getattr(bucket, damage)("key")
            assert [bucket.allow("key") for _ in range(5)] == [True] * 3 + [False] * 2


def test_a_whole_table_of_garbage_is_usable_again(name: str) -> None:
    """Garbage that looks like claims goes with time, the rest at once."""
    draws = random.Random(31)
    clock = ManualClock(1000.0)
    with Store(name, keys=1, on_full="deny", clock=clock) as store:
        bucket = TokenBucket(store, "api", "1000/second", 1)
        vandal = Vandal(name, 0)
        cells = len(read_cells(path_of(name)))
        garbage = b"".join(
            layout.CELL.pack(draws.getrandbits(64), draws.choice((2**64 - 1, 2**63, draws.getrandbits(64) | 2**62)))
            for _ in range(cells)
        )
        vandal.write(layout.TABLE_OFFSET, garbage)
        bucket.allow_many(list(range(20 * cells)))
        # An eighth looks like claims; half of those by their stamp not old enough to be abandoned.
        assert store.stats().live_keys > cells * 7 // 8
        for _ in range(3):
            # A stamp's range is 208 days: half of it later every garbled claim has been old once.
            clock.advance(60 * 86_400)
            bucket.allow_many(list(range(40 * cells)))
        clock.advance(1)
        bucket.allow_many(list(range(40 * cells)))
        assert store.stats().live_keys == cells


def test_damaged_counters_do_not_touch_decisions(crew: Crew, name: str) -> None:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 1000)
        assert bucket.allow("key")
        vandal = Vandal(name, 0)
        for data in (b"\xff" * 64, bytes(64), vandal.draws.randbytes(64)):
            for line in range(layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY):
                vandal.write(layout.COUNTERS_OFFSET + line * layout.COUNTER_LINE.size, data)
            assert bucket.allow("key")
            assert crew.start(_allow_in_new_store, name).result()
            _stats(store)
        admitted = 1 + 2 * 3
        while bucket.allow("key"):
            admitted += 1
        assert admitted == 1000


def _allow_in_new_store(name: str) -> bool:
    with Store(name, keys=100) as store:
        return TokenBucket(store, "api", REFILLS_NOTHING, 1000).allow("key")


@pytest.mark.parametrize(
    "entry",
    [b"\xff" * 64, bytes(64), b"\x01" + bytes(63), bytes(8) + b"\xff" * 56, b"\x01" * 8 + b"\xff" * 8 + b"a" * 48],
    ids=["all ones", "all zeros", "a name of no length", "no hash", "a name too long"],
)
def test_damaged_limiter_entries(crew: Crew, name: str, entry: bytes) -> None:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        assert bucket.allow("key")
        Vandal(name, 0).write(layout.LIMITERS_OFFSET, entry)
        _stats(store)
        # State is found by the limiter's name, not by its place in the list.
        other = crew.start(_admitted_elsewhere, name)
        assert other.result() == 9
        assert not bucket.allow("key")
        stats = _stats(store)
        if stats is not None and "api" in stats.limiters:
            assert stats.limiters["api"].allowed >= 9


def _admitted_elsewhere(name: str) -> int:
    with Store(name, keys=100) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        return sum([bucket.allow("key") for _ in range(30)])


def test_every_limiter_entry_damaged(name: str) -> None:
    with Store(name, keys=100) as store:
        vandal = Vandal(name, 0)
        vandal.write(layout.LIMITERS_OFFSET, b"\xff" * layout.LIMITER_CAPACITY * layout.LIMITER_ENTRY.size)
        with pytest.raises(DamagedSegment) as caught:
            store.stats()
        assert path_of(name) in str(caught.value)
        assert "UTF-8" in caught.value.expected
        assert "unlink" in caught.value.remedy
        with pytest.raises(ForebayError, match="has all its 256 limiters"):
            TokenBucket(store, "new", "1/second")


def test_a_member_in_every_cell(crew: Crew, name: str) -> None:
    """The limit of that key is off until its members expire; nothing hangs."""
    crew.start(_use_a_table_of_one_key, name).result(deadline_s=20)


def _use_a_table_of_one_key(name: str) -> None:
    with Store(name, keys=1) as store:
        bucket = TokenBucket(store, "api", "1000/second", 5)
        assert bucket.allow("key")
        tag = next(tag for tag, _ in read_cells(path_of(name)) if kind_of(tag) == layout.KIND_TAT)
        Vandal(name, 0).write(layout.TABLE_OFFSET, layout.CELL.pack(tag, 0) * 1024)
        for _ in range(100):
            bucket.allow("key")
            bucket.allow_many([*range(100), "key"])
            bucket.refund("key")
        for _ in range(1024):
            bucket.reset("key")
        assert bucket.allow("key")


@pytest.mark.parametrize("line", ["first", "last"])
@pytest.mark.parametrize("on_full", ["evict", "deny"])
def test_copies_of_a_member_in_its_line(crew: Crew, name: str, line: str, on_full: str) -> None:
    """Every way in which damage could put one tag into several cells of a line: a decision ends, inside the table."""
    with _store(name, "monotonic", on_full) as store:
        bucket = TokenBucket(store, "api", "1000/second", 5)
        lines = len(read_cells(path_of(name))) // layout.CELLS_PER_LINE
        wanted = 0 if line == "first" else lines - 1
        for key in range(100_000):
            bucket.allow(key)
            cells = read_cells(path_of(name))
            tags = [tag for tag, _ in cells[wanted * 4 : wanted * 4 + 4] if tag]
            if tags:
                break
            bucket.reset(key)
        for cells_with_it in range(16):
            vandal = Vandal(name, 0)
            for cell in range(4):
                member = layout.CELL.pack(tags[0], 0) if cells_with_it >> cell & 1 else bytes(16)
                vandal.write(layout.TABLE_OFFSET + (wanted * 4 + cell) * layout.CELL.size, member)
            # A loop that doesn't end would hold the interpreter's lock: in a process that can be killed.
            answers = crew.start(_ask_for_everything, bucket, key).result(deadline_s=20)
            assert answers[:5] == [True] * 5, f"{cells_with_it:04b}"


def _ask_for_everything(bucket: TokenBucket, key: int) -> list[bool]:
    answers = [bucket.allow(key) for _ in range(5)]
    answers += bucket.allow_many([key] * 5)
    answers.append(bool(bucket.hit(key)))
    bucket.peek(key)
    bucket.refund(key)
    for _ in range(4):
        bucket.reset(key)
    answers.append(bucket.allow(key))
    return answers


def test_garbled_claims_of_the_requested_key_are_resolved(crew: Crew, name: str) -> None:
    """All 48 cells of a key's probe set claim it, as after 48 deaths; several processes request it at once."""
    for turn in range(20):
        with Store(name, keys=1, on_full="deny") as store:
            bucket = TokenBucket(store, "api", REFILLS_NOTHING, 3)
            assert bucket.allow(("key", turn))
            tag = next(tag for tag, _ in read_cells(path_of(name)) if kind_of(tag) == layout.KIND_TAT)
            claim = layout.CELL.pack(tag ^ layout.KIND_TAT ^ layout.KIND_CLAIM, 0)
            Vandal(name, 0).write(layout.TABLE_OFFSET, claim * 1024)
            results = crew.run(4, _ask_five_times, Meeting(4), name, turn)
            assert sum(results) == 3
            tags = [cell[0] for cell in read_cells(path_of(name))]
            assert tags.count(tag) == 1
        Store.unlink(name)


def _ask_five_times(me: int, meeting: Meeting, name: str, turn: int) -> int:
    with Store(name, keys=1, on_full="deny") as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 3)
        meeting.wait(me)
        return sum([bucket.allow(("key", turn)) for _ in range(5)])


def test_lines_named_for_limiters_that_do_not_exist(name: str) -> None:
    with Store(name, keys=100) as store:
        for line in range(10):
            Vandal(name, 0).write(
                layout.COUNTERS_OFFSET + line * layout.COUNTER_LINE.size, layout.COUNTER_LINE.pack(2**32 - 1, *[7] * 8)
            )
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        assert bucket.allow("key")
        assert store.stats().limiters["api"].allowed == 1
        assert counter_lines(path_of(name))[10]["allowed"] == 1
