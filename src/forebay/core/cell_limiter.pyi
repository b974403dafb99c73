from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from typing_extensions import disjoint_base

from forebay.core.arguments import DEFAULT_REQUEST_TTL as DEFAULT_REQUEST_TTL
from forebay.core.decision import Decision
from forebay.core.limiter import Limiter
from forebay.core.reservation import Reservation
from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded
from forebay.holding import Limited
from forebay.rate import Duration, Rate

@disjoint_base
class CellLimiter(Limiter):
    """Base class of the limiters that decide by one CAS; not used by itself."""
    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Decision:
        """Charge `cost` permits to `key` if they are allowed, and return the ``Decision``.

        `cost` is a whole number; with 0 the call checks whether the key is within its limit, and charges nothing. A
        denial is a value. Only a request that can never be allowed raises an exception.

        With `rate` this one request is judged by that limit instead of the limiter's own, on the same state: the tiers
        of one limit. A token bucket takes any rate, and optionally a `burst`; a fixed or sliding window takes rates of
        its own period; a leaky bucket and a minimum interval take any rate; other limiters have one limit.

        With a `request_id` (str, bytes, int or a tuple of them), a request that is repeated with the same id within
        `request_ttl` (5 minutes by default) is allowed again without a second charge, in any worker. An id takes a cell
        of the store for that time. If a process is killed after it charged and before it remembered the id, the
        repeated request is charged again. A kill never leaves an id remembered without its charge. A request that is
        repeated while it is being charged is also charged again, if others already stand behind its place in a leaky
        bucket.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidLimiter``, ``InvalidKey``,
        ``StoreClosed``.
        """
    def peek(self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None) -> Decision:
        """The decision that `hit` with the same arguments would return now. Charges and counts nothing.

        ``allowed`` and ``retry_after`` describe the request, ``remaining`` and ``reset_after`` the key's current state.
        Only ``hit`` finds that a new key has no room, so ``on_full`` doesn't apply here.
        """
    def take_up_to(self, key: Key, most: int, *, rate: str | Rate | None = None, burst: int | None = None) -> int:
        """Charge as many permits of `key` as there are, at most `most`, and return how many: 0 is a denial.

        One decision, by one CAS. `most` may be above the limit; no more than the limit is charged at once. `rate` and
        `burst` are those of ``hit``. With ``on_full="allow"``, a new key without a cell gets all that a fresh key has.
        Raises what ``hit`` raises, except ``CostExceedsLimit``.
        """
    def reserve(
        self,
        key: Key,
        cost: int = 1,
        max_delay: Duration | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Reservation:
        """Book `cost` permits of `key`: a ``Reservation``, with the ``delay`` in seconds until they may be used.

        A token bucket, a leaky bucket and a minimum interval book ahead, by at most `max_delay`: text like
        ``"500 ms"``, seconds or a ``timedelta``. Every other limiter charges only a request that is allowed now, with a
        delay of 0. If nothing is booked, ``delay`` is the time until another attempt may succeed. `rate` and `burst`
        are those of ``hit``.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid `max_delay`.
        """
    def wait(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> bool:
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Sleeps, and never polls another process. Waiters in one process get their permits in the order of their calls,
        those with one `rate` and `burst` among themselves, which are those of ``hit``. A wait charges nothing if it
        ends early (``KeyboardInterrupt``, any exception) or would take too long. With `jitter` 0.1 each sleep is longer
        by a random share of up to a tenth, within the timeout. With a ``ManualClock`` the thread doesn't sleep: the
        wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
    def wait_async(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""
    def limited(
        self,
        key: Key | Callable[..., Key],
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
    ) -> Limited:
        """A decorator: each call of the function, or each run of the coroutine, first waits for `cost` permits.

        Also a ``with`` or ``async with`` block, which waits at its beginning. Both raise ``LimitExceeded`` if the
        permits don't come within `timeout`. The permits are spent, however the call or the block ends.

        `key` is a key, or for a decorator a callable that makes a key from the call's arguments. `cost`, `timeout` and
        `jitter` are those of ``wait``.
        """
    def exceeded(self, key: Key, cost: int = 1) -> LimitExceeded:
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        """Give back the charge of an allowed ``hit`` with the same arguments; never more than a fresh key has.

        Several requests may have charged a cost above the limit together: such a refund gives back as much as the
        limit. With the `request_id` of a ``hit``, gives back once, and only while the id is remembered.
        """
    def reset(self, key: Key) -> None:
        """Forget `key`: its next request finds a fresh key.

        O(1); in a sliding log O(limit), in a bucketed window O(buckets).
        """
    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged. Not atomic: requests of other processes may be decided
        in between. Faster than a loop of ``allow``, because it prefetches cells. Large batches release the GIL.
        """
