"""Limiters over Redis, and reservations: the public methods, one class for both executors.

Each executor has a public subclass, in ``public_limiters.py`` that of limiters. A method makes commands
(``commands.py``) and gives them to the executor of its store with a fallback. ``concurrency.py`` has
``Concurrency``, and ``all_of.py`` several limits at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from forebay.core.arguments import costs_of, keys_of
from forebay.core.decision import Decision, seconds_from_ns
from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded
from forebay.rate import Duration, Rate
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.commands import (
    ONE,
    Booked,
    CommandFlow,
    LimiterCommands,
    noop,
    was_allowed,
)
from forebay.redis.executor import Executor
from forebay.redis.operations import Operated, Pending, asyncio_operations, operation

__all__ = [
    "AsyncRedisReservation",
    "BaseLimiter",
    "BaseReservable",
    "BaseReservation",
    "RedisReservation",
    "would_block",
]

E = TypeVar("E")
R = TypeVar("R")


class BaseReservation(Operated[E], Generic[E]):
    __slots__ = ("_booked", "_executor", "_store")

    def __init__(self, store: Any, booked: Booked) -> None:
        self._store, self._executor, self._booked = store, store.executor, booked

    @property
    def store(self) -> Any:
        """The store that the permits belong to."""
        return self._store

    @property
    def allowed(self) -> bool:
        return self._booked.allowed

    @property
    def delay_ns(self) -> int:
        return self._booked.delay_ns

    @property
    def due_ns(self) -> int:
        return self._booked.due_ns

    @property
    def full(self) -> bool:
        return self._booked.full

    @property
    def delay(self) -> float:
        """The delay in seconds, rounded up: never less than ``delay_ns``."""
        return seconds_from_ns(self._booked.delay_ns)

    @operation
    def cancel(self) -> Pending[None]:
        """Give back the permits that still count.

        Only once: if it raises ``StoreUnavailable``, they may have come back, or may yet. A second call does nothing,
        as they might come back twice. The ``refund`` of a ``Concurrency`` gives back the permits that it then still
        holds.
        """
        # A booking in Redis stays booked while Redis is unavailable.
        return self._executor.run_to_end(self._booked.cancel(), noop)

    def give_back_flow(self) -> CommandFlow[None]:
        """The commands of ``cancel``."""
        return self._booked.cancel()

    def __bool__(self) -> bool:
        return self._booked.allowed

    def __repr__(self) -> str:
        return f"{type(self).__name__}(allowed={self.allowed}, delay={self.delay})"


class RedisReservation(BaseReservation[Executor]):
    """Permits booked for later use, as ``forebay.Reservation``. True if they were booked.

    ``due_ns`` is in the time of ``time.monotonic_ns``.
    """

    __slots__ = ()


@asyncio_operations
class AsyncRedisReservation(BaseReservation[AsyncExecutor]):
    """Permits booked for later use, as ``forebay.Reservation``. True if they were booked.

    ``due_ns`` is in the time of ``time.monotonic_ns``.
    """

    __slots__ = ()


class BaseReservable(Operated[E], Generic[E, R]):
    """Base class of a limiter and of ``AllOf``, which make reservations.

    `E` is the executor, `R` the class of reservations.
    """

    _reservation: type[R]

    def __init__(self, store: Any) -> None:
        self._store, self._executor = store, store.executor

    @property
    def store(self) -> Any:
        return self._store

    def _reserved(self, key: Any, booked: Booked) -> R:
        if booked.cancelling is not None:
            # The caller may change a list of keys before it cancels.
            key = key[:] if isinstance(key, list) else key
            booked.cancelling = self._giving_back(key, booked.cancelling)
        make: Any = self._reservation
        reservation: R = make(self._store, booked)
        return reservation

    def _giving_back(self, key: Any, flow: CommandFlow[None]) -> CommandFlow[None]:
        """Run the flow, then wake the first thread that waits for `key`."""
        yield from flow
        self._wake(key)

    def _wake(self, key: Any) -> None:
        self._executor.permits_came_back(self, key)


class BaseLimiter(BaseReservable[E, R], Generic[E, R]):
    def __init__(self, store: Any, commands: LimiterCommands) -> None:
        super().__init__(store)
        self.commands = commands

    @property
    def name(self) -> str:
        return self.commands.name

    @property
    def kind(self) -> type:
        """The public class that made the limiter."""
        return self.commands.kind

    @property
    def limit(self) -> int:
        """The most permits that can be allowed at once."""
        return self.commands.limit

    @property
    def may_free_early(self) -> bool:
        return self.commands.may_free_early

    def __getattr__(self, name: str) -> Any:
        """A parameter of the limiter: rate, burst, capacity, interval_ns, ..."""
        commands = self.__dict__.get("commands")
        try:
            return commands.parameters[name]  # type: ignore[union-attr]
        except (AttributeError, KeyError):
            kind = type(self) if commands is None else commands.kind
            raise AttributeError(f"{kind.__name__} over Redis has no attribute {name!r}") from None

    def __repr__(self) -> str:
        return repr(self.commands)

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same server and name")

    def queue_key(self, key: Key) -> object:
        """Requests with equal queue keys wait in one queue."""
        return self.commands.key(key)

    def check_request(self, key: Key, cost: int, *, rate: str | Rate | None = None, burst: int | None = None) -> None:
        """Raise for a request that can never be allowed, without a call to Redis."""
        self.commands.check_request(key, cost, rate, burst)

    @operation
    def allow(self, key: Key, /) -> Pending[bool]:
        commands = self.commands
        if commands.usual is None:
            return self._executor.run_command(commands.allow(key, 1), lambda: commands.fallback.allow(key))
        return self._executor.decide(
            commands.script,
            (commands.key(key),),
            commands.usual,
            commands.size,
            was_allowed,
            lambda: commands.fallback.allow(key),
        )

    @operation
    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Pending[Decision]:
        commands = self.commands
        if commands.usual and cost is ONE and rate is None and burst is None and request_id is request_ttl is None:
            return self._executor.decide(
                commands.script,
                (commands.key(key),),
                commands.usual,
                commands.size,
                commands.usual_decision,
                lambda: commands.fallback.hit(key),
            )
        command = commands.hit(key, cost, rate, burst, request_id, request_ttl)
        more = {"rate": rate, "burst": burst, "request_id": request_id, "request_ttl": request_ttl}
        return self._executor.run_command(command, lambda: commands.fallback.hit(key, cost, **more))

    @operation
    def peek(
        self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Pending[Decision]:
        commands = self.commands
        return self._executor.run_command(
            commands.peek(key, cost, rate, burst),
            lambda: commands.fallback.peek(key, cost, rate=rate, burst=burst),
        )

    @operation
    def take_up_to(
        self, key: Key, most: int, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Pending[int]:
        commands = self.commands
        return self._executor.run_command(
            commands.take_up_to(key, most, rate, burst),
            lambda: commands.fallback.take_up_to(key, most, rate=rate, burst=burst),
        )

    @operation
    def reserve(
        self,
        key: Key,
        cost: int = 1,
        max_delay: Duration | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Pending[R]:
        commands = self.commands
        return self._executor.run_command(
            commands.reserve(key, cost, max_delay, rate, burst).then(partial(self._reserved, key)),
            lambda: self._reserved(key, commands.fallback.reserve(key, cost, max_delay, rate=rate, burst=burst)),
        )

    @operation
    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> Pending[None]:
        commands = self.commands
        more = {"rate": rate, "burst": burst, "request_id": request_id}
        return self._executor.run(
            commands.refund(key, cost, rate, burst, request_id),
            lambda: commands.fallback.refund(key, cost, **more),
        )

    @operation
    def convert(
        self,
        key: Key,
        old_rate: str | Rate,
        old_burst: int | None = None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        keep: Literal["permits", "share", "used"] | None = None,
    ) -> Pending[int]:
        """Carry what `key` has used over to another limit, and return how many permits remain.

        See ``TokenBucket.convert`` and ``FixedWindow.convert``, with their defaults of `keep`. Raises
        ``StoreUnavailable`` while Redis is unavailable, and ``InvalidLimiter`` of limiters of another kind.
        """
        return self._executor.run_command(self.commands.convert(key, old_rate, old_burst, rate, burst, keep))

    @operation
    def add(self, key: Key, permits: int, *, rate: str | Rate | None = None, burst: int | None = None) -> Pending[int]:
        """Give `key` so many permits more, and return how many it then has. See ``TokenBucket.add``.

        Raises ``StoreUnavailable`` while Redis is unavailable. The permits may have been added then, if only the reply
        was lost. Raises ``InvalidLimiter`` of limiters of another kind.
        """
        return self._executor.run_command(self.commands.add(key, permits, rate, burst))

    @operation
    def reset(self, key: Key) -> Pending[None]:
        return self._executor.run_command(self.commands.reset(key).then(lambda _: self._wake(key)))

    @operation
    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> Pending[list[bool]]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        commands = self.commands
        # All commands are made before any is sent, so a wrong argument leaves every key uncharged.
        return self._executor.run_many(
            [commands.allow(key, cost) for key, cost in zip(keys, costs, strict=True)],
            lambda number: commands.fallback.allow(keys[number], costs[number]),
        )

    @operation
    def wait(
        self,
        key: Key,
        cost: int = 1,
        timeout: Duration | None = None,
        *,
        jitter: float = 0.0,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Pending[bool]:
        return self._executor.wait(self, key, cost, timeout, jitter, rate, burst)

    @operation
    def exceeded(self, key: Key, cost: int = 1) -> Pending[LimitExceeded]:
        """The exception for a wait in which `cost` permits of `key` didn't come in time."""
        commands = self.commands
        return self._executor.run_command(
            commands.peek(key, cost).then(commands.exceeded),
            lambda: commands.exceeded(commands.fallback.peek(key, cost)),
        )

    def view(self, key: Key, taken: Any) -> Any:
        """The object that gives back this limiter's part of a request to several limits."""
        return self._reserved(key, taken)


def would_block(limiter: object) -> TypeError:
    return TypeError(
        f"wait_async of {limiter!r} would stop the event loop for each round trip to Redis: make the limiter over an "
        "AsyncRedisStore, and await its wait"
    )
