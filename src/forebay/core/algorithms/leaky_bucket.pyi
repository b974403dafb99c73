from typing import Self, TypeVar, final, overload

from forebay.core.algorithms.gcra import GcraLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

_L = TypeVar("_L")

@final
class LeakyBucket(GcraLimiter):
    """A queue of `capacity` places that empties at `rate`, however requests arrive.

    ``LeakyBucket(store, "printer", "1/second", capacity=4)``. ``reserve`` and ``wait`` give each request a time of
    departure, one interval of the rate after the departure before it; they deny when the queue is full. ``allow`` and
    ``hit`` also take a place in the queue, but the caller decides when to proceed: use them where the work itself is
    queued.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: with ``reserve`` and ``wait``, any two departures are apart by at least the time of the first one's
    cost, over all processes. Algorithm: GCRA, ITU-T Recommendation I.371 (its "continuous-state leaky bucket").
    """
    @overload
    def __new__(cls, store: Store, name: str, rate: str | Rate, capacity: int) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: MakesLimiters[LeakyBucket, _L], name: str, rate: str | Rate, capacity: int
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def capacity(self) -> int: ...
