from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar, final, overload

from forebay.core.decision import Decision
from forebay.core.limiter import Limiter
from forebay.core.reservation import Reservation
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded
from forebay.holding import Hold
from forebay.rate import Duration
from forebay.store import Store

_L = TypeVar("_L")
_F = TypeVar("_F", bound=Callable[..., Any])

@final
class Lease:
    """Permits that this process holds. True if the request was allowed, as is ``allowed``.

    Give them back with ``release``, or use the lease as a context manager. Without that, the permits come back at the
    end of the lease, or with the end of the process, but not when this object is garbage. ``full``: the store had no
    room for the key, and its ``on_full`` decided.
    """
    def __init__(self, *args: object, **kwargs: object) -> None: ...
    @property
    def allowed(self) -> bool: ...
    @property
    def full(self) -> bool: ...
    def release(self) -> bool:
        """Give the permits back. Whether they were still held. Does nothing if repeated or after the lease's end."""
    def renew(self) -> bool:
        """Restart the lease. False if it has ended; then another request may hold the permits."""
    def __bool__(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

def lease_taken(limiter: Concurrency, key: Key, cost: int) -> Lease:
    """A lease for the permits that a ``wait`` of this process has just taken."""

@final
class Concurrency(Limiter):
    """At most `limit` permits of a key held at one time.

    ``Concurrency(store, "reports", 20)``, then one of

    * ``with reports.hold("user:42", timeout=0.5):`` or ``async with``: waits for a permit, gives it back at the end of
      the block, and raises ``LimitExceeded`` if there was none in time; without a timeout it waits until there is one;
    * ``lease = reports.acquire("user:42")``: at once or not at all; then ``lease.release()``, or ``with lease:``;
    * ``@reports.limited("nightly")``: each call of the function holds a permit;
    * ``allow``, ``hit``, ``wait`` and the other methods of every limiter: they take permits that ``refund`` gives back.

    A permit becomes free when it is given back, when the process that holds it has ended in any way, or at the end of
    its `lease`: text, seconds or a ``timedelta``; ``lease_ns`` is the same in nanoseconds. Work that takes longer
    renews the lease: ``lease.renew()``.

    `keys` is the number of keys that can be live at once, that is, used within the last two leases; by default as many
    as half a megabyte holds, but at least 64. Each key takes 16 bytes and a bit for every permit (and from 49 keys on a
    third of that again, of some dozens up to two thirds); ``Concurrency.bytes_needed(limit, keys=...)`` is the sum. The
    first limiter of the name allocates the memory, behind the store's table; it stays until the store is unlinked.

    Raises ``InvalidLimiter``, ``InvalidRate`` for an invalid lease, ``TooManyLimiters``, and ``SegmentSpaceError`` with
    the bytes needed if there is no room. Threads, processes, fork: see ``Limiter``; a permit belongs to the process
    that took it, not to its children. Between pid namespaces (containers that share ``/dev/shm``) only the end of its
    leases shows that a process has ended; docs/operations/killed-processes.md has what else delays it.

    Taking and giving back is usually O(1), with two CASes each. Before ``allow`` and ``acquire`` deny, they read a bit
    for each slot, and every tenth of a millisecond the slots. ``hit`` and ``peek`` read all slots each time, for
    ``retry_after``. Guarantee: never more than `limit` permits held, over all processes.
    """
    @overload
    def __new__(
        cls, store: Store, name: str, limit: int, lease: Duration = "30s", *, keys: int | None = None
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[Concurrency, _L],
        name: str,
        limit: int,
        lease: Duration = "30s",
        *,
        keys: int | None = None,
    ) -> _L: ...
    @property
    def limit(self) -> int: ...
    @property
    def lease_ns(self) -> int: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def bytes_needed(limit: int, *, keys: int | None = None) -> int:
        """How many bytes a limiter of this limit and number of keys takes of its store's file system."""
    def acquire(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> Lease:
        """Take `cost` permits of `key` if they are free now: a ``Lease``, which is true if they were.

        With a `request_id` (str, bytes, int or a tuple of them), a request that is repeated with the same id and cost
        while its permits are held takes no others: they move to the new lease, in whichever worker it is, and the lease
        of the earlier attempt has ended. Once they are given back, the id is free. While they are held, the id takes a
        cell of the store. A lease by an id is up to a sixteenth longer, or up to 1 µs for each permit of the limit if
        that is more. A process that is killed in between may leave permits that come back as after any kill. Then the
        repeated request takes others, and so it does while the earlier lease is just being renewed.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``StoreClosed``.
        """
    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> Hold[Lease]:
        """A context manager, with or without ``async``, that waits for `cost` permits and gives them back at the end.

        Entering raises ``LimitExceeded`` if they don't become free within `timeout`: text like ``"500 ms"``, seconds or
        a ``timedelta``. With None it waits until they are free.
        """
    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None
    ) -> Callable[[_F], _F]:
        """A decorator: each call of the function, or each run of the coroutine, holds `cost` permits.

        `key` is a key, or a callable that makes a key from the call's arguments.
        """
    def exceeded(self, key: Key) -> LimitExceeded:
        """The exception for a wait in which no permit of `key` became free in time."""
    def allow(self, key: Key, /) -> bool:
        """Take one permit of `key` and say whether it was free. It comes back by ``refund``, or as leases do."""
    def hit(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> Decision:
        """Take `cost` permits of `key` if they are free, and return the ``Decision``.

        ``retry_after`` is the time until enough leases end if no permit is given back before. `request_id` is that of
        ``acquire``: a ``refund`` with it gives the permits back in any worker.
        """
    def peek(self, key: Key, cost: int = 1) -> Decision:
        """The decision that ``hit`` would return now. Takes nothing."""
    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """A list of bools, one per key, decided in order: ``allow`` for each. `costs` is an iterable of as many."""
    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> Reservation:
        """Take `cost` permits if they are free now: a ``Reservation`` with a delay of 0, whose ``cancel`` gives them
        back.

        Otherwise nothing is taken, and ``delay`` is the time until enough leases end if no permit is given back before.
        """
    def refund(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> None:
        """Give back `cost` of the permits that ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process.

        If those are fewer, all of them. With a `request_id`, gives back the permits of the requests with this id and
        cost, whichever process holds them.
        """
    def reset(self, key: Key) -> None:
        """Free all permits of `key`, whichever process holds them."""
