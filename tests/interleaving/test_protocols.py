"""Every schedule of short programs, within stated bounds, has an outcome that one process alone could have had."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from scenes import SCENES, two_laps_at_once


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


def test_within_one_instant_a_log_of_several_processes_is_not_exact() -> None:
    """A limit that is stated: laps are told apart by times, so the clock has to move on between them.

    With a clock that does, the same program is among the scenes.
    """
    assert two_laps_at_once().explore().verdict == "wrong"
