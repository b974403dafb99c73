"""Words that the threads of this process share: the measurements of a load shedder."""

from __future__ import annotations

from forebay.fallback.store import Store
from forebay.segment import layout

__all__ = ["SharedWords"]


class SharedWords:
    """As the compiled core's, in this process."""

    def __init__(self, store: Store, name: str, kind: int, limit: int, period_ns: int) -> None:
        self._memory = store.segment
        self._words = store.segment.shedder_words((name, kind, limit, period_ns), layout.SHEDDER_WORDS)

    def load(self, number: int) -> int:
        """The value of the word of this number."""
        return self._words[number]

    def replace(self, number: int, seen: int, value: int) -> bool:
        """Whether the word had the value that was seen: then it has the new one."""
        with self._memory.lock:
            if self._words[number] != seen:
                return False
            self._words[number] = value
            return True
