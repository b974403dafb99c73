"""Every schedule of short programs, within stated bounds, has an outcome that one process alone could have had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hot_keys_scenes import HOT_KEYS_SCENES
from leased_scenes import LEASED_SCENES
from resize_scenes import RESIZE_SCENES
from scenes import SCENES
from synced_scenes import SYNCED_SCENES

ALL_SCENES = SCENES | HOT_KEYS_SCENES | LEASED_SCENES | RESIZE_SCENES | SYNCED_SCENES


@pytest.mark.parametrize("name", ALL_SCENES)
def test_every_schedule(name: str, full: bool, record: Callable[[str, object], None]) -> None:
    explorable = ALL_SCENES[name]
    wider = {**explorable.quick, **explorable.full}
    for bounds in [explorable.quick, wider] if full and explorable.full else [explorable.quick]:
        explored = explorable.make().explore(**bounds)
        assert explored.verdict == "complete", (
            f"{explored.verdict}: {explored.complaint}\n{explored.trace}\nagain: replay={explored.replay!r}, {bounds}"
        )
        record(
            f"{name}, wider" if bounds is wider else name,
            f"{explored.states:11,} states, {explored.executions:11,} schedules, {explored.outcomes:6,} outcomes",
        )
