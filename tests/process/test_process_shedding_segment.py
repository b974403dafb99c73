"""The words of load shedders in a segment: where they are, and what a check of the segment finds."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from process_helpers import extents, path_of

from forebay import Store
from forebay.segment import layout
from forebay.shedding import AIMD, AdaptiveLimit, BusyWorkers, ReservedSlots
from forebay.verification import verify


def of_shedders(name: str) -> list[dict[str, int]]:
    return [extent for extent in extents(path_of(name)) if extent["algorithm"] == layout.ALGORITHM_SHEDDER]


def write(name: str, offset: int, *words: int) -> None:
    with Path(path_of(name)).open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(struct.pack(f"<{len(words)}Q", *words))


def use(store: Store) -> list[AdaptiveLimit | BusyWorkers]:
    shedders = [
        BusyWorkers(store, "workers", 4, ["critical", "test"], interval="1s"),
        AdaptiveLimit(store, "search", AIMD()),
    ]
    ReservedSlots(store, "fleet", 100, {"critical": 20, "test": 0}).admit("test")
    for shedder in shedders:
        shedder.admit("critical" if shedder.priorities else None).end()
    return shedders


def test_a_segment_with_shedders_is_sound_whatever_their_words_are(name: str) -> None:
    draw = random.Random(26)
    with Store(name, keys=100) as store:
        shedders = use(store)
        assert verify(name).findings == ()
        assert len(of_shedders(name)) == 2
        for extent in of_shedders(name):
            end = extent["offset"] + extent["bytes"]
            write(name, end - 8 * layout.SHEDDER_WORDS, *[draw.getrandbits(64) for _ in range(layout.SHEDDER_WORDS)])
        assert verify(name).findings == ()
        for shedder in shedders:
            shedder.admit("critical" if shedder.priorities else None).end()
        assert verify(name).findings == ()


def test_a_cell_in_the_extent_of_a_shedder_is_damage(name: str) -> None:
    with Store(name, keys=100) as store:
        use(store)
        write(name, of_shedders(name)[0]["offset"], 8 | layout.KIND_TAT, 5)
        assert any("found kind" in str(finding) for finding in verify(name).damage)


def test_an_impossible_shedder_is_damage(name: str) -> None:
    with Store(name, keys=100) as store:
        use(store)
        number = next(n for n, one in enumerate(extents(path_of(name))) if one["algorithm"] == layout.ALGORITHM_SHEDDER)
        write(name, layout.EXTENTS_OFFSET + number * layout.EXTENT_ENTRY.size + layout.EXTENT_ENTRY_LIMIT, 0)
        assert any("numbers that fit each other" in str(finding) for finding in verify(name).damage)


def test_shedders_of_one_name_and_other_arguments_measure_apart(name: str) -> None:
    with Store(name, keys=100) as store:
        for workers, interval in ((4, "1s"), (5, "1s"), (4, "2s"), (4, "1s")):
            BusyWorkers(store, "workers", workers, ["critical", "test"], interval=interval)
        assert len(of_shedders(name)) == 3
        assert set(store.stats().limiters) == {"workers", "workers, measured"}
