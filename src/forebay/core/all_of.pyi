from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Self, TypeAlias, TypeVar, final, overload

from forebay.core.arguments import DEFAULT_REQUEST_TTL as DEFAULT_REQUEST_TTL
from forebay.core.decision import Decision
from forebay.core.limiter import Limiter
from forebay.core.reservation import Reservable, Reservation
from forebay.core.stores import Combinable, Joinable
from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded
from forebay.holding import Limited
from forebay.rate import Duration
from forebay.store import Store

_A = TypeVar("_A")
_Keys: TypeAlias = Key | list[Key] | list[str] | list[bytes] | list[int]
_Costs: TypeAlias = int | list[int]

def reserve_each(limits: AllOf, key: _Keys, cost: _Costs) -> tuple[Reservation, list[Decision]]:
    """The results of ``limits.reserve`` and ``limits.hit_each`` for one request, which is charged once."""

def binding(decisions: Iterable[Decision]) -> Decision:
    """The decision of the limit that bound a request, by those of all its limits: as ``AllOf.hit`` returns it."""

@final
class AllOf(Reservable):
    """Several limiters of one store as one: a request is charged to all of them or to none.

    ``AllOf(per_second, per_hour, for_everybody)``. A key is for all limiters, or a list with one key for each:
    ``limits.hit(["user:42", "user:42", "everybody"])``. The same holds for a cost. A tuple with as many parts as there
    are limiters is refused, as it may mean either: for one key write ``[key] * 3``. One limiter may come several times.
    If its costs for one key are above its limit together, each request is denied, with a wrong ``retry_after``. The
    order matters for speed only: put the limiter first that denies most often.

    A ``Decision`` names the limit that bound the request, ``decision.limiter``. For a denial it is the limit with the
    longest ``retry_after`` among those that denied, for an allowed request the one with the fewest ``remaining``.
    ``limit`` is that limit's; ``remaining`` is the least and ``reset_after`` the longest of all. ``limiters`` are the
    limiters, ``store`` is theirs, ``name`` has all their names, and ``may_free_early`` is true if it is so for any.

    Raises ``InvalidLimiter`` unless given 1 to 16 limiters of one store. Threads, processes, fork: as the limiters.
    O(number of limiters), lock-free; a denied request writes nothing shared. In a race of several requests for the last
    permits, some may be denied that would have been allowed one after the other.
    """
    @overload
    def __new__(cls, *limiters: Limiter) -> Self: ...
    @overload
    def __new__(cls, *limiters: Combinable[AllOf, _A]) -> _A: ...  # type: ignore[misc]
    @overload
    def __new__(cls, *limiters: Joinable[AllOf, Limiter, _A] | Limiter) -> _A: ...  # type: ignore[misc]
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
    def hit(
        self,
        key: _Keys,
        cost: _Costs = 1,
        *,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Decision:
        """Charge `cost` permits of `key` to every limiter if all allow it, and return the ``Decision``.

        `request_id` and `request_ttl` are those of each limiter's ``hit``: a repeated request with the same id, keys
        and costs is charged once to all. None of the limiters may be a ``Concurrency`` then: its permits are held by
        the latest of the requests.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``InvalidLimiter``, ``StoreClosed``.
        """
    def hit_each(self, key: _Keys, cost: _Costs = 1) -> list[Decision]:
        """``hit``, but returns the ``Decision`` of each limiter, in order, instead of the one that binds.

        The request is allowed if all decisions allow it. Otherwise nothing was charged, even in limits that allow it.
        """
    def peek(self, key: _Keys, cost: _Costs = 1) -> Decision:
        """The decision that ``hit`` would return now. Charges and counts nothing."""
    def allow_many(self, keys: Iterable[_Keys], costs: Iterable[_Costs] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key. Takes keys and costs as ``hit`` does.

        Not atomic: requests of other processes may be decided in between. An invalid key or cost raises an exception,
        after everything before it was charged.
        """
    def reserve(self, key: _Keys, cost: _Costs = 1, max_delay: Duration | None = None) -> Reservation:
        """Charge the request if it is allowed now: a ``Reservation`` with a delay of 0.

        Otherwise nothing is charged, and ``delay`` is the time until another attempt may succeed.
        """
    def wait(self, key: _Keys, cost: _Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        """Wait until all limiters allow the request, and charge it: see ``Limiter.wait``."""
    def wait_async(
        self, key: _Keys, cost: _Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Coroutine[Any, Any, bool]:
        """``wait`` for asyncio."""
    def limited(
        self,
        key: _Keys | Callable[..., _Keys],
        cost: _Costs = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> Limited:
        """A decorator, and a ``with`` block: see each limiter's ``limited``.

        Raises ``InvalidLimiter`` if one of the limiters is a ``Concurrency``, whose permits would not come back.
        """
    def exceeded(self, key: _Keys, cost: _Costs = 1) -> LimitExceeded:
        """The exception for a wait in which the permits of `key` didn't come in time: it names the limit that bound."""
    def refund(self, key: _Keys, cost: _Costs = 1, *, request_id: Key | None = None) -> None:
        """Give back the charges of an allowed ``hit`` with the same arguments: see each limiter's ``refund``."""
    def reset(self, key: _Keys) -> None:
        """Forget `key` in every limiter."""
