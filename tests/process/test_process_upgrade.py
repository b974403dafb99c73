"""A process with another layout, as after an upgrade, beside others: see docs/operations/upgrades.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import SegmentVersionMismatch, SlidingLog, Store, TokenBucket
from forebay.segment import layout
from forebay.snapshots import restore, snapshot
from forebay.snapshots.document import LAYOUTS

# What a process of a later release would do, as far as it depends on the layout's number.
LATER = f"""
import sys
from forebay.segment import layout
layout.LAYOUT_VERSION = {layout.LAYOUT_VERSION + 1}
from forebay import SegmentVersionMismatch, Store, TokenBucket

name = sys.argv[1]
try:
    Store(name, keys=100)
except SegmentVersionMismatch as error:
    print("refused:", error)
print([TokenBucket(Store(name + "-2", keys=100), "api", "3/year").allow("k") for _ in range(4)])
"""

IS_LATER = LATER[: LATER.index("from forebay import")]
RESTORING = f"""{IS_LATER}
from forebay import SlidingLog, Store, TokenBucket
from forebay.snapshots import restore
from forebay.verification import verify

name = sys.argv[1]
print(restore(FILE, name, replace=True).carried_keys, "keys,", "sound" if verify(name).sound else "damaged")
store = Store(name, keys=100)
print([TokenBucket(store, "api", "3/year").allow("k") for _ in range(2)])
print(SlidingLog(store, "log", "3/year", keys=10).allow("k"))
"""
SNAPSHOT_OF_LATER = f"""{IS_LATER}
from forebay import Store
from forebay.snapshots import snapshot

Store(sys.argv[1] + "-2", keys=100).close()
snapshot(sys.argv[1] + "-2", FILE)
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"upgrade-{os.getpid()}"
    yield name
    for each in (name, f"{name}-2"):
        Store.unlink(each, missing_ok=True)


def later(name: str, program: str = LATER) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, name], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_later_layout_is_refused_and_leaves_the_old_processes_deciding(name: str) -> None:
    store = Store(name, keys=100)
    api = TokenBucket(store, "api", "3/year")
    assert api.allow("k")
    with open(f"/dev/shm/forebay-{name}", "rb") as file:
        header = file.read(layout.HEADER.size)
        refusal, beside = later(name).splitlines()
        file.seek(0)
        assert file.read(layout.HEADER.size) == header
    assert refusal.startswith("refused:")
    assert f"layout version {layout.LAYOUT_VERSION}" in refusal
    assert f"layout version {layout.LAYOUT_VERSION + 1}" in refusal
    assert beside == "[True, True, True, False]"  # under another name, with counts of its own
    assert [api.allow("k") for _ in range(3)] == [True, True, False]


def test_later_layout_keeps_all_keys_by_a_snapshot(name: str, tmp_path: Path) -> None:
    """The old version takes it, once its processes have stopped; the new one puts it in the old segment's place."""
    file = tmp_path / "shop.snapshot"
    with Store(name, keys=100) as store:
        assert TokenBucket(store, "api", "3/year").hit("k", 2).remaining == 1
        assert SlidingLog(store, "log", "3/year", keys=10).hit("k", 3)
    snapshot(name, file)
    assert later(name, RESTORING.replace("FILE", repr(str(file)))).splitlines() == [
        "2 keys, sound",
        "[True, False]",  # one was left
        "False",
    ]
    with open(f"/dev/shm/forebay-{name}", "rb") as segment:
        raw = segment.read(layout.HEADER.size)
    version = raw[layout.HEADER_LAYOUT_VERSION : layout.HEADER_LAYOUT_VERSION + 4]
    assert int.from_bytes(version, "little") == layout.LAYOUT_VERSION + 1


def test_a_snapshot_of_a_layout_that_is_not_restored_is_refused(name: str, tmp_path: Path) -> None:
    file = tmp_path / "shop.snapshot"
    later(name, SNAPSHOT_OF_LATER.replace("FILE", repr(str(file))))
    with pytest.raises(SegmentVersionMismatch, match=f"of layout version {layout.LAYOUT_VERSION + 1}"):
        restore(file, name)
    assert not Path(f"/dev/shm/forebay-{name}").exists()


def test_this_layouts_snapshots_are_restored() -> None:
    """A release that raises the number decides which older snapshots it restores, too."""
    assert layout.LAYOUT_VERSION in LAYOUTS


def test_later_layout_replaces_the_segment_of_stopped_processes_once_it_is_unlinked(name: str) -> None:
    with Store(name, keys=100) as store:
        assert not TokenBucket(store, "api", "3/year").hit("k", 3).remaining
    later(name, LATER.replace("try:", "Store.unlink(name)\ntry:", 1))
    with open(f"/dev/shm/forebay-{name}", "rb") as file:
        raw = file.read(layout.HEADER.size)
    version = raw[layout.HEADER_LAYOUT_VERSION : layout.HEADER_LAYOUT_VERSION + 4]
    assert int.from_bytes(version, "little") == layout.LAYOUT_VERSION + 1
