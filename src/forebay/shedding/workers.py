"""BusyWorkers: shed the least important requests while the workers of the host are busy.

**State.** A slot for each worker that handles a request, in a ``Concurrency``; and one word of shared memory, whose
fields and arithmetic are in `level`.

**Transitions.** A request that begins or ends after a tick computes the next state from the word that it has read, and
replaces the word by one CAS. If it loses, another request has counted the same tick, and it goes on without another
attempt. So the word moves on by one winner for each tick, and no request waits.

**Crash and stall.** A process that is killed before the CAS leaves the state as it was, and the next request counts the
ticks that were missed. Its slot is free as soon as another process looks, so it no longer counts as a busy worker. A
process that stops between its reading and the CAS loses the CAS, because the tick in the word has moved on.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Final

from forebay.core.algorithms.concurrency import Lease
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, as_period_ns
from forebay.shedding.level import TICKS, UNIT, LevelState, Thresholds, after
from forebay.shedding.measuring import MOST_PRIORITIES, MeasuringShedder
from forebay.shedding.shedder import (
    ALL,
    LEASE,
    Admission,
    Outcome,
    check_count,
    checked_priorities,
    checked_store,
)
from forebay.store import Store

__all__ = ["BusyWorkers"]

KIND: Final = 0
LEVEL: Final = 0
"""The word."""
LEAST_INTERVAL_NS: Final = 10_000_000


class BusyWorkers(MeasuringShedder):
    """Sheds requests while the workers of this host are busy: the least important first, and little by little.

    ``BusyWorkers(store, "workers", 16, ["critical", "default", "test"])`` is for a host with 16 workers, or 4 of 4
    threads, that is, 16 requests at one time. It measures which part of them is busy. At the end of each `interval` in
    which that was `above` or more, it sheds one `step` more. The first step sheds 10 % of the requests of the lowest
    priority, the second 20 %. When all of them are shed, it goes on with the next priority. The first priority is never
    shed. After an interval in which at most `below` was busy, it sheds one step less. Between the two it goes on as it
    does.

    `workers`: requests that the host handles at one time. `priorities`: names, the most important first, from 2 to 16.
    `above`, `below`, `step`: parts, from 0 to 1. `interval`: text, seconds or a ``timedelta``, at least 10 ms.
    `lease`: how long a request counts as busy without ``renew``.

    ``level`` is how many priorities are shed, such as 1.3. All processes of the host share the measurement and the
    level; each applies its own arguments.

    Raises ``InvalidLimiter``, ``InvalidRate``, ``TooManyLimiters``, ``SegmentSpaceError``. ``admit`` takes a slot and
    reads the clock and a word; after a tick, eight in an interval, it also reads all slots.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        workers: int,
        priorities: Iterable[str],
        *,
        above: float = 0.9,
        below: float = 0.7,
        step: float = 0.1,
        interval: Duration = "500ms",
        lease: Duration = LEASE,
    ) -> None:
        checked_store(BusyWorkers, store, name)
        self.priorities = checked_priorities(BusyWorkers, priorities, MOST_PRIORITIES)
        for what, part in (("above", above), ("below", below), ("step", step)):
            if isinstance(part, bool) or not isinstance(part, (int, float)) or not 0 < part <= 1:
                raise InvalidLimiter(f"{what} is a part above 0, up to 1, such as 0.9, not {short_repr(part)}")
        if below >= above:
            raise InvalidLimiter(f"below is less than above, {above:g}, not {below:g}: between them the level stays")
        # Rounded down, as samples are: a sample of exactly `above` reaches it. With nobody busy none does.
        above_units = max(1, int(above * UNIT))
        self._thresholds = Thresholds(
            above=above_units,
            below=min(int(below * UNIT), above_units - 1),
            step=max(1, round(step * UNIT)),
            highest=(len(self.priorities) - 1) * UNIT,
        )
        interval_ns = as_period_ns(interval)
        if interval_ns < LEAST_INTERVAL_NS:
            raise InvalidLimiter(f"an interval is 10 ms or more, not {short_repr(interval)}")
        self._tick_ns = interval_ns // TICKS
        check_count("workers of BusyWorkers", workers)
        super().__init__(store, name, workers, lease, KIND, interval_ns)

    def __repr__(self) -> str:
        return f"<BusyWorkers {self.name!r} {self.slots}>"

    @property
    def level(self) -> float:
        """How many priorities are shed now: 0, or up to one less than there are."""
        return LevelState.of(self._observed()).level / UNIT

    @property
    def busy(self) -> int:
        """How many workers are busy now."""
        return self._slots_held()

    def admit(self, priority: str | None = None) -> Admission:
        """As the base class's."""
        place = len(self.priorities) - 1 - self.rank(priority)
        shed = LevelState.of(self._observed()).level - place * UNIT
        # Python seeds this generator anew in a forked child.
        if shed > 0 and (shed >= UNIT or random.random() * UNIT < shed):
            return Admission(self, None)
        lease = self._slots.acquire(ALL)
        # With more requests than workers, all slots are taken, and all workers are busy.
        return Admission(self, (lease,) if lease else ())

    def finish(self, admission: Admission, leases: Iterable[Lease], outcome: Outcome) -> bool:
        """As the base class's."""
        try:
            self._observed()
        finally:
            was_held = super().finish(admission, leases, outcome)
        return was_held

    def _observed(self) -> Any:
        """The word now. Counts the ticks that have passed."""
        word = self.words.load(LEVEL)
        tick = self.store.now_ns() // self._tick_ns
        if LevelState.of(word).tick == tick:
            return word
        moved = after(word, tick, self.busy * UNIT // self.slots, self._thresholds)
        # A loser goes on with what it has computed, which differs by a request in flight at most.
        self.words.replace(LEVEL, word, moved)
        return moved
