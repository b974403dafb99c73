"""The faults that fuzzing has found, as tests; and the fuzzed functions, on the inputs that fuzzing begins with.

Run by ``ci/test``. ``ci/fuzz`` goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seeds import seeds
from segments import SegmentBytes
from targets import TARGETS

from forebay import LeakyBucket, MinInterval, Store, TokenBucket
from forebay.segment import layout
from forebay.testing import ManualClock


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_the_first_inputs(target: str) -> None:
    for data in seeds(target):
        TARGETS[target](data)


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[tuple[Store, SegmentBytes]]:
    path = str(tmp_path / "segment")
    with Store("fuzz", keys=1, path=path, clock=ManualClock(1000)) as store:
        memory = SegmentBytes(path)
        yield store, memory
        memory.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda store: TokenBucket(store, "a", "5/minute"),
        lambda store: LeakyBucket(store, "a", "2/second", 4),
        lambda store: MinInterval(store, "a", "2s"),
    ],
)
def test_an_impossible_time_delays_no_request(
    segment: tuple[Store, SegmentBytes], make: Callable[[Store], Any]
) -> None:
    """A booking that costs nothing got a delay of centuries, beyond its longest delay."""
    store, memory = segment
    limiter = make(store)
    limiter.allow("key")
    (cell,) = memory.live_cells()
    memory.write_word(cell + layout.CELL_STATE, 2**63)
    reservation = limiter.reserve("key", 0, 10)
    assert reservation.allowed
    assert reservation.delay == 0
    assert limiter.wait("key", 0, timeout=1)
    assert store.now_ns() == 1000 * 10**9


def test_full_table_of_latest_times_has_a_victim(segment: tuple[Store, SegmentBytes]) -> None:
    """No such time was earlier than any, so no cell was the victim, and memory before the first was read as one."""
    store, memory = segment
    limiter = TokenBucket(store, "a", "5/minute")
    cells = range(layout.TABLE_OFFSET, memory.table_end, layout.CELL.size)
    for number, cell in enumerate(cells):
        memory.write_word(cell + layout.CELL_STATE, 2**64 - 1)
        memory.write_word(cell + layout.CELL_TAG, (number + 1) << layout.KIND_BITS | layout.KIND_COUNT)
    assert limiter.allow("key")
    assert limiter.peek("key").remaining == 4
    assert store.stats().total.evicted == 1
    changed = [cell for cell in cells if memory.word(cell + layout.CELL_STATE) != 2**64 - 1]
    assert len(changed) == 1
