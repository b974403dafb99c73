"""The common part of the limited task queues: whether a task runs now, later or never.

A task asks its limiter each time that it is about to run. So each run has its own permit, taken no earlier than it is
used. A denied task goes back to its queue. Nothing is booked for it in the limiter: queues return tasks late, and late
tasks would use their booked permits together. The denied task gets a *turn* instead. A turn is the time at which it
asks again, from a token bucket with the limit's own rate and a burst of one. So the denied tasks of one key return one
by one, at the limit's rate. A turn that nobody uses delays other tasks, and never admits one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypedDict

from forebay._native import native
from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.arguments import cost_of
from forebay.core.limiter import Limiter
from forebay.errors import (
    CostExceedsLimit,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    LimitExceeded,
    StoreUnavailable,
    short_repr,
)
from forebay.flows import Flow, run, run_async
from forebay.rate import MAX_PERIOD_NS, NS, Duration, Rate, as_period_ns, is_never
from forebay.web.functions import has_to_be_awaited, is_cost, is_key
from forebay.web.rules import kind_of

if TYPE_CHECKING:
    from forebay.core.decision import Decision
    from forebay.core.table.keys import Key

__all__ = ["NEVER", "Admission", "Blocking", "ForEventLoop", "Options", "TaskLimit", "checked_function"]

NEVER: Final = (CostExceedsLimit, InvalidCost, InvalidKey, LimitExceeded)
"""Errors of a task that no repetition can cure."""

TURNS: Final = "task turns"
"""The name of the turns' bucket in the store."""
UNAVAILABLE_NS: Final = 5 * NS
"""A task asks again after this or half of it, if Redis doesn't answer."""

_log: Final = logging.getLogger("forebay.contrib")


class Blocking(Protocol):
    """A limiter whose methods block, as all do but those over an ``AsyncRedisStore`` or an ``AsyncLeasedStore``."""

    @property
    def name(self) -> str: ...
    @property
    def store(self) -> Any: ...
    @property
    def hit(self) -> Callable[..., Decision]: ...


class ForEventLoop(Protocol):
    """A limiter for an event loop: in shared memory, or with methods that are awaited."""

    @property
    def name(self) -> str: ...
    @property
    def store(self) -> Any: ...
    @property
    def hit(self) -> Callable[..., Decision | Coroutine[Any, Any, Decision]]: ...


class Options(TypedDict, total=False):
    """The options of ``limited`` of every queue."""

    cost: int | Callable[..., int]
    """Permits for each run of the task, or a function of the task's arguments; 1 by default."""
    max_delay: Duration
    """No denied task goes back for longer; ten minutes by default. Later turns are not booked: such a task asks again
    after `max_delay` or half of it."""
    task_time: Duration
    """With a ``Concurrency``: how long a task usually holds its permit. Denied tasks return that far apart, divided by
    the limit. One second by default."""
    request_ttl: Duration
    """Charge a task once: within this time, another run of the task with the same id isn't charged. By default each run
    is charged."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a task runs now."""

    later_s: float | None = None
    """The seconds after which the task asks again; None: it runs now."""
    lease: Any = None
    """The permit of a ``Concurrency`` that it holds, or None."""


class TaskLimit:
    """The limit of one task function: its limiter, and the keys and costs of its calls.

    `function` is the task's function, whose arguments the functions for key and cost take. `in_loop`: whether it runs
    in an event loop. Raises ``InvalidLimiter``, ``InvalidKey``, ``InvalidCost``, ``InvalidRate`` and
    ``CostExceedsLimit`` for what could never limit the task as meant. *Threads*, *fork*: safe.
    """

    def __init__(
        self,
        function: Any,
        limiter: Any,
        key: Key | list[Key] | Callable[..., Key | list[Key]],
        options: Options,
        *,
        in_loop: bool,
    ) -> None:
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"there is no option {min(unknown)!r}: those are {', '.join(Options.__annotations__)}")
        self._parts = _checked_parts(limiter, in_loop)
        self._limiter = limiter
        self._signature = inspect.signature(function)
        self._cost = options.get("cost", 1)
        self._key = key
        name = getattr(function, "__name__", short_repr(function))
        if callable(key):
            self._check_function("key", key, name)
        elif not all(map(is_key, key if isinstance(key, list) and _is_all_of(limiter) else [key])):
            raise InvalidKey(f"key is str, bytes, int, a tuple of them or a function, not {short_repr(key)}")
        if callable(self._cost):
            self._check_function("cost", self._cost, name)
        elif not is_cost(self._cost):
            raise InvalidCost(f"cost is a whole number of at least 0 or a function, not {short_repr(self._cost)}")
        else:
            for part in self._parts:
                _check_fits(part, self._cost)
        self._max_delay_ns = as_period_ns(options.get("max_delay", "10 minutes"))
        self._task_time_ns = as_period_ns(options.get("task_time", "1 second"))
        kinds = [kind_of(part) for part in self._parts]
        self._is_held, self._is_queue = kinds == [Concurrency], kinds == [LeakyBucket]
        if "task_time" in options and not self._is_held:
            raise InvalidLimiter(f"task_time is for a Concurrency: {limiter!r} has a rate, by which tasks return")
        self._charge_options: dict[str, Any] = {}
        if "request_ttl" in options:
            if self._is_held or self._is_queue:
                raise InvalidLimiter(f"{limiter!r} takes no request_ttl: each run of a task needs a permit of its own")
            if any(map(_is_leased, self._parts)):
                raise InvalidLimiter(
                    f"{limiter!r} takes no request_ttl, as a task that runs again on another host would be charged "
                    "again: make the limiter over the RedisStore itself"
                )
            self._charge_options["request_ttl"] = as_period_ns(options["request_ttl"]) / NS
        store = next((part.store for part in self._parts if _is_remote(part)), self._parts[0].store)
        # A leased limit books nothing ahead.
        store = getattr(store, "redis_store", store)
        self._is_awaited = bool(getattr(store, "is_awaited", False))
        # Each call has a rate and a burst of its own. With a burst of 1 here, a full store would deny by default.
        self._turns: Any = TokenBucket(store, TURNS, "1/second", burst=2)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str | None) -> Admission:
        """Take a permit for a call of the task's function, or the time at which it asks again.

        `task_id` None: no queue can return the task, so a denial raises ``LimitExceeded``, as does one by ``Credits``.
        Raises one of `NEVER` for a call that no time allows.
        """
        return run(self._steps(args, kwargs, task_id))

    async def ask_async(self, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str | None) -> Admission:
        """As ``ask``, in an event loop."""
        return await run_async(self._steps(args, kwargs, task_id))

    @contextlib.contextmanager
    def held(self, admission: Admission) -> Iterator[None]:
        """Hold the admission's permit in the block: a thread renews its lease. The end of the block releases it."""
        lease = admission.lease
        if lease is None:
            yield
            return
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self._renewal_s):
                with contextlib.suppress(StoreUnavailable):
                    if not lease.renew():
                        self._warn_of_lost_permit()
                        return

        thread = threading.Thread(target=renew, name="forebay lease renewal", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            # Permits that can't be released come back at the end of their lease.
            with contextlib.suppress(StoreUnavailable):
                lease.release()

    @contextlib.asynccontextmanager
    async def held_async(self, admission: Admission) -> AsyncIterator[None]:
        """As ``held``, in an event loop, where a task renews the lease."""
        lease = admission.lease
        if lease is None:
            yield
            return

        async def renew() -> None:
            while True:
                await asyncio.sleep(self._renewal_s)
                with contextlib.suppress(StoreUnavailable):
                    renewed = lease.renew()
                    if not (await renewed if self._is_awaited else renewed):
                        self._warn_of_lost_permit()
                        return

        renewal = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewal.cancel()
            with contextlib.suppress(StoreUnavailable):
                released = lease.release()
                if self._is_awaited:
                    await released

    @property
    def _renewal_s(self) -> float:
        renewal_s: float = self._limiter.lease_ns / NS / 3
        return renewal_s

    def _warn_of_lost_permit(self) -> None:
        _log.warning(
            "a task goes on without its permit of %r, whose lease has ended: another task may hold it", self._limiter
        )

    def _steps(self, args: tuple[Any, ...], kwargs: dict[str, Any], task_id: str | None) -> Flow[Admission]:
        key, cost = self._key_and_cost(args, kwargs)
        try:
            taken = self._take(key, cost, task_id)
            if self._is_awaited:
                taken = yield taken
            if taken:
                return Admission(lease=taken if self._is_held else None)
            return (yield from self._turn(key, cost, taken, task_id))
        except StoreUnavailable:
            if task_id is None:
                raise
            return Admission(_spread_s(UNAVAILABLE_NS))

    def _take(self, key: Any, cost: int, task_id: str | None) -> Any:
        if self._is_held:
            return self._limiter.acquire(key, cost)
        if self._is_queue:
            # Its other methods take a place in the queue, whenever that is due.
            return self._limiter.reserve(key, cost, 0)
        if self._charge_options and task_id is not None:
            return self._limiter.hit(key, cost, request_id=task_id, **self._charge_options)
        return self._limiter.hit(key, cost)

    def _turn(self, key: Any, cost: int, denial: Any, task_id: str | None) -> Flow[Admission]:
        """The time at which a denied task asks again."""
        number = 0
        if len(self._parts) > 1:
            number = next(i for i, part in enumerate(self._parts) if part.name == denial.limiter)
        key = key[number] if isinstance(key, list) else key
        part = self._parts[number]
        if not (self._is_held or self._is_queue) and is_never(denial.retry_after_ns):
            # No time brings the permits, so the task would ask again for ever.
            raise LimitExceeded(part.name, denial.limit, denial.retry_after)
        interval_ns = self._interval_ns(part, cost)
        if self._is_held:
            wait_ns, at_once = interval_ns, part.limit
        elif self._is_queue:
            wait_ns, at_once = denial.delay_ns, part.capacity
        else:
            wait_ns, at_once = denial.retry_after_ns, denial.limit
        if task_id is None:
            raise LimitExceeded(part.name, at_once, wait_ns / NS)
        left_ns = self._max_delay_ns - wait_ns
        if denial.full or left_ns < 0:
            return Admission(_spread_s(self._max_delay_ns))
        turn = self._turns.reserve((part.name, repr(key)), 1, left_ns / NS, rate=Rate.per_ns(1, interval_ns), burst=1)
        if self._is_awaited:
            turn = yield turn
        return Admission((wait_ns + turn.delay_ns) / NS if turn else _spread_s(self._max_delay_ns))

    def _interval_ns(self, part: Any, cost: int) -> int:
        """The time between two turns: that in which the limit gives `cost` permits."""
        period_ns, limit = (self._task_time_ns, part.limit) if self._is_held else (part.rate.period_ns, part.rate.limit)
        interval_ns: int = -(-period_ns * max(cost, 1) // limit)
        return min(interval_ns, MAX_PERIOD_NS)

    def _key_and_cost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        key, cost = self._key, self._cost
        if callable(key) or callable(cost):
            call = self._signature.bind(*args, **kwargs)
            call.apply_defaults()
            key = key(*call.args, **call.kwargs) if callable(key) else key
            cost = cost(*call.args, **call.kwargs) if callable(cost) else cost
        return key, cost_of(cost)

    def _check_function(self, what: str, function: Any, name: str) -> None:
        expectation = f"{what} is a function that takes the arguments of {name}{self._signature}"
        if has_to_be_awaited(function):
            raise InvalidLimiter(f"{expectation}, and {short_repr(function)} has to be awaited: write a plain function")
        parameters = self._signature.parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        try:
            inspect.signature(function).bind(*positional, **named)
        except ValueError:
            # Some compiled functions have no signature.
            return
        except TypeError as error:
            raise InvalidLimiter(f"{expectation}, and {short_repr(function)} can't be called so: {error}") from None


def checked_function(function: Any, usage: str) -> Any:
    """The function that ``limited`` decorates. `usage` says how. Raises ``InvalidLimiter``."""
    if not inspect.isfunction(function):
        raise InvalidLimiter(f"{usage}: {short_repr(function)} is not a plain function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise InvalidLimiter(f"{usage}: {short_repr(function)} is a generator, which runs after its call")
    return function


def _is_all_of(limiter: Any) -> bool:
    """Whether it is an ``AllOf``, also one over Redis."""
    return hasattr(limiter, "limiters")


def _spread_s(longest_ns: int) -> float:
    """A random time from half of `longest_ns` on, for tasks without a turn."""
    return random.uniform(longest_ns / 2, longest_ns) / NS


def _checked_parts(limiter: Any, in_loop: bool) -> tuple[Any, ...]:
    """The limiter, or the limiters of an ``AllOf``."""
    if not all(hasattr(limiter, name) for name in ("name", "store", "hit")):
        raise InvalidLimiter(
            f"a task is limited by a limiter, like TokenBucket(store, 'api', '10/second'), not by {short_repr(limiter)}"
        )
    parts: tuple[Any, ...] = getattr(limiter, "limiters", (limiter,))
    for part in parts:
        if _is_all_of(limiter) and kind_of(part) in (Concurrency, LeakyBucket):
            raise InvalidLimiter(
                f"{part!r} can't be in the AllOf of a task: put @limited with it above @limited with the others"
            )
        if _is_remote(part):
            _check_remote(part, in_loop)
        elif native and part.store.path is None:
            raise InvalidLimiter(
                f"limiter {part.name!r} is in a private store of this process, and a queue has several workers, each "
                f'of which would count by itself: name the store, Store("shop", keys={part.store.keys})'
            )
    return parts


def _check_remote(part: Any, in_loop: bool) -> None:
    kind = "LeasedStore" if _is_leased(part) else "RedisStore"
    is_awaited = bool(part.store.is_awaited)
    if is_awaited and not in_loop:
        raise InvalidLimiter(f"{part!r} has to be awaited, and this queue's tasks run in threads: take a {kind}")
    if in_loop and not is_awaited:
        raise InvalidLimiter(f"{part!r} would stop the event loop for each round trip to Redis: take an Async{kind}")


def _is_remote(part: Any) -> bool:
    """Whether a decision is a round trip to Redis, or may be one."""
    return _is_leased(part) or not isinstance(part, Limiter)


def _is_leased(part: Any) -> bool:
    return bool(getattr(part.store, "is_leased", False))


def _check_fits(part: Any, cost: int) -> None:
    """Raise ``CostExceedsLimit`` if no call can ever be allowed."""
    if not _is_remote(part):
        part.peek("", cost)
    elif not _is_leased(part) and cost > part.limit:
        raise CostExceedsLimit(cost, part.limit, part.name)
