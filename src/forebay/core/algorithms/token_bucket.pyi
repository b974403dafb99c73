from typing import Literal, Self, TypeVar, final, overload

from forebay.core.algorithms.gcra import GcraLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

_L = TypeVar("_L")

@final
class TokenBucket(GcraLimiter):
    """Up to `burst` permits at once, refilled at `rate`.

    ``TokenBucket(store, "api", "100/minute", burst=20)``. `rate` is text or a ``Rate``; `burst` a whole number of
    permits, by default as many as the rate allows per period. `name` identifies the limiter in its store. With
    ``refill="continuous"`` permits come back one by one. With ``refill="interval"`` the permits of a whole period come
    back at once, at the start of each period by the wall clock; permits above the burst are lost.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: in any span of time t, at most ``burst + t * rate`` permits, rounded up, over all processes. With
    intervals, at most ``burst``, and the rate's limit for each start of a period in the span. Algorithm: GCRA, ITU-T
    Recommendation I.371.
    """
    @overload
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[TokenBucket, _L],
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def burst(self) -> int: ...
    @property
    def refill(self) -> str: ...
