from typing import Self, TypeVar, final, overload

from forebay.core.algorithms.gcra import GcraLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Duration
from forebay.store import Store

_L = TypeVar("_L")

@final
class MinInterval(GcraLimiter):
    """At least `interval` from one allowed request of a key to the next.

    ``MinInterval(store, "sms", "30s")``. `interval` is text, a number of seconds or a ``timedelta``. ``interval_ns`` is
    the same in nanoseconds.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: allowed requests of a key are at least `interval` apart, over all processes. In a full store a new
    key is denied, unless the store has an `on_full`.
    """
    @overload
    def __new__(cls, store: Store, name: str, interval: Duration) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: MakesLimiters[MinInterval, _L], name: str, interval: Duration
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def interval_ns(self) -> int: ...
