"""Every schedule of short programs, within stated bounds, has an outcome that one process alone could have had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenes import SCENES


@pytest.mark.parametrize("name", SCENES)
def test_every_schedule(name: str, full: bool, tell: Callable[[str, object], None]) -> None:
    explorable = SCENES[name]
    wider = {**explorable.quick, **explorable.full}
    for bounds in [explorable.quick, wider] if full and explorable.full else [explorable.quick]:
        explored = explorable.make().explore(**bounds)
        assert explored.verdict == "complete", (
            f"{explored.verdict}: {explored.complaint}\n{explored.trace}\nagain: replay={explored.replay!r}, {bounds}"
        )
        tell(
            f"{name}, wider" if bounds is wider else name,
            f"{explored.states:11,} states, {explored.executions:11,} schedules, {explored.outcomes:6,} outcomes",
        )
