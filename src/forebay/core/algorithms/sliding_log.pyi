from typing import Self, TypeVar, final, overload

from forebay.core.cell_limiter import CellLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

_L = TypeVar("_L")

@final
class SlidingLog(CellLimiter):
    """Never more permits than the rate allows in any span as long as the period: exact, at the price of memory.

    ``SlidingLog(store, "export", "10/hour", keys=10_000)``. `keys` is how many keys can be live at once, that is,
    have a permit in the last period. Each takes 8 bytes for every permit of the limit. Room to find a key's place at
    once adds a third of that from 49 keys on, and up to two thirds for some dozens of keys.
    ``SlidingLog.bytes_needed(rate, keys=...)`` returns the total. The memory is taken when the limiter is first made,
    behind the store's table, and kept until the store is unlinked.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``, and ``SegmentSpaceError`` with the bytes needed if
    there is no room. Threads, processes, fork: see ``Limiter``.

    ``allow`` is O(1) whatever the limit, two CASes on two cache lines; a denied one writes nothing shared but what a
    killed process has left to write. A cost of n writes n times. ``hit`` and ``peek`` find ``remaining`` in
    O(log limit). A refund gives back the oldest permits that still count; taken again, they are dated behind those: by
    a clock that stands still, some ns ahead of it. A limit above 2**23, or above the period in ns, is refused; one up
    to half of that is not.
    """
    @overload
    def __new__(cls, store: Store, name: str, rate: str | Rate, *, keys: int) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls, store: MakesLimiters[SlidingLog, _L], name: str, rate: str | Rate, *, keys: int | None = None
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def rate(self) -> Rate: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def bytes_needed(rate: str | Rate, *, keys: int) -> int:
        """How many bytes a sliding log of this rate and number of keys takes of its store's file system."""
