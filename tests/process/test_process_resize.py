"""A store resized while processes decide by it: nothing is lost, whatever becomes of the resizing process."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from process_helpers import Crew, SharedNumbers, Worker, wait_until

from forebay import FixedWindow, SlidingLog, Store, TokenBucket
from forebay.errors import DamagedSegment, SegmentBusy, SegmentSpaceError
from forebay.segment import layout
from forebay.segment.extents import append_table, give_back_table
from forebay.snapshots import resize, restore, snapshot
from forebay.verification import verify
from forebay.verification.mapped_segment import MappedSegment

WRITERS: Final = 3
KEYS: Final = 2_000
LIMIT: Final = 5
MADE_FOR: Final = 300_000  # so that a resize has some steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "forebay-shop"


def _window(store: Store) -> FixedWindow:
    return FixedWindow(store, "window", f"{LIMIT}/day", align="first")


def _spend(path: Path, writer: int, begun: SharedNumbers, stop: SharedNumbers) -> tuple[int, int]:
    """Spend all permits of all keys, after some rounds that go on until `stop`. How many were admitted, and logged."""
    admitted = logged = 0
    with Store("a", keys=MADE_FOR, path=path) as store:
        window, log = _window(store), SlidingLog(store, "log", "1000/day", keys=10)
        for step in itertools.count(writer * 700):
            begun[writer] += 1
            admitted += window.allow(step % KEYS)
            admitted += sum(window.allow_many([(step + i) % KEYS for i in range(20)]))
            logged += log.allow("key")
            # Taken and given back, away from the keys that are counted.
            if window.allow(("back", writer)):
                window.refund(("back", writer))
            assert window.peek(("back", writer)).remaining == LIMIT
            if stop[0]:
                break
        for key in range(KEYS):
            while window.allow(key):
                admitted += 1
        while log.allow("key"):
            logged += 1
    return admitted, logged


def _progress(path: Path) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(os.pread(file.fileno(), 8, layout.HEADER_RESIZE_PROGRESS), "little")


def _keep_resizing(path: Path) -> None:
    for keys in itertools.cycle((MADE_FOR, MADE_FOR + 1)):
        resize(path, keys)


def _stopped_in_between(crew: Crew, path: Path, keep_resizing: Callable[[], object] | None = None) -> Worker:
    """A process that is stopped while it resizes."""
    worker = crew.start(keep_resizing or (lambda: _keep_resizing(path)))
    while True:
        before = _progress(path)
        wait_until(lambda: _progress(path) != before, "a step of a resize")  # noqa: B023
        worker.pause()
        if _progress(path) % 2:
            return worker
        worker.resume()


def _begin(crew: Crew, path: Path) -> tuple[list[Worker], SharedNumbers, SharedNumbers]:
    begun, stop = SharedNumbers(WRITERS), SharedNumbers(1)
    workers = [crew.start(_spend, path, writer, begun, stop) for writer in range(WRITERS)]
    wait_until(lambda: all(begun), "a request of each process")
    return workers, begun, stop


def _each_goes_on(begun: SharedNumbers) -> None:
    before = list(begun)
    wait_until(lambda: all(now > then for now, then in zip(begun, before, strict=True)), "another request of each")


def _expect_all(crew: Crew, path: Path, workers: list[Worker], keys: int) -> None:
    counts = crew.results(workers)
    assert sum(admitted for admitted, _ in counts) == KEYS * LIMIT
    assert sum(logged for _, logged in counts) == 1000
    report = verify(path)
    assert report.sound
    assert report.keys == keys
    with Store.attach(path=path) as store:
        assert store.keys == keys
        assert not any(_window(store).allow(key) for key in range(KEYS))
        assert store.stats().limiters["window"].full == 0


def test_a_store_in_use(path: Path, crew: Crew) -> None:
    """Larger, smaller, and larger again: each key gets its limit, and no request is denied for want of room."""
    workers, begun, stop = _begin(crew, path)
    for keys in (2 * MADE_FOR, 4 * KEYS, MADE_FOR):
        summary = resize(path, keys)
        assert (summary.keys, summary.started_anew) == (keys, ())
        _each_goes_on(begun)
    stop[0] = 1
    _expect_all(crew, path, workers, MADE_FOR)
    # Without users it gets a file of its own again.
    size = path.stat().st_size
    assert resize(path, MADE_FOR).carried_keys == KEYS + WRITERS + 1
    assert path.stat().st_size < size


@pytest.mark.parametrize("attempt", range(4))
def test_a_killed_resize(path: Path, crew: Crew, attempt: int) -> None:
    """Processes that wait for it end it. Nothing is lost, and no request is denied for want of room."""
    workers, begun, stop = _begin(crew, path)
    mover = _stopped_in_between(crew, path)
    mover.kill()
    _each_goes_on(begun)
    stop[0] = 1
    _expect_all(crew, path, workers, verify(path).keys)


def test_a_killed_resize_of_a_store_that_no_process_uses_any_more(path: Path, tmp_path: Path, crew: Crew) -> None:
    with Store("a", keys=MADE_FOR, path=path) as store:
        assert all(_window(store).hit(key, LIMIT) for key in range(KEYS))
        _stopped_in_between(crew, path).kill()
    assert verify(path).sound
    assert verify(path).live_keys == KEYS
    assert snapshot(path, tmp_path / "shop.snapshot").carried_keys == KEYS
    assert restore(tmp_path / "shop.snapshot", tmp_path / "forebay-other").carried_keys == KEYS
    assert resize(path, MADE_FOR).carried_keys == KEYS
    with Store("a", keys=MADE_FOR, path=path) as store:
        assert not any(_window(store).allow(key) for key in range(KEYS))


def test_a_resize_after_a_killed_one(path: Path, crew: Crew) -> None:
    with Store("a", keys=MADE_FOR, path=path) as store:
        assert all(_window(store).hit(key, LIMIT) for key in range(KEYS))
        _stopped_in_between(crew, path).kill()
        assert resize(path, 2 * MADE_FOR).carried_keys == KEYS
        assert not any(_window(store).allow(key) for key in range(KEYS))
        assert store.keys == 2 * MADE_FOR


def test_a_stopped_resize_leaves_no_room(path: Path, crew: Crew) -> None:
    """Requests are denied, counted as those of a full table, until it goes on. Then nothing is lost."""
    with Store("a", keys=MADE_FOR, path=path, on_full="deny") as store:
        window, bucket = _window(store), TokenBucket(store, "bucket", "5/day")
        assert window.hit("key", LIMIT)
        mover = _stopped_in_between(crew, path)
        assert not window.allow("key")
        assert not bucket.allow("new")
        assert store.stats().limiters["bucket"].full >= 1
        os.kill(mover.pid, signal.SIGCONT)
        wait_until(lambda: bucket.allow("new"), "a resize that has gone on")
        mover.kill()
        assert not window.allow("key")


def test_a_table_that_is_too_small(path: Path) -> None:
    with Store("a", keys=50_000, path=path) as store:
        window = _window(store)
        assert all(window.hit(key, LIMIT) for key in range(20_000))
        blocks = path.stat().st_blocks
        with pytest.raises(SegmentSpaceError, match=r"20000 live keys, of which \d+ have no room in a table for 1000"):
            resize(path, 1000)
        assert path.stat().st_blocks <= blocks
        assert store.keys == 50_000
        assert not any(window.allow(key) for key in range(20_000))
        assert verify(path).sound


def test_an_interrupted_resize(path: Path, crew: Crew) -> None:
    """It ends, and then the process is interrupted. The others have the new table."""

    def resize_until_interrupted() -> bool:
        try:
            _keep_resizing(path)
        except KeyboardInterrupt:
            return True
        return False

    with Store("a", keys=MADE_FOR, path=path) as store:
        window = _window(store)
        assert all(window.hit(key, LIMIT) for key in range(KEYS))
        mover = _stopped_in_between(crew, path, resize_until_interrupted)
        os.kill(mover.pid, signal.SIGINT)
        mover.resume()
        assert mover.result()
        assert crew.start(lambda: sum(window.allow(key) for key in range(KEYS))).result() == 0
        assert verify(path).live_keys == KEYS


def test_a_resize_that_is_given_up_kills_no_reader(path: Path, crew: Crew) -> None:
    """The file keeps its length: a process that checks it may have mapped the bytes that are given back."""

    def read_behind() -> int:
        with MappedSegment(path) as segment:
            mapped[0] = 1
            wait_until(lambda: given_back[0], "the end of the resize")
            return sum(segment.memory[:])

    mapped, given_back = SharedNumbers(1), SharedNumbers(1)
    with Store("a", keys=1000, path=path) as store:
        before = path.stat().st_size
        place, _ = append_table(store.attachment, MADE_FOR)
        reader = crew.start(read_behind)
        wait_until(lambda: mapped[0], "a mapping")
        give_back_table(store.attachment, place)
        given_back[0] = 1
        assert reader.result()
        assert path.stat().st_blocks * 512 < before + layout.EXTENT_ALIGNMENT


def test_a_resize_that_was_killed_between_two_words(path: Path) -> None:
    """It had written how many keys the table is for, and not yet where that is. The earlier table stays."""
    with Store("a", keys=MADE_FOR, path=path) as store:
        window = _window(store)
        assert all(window.hit(key, LIMIT) for key in range(KEYS))
        resize(path, 20_000)
        with open(path, "r+b") as file:
            for offset in (layout.HEADER_MOVED_KEYS, layout.HEADER_MOVED_CHECK, layout.HEADER_RESIZE_PROGRESS):
                value = int.from_bytes(os.pread(file.fileno(), 8, offset), "little") + 1
                os.pwrite(file.fileno(), value.to_bytes(8, "little"), offset)
        assert verify(path).sound
        with Store.attach(path=path) as another:
            assert not any(_window(another).allow(key) for key in range(KEYS))
            assert another.stats().limiters["window"].full == 0
            assert 20_000 <= another.keys < 21_000
        assert not any(window.allow(key) for key in range(KEYS))
        assert verify(path).sound
        assert resize(path, MADE_FOR).carried_keys == KEYS
        assert not any(window.allow(key) for key in range(KEYS))


def test_a_table_within_the_segment_as_it_was_made_is_damage(path: Path) -> None:
    """The header names such a place in the middle of a resize: what is there are no frozen cells, and stays."""
    with Store("a", keys=1000, path=path) as store, open(path, "r+b") as file:
        window = _window(store)
        assert window.hit("key", LIMIT)
        at_its_beginning = layout.MIN_GROUPS  # groups, at the offset 0
        for offset, word in ((layout.HEADER_MOVED_TABLE, at_its_beginning), (layout.HEADER_RESIZE_PROGRESS, 1)):
            os.pwrite(file.fileno(), word.to_bytes(8, "little"), offset)
        before = os.pread(file.fileno(), layout.COUNTERS_OFFSET, 0)
        # As tags, some of these words are those of frozen cells.
        assert before[0] % 8 > layout.KIND_USED
        assert not window.allow("another")  # denied for want of room
        assert store.stats().limiters["window"].full == 1
        assert os.pread(file.fileno(), layout.COUNTERS_OFFSET, 0) == before
        assert not verify(path).sound


@pytest.mark.parametrize("word", [layout.HEADER_MOVED_TABLE, layout.HEADER_MOVED_KEYS, layout.HEADER_MOVED_CHECK])
def test_a_store_in_use_whose_table_is_nowhere_names_the_damage(path: Path, word: int) -> None:
    with Store("a", keys=1000, path=path) as store:
        window = _window(store)
        resize(path, 2000)
        assert window.hit("key", LIMIT)
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"\1\2\3\4\5\6\7\0", word)
        with pytest.raises(DamagedSegment, match=r"`moved_table`, `moved_keys` and `moved_check`.*stop its users"):
            resize(path, 4000)
        assert not window.allow("key")
        assert _progress(path) % 2 == 0
    assert not verify(path).sound
    resize(path, 4000)
    assert verify(path).sound


def test_a_check_during_a_resize(path: Path) -> None:
    """It finds no damage in the table that it has begun to check: its cells are frozen."""
    resized = []

    def resize_once(done: int, total: int) -> None:
        if not resized:
            resized.append(resize(path, 20_000))

    with Store("a", keys=MADE_FOR, path=path) as store:
        assert all(_window(store).hit(key, LIMIT) for key in range(KEYS))
        report = verify(path, progress=resize_once)
    assert report.findings == ()
    assert report.live_keys == KEYS


def test_forked_children_follow(path: Path, crew: Crew) -> None:
    """A child of a process that attached has the parent's view, and moves on its own."""
    with Store("a", keys=MADE_FOR, path=path) as store:
        window = _window(store)
        assert window.hit("key", 3)

        def spend() -> list[bool]:
            return [window.allow("key") for _ in range(2)]

        before = SharedNumbers(1)

        def wait_and_spend() -> list[bool]:
            wait_until(lambda: before[0], "the resize")
            return spend()

        child = crew.start(wait_and_spend)
        resize(path, 2 * MADE_FOR)
        before[0] = 1
        assert child.result() == [True, True]
        assert spend() == [False, False]
        assert crew.start(spend).result() == [False, False]


def test_a_count_follows(path: Path) -> None:
    """Also for a process that has decided nothing since."""
    with Store("a", keys=1000, path=path) as store, Store.attach(path=path) as another:
        window = _window(store)
        assert window.allow("key")
        assert another.stats().live_keys == 1
        resize(path, 2000)
        assert all(window.allow(key) for key in range(5))
        assert another.stats().live_keys == 6


def test_a_process_without_the_gil_prevents_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.abiflags", "t")
    with Store("a", keys=1000, path=path) as store:
        assert _window(store).hit("key", LIMIT)
        with pytest.raises(SegmentBusy, match="a process without the GIL"):
            resize(path, 2000)
        assert (store.keys, _progress(path)) == (1000, 0)
    assert resize(path, 2000).carried_keys == 1


def test_a_batch_larger_than_the_gil_is_kept_for(path: Path, crew: Crew) -> None:
    """It moves on in its middle, while another thread of its process may do so, too."""
    begun, stop = SharedNumbers(1), SharedNumbers(1)

    def batches() -> int:
        admitted = 0
        with Store("a", keys=MADE_FOR, path=path) as store:
            window = _window(store)
            while not stop[0]:
                admitted += sum(window.allow_many(list(range(KEYS))))
                begun[0] += 1
            for _ in range(LIMIT):
                admitted += sum(window.allow_many(list(range(KEYS))))
        return admitted

    worker = crew.start(batches)
    wait_until(lambda: begun[0], "a batch")
    for keys in (2 * MADE_FOR, MADE_FOR):
        resize(path, keys)
        _each_goes_on(begun)
    stop[0] = 1
    assert worker.result() == KEYS * LIMIT
