"""ReservedSlots: a share of the slots that only important requests may take.

**Composition.** The shedder adds no state of its own. With 20 of 100 slots reserved for critical requests, two
``Concurrency`` limiters decide: one of 80 slots, for all other requests together, and one of 100, for all. A critical
request takes a slot of the second; another one takes a slot of both.

**Guarantee.** The other requests never hold more than 80 slots, so 20 are left to critical requests at every moment,
whatever the others do. Critical requests may hold up to 100.

**Order.** A request takes the slot of the smaller limiter first. A request that is denied there has taken no slot of
the larger one, not even for a moment. In the other order a flood of unimportant requests could take the last slots for
as long as it takes to deny them, and a critical request that comes in between would be denied. A request that gets the
first slot and not the second gives the first one back.

**Crash and stall.** Those of ``Concurrency``: a process that ends, at any step, holds no slot afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration
from forebay.shedding.shedder import (
    ALL,
    LEASE,
    Admission,
    Shedder,
    check_count,
    checked_priorities,
    checked_store,
    per_cent,
    slots_of,
)
from forebay.store import Store

__all__ = ["ReservedSlots", "name_below"]

MOST_PRIORITIES: Final = 8


def name_below(name: str, priority: str) -> str:
    """The name of the limiter of the requests that are less important than `priority`, for a shedder `name`."""
    return f"{name}, less than {priority}"


class ReservedSlots(Shedder):
    """Slots for requests in flight, a part of them reserved for important ones.

    ``ReservedSlots(store, "fleet", 100, {"critical": "20%", "default": 0})`` admits up to 100 requests at one time,
    critical or not, and of those that aren't critical up to 80. `reserved` has the priorities, the most important
    first, and how many slots each keeps from the less important ones: a number or per cent, rounded up. The last
    priority keeps none. A critical request is denied only when all 100 slots are held.

    `lease`: how long a request holds its slot at most without ``renew``; text, seconds or a ``timedelta``.

    Raises ``InvalidLimiter``, ``InvalidRate``, ``TooManyLimiters``, ``SegmentSpaceError``. A decision is one
    ``Concurrency.acquire`` for each limiter of the request's priority and those above it.
    """

    def __init__(
        self, store: Store, name: str, slots: int, reserved: Mapping[str, int | str], *, lease: Duration = LEASE
    ) -> None:
        checked_store(ReservedSlots, store, name)
        if not isinstance(reserved, Mapping):
            raise InvalidLimiter(
                f'reserved has the slots of each priority, as {{"critical": "20%", "default": 0}}, not '
                f"{short_repr(reserved)}"
            )
        self.store, self.name = store, name
        self.priorities = checked_priorities(ReservedSlots, reserved, MOST_PRIORITIES)
        check_count("slots of ReservedSlots", slots)
        whole = slots_of(store, name, slots, lease)
        self.slots, self.lease_ns = slots, whole.lease_ns
        kept = [_slots_kept(priority, reserved[priority], slots) for priority in self.priorities]
        if kept[-1]:
            raise InvalidLimiter(
                f"no request is less important than {self.priorities[-1]!r}, so it keeps 0 slots, not {kept[-1]}"
            )
        if sum(kept) >= slots:
            raise InvalidLimiter(
                f"{sum(kept)} of the {slots} slots of {name!r} are reserved, so requests of priority "
                f"{self.priorities[-1]!r} would all be denied: reserve fewer"
            )
        limiters = [whole]
        self._by_rank: list[tuple[Concurrency, ...]] = [(whole,)]
        for rank in range(1, len(kept)):
            if kept[rank - 1]:
                below = name_below(name, self.priorities[rank - 1])
                limiters.insert(0, slots_of(store, below, slots - sum(kept[:rank]), lease))
            self._by_rank.append(tuple(limiters))
        self._limiters = tuple(limiters)

    def __repr__(self) -> str:
        return f"<ReservedSlots {self.name!r} {self.slots}>"

    @property
    def limiters(self) -> tuple[Concurrency, ...]:
        """The smallest first; the last one holds all slots."""
        return self._limiters

    def admit(self, priority: str | None = None) -> Admission:
        """As the base class's."""
        taken: list[Lease] = []
        try:
            for limiter in self._by_rank[self.rank(priority)]:
                lease = limiter.acquire(ALL)
                if not lease:
                    _release(taken)
                    return Admission(self, None)
                taken.append(lease)
        except BaseException:
            _release(taken)
            raise
        return Admission(self, tuple(taken))


def _release(leases: list[Lease]) -> None:
    for lease in leases:
        lease.release()


def _slots_kept(priority: str, kept: Any, slots: int) -> int:
    part = per_cent(kept)
    if part is not None:
        return -(-slots * part // 100)
    if isinstance(kept, bool) or not isinstance(kept, int) or not 0 <= kept <= slots:
        raise InvalidLimiter(
            f'the slots that {priority!r} keeps are a number from 0 to {slots} or per cent, as "20%", not '
            f"{short_repr(kept)}"
        )
    return kept
