"""How many examples Hypothesis tries: as many as find the planted bugs, and with ``--full`` five times as many.

Every run draws others. So few in each run are many in time, and one long run for a proof draws more than one short run.
"""

from __future__ import annotations

from hypothesis import settings

FULL_FACTOR = 5

_factor = 1


def be_full() -> None:
    """For all tests that are collected from now on."""
    global _factor
    _factor = FULL_FACTOR


def examples(count: int, steps: int = 30) -> settings:
    """`steps` is the most that an example of a state machine takes."""
    return settings(max_examples=_factor * count, stateful_step_count=steps)
