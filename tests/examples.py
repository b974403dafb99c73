"""How many examples Hypothesis draws: enough to find the planted bugs; ``--full`` draws five times as many, ``--few``
a tenth.

Every run draws new examples, so small runs add up; only the proofs' long run draws many at once.
"""

from __future__ import annotations

from hypothesis import settings

FULL_FACTOR = 5
FEW_FACTOR = 0.1
LEAST = 3

_factor: float = 1


def be_full() -> None:
    """Apply `FULL_FACTOR` to all tests that are collected from now on."""
    global _factor
    _factor = FULL_FACTOR


def be_few() -> None:
    """Apply `FEW_FACTOR` to all tests that are collected from now on."""
    global _factor
    _factor = FEW_FACTOR
    usual = settings()
    settings.register_profile("few", usual, max_examples=round(FEW_FACTOR * usual.max_examples))
    settings.load_profile("few")


def examples(count: int, steps: int = 30) -> settings:
    """Settings for `count` examples; a state machine takes at most `steps` steps in each."""
    return settings(max_examples=max(LEAST, round(_factor * count)), stateful_step_count=steps)
