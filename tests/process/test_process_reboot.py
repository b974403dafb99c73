"""Segments on a disk outlive a reboot: their time goes on by the wall clock."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from process_helpers import Crew, Meeting

from forebay import Store, TokenBucket
from forebay.segment import layout
from forebay.segment.header import Header
from forebay.testing import ManualClock

SECOND_NS = 1_000_000_000
HOUR_NS = 3600 * SECOND_NS
RATE, BURST = "1/hour", 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segment"


def reboot(
    path: Path, *, asleep_ns: int = 0, new_epoch_ns: int | None = None, state: int = layout.STATE_READY
) -> Header:
    """Make it look as if the segment had been made in another boot, and its time stood still for `asleep_ns`.

    The monotonic clock of that boot had nothing to do with today's.
    """
    header = Header.unpack(path.read_bytes()[: layout.HEADER.size])
    before = replace(
        header,
        boot_id=bytes(range(16)),
        epoch_ns=987_654_321_000 if new_epoch_ns is None else new_epoch_ns,
        wall_epoch_ns=header.wall_epoch_ns - asleep_ns,
    )
    with path.open("r+b") as file:
        file.write(before.pack(state))
    return before


def remaining_time_ns(store: Store, key: str) -> int:
    return TokenBucket(store, "api", RATE, BURST).peek(key).reset_after_ns


def use(path: Path) -> None:
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", RATE, BURST)
        for cost, key in ((10, "ten"), (5, "five"), (1, "one")):
            assert bucket.hit(key, cost)


@pytest.mark.parametrize("epoch_ns", [0, 5, 10**18, 2**64 - 10**15])
def test_states_keep_their_distance_in_wall_time(path: Path, epoch_ns: int) -> None:
    """Whatever the old boot's clock was at, and however long the host was down: that many hours have passed."""
    use(path)
    reboot(path, asleep_ns=3 * HOUR_NS, new_epoch_ns=epoch_ns)
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", RATE, BURST)
        left = {key: remaining_time_ns(store, key) for key in ("ten", "five", "one", "none")}
        # The tests' own time counts too: it only makes the rest shorter.
        assert 6 * HOUR_NS < left["ten"] <= 7 * HOUR_NS
        assert left["ten"] - 5 * HOUR_NS - 60 * SECOND_NS < left["five"] <= left["ten"] - 5 * HOUR_NS
        assert left["one"] == left["none"] == 0
        assert [bucket.allow("ten") for _ in range(5)] == [True] * 3 + [False] * 2
        assert store.stats().limiters["api"].allowed == 3 + 3


def test_a_header_is_rebased_once(path: Path, crew: Crew) -> None:
    use(path)
    before = reboot(path, asleep_ns=HOUR_NS)
    headers = crew.run(6, _attach_and_read_header, Meeting(6), path)
    assert len(set(headers)) == 1
    header = Header.unpack(headers[0])
    assert header.boot_id == bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    assert header == replace(before, boot_id=header.boot_id, epoch_ns=header.epoch_ns)
    # Segment time is the wall time since the segment was made.
    now_ns = (time.monotonic_ns() - header.epoch_ns) % 2**64
    assert abs(now_ns - (time.time_ns() - header.wall_epoch_ns)) < 60 * SECOND_NS


def _attach_and_read_header(me: int, meeting: Meeting, path: Path) -> bytes:
    meeting.wait(me)
    with Store("a", keys=100, path=path):
        return path.read_bytes()[: layout.HEADER.size]


def test_processes_that_rebase_at_the_same_moment_stay_exact(path: Path, crew: Crew) -> None:
    for _ in range(30):
        use(path)
        reboot(path, asleep_ns=2 * HOUR_NS)
        assert sum(crew.run(4, _drain, Meeting(4), path)) == 2
        path.unlink()


def _drain(me: int, meeting: Meeting, path: Path) -> int:
    meeting.wait(me)
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", RATE, BURST)
        return sum([bucket.allow("ten") for _ in range(20)])


def test_a_wall_clock_from_before_the_segment_was_made_starts_empty(path: Path) -> None:
    use(path)
    reboot(path, asleep_ns=-HOUR_NS)
    with pytest.warns(RuntimeWarning, match="starts empty") as warned:
        store = Store("a", keys=100, path=path)
    assert warned[0].filename == __file__
    with store:
        assert store.stats().live_keys == 0
        assert TokenBucket(store, "api", RATE, BURST).hit("ten", 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Store("a", keys=100, path=path).close()


def test_a_reboot_during_a_creation_starts_again(path: Path) -> None:
    use(path)
    reboot(path, state=layout.STATE_CREATING)
    with Store("a", keys=100, path=path) as store:
        assert store.stats().live_keys == 0


@pytest.mark.parametrize("step", ["pwrite", "open"])
def test_a_process_killed_while_it_rebases(path: Path, crew: Crew, step: str) -> None:
    """Before its one write the next rebases; there is no state in between."""
    use(path)
    reboot(path, asleep_ns=3 * HOUR_NS)
    with pytest.raises(AssertionError, match="by SIGKILL"):
        crew.start(_die_at, step, path).result()
    assert sum(crew.run(4, _drain, Meeting(4), path)) == 3


def _die_at(step: str, path: Path) -> None:
    def die(*arguments: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, step, die)
    Store("a", keys=100, path=path)


def test_states_that_cannot_be(path: Path) -> None:
    """A power cut can leave pages old and new: a claim, a state of a time to come. All heal or end."""
    use(path)
    raw = bytearray(path.read_bytes())
    cells = [offset for offset in range(layout.TABLE_OFFSET, len(raw), 16) if any(raw[offset : offset + 16])]
    for offset, state in zip(cells, (2**62, 2**64 - 1, 2**63), strict=True):
        raw[offset + 8 : offset + 16] = state.to_bytes(8, "little")
    path.write_bytes(raw)
    reboot(path, asleep_ns=HOUR_NS)
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", RATE, BURST)
        assert store.stats().live_keys == 0
        for key in ("ten", "five", "one"):
            assert [bool(bucket.hit(key, 5)) for _ in range(3)] == [True, True, False]


def test_a_manual_clock_knows_no_reboot(path: Path) -> None:
    with Store("a", keys=100, path=path, clock=ManualClock(500.0)) as store:
        assert TokenBucket(store, "api", RATE, BURST).hit("ten", 10)
    reboot(path, asleep_ns=-HOUR_NS)
    with Store("a", keys=100, path=path, clock=ManualClock()) as store:
        assert remaining_time_ns(store, "ten") == 10 * HOUR_NS


def test_a_very_old_segment(path: Path) -> None:
    use(path)
    header = reboot(path)
    with path.open("r+b") as file:
        file.write(replace(header, wall_epoch_ns=0).pack(layout.STATE_READY))
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", RATE, BURST)
        assert [bool(bucket.hit("ten", 10)), bool(bucket.hit("ten", 1))] == [True, False]
