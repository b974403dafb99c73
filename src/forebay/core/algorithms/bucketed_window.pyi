from typing import Self, TypeVar, final, overload

from forebay.core.cell_limiter import CellLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

_L = TypeVar("_L")

@final
class BucketedWindow(CellLimiter):
    """At most as many permits as the rate allows, in the newest `buckets` sub-windows together.

    ``BucketedWindow(store, "api", "500/hour", buckets=60)``. A request is counted for the bucket it falls in, a
    period's `buckets`-th part (rounded up to the nanosecond) that begins at a multiple of its length by the wall
    clock.

    `keys` is how many keys can be live at once, that is, have a permit in the window; by default as many as half a
    megabyte holds, but at least 64. Each takes 8 bytes for every bucket. Room to find a key's place at once adds a
    third of that from 49 keys on, and up to two thirds for some dozens of keys.
    ``BucketedWindow.bytes_needed(buckets, keys=...)`` returns the total. The memory is taken when the limiter is first
    made, behind the store's table, and kept until the store is unlinked.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``, and ``SegmentSpaceError`` with the bytes needed if
    there is no room. Threads, processes, fork: see ``Limiter``.

    A decision takes one CAS, and a second one for a bucket's first; a denied one writes nothing shared. It reads the
    mark of the window's oldest bucket, and on to the first bucket in which the key was allowed something: at most
    all. Guarantee: never more than the limit in `buckets` buckets that follow each other; so at most that in any span
    of a period less one bucket, and at worst twice that in a whole period. A refund gives back at most what the
    newest bucket holds. A limit is below 2**30; up to a quarter of a bucket's length in ns it is accepted, above half
    of that refused.
    """
    @overload
    def __new__(
        cls, store: Store, name: str, rate: str | Rate, buckets: int = 60, *, keys: int | None = None
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[BucketedWindow, _L],
        name: str,
        rate: str | Rate,
        buckets: int = 60,
        *,
        keys: int | None = None,
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def rate(self) -> Rate: ...
    @property
    def buckets(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def bytes_needed(buckets: int = 60, *, keys: int | None = None) -> int:
        """How many bytes a bucketed window of so many buckets and keys takes of its store's file system."""
