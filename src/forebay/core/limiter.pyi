from collections.abc import Coroutine
from typing import Any, ClassVar

from typing_extensions import disjoint_base

from forebay.core.reservation import Reservable
from forebay.core.table.keys import Key
from forebay.rate import Duration
from forebay.segment.limiter_list import ALGORITHM_NAMES as ALGORITHM_NAMES
from forebay.store import Store

@disjoint_base
class Limiter(Reservable):
    """Base class of every limiter; not used by itself.

    A limiter is a name in a store. Limiters of the same name share their state, within a process and across processes:
    ``TokenBucket``, ``LeakyBucket`` and ``MinInterval`` with each other, whatever their rates; others with their own
    class only, if the parameters that docs/using.md names are the same. A limiter has its arguments as attributes, such
    as ``store``, ``name`` and ``rate``. ``may_free_early`` is true if a permit may be free before a decision's
    ``retry_after``, because its holder gave it back.

    *Threads*: every method may be called from any thread. *Processes*: the store shares the state. The object itself
    can't be pickled: make one in each process, from the same store and name. *Fork*: a limiter made before a fork works
    in parent and child; the child takes counters of its own at its first decision.
    """

    may_free_early: ClassVar[bool]
    @property
    def store(self) -> Store: ...
    @property
    def name(self) -> str: ...
    def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Sleeps, and never polls another process. Waiters in one process get their permits in the order of their calls.
        A wait charges nothing if it ends early (``KeyboardInterrupt``, any exception) or would take too long. With
        `jitter` 0.1 each sleep is longer by a random share of up to a tenth, within the timeout. With a ``ManualClock``
        the thread doesn't sleep: the wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
    def wait_async(
        self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Coroutine[Any, Any, bool]:
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""

def hot_name_of(limiter: Limiter, key: Key) -> int:
    """The name of a limiter's key in the record of hot keys."""
