from typing import Self, final, overload

from forebay.core.algorithms.gcra import GcraLimiter
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.redis.limiter import AsyncRedisLimiter, RedisLimiter
from forebay.redis.store import AsyncRedisStore, RedisStore
from forebay.store import Store

@final
class LeakyBucket(GcraLimiter):
    """A queue of `capacity` places that is emptied at `rate`, however the requests come.

    ``LeakyBucket(store, "printer", "1/second", capacity=4)``. ``reserve`` and ``wait`` give each request its time of
    departure, one rate's interval after the one before it; when the queue is full they deny. ``allow`` and ``hit`` take
    a place in the queue just the same, and leave it to the caller when to go: use them where the work itself is
    queued.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), one CAS on one cache line in the usual case; a denied one writes nothing shared. 21 bytes of
    the store per key. Guarantee: with ``reserve`` and ``wait`` any two departures are at least the time of the first
    one's cost apart, over all processes. Algorithm: GCRA, ITU-T Recommendation I.371 (its "continuous-state leaky
    bucket").
    """
    @overload
    def __new__(cls, store: Store, name: str, rate: str | Rate, capacity: int) -> Self: ...
    @overload
    def __new__(cls, store: RedisStore, name: str, rate: str | Rate, capacity: int) -> RedisLimiter: ...  # type: ignore[misc]
    @overload
    def __new__(cls, store: AsyncRedisStore, name: str, rate: str | Rate, capacity: int) -> AsyncRedisLimiter: ...  # type: ignore[misc]
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and say whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def capacity(self) -> int: ...
