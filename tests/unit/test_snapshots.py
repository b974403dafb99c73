"""Snapshots: what is carried over, by which clock, what is refused; stores of another size."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
import time
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner, Result
from limiter_makers import OF_A_HUNDRED, OF_FIVE
from process_helpers import Crew, groups_of

from forebay import BucketedWindow, Concurrency, Credits, LimiterStats, SlidingLog, Store, TokenBucket
from forebay.cli.commands import forebay
from forebay.errors import (
    ClockMismatch,
    DamagedSegment,
    ForeignSegment,
    SegmentBusy,
    SegmentError,
    SegmentMissing,
    SegmentSpaceError,
    SegmentVersionMismatch,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.segment import host_clock, layout
from forebay.segment.extents import ExtentEntry
from forebay.snapshots import copying, document, making, resize, restore, snapshot
from forebay.snapshots.document import DIGEST_BYTES, FRAME, MAGIC, VERSIONS, Head
from forebay.testing import ManualClock
from forebay.verification import verify

HOUR_NS: Final = 3600 * 10**9
ANOTHER_BOOT: Final = bytes(range(16))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "forebay-shop"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.snapshot"


def reboot(monkeypatch: pytest.MonkeyPatch, asleep_ns: int = 0) -> None:
    """From now on the host is in another boot, and the wall clock is so much later."""
    now_ns = time.time_ns
    monkeypatch.setattr(host_clock, "read_boot_id", lambda: ANOTHER_BOOT)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + asleep_ns)


def with_digest(raw: bytes) -> bytes:
    """The same bytes as a whole file."""
    return raw + blake2b(raw, digest_size=DIGEST_BYTES).digest()


def changed(file: Path, before: bytes, after: bytes) -> None:
    raw = file.read_bytes()[:-DIGEST_BYTES]
    assert raw.count(before) == 1
    file.write_bytes(with_digest(raw.replace(before, after)))


@pytest.mark.parametrize("kind", sorted(OF_FIVE.keys() - {"concurrency"}))
def test_a_used_limit_stays_used_over_a_reboot(
    kind: str, path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store("a", keys=100, path=path) as store:
        limiter = OF_FIVE[kind](store)
        assert sum(limiter.allow("key") for _ in range(6)) == 5
        reset_after_ns = limiter.peek("key").reset_after_ns
        assert snapshot(path, file).carried_keys == 1
    path.unlink()
    reboot(monkeypatch, asleep_ns=1000)
    assert restore(file).path == str(path)
    assert verify(path).sound
    with Store("a", keys=100, path=path) as store:
        limiter = OF_FIVE[kind](store)
        assert not limiter.allow("key")
        assert limiter.allow("another")
        assert 0 < limiter.peek("key").reset_after_ns <= reset_after_ns


@pytest.mark.parametrize("kind", OF_A_HUNDRED)
def test_time_goes_on_by_the_wall_clock_over_a_reboot(
    kind: str, path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store("a", keys=100, path=path) as store:
        limiter = OF_A_HUNDRED[kind](store)
        assert limiter.hit("key", 100)
        assert not limiter.allow("key")
        snapshot(path, file)
    path.unlink()
    reboot(monkeypatch, asleep_ns=2 * HOUR_NS)
    assert restore(file).carried_keys == 1
    with Store("a", keys=100, path=path) as store:
        assert OF_A_HUNDRED[kind](store).peek("key").remaining == 100


def test_ten_of_ten_used_and_half_an_hour_later(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 10)
        snapshot(path, file)
    path.unlink()
    reboot(monkeypatch, asleep_ns=HOUR_NS // 2)
    restore(file)
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        assert [bucket.allow("key") for _ in range(6)] == [True] * 5 + [False]


def test_in_the_same_boot_the_wall_clock_does_not_matter(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 10)
        snapshot(path, file)
    path.unlink()
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 100 * HOUR_NS)
    restore(file)
    with Store("a", keys=100, path=path) as store:
        assert not TokenBucket(store, "api", "10/hour").allow("key")


def test_a_snapshot_of_the_future_is_refused(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    path.unlink()
    reboot(monkeypatch, asleep_ns=-HOUR_NS)
    with pytest.raises(ClockMismatch, match=r"taken 3,[56]\d\d s after now, by the wall clock.*set the host's clock"):
        restore(file)
    assert not path.exists()


def test_a_snapshot_of_the_future_of_the_same_boot_is_refused(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    path.unlink()
    now_ns = host_clock.monotonic_ns
    monkeypatch.setattr(host_clock, "monotonic_ns", lambda offset_ns: now_ns(offset_ns) - HOUR_NS)
    with pytest.raises(ClockMismatch, match="after now, by the clock of this host"):
        restore(file)


def test_a_segment_of_an_earlier_boot_is_refused(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store("a", keys=100, path=path).close()
    reboot(monkeypatch)
    with pytest.raises(ClockMismatch, match="start a process"):
        snapshot(path, file)
    with pytest.raises(ClockMismatch, match="start a process"):
        resize(path, 200)


def test_all_is_carried_over_but_permits_that_are_held(path: Path, file: Path, clock: ManualClock) -> None:
    with Store("a", keys=500, path=path, clock=clock) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        for key in range(300):
            assert bucket.hit(key, 1 + key % 10)
        Credits(store, "credits").add("key", 7)
        held = Concurrency(store, "held", 2, keys=10)
        assert held.hit("job")
        log, window = (
            SlidingLog(store, "log", "20/hour", keys=10),
            BucketedWindow(store, "window", "20/hour", 5, keys=9),
        )
        for key in range(5):
            assert log.hit(key, 3 + key)
            clock.advance(60)
            assert window.hit(key, 4 + key)
        assert bucket.hit("paid", 1, request_id="once")
        before, now_ns = store.stats(), store.now_ns()
        summary = snapshot(path, file)
    assert summary.started_anew == ("held (Concurrency)",)
    assert (summary.keys, summary.limiters) == (500, len(before.limiters))
    path.unlink()
    for keys in (None, 400, 3000):
        restore(file, path, keys=keys, replace=True)
        report = verify(path)
        assert report.sound
        with Store("a", keys=keys or 500, path=path, clock=clock) as store:
            assert store.now_ns() == now_ns
            after = store.stats()
            assert ({*after.limiters}, after.live_keys) == ({*before.limiters}, before.live_keys)
            assert after.total == LimiterStats()
            bucket = TokenBucket(store, "api", "10/hour")
            assert [bucket.peek(key).remaining for key in range(300)] == [9 - key % 10 for key in range(300)]
            assert bucket.hit("paid", 1, request_id="once")
            assert bucket.peek("paid").remaining == 9
            assert Credits(store, "credits").peek("key").remaining == 7
            assert Concurrency(store, "held", 2, keys=10).peek("job").remaining == 2
            log = SlidingLog(store, "log", "20/hour", keys=10)
            window = BucketedWindow(store, "window", "20/hour", 5, keys=9)
            assert [log.peek(key).remaining for key in range(5)] == [17 - key for key in range(5)]
            assert [window.peek(key).remaining for key in range(5)] == [16 - key for key in range(5)]


def test_a_restored_store_keeps_mode_and_name(path: Path, file: Path, tmp_path: Path) -> None:
    Store("a", keys=100, path=path, mode=0o660).close()
    snapshot(path, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    another = tmp_path / "forebay-another"
    restore(file, another)
    assert stat.S_IMODE(another.stat().st_mode) == 0o660
    Store("a", keys=100, path=another, mode=0o660).close()


def test_a_store_that_is_there_is_kept(path: Path, file: Path) -> None:
    with Store("a", keys=100, path=path) as store:
        snapshot(path, file)
        before = path.stat()
        with pytest.raises(SegmentError, match=r"a file that is there already.*--replace"):
            restore(file)
        with pytest.raises(SegmentBusy, match=r"a store that 1 process has attached.*stop them"):
            restore(file, replace=True)
        assert TokenBucket(store, "api", "10/hour").hit("key", 10)
    assert path.stat().st_ino == before.st_ino
    restore(file, replace=True)
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").allow("key")
    assert sorted(path.parent.iterdir()) == [path, file]


def test_another_size(path: Path) -> None:
    with Store("a", keys=1500, path=path) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        for key in range(1200):
            assert bucket.hit(key, 10)
    before = path.stat()
    # The smallest table has 1024 cells.
    with pytest.raises(
        SegmentSpaceError, match=r"1200 live keys, of which \d+ have no room in a table for 100"
    ) as error:
        resize(path, 100)
    assert path.stat().st_ino == before.st_ino
    enough = int(error.value.remedy.rpartition(" ")[2].rstrip(")"))
    for keys in (enough, 100_000, 1500):
        assert resize(path, keys).carried_keys == 1200
        assert verify(path).sound
        with Store("a", keys=keys, path=path) as store:
            bucket = TokenBucket(store, "api", "10/hour")
            assert not any(map(bucket.allow, range(1200)))
            assert store.stats().live_keys == 1200
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("keys", [0, -1, True, 1.5, "many"])
def test_no_size(keys: Any, path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    with pytest.raises(ValueError, match="keys is a whole number"):
        resize(path, keys)
    with pytest.raises(ValueError, match="keys is a whole number"):
        restore(file, path.with_name("another"), keys=keys)


def test_nothing_there(path: Path, file: Path) -> None:
    with pytest.raises(SegmentMissing):
        snapshot(path, file)
    with pytest.raises(SegmentMissing):
        resize(path, 100)
    with pytest.raises(FileNotFoundError):
        restore(file)
    assert list(path.parent.iterdir()) == []


def test_files_that_are_no_snapshot(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    file.write_text("a letter to a friend")
    with pytest.raises(ForeignSegment, match="the file is unchanged"):
        snapshot(path, file)
    assert file.read_text() == "a letter to a friend"
    with pytest.raises(ForeignSegment, match="a letter"):
        restore(file)
    with pytest.raises(ForeignSegment, match="no regular file"):
        restore("/dev/null")
    file.write_bytes(b"")
    with pytest.raises(ForeignSegment):
        restore(file)
    snapshot(path, file)
    whole = file.read_bytes()
    file.write_bytes(whole[:20])
    with pytest.raises(TruncatedSegment, match="20 bytes"):
        restore(file, path, replace=True)
    file.write_bytes(whole[:-1])
    with pytest.raises(DamagedSegment, match="take another snapshot"):
        restore(file, path, replace=True)


def test_a_snapshot_of_another_version(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    changed(file, VERSIONS.pack(1, layout.LAYOUT_VERSION), VERSIONS.pack(1, layout.LAYOUT_VERSION + 1))
    with pytest.raises(SegmentVersionMismatch, match=f"layout version {layout.LAYOUT_VERSION + 1}"):
        restore(file, path, replace=True)


def test_a_snapshot_that_others_may_write_is_refused(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    file.chmod(0o620)
    with pytest.raises(UntrustedSegment, match="mode 0620"):
        restore(file, path, replace=True)


def test_what_a_killed_snapshot_left_is_overwritten(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    partial = Path(f"{file}.partial")
    partial.write_bytes(b"x" * 10**6)
    snapshot(path, file)
    restore(file, path, replace=True)
    partial.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        snapshot(path, file)


def test_a_key_that_was_copied_twice_has_its_later_state(path: Path, file: Path) -> None:
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 4)
    with copying.MappedSegment(path) as segment:
        copy = copying.Copy(segment, lambda done, total: None)
        head, frames = copy.head, list(copy.frames())
    (place,) = [number for number, (kind, _) in enumerate(frames) if kind == document.KEYS]
    index, tag, state = array("Q", frames[place][1])
    later = array("Q", [index ^ 1, tag, state + HOUR_NS // 5])
    for keys in (100, 1000):
        document.write(str(file), head, [*frames[: place + 1], (document.KEYS, later.tobytes()), *frames[place + 1 :]])
        restore(file, path, keys=keys, replace=True)
        assert verify(path).sound
        with Store("a", keys=keys, path=path) as store:
            assert TokenBucket(store, "api", "10/hour").peek("key").remaining == 4
            assert store.stats().live_keys == 1


def test_a_place_that_a_key_cannot_have_is_refused(path: Path, file: Path) -> None:
    with Store("a", keys=100_000, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 4)
    with copying.MappedSegment(path) as segment:
        copy = copying.Copy(segment, lambda done, total: None)
        head, frames = copy.head, list(copy.frames())
    ((index, tag, state),) = [array("Q", content) for kind, content in frames if kind == document.KEYS]
    group = next(group for group in range(head.group_count) if group not in groups_of(tag, head.group_count))
    elsewhere = group * (layout.GROUP_BYTES // layout.CELL.size)
    for record in ([elsewhere, tag, state], [2**63, tag, state], [index, tag & ~7, state], [index, tag, 2**62 + 9]):
        damaged = [(document.KEYS, array("Q", record).tobytes()), *frames[1:]]
        document.write(str(file), head, damaged)
        with pytest.raises(DamagedSegment):
            restore(file, path.with_name("another"))
    assert sorted(path.parent.iterdir()) == [path, file]


def test_keys_that_never_stand_still(path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of logs by the slower way."""

    def none_stands_still(*arguments: Any, **more: Any) -> tuple[bytes, list[int]]:
        copies, _ = copy_live(*arguments, **more)
        size = 3 + more["word_count"]
        return (copies, []) if size == 3 else (b"", list(array("Q", copies)[::size]))

    copy_live = copying.copy_live
    monkeypatch.setattr(copying, "copy_live", none_stands_still)
    with Store("a", keys=100, path=path) as store:
        assert SlidingLog(store, "log", "20/hour", keys=10).hit("key", 7)
        assert BucketedWindow(store, "window", "20/hour", 5, keys=10).hit("key", 8)
    snapshot(path, file)
    restore(file, replace=True)
    with Store("a", keys=100, path=path) as store:
        assert SlidingLog(store, "log", "20/hour", keys=10).peek("key").remaining == 13
        assert BucketedWindow(store, "window", "20/hour", 5, keys=10).peek("key").remaining == 12


@pytest.mark.parametrize("seed", range(30))
def test_a_ring_that_was_read_while_it_was_written(seed: int, path: Path, clock: ManualClock) -> None:
    """No permit of it leaves the window earlier than in the real one."""
    dice = random.Random(seed)
    limit = dice.choice((1, 2, 3, 7, 50))
    with Store("a", keys=100, path=path, clock=clock) as store:
        log = SlidingLog(store, "log", f"{limit}/minute", keys=1)

        def go_on(steps: int, longest_s: float) -> None:
            for _ in range(steps):
                clock.advance(dice.uniform(0, longest_s))
                log.hit("key", min(limit, dice.randint(1, 3)))

        go_on(dice.randint(1, 2 * limit), 60 / limit)
        entry = _entry(path)
        words = entry.offset + entry.shape.group_count * layout.GROUP_BYTES
        before, first = _cell(path, entry), _ring(path, words, limit)
        clock.advance(dice.uniform(20, 50))
        go_on(dice.randint(1, limit), 9 / limit)
        after, last = _cell(path, entry), _ring(path, words, limit)
        mixed = array("Q", [dice.choice(pair) for pair in zip(first, last, strict=True)])
        if not copying.settle(entry, before[1], after[1], mixed):
            assert after[1] - before[1] >= 4 * 59 * 10**9  # a window has passed, less what times are rounded by
            return
        times = [0.0, *sorted(dice.uniform(0, 61) for _ in range(20)), 61.0]
        start_ns = store.now_ns()
        real = _remaining(log, clock, times)
        with path.open("r+b") as segment:
            segment.seek(words)
            segment.write(mixed.tobytes())
        clock.set_ns(start_ns)
        assert verify(path).sound
        assert all(mine <= true for mine, true in zip(_remaining(log, clock, times), real, strict=True))


def _remaining(log: SlidingLog, clock: ManualClock, times: list[float]) -> list[int]:
    found = []
    for i, when in enumerate(times):
        clock.advance(when - times[i - 1] if i else when)
        found.append(log.peek("key").remaining)
    return found


def _entry(path: Path) -> ExtentEntry:
    with path.open("rb") as segment:
        segment.seek(layout.EXTENTS_OFFSET)
        return ExtentEntry.unpack(segment.read(layout.EXTENT_ENTRY.size))


def _cell(path: Path, entry: ExtentEntry) -> tuple[int, int]:
    with path.open("rb") as segment:
        segment.seek(entry.offset)
        tag, state = layout.CELL.unpack(segment.read(layout.CELL.size))
    return tag, state


def _ring(path: Path, words: int, limit: int) -> array[int]:
    with path.open("rb") as segment:
        segment.seek(words)
        return array("Q", segment.read(limit * 8))


def test_live_rules_are_carried_over(path: Path, file: Path) -> None:
    from datetime import UTC, datetime

    from forebay.rules.live.publication import Board, Publication

    publication = Publication("limits.toml", "a test", 1, datetime.now(UTC), {}, b"# no limits")
    with Store("a", keys=100, path=path) as store:
        board = Board(store)
        assert board.publish(publication, 0) == 1
        assert board.publish(publication, 1) == 2
        snapshot(path, file)
    Store.unlink(path=path)
    assert list(path.parent.iterdir()) == [file]
    restore(file)
    with Store("a", keys=100, path=path) as store:
        assert Board(store).version == 2
        assert Board(store).read(2) == publication
    resize(path, 1000)
    with Store("a", keys=1000, path=path) as store:
        assert Board(store).read(2) == publication
    another = path.with_name("forebay-another")
    restore(file, another)
    with Store("a", keys=100, path=another) as store:
        assert Board(store).read(2) == publication


def test_restored_rules_take_the_place_of_no_file(path: Path, file: Path) -> None:
    from datetime import UTC, datetime

    from forebay.rules.live.publication import Board, Publication

    publication = Publication("limits.toml", "a test", 1, datetime.now(UTC), {}, b"# no limits")
    with Store("a", keys=100, path=path) as store:
        assert Board(store).publish(publication, 0) == 1
        snapshot(path, file)
    (rules,) = path.parent.glob("*.rules-*")
    whole, prefix = rules.read_bytes(), str(rules).removesuffix("1")
    Store.unlink(path=path)
    path.with_name(f"{path.name}.rules-01234567.1").touch()
    os.mkfifo(f"{prefix}1")
    Path(f"{prefix}2").symlink_to(file)
    Path(f"{prefix}3").write_bytes(whole[:-1])
    Path(f"{prefix}4").write_bytes(whole)
    Path(f"{prefix}4").chmod(0o666)
    Path(f"{prefix}5").mkdir()
    restore(file)
    with Store("a", keys=100, path=path) as store:
        assert Board(store).version == 6
        assert Board(store).read(6) == publication
    # No store has the other files.
    assert sorted(path.parent.glob("*.rules-*")) == [Path(f"{prefix}5"), Path(f"{prefix}6")]
    assert os.stat(f"{prefix}6").st_mode == os.stat(path).st_mode


def test_a_second_restore_waits_for_the_files_of_the_first(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first one removes the rules of the second, if those are as the store's before."""
    from datetime import UTC, datetime

    from forebay.rules.live.publication import Board, Publication
    from forebay.snapshots.making import NewSegment

    other = file.with_name("other")
    with Store("a", keys=100, path=path) as store:
        for version, snapshots in enumerate((file, other)):
            publication = Publication("limits.toml", "a test", 1, datetime.now(UTC), {}, b"# %d" % version)
            assert Board(store).publish(publication, version) == version + 1
            snapshot(path, snapshots)
    clean: Any = NewSegment._clean
    refused = []

    def restoring(*arguments: object) -> None:
        if not refused:
            with pytest.raises(SegmentBusy) as raised:
                restore(other, path, replace=True)
            refused.append(raised)
        clean(*arguments)

    monkeypatch.setattr(NewSegment, "_clean", restoring)
    restore(file, path, replace=True)
    assert refused
    with Store("a", keys=100, path=path) as store:
        assert Board(store).read(Board(store).version).document == b"# 0"
    restore(other, path, replace=True)
    with Store("a", keys=100, path=path) as store:
        assert Board(store).read(Board(store).version).document == b"# 1"


def test_restored_rules_never_get_the_number_of_a_store_that_has_lost_its_file(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that store would have them if the replacement ends before its rename."""
    from datetime import UTC, datetime

    from forebay.rules.live.publication import Board, Publication, UnreadableRules

    with Store("a", keys=100, path=path) as store:
        board = Board(store)
        for version in range(2):
            publication = Publication("limits.toml", "a test", 1, datetime.now(UTC), {}, b"# %d" % version)
            assert board.publish(publication, version) == version + 1
            if version == 0:
                snapshot(path, file)
    (rules,) = path.parent.glob("*.rules-*.2")
    rules.unlink()
    rules.with_suffix(".1").mkdir()

    def failing(*arguments: object) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", failing)
        with pytest.raises(PermissionError):
            restore(file, path, replace=True)
    with Store("a", keys=100, path=path) as store, pytest.raises(UnreadableRules):
        Board(store).read(2)
    restore(file, path, replace=True)
    with Store("a", keys=100, path=path) as store:
        board = Board(store)
        assert (board.version, board.read(3).document) == (3, b"# 0")


def test_a_removed_segment_leaves_the_rules_of_a_restored_one(path: Path, file: Path) -> None:
    """It is still in use: both have the same names for their files."""
    from datetime import UTC, datetime

    from forebay.rules.live.publication import Board, Publication

    first, other = (
        Publication("limits.toml", "a test", 1, datetime.now(UTC), {}, document) for document in (b"# 1", b"# 2")
    )
    with Store("a", keys=100, path=path) as removed:
        board = Board(removed)
        assert board.publish(first, 0) == 1
        snapshot(path, file)
        path.unlink()
        restore(file, path)
        for act in (lambda: board.publish(other, 1), lambda: board.write_note(b"{}")):
            with pytest.raises(FileNotFoundError, match="the store was removed"):
                act()
        assert [found.suffix for found in path.parent.glob("*.rules-*")] == [".1"]
        with Store("a", keys=100, path=path) as store:
            assert (Board(store).version, Board(store).read(1)) == (1, first)


def test_a_name_that_leaves_no_room_for_those_beside_it_is_refused(path: Path) -> None:
    with pytest.raises(SegmentError, match="a name of 201 bytes, expected one of up to 200"):
        Store("a", keys=100, path=path.with_name("n" * 201))
    longest = path.with_name("n" * 200)
    Store("a", keys=100, path=longest).close()
    assert resize(longest, 200).keys == 200


@pytest.mark.parametrize(
    "name", ["forebay-shop.rules-deadbeef.1", "shop.rules-01234567.loader", "x.rules-01234567.loader.new", ".shop.new"]
)
def test_no_store_has_a_name_that_is_removed_with_another(name: str, path: Path, file: Path) -> None:
    taken = path.with_name(name)
    with pytest.raises(SegmentError, match="choose one that neither ends as in"):
        Store("a", keys=100, path=taken)
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    with pytest.raises(SegmentError, match="choose one that neither ends as in"):
        restore(file, taken)
    assert not taken.exists()
    for other in (f"{name}x", f"x{name.replace('-', '.')}"):
        Store("a", keys=100, path=path.with_name(other)).close()


def test_a_replacement_takes_the_place_of_a_segment_only(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    snapshot(path, file)
    ledger = path.with_name("ledger")
    for content in (b"all of the money", file.read_bytes()):
        ledger.write_bytes(content)
        ledger.chmod(0o600)
        with pytest.raises(ForeignSegment, match="the file is unchanged"):
            restore(file, ledger, replace=True)
        assert ledger.read_bytes() == content
    ledger.write_bytes(b"")
    restore(file, ledger, replace=True)
    assert verify(ledger).sound


def test_a_forked_child_takes_a_snapshot(path: Path, file: Path, crew: Crew) -> None:
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 4)
        assert crew.start(lambda: snapshot(path, file).carried_keys).result() == 1
        assert store.stats().live_keys == 1
    restore(file, replace=True)


# The commands


def run(*arguments: object) -> Result:
    return CliRunner().invoke(forebay, list(map(str, arguments)), env={"COLUMNS": "200"}, prog_name="forebay")


def test_the_commands(tmp_path: Path, file: Path) -> None:
    with Store("shop", keys=1000, directory=tmp_path) as store:
        assert TokenBucket(store, "api", "10/hour").hit("key", 4)
        assert Concurrency(store, "held", 2, keys=10).hit("job")
        path = Path(store.path or "")
        result = run("snapshot", "shop", file, "--directory", tmp_path)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        assert result.stdout == f"{file}: 1 live key of {path}\nwithout the state of held (Concurrency)\n"
        result = run("resize", "shop", "--keys", 1500, "--directory", tmp_path)
        assert (result.exit_code, result.stdout) == (0, f"{path}: 1 live key, made for 1,500\n")
        assert store.keys == 1500
    result = run("restore", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there already" in result.stderr
    result = run("restore", file, "--replace")
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, f"{path}: 1 live key of {file}, made for 1,000")
    result = run("restore", file, "copy", "--keys", 5000, "--directory", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found == {
        "version": 1,
        "path": str(tmp_path / "forebay-copy"),
        "keys": 5000,
        "carried_keys": 1,
        "bytes": (tmp_path / "forebay-copy").stat().st_size,
        "limiters": 2,
        "started_anew": ["held (Concurrency)"],
        "file": str(file),
    }
    result = run("resize", tmp_path / "forebay-copy", "--keys", 70, "--json")
    assert json.loads(result.stdout)["keys"] == 70
    assert run("resize", tmp_path / "forebay-copy").exit_code == 2
    assert run("restore", file, "--directory", tmp_path).exit_code == 2
    assert run("snapshot", "shop", "/", "--directory", tmp_path).exit_code == 2
    assert os.path.exists(file)


def test_a_snapshot_locks_and_changes_nothing(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    before = path.stat(), path.read_bytes()
    path.chmod(0o440)
    snapshot(path, file)
    path.chmod(0o600)
    restore(file, another := path.with_name("another"))
    assert stat.S_IMODE(another.stat().st_mode) == 0o640
    assert (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) == (
        before[0].st_ino,
        before[0].st_mtime_ns,
        before[1],
    )


def test_a_head_that_cannot_be(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    with copying.MappedSegment(path) as segment:
        copy = copying.Copy(segment, lambda done, total: None)
        head, frames = copy.head, list(copy.frames())
    from dataclasses import replace

    wrong: list[Head] = [
        replace(head, clock_kind=9),
        replace(head, keys=0),
        replace(head, keys=2**40),
        replace(head, group_count=1),
        replace(head, group_count=2**50),
        replace(head, path="relative"),
        replace(head, wall_ns=2**63),
        replace(head, group_count=2**39),
    ]
    for one in wrong:
        document.write(str(file), one, frames)
        with pytest.raises(SegmentError):
            restore(file, path.with_name("another"))
    assert sorted(path.parent.iterdir()) == [path, file]


@pytest.mark.parametrize(
    "fields",
    [{"uid": 2**32 - 1}, {"gid": 2**32 - 1}, *({"mode": mode} for mode in (0, 0o060, 0o400, 0o666, 0o700, 0o4600))],
)
def test_an_owner_or_a_mode_that_no_store_has_is_named(fields: dict[str, int], path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    with copying.MappedSegment(path) as segment:
        copy = copying.Copy(segment, lambda done, total: None)
        head, frames = copy.head, list(copy.frames())
    from dataclasses import replace

    document.write(str(file), replace(head, **fields), frames)
    ((name, value),) = fields.items()
    with pytest.raises(DamagedSegment, match=f"{name} {value:04o}" if name == "mode" else f"{name} {value}"):
        restore(file, path.with_name("another"))
    assert sorted(path.parent.iterdir()) == [path, file]


def test_frames_that_cannot_be(path: Path, file: Path) -> None:
    Store("a", keys=100, path=path).close()
    with copying.MappedSegment(path) as segment:
        copy = copying.Copy(segment, lambda done, total: None)
        head, frames = copy.head, list(copy.frames())
    entry = ExtentEntry(1, 0, 2**40, 10, 0, making.ExtentEntry.unpack(bytes(64)).purpose)
    for one in (
        [(99, b"")],
        [(document.KEYS, b"12345678")],
        [(document.COUNTERS, b"")],
        [(document.LIMITERS, b"1")],
        [(document.RULES, bytes(9))],
        [(document.EXTENT, b"x")],
        [(document.EXTENT, entry.pack())],
    ):
        document.write(str(file), head, [*frames, *one])
        with pytest.raises(DamagedSegment):
            restore(file, path.with_name("another"))
    raw = file.read_bytes()[:-DIGEST_BYTES]
    for cut in (raw + FRAME.pack(document.KEYS, 10**12), raw + b"x", MAGIC, MAGIC + FRAME.pack(document.KEYS, 0)):
        file.write_bytes(with_digest(cut))
        with pytest.raises(DamagedSegment):
            restore(file, path.with_name("another"))
    assert sorted(path.parent.iterdir()) == [path, file]
