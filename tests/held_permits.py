"""The permit that a request holds while a manual clock moves, and whether it is held at each moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay import Concurrency
from forebay.testing import ManualClock


class WatchedClock(ManualClock):
    """Calls `on_move` whenever it has moved: in the midst of a wait, too."""

    def __init__(self) -> None:
        self.on_move: Callable[[], object] = lambda: None
        super().__init__()

    def set_ns(self, now_ns: int) -> None:
        super().set_ns(now_ns)
        self.on_move()


class Held:
    """A permit that a request holds. From ``watch`` on, it must be held whenever the clock has moved."""

    def __init__(self, clock: WatchedClock, limiter: Concurrency, rule: Any, key: str = "everyone") -> None:
        self.rule = rule
        """The rule by which the request holds it."""
        self._clock, self._limiter, self._key = clock, limiter, key
        self.moves = 0

    @property
    def is_free(self) -> bool:
        return self._limiter.peek(self._key, 0).remaining > 0

    def watch(self) -> None:
        self._clock.on_move = self.check

    def check(self) -> None:
        self.moves += 1
        assert not self.is_free, f"free after {self._clock.now()} s"

    def ended(self) -> bool:
        """Whether it was held until now, through many slices, and is free."""
        moves, self.moves = self.moves, 0
        self._clock.on_move = lambda: None
        return moves > 5 and self.is_free
