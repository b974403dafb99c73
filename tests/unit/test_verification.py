"""`verify` finds damage, finds none in a sound segment, and changes nothing."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_helpers import Crew, SharedNumbers, extents, groups_of, kind_of, path_of, read_cells

from forebay import (
    BucketedWindow,
    Concurrency,
    FixedWindow,
    SlidingLog,
    SlidingWindow,
    Store,
    TokenBucket,
)
from forebay.core.audit import keyed_hash
from forebay.errors import (
    DamagedSegment,
    ForeignSegment,
    SegmentBusy,
    SegmentError,
    SegmentSpaceError,
    SegmentVersionMismatch,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.metrics.segments import observed_in
from forebay.segment import layout
from forebay.segment.extents import ExtentEntry
from forebay.snapshots import resize
from forebay.testing import ManualClock
from forebay.verification import Report, verify
from forebay.verification.extent_list import Extents
from forebay.verification.mapped_segment import MappedSegment

KEYS = 60
CELL = layout.CELL.size
NAMES = (
    "bucket",
    "interval bucket",
    "fixed",
    "first",
    "sliding",
    "buckets",
    "log",
    "larger log",
    "held",
    "held by few",
)


def make_limiters(store: Store) -> list[Any]:
    return [
        TokenBucket(store, "bucket", "100/hour", 20),
        TokenBucket(store, "interval bucket", "100/hour", 20, refill="interval"),
        FixedWindow(store, "fixed", "10/hour"),
        FixedWindow(store, "first", "10/hour", align="first"),
        SlidingWindow(store, "sliding", "10/hour"),
        BucketedWindow(store, "buckets", "10/hour", 6, keys=KEYS),
        SlidingLog(store, "log", "5/hour", keys=3),
        SlidingLog(store, "larger log", "100/minute", keys=KEYS),
        Concurrency(store, "held", 20, lease="1 hour", keys=KEYS),
        Concurrency(store, "held by few", 200, lease="1 hour", keys=3),
    ]


def use(store: Store) -> None:
    for limiter in make_limiters(store):
        for key in range(KEYS):
            limiter.allow(key)
            limiter.allow(key % 5)
            limiter.hit(key % 7, 2)
            limiter.refund(key % 3)
    store.stats()


@pytest.fixture(params=["monotonic", "manual"])
def used(request: pytest.FixtureRequest, name: str) -> Iterator[str]:
    """The name of a store in which every kind of limiter has state."""
    clock = ManualClock(10_000_000) if request.param == "manual" else "monotonic"
    with Store(name, keys=1000, clock=clock) as store:  # type: ignore[arg-type]
        use(store)
        yield name


class Vandal:
    """Writes invalid values to a segment's file."""

    def __init__(self, name: str) -> None:
        self.path = Path(path_of(name))
        self.extents = extents(str(self.path))

    def read(self, offset: int) -> int:
        with self.path.open("rb") as file:
            file.seek(offset)
            return int.from_bytes(file.read(8), "little")

    def write(self, offset: int, *words: int) -> None:
        with self.path.open("r+b", buffering=0) as file:
            file.seek(offset)
            file.write(struct.pack(f"<{len(words)}Q", *words))

    def cell(self, kind: int, start: int = layout.TABLE_OFFSET, which: int = 0) -> int:
        """The offset of a cell of this kind."""
        offset = start
        while kind_of(self.read(offset)) != kind or which:
            which -= kind_of(self.read(offset)) == kind
            offset += CELL
        return offset

    def extent_cell(self, number: int, kind: int, which: int = 0) -> tuple[int, int]:
        """The offsets of a cell in an extent and of its record."""
        entry = self.extents[number]
        offset = self.cell(kind, entry["offset"], which)
        groups = -(-entry["keys"] // 16) if entry["keys"] <= 48 else -(-entry["keys"] * 21 // layout.GROUP_BYTES)
        used = entry["keys"] if entry["keys"] <= 48 else 16 * groups
        words = (entry["bytes"] - groups * layout.GROUP_BYTES) // used
        return offset, entry["offset"] + groups * layout.GROUP_BYTES + (offset - entry["offset"]) // CELL * words


BUCKETS, LOG, LARGER_LOG, HELD, HELD_BY_FEW = range(5)


def damage_header(vandal: Vandal) -> None:
    vandal.write(layout.HEADER.size - 8, 1)


def damage_moved_table(vandal: Vandal) -> None:
    vandal.write(layout.HEADER_MOVED_TABLE, 1)


def damage_time(vandal: Vandal) -> None:
    vandal.write(layout.HEADER_MANUAL_NS, 2**63)


def damage_name(vandal: Vandal) -> None:
    vandal.write(
        layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME, int.from_bytes(b"\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8")
    )


def damage_name_hash(vandal: Vandal) -> None:
    vandal.write(layout.LIMITERS_OFFSET, 12345)


def damage_name_length(vandal: Vandal) -> None:
    vandal.write(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME_BYTES, 49)


def damage_algorithm(vandal: Vandal) -> None:
    length = vandal.read(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME_BYTES) % 2**32
    vandal.write(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME_BYTES, length + (99 << 32))


def exchange_algorithm(vandal: Vandal) -> None:
    length = vandal.read(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME_BYTES) % 2**32
    algorithm = layout.ALGORITHM_SLIDING_WINDOW
    vandal.write(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY_NAME_BYTES, length + (algorithm << 32))


def repeat_a_limiter(vandal: Vandal) -> None:
    size = layout.LIMITER_ENTRY.size
    first = [vandal.read(layout.LIMITERS_OFFSET + place) for place in range(0, size, 8)]
    vandal.write(layout.LIMITERS_OFFSET + size, *first)


def free_a_limiter(vandal: Vandal) -> None:
    vandal.write(layout.LIMITERS_OFFSET + layout.LIMITER_ENTRY.size, *[0] * 8)


def count_for_nobody(vandal: Vandal) -> None:
    vandal.write(layout.COUNTERS_OFFSET + 500 * 64, 200)


def count_in_a_free_line(vandal: Vandal) -> None:
    vandal.write(layout.COUNTERS_OFFSET + 500 * 64 + 16, 1)


def count_too_far(vandal: Vandal) -> None:
    vandal.write(layout.COUNTERS_OFFSET + 16, 2**63)


def move_an_extent(vandal: Vandal) -> None:
    vandal.write(layout.EXTENTS_OFFSET + layout.EXTENT_ENTRY_OFFSET, vandal.extents[0]["offset"] + 64)


def lengthen_an_extent(vandal: Vandal) -> None:
    vandal.write(layout.EXTENTS_OFFSET + layout.EXTENT_ENTRY_BYTES, vandal.extents[0]["bytes"] + 8)


def put_an_extent_into_another(vandal: Vandal) -> None:
    vandal.write(
        layout.EXTENTS_OFFSET + layout.EXTENT_ENTRY.size + layout.EXTENT_ENTRY_OFFSET, vandal.extents[0]["offset"]
    )


def free_an_extent(vandal: Vandal) -> None:
    vandal.write(layout.EXTENTS_OFFSET, 0)


def forget_the_last_extent(vandal: Vandal) -> None:
    vandal.write(layout.EXTENTS_OFFSET + HELD_BY_FEW * layout.EXTENT_ENTRY.size, 0)


def repeat_an_extent(vandal: Vandal) -> None:
    vandal.write(layout.EXTENTS_OFFSET, vandal.extents[1]["identity"])


def unknown_kind(vandal: Vandal) -> None:
    offset = vandal.cell(layout.KIND_TAT)
    vandal.write(offset, vandal.read(offset) & ~7 | 5)


def block_a_cell(vandal: Vandal) -> None:
    vandal.write(vandal.cell(layout.KIND_EMPTY), layout.KIND_BLOCKED)


def state_in_an_empty_cell(vandal: Vandal) -> None:
    vandal.write(vandal.cell(layout.KIND_EMPTY) + 8, 1)


def tag_in_an_empty_cell(vandal: Vandal) -> None:
    vandal.write(vandal.cell(layout.KIND_EMPTY), 8)


def late_state(vandal: Vandal) -> None:
    vandal.write(vandal.cell(layout.KIND_TAT) + 8, 2**62)


def claim_of_nobody(vandal: Vandal) -> None:
    offset = vandal.cell(layout.KIND_TAT)
    vandal.write(offset, vandal.read(offset) & ~7 | layout.KIND_CLAIM, 0xFFF << 28)


def key_elsewhere(vandal: Vandal) -> None:
    offset = vandal.cell(layout.KIND_TAT)
    tag, groups = vandal.read(offset), vandal.read(layout.HEADER_GROUP_COUNT)
    here = (offset - layout.TABLE_OFFSET) // layout.GROUP_BYTES
    # By chance, one of the key's other groups may be this one.
    others = (tag ^ 1 << bit for bit in range(63, 40, -1))
    vandal.write(offset, next(other for other in others if here not in groups_of(other, groups)))


def key_twice(vandal: Vandal) -> None:
    offset = vandal.cell(layout.KIND_TAT)
    group = (offset - layout.TABLE_OFFSET) // layout.GROUP_BYTES
    start = layout.TABLE_OFFSET + group * layout.GROUP_BYTES
    other = next(at for at in range(start, start + layout.GROUP_BYTES, CELL) if at != offset)
    vandal.write(other, vandal.read(offset), vandal.read(offset + 8))


def unblock(vandal: Vandal) -> None:
    vandal.write(vandal.cell(layout.KIND_BLOCKED, vandal.extents[LOG]["offset"]), 0)


def foreign_kind(vandal: Vandal) -> None:
    offset, _ = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT)
    vandal.write(offset, vandal.read(offset) & ~7 | layout.KIND_TAT)


def position_beyond_the_ring(vandal: Vandal) -> None:
    offset, _ = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT)
    vandal.write(offset + 8, vandal.read(offset + 8) & ~255 | 101 << 1)


def entry_of_another_lap(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT)
    vandal.write(words + 8 * 50, vandal.read(words + 8 * 50) ^ 1 << 62)


def entry_from_the_future(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT)
    vandal.write(words, vandal.read(words) + 10**15)


def entries_in_disorder(vandal: Vandal) -> None:
    # A key with several entries.
    which = 0
    while True:
        offset, words = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT, which)
        position = (vandal.read(offset + 8) & 255) >> 1
        if position > 8:
            break
        which += 1
    vandal.write(words + 8 * (position - 1), vandal.read(words + 8 * (position - 1)) - 10**6)


def mark_elsewhere(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(BUCKETS, layout.KIND_COUNT)
    vandal.write(words + 8, 6 << 32)


def mark_beyond_the_total(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(BUCKETS, layout.KIND_COUNT)
    # Bucket 0 has the mark 0, which lies in the past of a segment with a manual clock.
    for i in range(6):
        vandal.write(words + 8 * i, vandal.read(words + 8 * i) + 1000 * (i == 0 or vandal.read(words + 8 * i) != 0))


def state_of_no_bucket(vandal: Vandal) -> None:
    offset, _ = vandal.extent_cell(BUCKETS, layout.KIND_COUNT)
    vandal.write(offset + 8, vandal.read(offset + 8) + (1 << 34))


def permits_above_no_burst(vandal: Vandal) -> None:
    offset, _ = vandal.extent_cell(HELD, layout.KIND_TAT)
    vandal.write(offset + 8, 2**63 - 2**48 + 5)


def hint_of_no_slot(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(HELD, layout.KIND_TAT)
    vandal.write(words, 1 << 20)


def slot_of_nobody(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(HELD, layout.KIND_TAT)
    vandal.write(words + 16, 1 << 22)


def endless_lease(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(HELD, layout.KIND_TAT)
    vandal.write(words + 16, 1234, 2**62)


def behind_the_slots(vandal: Vandal) -> None:
    _, words = vandal.extent_cell(HELD, layout.KIND_TAT)
    vandal.write(words + 16 + 20 * 16, 1)


DAMAGES: list[tuple[Callable[[Vandal], None], str]] = [
    (damage_header, "header: found bytes behind the fields"),
    (damage_moved_table, "header: found a table at 01"),
    (damage_time, "header: found a"),
    (damage_name, "limiter 0: found 6 bytes"),
    (damage_name_hash, "limiter 0: found an identity"),
    (damage_name_length, "limiter 0: found 49 bytes"),
    (damage_algorithm, "limiter 0: found algorithm 99 of limiter b'bucket'"),
    (exchange_algorithm, "limiter 0: found an identity that is not that of SlidingWindow b'bucket'"),
    (repeat_a_limiter, "limiter 1: found the identity of limiter 0"),
    (free_a_limiter, "limiter 2: found a free entry before it"),
    (count_for_nobody, "counter line 500: found counts of limiter 199"),
    (count_in_a_free_line, "counter line 500: found counts in a line that was never used"),
    (count_too_far, "counter line 0: found a count of 2**63"),
    (move_an_extent, "extent 0: found"),
    (lengthen_an_extent, "extent 0: found"),
    (put_an_extent_into_another, "found that it begins within"),
    (free_an_extent, "extent 1: found a free entry before it"),
    (forget_the_last_extent, "behind extent 3, limiter 'held' that are in no list"),
    (repeat_an_extent, "for the second time"),
    (unknown_kind, "found kind 5"),
    (block_a_cell, "found kind 7"),
    (state_in_an_empty_cell, "in an empty cell"),
    (tag_in_an_empty_cell, "in an empty cell"),
    (late_state, "found state 0x4000000000000000"),
    (claim_of_nobody, "a claim of a counter line that doesn't exist"),
    (key_elsewhere, "that no request looks for there"),
    (key_twice, "one cell for each key"),
    (unblock, "as no key may live there"),
    (foreign_kind, "limiter 'larger log': found kind 2"),
    (position_beyond_the_ring, "limiter 'larger log': found position 101"),
    (entry_of_another_lap, "limiter 'larger log': found entry 50 of another lap"),
    (entry_from_the_future, "limiter 'larger log': found entry 0"),
    (entries_in_disorder, "later than a newer one"),
    (mark_elsewhere, "limiter 'buckets': found mark"),
    (mark_beyond_the_total, "beyond the state's total"),
    (state_of_no_bucket, "limiter 'buckets': found state"),
    (permits_above_no_burst, "limiter 'held': found state 0x7fff000000000005"),
    (hint_of_no_slot, "limiter 'held': found hint 0"),
    (slot_of_nobody, "limiter 'held': found"),
    (endless_lease, "limiter 'held': found a lease"),
    (behind_the_slots, "limiter 'held': found 0x1 behind the slots"),
]


def test_used_segment_is_sound(used: str) -> None:
    report = verify(used)
    assert report.findings == ()
    assert [(part.name, part.algorithm) for part in report.parts] == [
        ("table", ""),
        ("buckets", "BucketedWindow"),
        ("log", "SlidingLog"),
        ("larger log", "SlidingLog"),
        ("held", "Concurrency"),
        ("held by few", "Concurrency"),
    ]
    assert report.limiters == NAMES
    assert report.parts[4].held > KEYS


def test_report_counts_cells_and_keys(used: str, name: str) -> None:
    cells = read_cells(path_of(used))
    report = verify(used)
    table = cells[: sum(report.cells.values())]
    assert report.cells["times"] == sum(kind_of(tag) == layout.KIND_TAT for tag, _ in table)
    assert report.cells["counts"] == sum(kind_of(tag) == layout.KIND_COUNT for tag, _ in table)
    assert report.cells["unknown"] == report.cells["blocked"] == 0
    clock = ManualClock() if report.clock == "manual" else "monotonic"
    with Store(name, keys=1000, clock=clock) as store:  # type: ignore[arg-type]
        assert report.live_keys == store.stats().live_keys > 0
    assert report.parts[2].cells["blocked"] == 13


@pytest.mark.parametrize(("damage", "expected"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_damage_is_found(used: str, damage: Callable[[Vandal], None], expected: str) -> None:
    damage(Vandal(used))
    report = verify(used)
    assert not report.sound
    assert any(expected in str(finding) for finding in report.damage), report.damage


def test_an_extent_of_another_algorithm_is_damage(name: str) -> None:
    with Store(name, keys=100) as store:
        SlidingLog(store, "log", "5/hour", keys=3)
        TokenBucket(store, "log", "5/hour")
        assert verify(name).findings == ()
        offset = layout.EXTENTS_OFFSET + layout.EXTENT_ENTRY_LIMITER
        Vandal(name).write(offset, 1 + (layout.ALGORITHM_SLIDING_LOG << 32))
        expected = f"extent 0: found algorithm {layout.ALGORITHM_SLIDING_LOG} for limiter 1"
        assert any(expected in str(finding) for finding in verify(name).damage)


def test_verify_changes_nothing_and_needs_no_write_permission(used: str) -> None:
    path = Path(path_of(used))
    before = path.stat()
    # Only segments with a manual clock store their time; it stands still.
    content = path.read_bytes()
    path.chmod(0o400)
    assert verify(used).sound
    after = path.stat()
    assert path.read_bytes() == content
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_verify_accepts_a_name_or_a_path(used: str, tmp_path: Path) -> None:
    assert verify(used) == verify(path_of(used)) == verify(Path(path_of(used)))
    with Store("x", keys=1, path=tmp_path / "limits"):
        assert verify(tmp_path / "limits").path == str(tmp_path / "limits")


def test_verify_reports_its_progress(used: str) -> None:
    calls: list[tuple[int, int]] = []
    verify(used, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    (total,) = {total for _, total in calls}
    assert total - calls[-1][0] < layout.TABLE_OFFSET + layout.GROUP_BYTES


# Files that can't be read.


def test_missing_segment_is_an_error_and_stays_missing(name: str) -> None:
    with pytest.raises(SegmentError, match="no such file"):
        verify(name)
    assert not Path(path_of(name)).exists()


def test_invalid_name_is_refused() -> None:
    with pytest.raises(ValueError, match="a store's name is"):
        verify("a b")


def damaged_header(used: str, offset: int, value: int) -> None:
    Vandal(used).write(offset, value)


@pytest.mark.parametrize(
    ("offset", "value", "error"),
    [
        (layout.HEADER_MAGIC, 1, ForeignSegment),
        (layout.HEADER_LAYOUT_VERSION, layout.LAYOUT_VERSION - 1, SegmentVersionMismatch),
        (layout.HEADER_LAYOUT_VERSION, 99, SegmentVersionMismatch),
        (layout.HEADER_GROUP_COUNT, 5, DamagedSegment),
        (layout.HEADER_CHECKSUM, layout.STATE_CREATING << 32, SegmentBusy),
    ],
)
def test_invalid_header_is_refused(used: str, offset: int, value: int, error: type[SegmentError]) -> None:
    damaged_header(used, offset, value)
    with pytest.raises(error):
        verify(used)


@pytest.mark.parametrize("size", [0, 50, layout.HEADER_STATE + 4, 200, 5000])
def test_short_file_is_refused(used: str, size: int, tmp_path: Path) -> None:
    copy = tmp_path / "short"
    copy.write_bytes(Path(path_of(used)).read_bytes()[:size])
    with pytest.raises(SegmentError) as refused:
        verify(copy)
    assert type(refused.value) in (ForeignSegment, TruncatedSegment, SegmentBusy, DamagedSegment)
    assert copy.stat().st_size == size


def test_links_directories_and_devices_are_refused(used: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(path_of(used))
    with pytest.raises(UntrustedSegment):
        verify(tmp_path / "link")
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(ForeignSegment):
            verify(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForeignSegment):
        verify(tmp_path / "pipe")


def test_verify_survives_arbitrary_bytes(used: str) -> None:
    """Damage anywhere behind the header gives a report or a refusal, and nothing else."""
    draws = random.Random(3)
    path = Path(path_of(used))
    size = path.stat().st_size
    found = 0
    for _ in range(60):
        with path.open("r+b", buffering=0) as file:
            for _ in range(20):
                start = draws.choice((layout.LIMITERS_OFFSET, layout.EXTENTS_OFFSET, layout.TABLE_OFFSET))
                file.seek(draws.randrange(start, size - 64) if draws.random() < 0.5 else start + draws.randrange(2000))
                file.write(draws.randbytes(draws.choice((1, 8, 16, 64))))
        report = verify(used)
        found += not report.sound
        assert len(str(report)) > 0
    assert found == 60


# Sound segments that look damaged.


def test_abandoned_claim_is_a_note(name: str) -> None:
    clock = ManualClock(1000)
    with Store(name, keys=100, clock=clock) as store:
        assert TokenBucket(store, "bucket", "1/hour").allow("key")
        vandal = Vandal(name)
        offset = vandal.cell(layout.KIND_TAT)
        stamp = 10**12 >> 30
        vandal.write(offset, vandal.read(offset) & ~7 | layout.KIND_CLAIM, stamp << 40)
        assert verify(name).findings == ()
        assert verify(name).cells["claims"] == 1
        clock.advance(10)
        (note,) = verify(name).findings
        assert (note.severity, note.where) == ("note", "the table")
        assert "1 claims of killed processes" in note.found
        assert verify(name).sound


def test_unfinished_ring_is_a_note(name: str) -> None:
    with Store(name, keys=100, clock=ManualClock(1000)) as store:
        log = SlidingLog(store, "log", "5/hour", keys=1)
        assert log.hit("key", 3)
        assert log.hit("key", 2)
        vandal = Vandal(name)
        _, words = vandal.extent_cell(0, layout.KIND_COUNT)
        vandal.write(words + 8 * 3, 0, 0)
        (note,) = verify(name).findings
        assert note.severity == "note"
        assert "not written to the end" in note.found


def leave(name: str, size: int, *words: int) -> None:
    """Append bytes, as a maker of an extent does that is killed."""
    with open(path_of(name), "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        os.posix_fallocate(file.fileno(), end, -end % layout.EXTENT_ALIGNMENT + size)
    Vandal(name).write(end + -end % layout.EXTENT_ALIGNMENT, *words)


def test_unlisted_bytes_are_a_note(name: str) -> None:
    with Store(name, keys=100) as store:
        end = os.stat(path_of(name)).st_size
        leave(name, 4096)
        (note,) = verify(name).findings
        expected = f"{os.stat(path_of(name)).st_size - end} bytes behind the table that are in no list, all zero"
        assert (note.severity, note.where, note.found) == ("note", "the file", expected)
        # They are not reused: the next extent is made behind them.
        SlidingLog(store, "log", "5/hour", keys=3).allow("key")
        assert [finding.found for finding in verify(name).findings] == [
            f"{extents(path_of(name))[0]['offset'] - end} bytes behind the table that are in no list, all zero"
        ]
        leave(name, 4096, 0, 0, layout.KIND_BLOCKED, 0, layout.KIND_BLOCKED)
        notes = verify(name).findings
        assert len(notes) == 2
        assert "behind extent 0, limiter 'log' that are in no list, all zero except 2 blocked cells" in notes[1].found
        assert verify(name).sound


def test_alignment_of_the_next_extent_is_no_note(used: str) -> None:
    assert len(extents(path_of(used))) == 5
    assert verify(used).findings == ()


@pytest.mark.parametrize("words", [(1,), (0, layout.KIND_BLOCKED), (0,) * 511 + (2**63,)])
def test_bytes_that_no_process_can_have_left_are_damage(used: str, words: tuple[int, ...]) -> None:
    leave(used, 4096, *words)
    (finding,) = verify(used).findings
    assert finding.severity == "damage"
    assert "behind extent 4, limiter 'held by few' that are in no list" in finding.found


def test_trailing_bytes_below_a_word_are_checked(used: str) -> None:
    end = os.stat(path_of(used)).st_size
    for last, severity in ((b"\0", "note"), (b"\1", "damage")):
        with open(path_of(used), "r+b") as file:
            file.seek(end)
            file.write(b"\0\0" + last)
        (finding,) = verify(used).findings
        assert finding.severity == severity
        assert "3 bytes behind extent 4" in finding.found


@pytest.mark.parametrize("rate", ["3 per 7919.123 seconds", "3 per 0.007919 ms", "3 per 9.7 years"])
def test_records_of_every_period_are_checked(name: str, rate: str) -> None:
    with Store(name, keys=100, clock=ManualClock(1000)) as store:
        assert BucketedWindow(store, "buckets", rate, 2, keys=5).allow("key")
        assert SlidingLog(store, "log", rate, keys=5).allow("key")
        report = verify(name)
        assert report.findings == ()
        assert [part.algorithm for part in report.parts] == ["", "BucketedWindow", "SlidingLog"]
        _, words = Vandal(name).extent_cell(1, layout.KIND_COUNT)
        Vandal(name).write(words, 2**62 + 2**61)
        assert verify(name).damage[0].where.endswith("of extent 1, limiter 'log'")


# The list of extents.


def put(vandal: Vandal, field: str, value: int, number: int = LARGER_LOG) -> None:
    """Write to a field of an extent's entry."""
    entry = layout.EXTENT_ENTRY.pack(*{**vandal.extents[number], field: value}.values())
    words = struct.unpack("<8Q", entry)
    vandal.write(layout.EXTENTS_OFFSET + number * layout.EXTENT_ENTRY.size, *words)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("identity", 12345, "found identity 0x3039, expected that of limiter 'larger log' and algorithm 1"),
        ("limiter", 0, "expected that of limiter 'bucket' and algorithm 1"),
        ("limiter", 10, "found an extent of limiter 10, expected one that is in the list of limiters"),
        ("limiter", 2**32 - 1, "found an extent of limiter 4294967295"),
        ("algorithm", 0, "found algorithm 0, 100 words per cell"),
        ("algorithm", 2, "expected numbers that fit each other"),
        ("algorithm", 4, "expected numbers that fit each other"),
        ("words_per_cell", 101, "found 65280 bytes for 60 keys of 101 words"),
        ("words_per_cell", 0, "of 0 words"),
        ("low_bits", 9, "expected numbers that fit each other"),
        ("limit", 99, "expected numbers that fit each other"),
        ("limit", 2**64 - 1, "expected numbers that fit each other"),
        ("period_ns", 0, "expected numbers that fit each other"),
        ("period_ns", 59 * 10**9, "period 59000000000 ns: its words were not checked"),
        ("keys", 61, "bytes for 61 keys"),
    ],
)
def test_damaged_entry_is_found(used: str, field: str, value: int, expected: str) -> None:
    vandal = Vandal(used)
    put(vandal, field, value)
    report = verify(used)
    assert len(report.damage) == 1
    assert str(report.damage[0]).startswith(f"damage: extent {LARGER_LOG}: found")
    assert expected in str(report.damage[0])
    if field not in ("words_per_cell", "keys"):
        # Its cells are checked nevertheless.
        assert report.parts[1 + LARGER_LOG].name == f"extent {LARGER_LOG}"
        assert report.parts[1 + LARGER_LOG].algorithm == ""
        assert report.parts[1 + LARGER_LOG].live_keys == KEYS
        unknown_kind_of_the_log(vandal)
        assert len(verify(used).damage) == 2


def unknown_kind_of_the_log(vandal: Vandal) -> None:
    offset, _ = vandal.extent_cell(LARGER_LOG, layout.KIND_COUNT)
    vandal.write(offset, vandal.read(offset) & ~7 | 5)


@pytest.mark.parametrize("number", range(5))
def test_impossible_parameters_are_not_used_even_with_a_valid_identity(used: str, number: int) -> None:
    """A process that damages a segment may know its hash key. Some parameters would lead out of the records, or divide
    by 0."""
    vandal = Vandal(used)
    key = (vandal.read(layout.HEADER_HASH_KEY), vandal.read(layout.HEADER_HASH_KEY + 8))
    whole = dict(vandal.extents[number])
    draws = random.Random(number)
    for field, below in {"algorithm": 5, "low_bits": 2**32, "limit": 2**64, "period_ns": 2**64}.items():
        for value in {0, 1, 64, whole[field] + 100, below - 1, draws.randrange(below)} - {whole[field]}:
            vandal.extents[number] = {**whole, field: value}
            purpose = ExtentEntry.unpack(layout.EXTENT_ENTRY.pack(*vandal.extents[number].values())).purpose
            name = NAMES[whole["limiter"]].encode()
            put(vandal, "identity", keyed_hash(key, purpose.identity_text(name)), number)
            report = verify(used)
            # Another limit of a bucketed window or another period of a log is valid, but not with that content.
            assert report.parts[number + 1].live_keys > 0
            if field != "period_ns":
                assert [finding.where for finding in report.damage] == [f"extent {number}"], (field, value)


def test_unfinished_entry_is_free(used: str) -> None:
    """Its maker was killed before it wrote the identity; the other fields don't matter."""
    draws = random.Random(5)
    vandal = Vandal(used)
    words = struct.unpack("<7Q", draws.randbytes(56))
    vandal.write(layout.EXTENTS_OFFSET + 5 * layout.EXTENT_ENTRY.size, 0, *words)
    assert verify(used).findings == ()
    clock = ManualClock() if verify(used).clock == "manual" else "monotonic"
    with Store(used, keys=1000, clock=clock) as store:  # type: ignore[arg-type]
        assert SlidingLog(store, "next", "5/hour", keys=3).allow("key")
    assert verify(used).findings == ()
    assert verify(used).parts[6].name == "next"


def test_extent_made_during_verification_is_checked(used: str) -> None:
    clock = ManualClock() if verify(used).clock == "manual" else "monotonic"
    with MappedSegment(used) as segment, Store(used, keys=1000, clock=clock) as store:  # type: ignore[arg-type]
        before = len(segment.memory)
        SlidingLog(store, "next", "5/hour", keys=3)
        list_of_extents = Extents(segment)
        assert list_of_extents.look() == []
        assert [extent.limiter for extent in list_of_extents.sound][-1] == "next"
        assert len(segment.memory) > before


def test_segment_in_use_is_not_damage(crew: Crew, name: str) -> None:
    ticks = SharedNumbers(3)

    def work(place: int) -> None:
        draws = random.Random(place)
        limiters = make_limiters(store)
        while True:
            if place == 0 and ticks[0] % 20 == 0 and ticks[0] < 1600:
                # New limiters, with extents behind the mapping's end.
                limiters.append(SlidingLog(store, f"log {ticks[0]}", "5/hour", keys=3))
            for limiter in limiters:
                key = draws.randrange(200)
                limiter.hit(key, draws.choice((1, 1, 3)))
                limiter.allow(draws.randrange(4))
                limiter.refund(key)
                limiter.reset(draws.randrange(200))
            ticks[place] += 1

    with Store(name, keys=1) as store:
        make_limiters(store)
        workers = [crew.start(work, place) for place in range(3)]
        reports: list[Report] = []
        while len(reports) < 40 or min(ticks) < 1000:
            reports.append(verify(name))
            assert reports[-1].sound, reports[-1].damage
        assert all(worker.is_running() for worker in workers)
        assert reports[-1].live_keys > 100


def test_a_look_takes_no_memory_that_a_resize_has_given_back(name: str) -> None:
    with Store(name, keys=20_000) as store:
        TokenBucket(store, "api", "20/day").allow_many([str(key) for key in range(15_000)])
        with pytest.raises(SegmentSpaceError):
            resize(path_of(name), 100)
        before = os.stat(path_of(name)).st_blocks
        assert before * 512 < os.stat(path_of(name)).st_size
        assert verify(name).sound
        with MappedSegment(name) as segment:
            assert observed_in(segment).live_keys == 15_000
        assert os.stat(path_of(name)).st_blocks == before


def test_a_file_with_holes_is_refused_before_they_are_read(name: str) -> None:
    """Else any user could let a command of root take all memory."""
    with Store(name, keys=100_000):
        pass
    with open(path_of(name), "r+b") as file:
        begin = file.read(layout.TABLE_OFFSET)
        size = file.seek(0, os.SEEK_END)
        file.truncate(0)
        file.seek(0)
        file.write(begin)
        file.truncate(size + 10**9)
    with pytest.raises(DamagedSegment, match="a file with holes"):
        verify(name)
    assert os.stat(path_of(name)).st_blocks * 512 <= layout.TABLE_OFFSET + 4096
