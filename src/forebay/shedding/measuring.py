"""The common part of the shedders that measure: one limiter for their slots, and words of shared memory."""

from __future__ import annotations

from typing import Final

from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.shared_words import SharedWords
from forebay.rate import Duration
from forebay.shedding.shedder import ALL, Shedder, slots_of
from forebay.store import Store

__all__ = ["MOST_PRIORITIES", "MeasuringShedder"]

MOST_PRIORITIES: Final = 16


class MeasuringShedder(Shedder):
    """Base class; not used by itself. `kind` and `interval_ns` are those of its ``SharedWords``."""

    def __init__(self, store: Store, name: str, slots: int, lease: Duration, kind: int, interval_ns: int) -> None:
        self.store, self.name = store, name
        self._slots = slots_of(store, name, slots, lease)
        self.slots, self.lease_ns = slots, self._slots.lease_ns
        self.words = SharedWords(store, name, kind, slots, interval_ns)

    @property
    def limiters(self) -> tuple[Concurrency, ...]:
        """The one that counts requests in flight."""
        return (self._slots,)

    def _slots_held(self) -> int:
        """Reads all slots."""
        return self.slots - self._slots.peek(ALL, 0).remaining
