from collections.abc import Coroutine, Iterable
from typing import Any, Self, TypeAlias, final, overload

from forebay.core.decision import Decision
from forebay.core.limiter import Limiter
from forebay.core.reservation import Reservation
from forebay.core.table.keys import Key
from forebay.errors import InvalidKey
from forebay.rate import Duration
from forebay.redis.all_of import AsyncRedisAllOf, RedisAllOf
from forebay.redis.limiter import AsyncRedisLimiter, RedisLimiter
from forebay.store import Store

_Keys: TypeAlias = Key | list[Key] | list[str] | list[bytes] | list[int]
_Costs: TypeAlias = int | list[int]

def ambiguous_key(key: tuple[Any, ...], count: int) -> InvalidKey: ...

@final
class AllOf:
    """Several limiters of one store as one: a request is charged to all of them or to none.

    ``AllOf(per_second, per_hour, for_everybody)``. A key is for all of them, or a list with one key for each:
    ``limits.hit(["user:42", "user:42", "everybody"])``. So is a cost. A tuple of as many parts as there are limiters is
    refused, as it may be either: for one key say ``[key] * 3``. The order matters for speed only: put first what
    denies most often.

    A ``Decision`` names the limit that bound it, ``decision.limiter``: of those that denied, the one with the longest
    ``retry_after``; of an allowed request's, the one with the fewest ``remaining``. ``limit`` is that one's;
    ``remaining`` is the least and ``reset_after`` the longest of all.

    Raises ``InvalidLimiter`` unless given 1 to 16 limiters of one store. Threads, processes, fork: as the limiters.
    O(number of limiters), lock-free; a denied request writes nothing shared. In a race of several requests for the last
    permits, some may be denied that would have been allowed one after the other.
    """
    @overload
    def __new__(cls, *limiters: Limiter) -> Self: ...
    @overload
    def __new__(cls, *limiters: RedisLimiter) -> RedisAllOf: ...  # type: ignore[misc]
    @overload
    def __new__(cls, *limiters: AsyncRedisLimiter) -> AsyncRedisAllOf: ...  # type: ignore[misc]
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
    @property
    def limiters(self) -> tuple[Limiter, ...]: ...
    @property
    def may_free_early(self) -> bool: ...
    def allow(self, key: _Keys, /) -> bool:
        """Charge one permit of `key` to every limiter if all allow it: the fast path of ``hit``."""
    def hit(self, key: _Keys, cost: _Costs = 1) -> Decision:
        """Charge `cost` permits of `key` to every limiter if all allow it, and return the ``Decision``.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``StoreClosed``.
        """
    def hit_each(self, key: _Keys, cost: _Costs = 1) -> list[Decision]:
        """``hit``, with the ``Decision`` of each limiter, in their order, instead of the one that binds.

        The request is allowed if all of them are; else nothing was charged, whatever the others say is left.
        """
    def peek(self, key: _Keys, cost: _Costs = 1) -> Decision:
        """What ``hit`` would decide now, without charging or counting anything."""
    def allow_many(self, keys: Iterable[_Keys], costs: Iterable[_Costs] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key; of keys and costs as for ``hit``.

        Not atomic: other processes' requests may come between. A key or cost that can't be used raises an exception,
        with everything before it charged.
        """
    def reserve(self, key: _Keys, cost: _Costs = 1, max_delay: Duration | None = None) -> Reservation:
        """Charge the request if it is allowed now: a ``Reservation`` with a delay of 0.

        Otherwise nothing is charged, and ``delay`` says after how long asking again may succeed.
        """
    def _reserve_each(self, key: _Keys, cost: _Costs) -> tuple[Reservation, list[Decision]]: ...
    def wait(self, key: _Keys, cost: _Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        """Wait until all limiters allow the request, and charge it: see ``Limiter.wait``."""
    def wait_async(
        self, key: _Keys, cost: _Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Coroutine[Any, Any, bool]:
        """``wait`` for asyncio."""
    def refund(self, key: _Keys, cost: _Costs = 1) -> None:
        """Give back to every limiter what an allowed ``hit`` with the same arguments charged: see its ``refund``."""
    def reset(self, key: _Keys) -> None:
        """Forget `key` in every limiter."""
