"""The base class of all limiters: its memory, its counts, and the constructor that all public classes share."""

from __future__ import annotations

import inspect
import warnings
from inspect import Signature
from typing import Any, ClassVar, NoReturn, Self

from forebay import waiting
from forebay.core.limiter_arguments import bound_arguments, not_a_store
from forebay.errors import SegmentSizeWarning, StoreClosed
from forebay.fallback.awaited import Awaited
from forebay.fallback.decision import Decision
from forebay.fallback.keys import Key, known_key
from forebay.fallback.memory import Charge, Counts, Memory, Table, Tag, Verdict
from forebay.fallback.reservation import Reservable
from forebay.fallback.store import Store
from forebay.rate import Duration
from forebay.segment.limiter_list import encode_limiter_name
from forebay.segment.sizes import ExtentShape

__all__ = ["Attempt", "Limiter", "Made"]


class Made:
    """The base of the public classes: other stores make objects of their own for them, and they are immutable.

    ``TokenBucket(store, ...)`` is a ``TokenBucket`` if the store is a ``Store``. Every other store has a method
    ``make_limiter``, and the constructor returns what that method returns.
    """

    __signature__: ClassVar[Signature]

    is_made = False
    """Whether the constructor has ended: from then on no attribute changes."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        first = cls.maker_among(args, kwargs)
        make_limiter = getattr(type(first), "make_limiter", None)
        if make_limiter is not None:
            made: Self = make_limiter(first, cls, args, kwargs)
            return made
        bound_arguments(cls, args, kwargs)
        return super().__new__(cls)

    @staticmethod
    def maker_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """The argument whose ``make_limiter`` makes the object, if it has one."""
        return args[0] if args else kwargs.get("store")

    def __setattr__(self, name: str, value: object) -> None:
        if self.is_made:
            raise AttributeError(f"{name} of {self!r} can't be set: make another limiter")
        super().__setattr__(name, value)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self!r} can't be pickled: make it again in the other process, where it counts apart")


class Attempt:
    """One limit's part of a request to several limits."""

    __slots__ = ("charge", "tag", "verdict")

    charge: Charge
    tag: Tag
    verdict: Verdict


class Limiter(Made, Reservable):
    """Base class of every limiter; not used by itself.

    A limiter is a name in a store. Limiters of the same name share their state: ``TokenBucket``, ``LeakyBucket`` and
    ``MinInterval`` with each other, whatever their rates; others with their own class only, if the parameters that
    docs/using.md names are the same. A limiter has its arguments as attributes. ``may_free_early`` is true if a permit
    may be free before a decision's ``retry_after``, because its holder gave it back.

    *Threads*: every method may be called from any thread.
    """

    may_free_early: ClassVar[bool] = False

    store: Store
    name: str
    memory: Memory
    table: Table
    counts: Counts
    identity: Tag
    on_full: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if "store" not in inspect.signature(cls.__init__).parameters:
            raise TypeError(f"{cls.__name__} is a base of the limiters: use TokenBucket or another one")
        return super().__new__(cls, *args, **kwargs)

    def begin(self, store: Any, name: str) -> None:
        """Check the arguments that all limiters have. Constructors call this first."""
        if not isinstance(getattr(store, "segment", None), Memory):
            raise not_a_store(type(self), store)
        encode_limiter_name(name)
        self.store, self.name, self.memory = store, name, store.segment
        self.table = self.memory.table

    def open_extent(self, encoding: str, shape: ExtentShape) -> int:
        """Take a table of the limiter's own. Returns the number of keys that it was made for."""
        self.check_open()
        self.table = self.memory.extent((self.name, encoding), shape)
        if self.table.keys != shape.keys:
            warnings.warn(
                f"the memory of limiter {self.name!r} was made for {self.table.keys} keys and keeps that size, "
                f"although this limiter has keys={shape.keys}; to change it, call Store.unlink",
                SegmentSizeWarning,
                stacklevel=3,
            )
        return self.table.keys

    def register(self, algorithm: str, encoding: str, most: int) -> None:
        """Take a place among the store's limiters. Constructors call this last: invalid parameters take none.

        `encoding` identifies the format of states. A limiter of the same name with another format starts afresh.
        `most` is how many permits a fresh key has. With one, one request uses up a key's limit, so no live key has used
        less than another: then a full table denies a new key, unless the store has an `on_full`.
        """
        self.check_open()
        self.on_full = self.store.on_full or ("deny" if most == 1 else "evict")
        self.identity = (self.name, encoding)
        self.counts = self.memory.counts_of(encode_limiter_name(self.name).decode(), algorithm)
        # Without an encoding, states are times: limiters of other classes may use them, too.
        self.store.names.note(self, algorithm, encoding, is_common=not encoding)
        self.is_made = True

    def check_open(self) -> None:
        if self.store.closed:
            raise StoreClosed(f"limiter {self.name!r} was used after its store was closed: {self.store!r}")

    def open_now_ns(self) -> int:
        """The time of a decision. Raises ``StoreClosed``.

        Called once for each, at its beginning, as Python's clock may be a test's code, which makes other decisions.
        """
        self.check_open()
        return self.memory.now_ns()

    def tag_of(self, key: Any) -> Tag:
        return (*self.identity, *known_key(key))

    def attempt_for(self, key: Any, cost: Any) -> Attempt:
        raise TypeError(f"{self!r} can't be one of several limits")

    def check(self, attempt: Attempt, now_ns: int) -> bool:
        """Whether the limit would allow its part now."""
        raise NotImplementedError

    def commit(self, attempt: Attempt, now_ns: int) -> bool:
        """Charge the part, if the limit allows it."""
        raise NotImplementedError

    def roll_back(self, attempt: Attempt, now_ns: int) -> None:
        """Give back what the part has charged."""
        raise NotImplementedError

    def decision_on(self, attempt: Attempt) -> Decision:
        raise NotImplementedError

    def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        """Wait until the request is allowed, and charge it. False if that would take longer than `timeout`: text
        like ``"500 ms"``, seconds or a ``timedelta``.

        Waiters get their permits in the order of their calls. A wait charges nothing if it ends early or would take too
        long. With `jitter` 0.1 each sleep is longer by a random share of up to a tenth, within the timeout. With a
        ``ManualClock`` the thread doesn't sleep: the wait advances the clock.

        Raises what ``hit`` raises, and ``ValueError`` for an invalid timeout or jitter.
        """
        return waiting.wait(self, key, cost, timeout, jitter)  # type: ignore[arg-type]

    def wait_async(
        self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> Awaited[bool]:
        """``wait`` for asyncio: ``await limiter.wait_async(key)``. Cancelling the task charges nothing."""
        return Awaited(waiting.wait_async(self, key, cost, timeout, jitter))  # type: ignore[arg-type]
