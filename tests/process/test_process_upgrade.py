"""A process with another layout, as after an upgrade, beside others: see docs/operations/upgrades.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from forebay import Store, TokenBucket
from forebay.segment import layout

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


def test_later_layout_replaces_the_segment_of_stopped_processes_once_it_is_unlinked(name: str) -> None:
    with Store(name, keys=100) as store:
        assert not TokenBucket(store, "api", "3/year").hit("k", 3).remaining
    later(name, LATER.replace("try:", "Store.unlink(name)\ntry:", 1))
    with open(f"/dev/shm/forebay-{name}", "rb") as file:
        raw = file.read(layout.HEADER.size)
    version = raw[layout.HEADER_LAYOUT_VERSION : layout.HEADER_LAYOUT_VERSION + 4]
    assert int.from_bytes(version, "little") == layout.LAYOUT_VERSION + 1
