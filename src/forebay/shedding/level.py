"""The state of a ``BusyWorkers``, one word: how busy the workers were, and how much is shed.

**State.** The number of the last tick, the sum of the samples of this interval, and the level. There are `TICKS` ticks
in an interval. A sample is the part of the workers that was busy at a tick, in 1/`UNIT`. The level is how many
priorities are shed, in 1/`UNIT` of a priority: at 1.25 of them, the lowest is shed whole, and a quarter of the next.

**Samples.** The first request that begins or ends after a tick reads how many were in flight before it. No request
began or ended since the tick, so as many were in flight at the tick, and at each further tick that has passed. Thus the
mean over the ticks weighs by time, not by requests.

**Transitions.** At the end of an interval the level moves by one step: up if the mean of its samples is `above` or
more, down if it is `below` or less. Between the two it stays, so a level that has helped isn't given up at once
(hysteresis). In a pause without requests it moves down by a step each interval, but up only once: to shed more,
requests have to come.

**Damage.** Any word is a state. One that lies in the future is replaced by a state of now, with its level.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["TICKS", "UNIT", "LevelState", "Thresholds", "after"]

TICKS: Final = 8
UNIT: Final = 256
PART_BITS: Final = 12
"""Bits of the sum, up to `TICKS` * `UNIT`, and of the level."""
_PART: Final = 2**PART_BITS - 1
_TICK: Final = 2 ** (64 - 2 * PART_BITS) - 1


class LevelState(NamedTuple):
    """The fields of the word."""

    tick: int
    total: int
    level: int

    @classmethod
    def of(cls, word: int) -> LevelState:
        return cls(word >> 2 * PART_BITS, word >> PART_BITS & _PART, word & _PART)

    @property
    def word(self) -> int:
        return self.tick << 2 * PART_BITS | self.total << PART_BITS | self.level


class Thresholds(NamedTuple):
    """When the level moves, in 1/`UNIT`."""

    above: int
    below: int
    step: int
    highest: int
    """The level at which all priorities are shed that may be."""


def after(word: int, tick: int, busy: int, thresholds: Thresholds) -> int:
    """The state at a tick, if the part `busy` of the workers has been busy since the state's own tick.

    The same word if no tick has passed. O(1), however many have passed.
    """
    seen = LevelState.of(word)
    level = min(seen.level, thresholds.highest)
    passed = (tick - seen.tick) & _TICK
    is_ahead = passed > _TICK // 2
    if passed == 0 or (is_ahead and _TICK + 1 - passed <= TICKS):
        # The same tick, or another process has read the clock later.
        return word
    if word == 0 or is_ahead:
        # Never used; or the clock went back, or the word is damaged.
        return LevelState(tick & _TICK, 0, level).word
    left = TICKS - seen.tick % TICKS
    if passed < left:
        return LevelState(tick & _TICK, min(seen.total + passed * busy, TICKS * UNIT), level).word
    level = _moved(level, seen.total + left * busy, 1, thresholds)
    intervals, ticks = divmod(passed - left, TICKS)
    if intervals and busy <= thresholds.below:
        level = _moved(level, TICKS * busy, intervals, thresholds)
    return LevelState(tick & _TICK, ticks * busy, level).word


def _moved(level: int, total: int, intervals: int, thresholds: Thresholds) -> int:
    if total >= TICKS * thresholds.above:
        return min(level + thresholds.step, thresholds.highest)
    if total <= TICKS * thresholds.below:
        return max(level - intervals * thresholds.step, 0)
    return level
