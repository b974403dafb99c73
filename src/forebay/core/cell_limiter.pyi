from collections.abc import Iterable

from typing_extensions import disjoint_base

from forebay.core.decision import Decision
from forebay.core.limiter import Limiter
from forebay.core.reservation import Reservation
from forebay.core.table.keys import Key
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

        `cost` is a whole number; 0 asks whether the key is within its limit, and charges nothing. A denial is a value:
        only what can never be allowed is an exception.

        With `rate` this one request is judged by that limit instead of the limiter's own, on the same state: the tiers
        of one limit. A token bucket takes any rate, and a `burst` beside it; a fixed or sliding window takes rates of
        its own period; a leaky bucket and a minimum interval take any rate; other limiters have one limit.

        With a `request_id` (str, bytes, int or a tuple of them) a request that is repeated under the same id within
        `request_ttl` (5 minutes by default) is allowed again without being charged again, whichever worker it comes to.
        An id takes a cell of the store for that time. Should a process be killed between charging and remembering, the
        repeated request is charged again: never the other way round. So is one that is repeated while it is being
        charged, and whose place in a leaky bucket others already stand behind.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidRate``, ``InvalidLimiter``, ``InvalidKey``,
        ``StoreClosed``.
        """
    def peek(self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None) -> Decision:
        """What `hit` with the same arguments would decide now, without charging or counting anything.

        ``allowed`` and ``retry_after`` speak of that request, ``remaining`` and ``reset_after`` of the key as it is.
        Only ``hit`` finds out that a new key has no room, so here ``on_full`` doesn't come in.
        """
    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> Reservation:
        """Book `cost` permits of `key` and say after how many seconds they may be used: a ``Reservation``.

        A token bucket, a leaky bucket and a minimum interval book ahead, by at most `max_delay`: text like
        ``"500 ms"``, seconds or a ``timedelta``. Every other limiter can only charge what is allowed now, with a delay
        of 0; otherwise nothing is booked and ``delay`` says after how long asking again may succeed.

        Raises what ``hit`` raises, and ``ValueError`` for a `max_delay` that is none.
        """
    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        """Give back what an allowed ``hit`` with the same arguments charged; never more than a fresh key has.

        A cost above the limit, which several requests may have charged, gives back as much as the limit. With the
        `request_id` of a ``hit``, once, and only as long as it is remembered.
        """
    def reset(self, key: Key) -> None:
        """Forget `key`: its next request meets a fresh one.

        O(1); of a sliding log O(limit), of a bucketed window O(buckets).
        """
    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key.

        `keys` is an iterable of keys, `costs` an iterable of as many costs (default: 1 each). Either every key is
        decided, or an exception is raised and none is charged. Not atomic: other processes' requests may come
        between. Faster than a loop of ``allow``, because cells are fetched ahead; large batches release the GIL.
        """
