from datetime import datetime
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
    back at once, at the start of each period; permits above the burst are lost. Periods start at multiples of their
    length by the wall clock; with ``start=datetime(2026, 1, 1, 6, tzinfo=UTC)``, whole periods before and after that.

    With ``initial=5`` a new key has 5 permits, and the others come at the rate from its first request on. A key is new
    if the store has never seen it, or has forgotten it: after a reset, an eviction, or when its bucket has been full
    for as long as a new key's takes to fill. No request may cost more than `initial`, so that each is allowed in time.
    ``reset_after`` is the time until the bucket is full. Such a bucket shares no state with one of another `initial`,
    and takes no `rate` for one call.

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
        *,
        initial: int | None = None,
        start: datetime | None = None,
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[TokenBucket, _L],
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
        *,
        initial: int | None = None,
        start: datetime | None = None,
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def burst(self) -> int: ...
    @property
    def refill(self) -> str: ...
    @property
    def initial(self) -> int | None: ...
    @property
    def start(self) -> datetime | None: ...
    def add(self, key: Key, permits: int, *, rate: str | Rate | None = None, burst: int | None = None) -> int:
        """Give `key` so many permits more, also above the burst. Returns how many it then has.

        As long as a key has more permits than the burst, none are refilled, and the store never evicts the key: its
        cell is free again when the key has used them or is ``reset``. ``refund`` never fills a bucket above its burst.
        One request still costs at most the burst. `rate` and `burst` are those of ``hit``. Permits above the burst are
        a number of permits: at any rate, a request takes as many as it costs. Parts of a permit are rounded against the
        key, when it comes to be above the burst.

        Raises ``InvalidCost`` if `permits` is no whole number of at least 0, or if the key would have more than
        281,474,976,710,655 above the burst; ``StoreFull`` if there is no room for a new key; and what ``peek`` raises.
        Then nothing was added. Only over a ``Store`` or Redis, and with continuous refill that starts full. O(1), one
        CAS: a process that is killed has added all or nothing, and permits that several add at once are all there.
        """
    def convert(
        self,
        key: Key,
        old_rate: str | Rate,
        old_burst: int | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        keep: Literal["permits", "share", "used"] = "permits",
    ) -> int:
        """Carry what `key` has used over to another limit. Returns how many permits remain under it.

        A state is the time until the bucket is full, and says nothing of the limit. So a key with 40 of 100 permits
        left has none when the burst becomes 20, until enough of the 60 others have come back. Call this once for each
        key that moves. The new limit is the limiter's own, or that of `rate` and `burst`, as in ``hit``.
        `keep` is what stays the same: ``"permits"``, the number that remain, at most the new burst; ``"share"``, their
        share of the burst; ``"used"``, the number that are missing. Parts of a permit are rounded against the key, and
        bookings stay booked. Cancel a booking before: afterwards, ``cancel`` gives back the time that its permits took
        by the old rate. A key whose bucket is full is as a new one: it has the new burst, and permits above the old one
        are above the new one. To give a key a full bucket, ``reset`` it.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``. Threads and processes may charge
        the key meanwhile: each charge counts by the limit before or after. O(1), one CAS.
        """
