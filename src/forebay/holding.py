"""``Concurrency.hold`` and ``limited``: wait for permits, hold them during a block or a call, and release them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast

from forebay.errors import LimitExceeded, NotAwaited

if TYPE_CHECKING:
    from forebay.core.table.keys import Key
    from forebay.rate import Duration

F = TypeVar("F", bound=Callable[..., Any])
L = TypeVar("L")


class Holdable(Protocol):
    """A ``Concurrency`` in memory or over Redis."""

    @property
    def name(self) -> str: ...
    def wait(self, key: Key, cost: int, timeout: Duration | None) -> bool: ...
    def wait_async(self, key: Key, cost: int, timeout: Duration | None) -> Awaitable[bool]: ...
    def hold(self, key: Key, cost: int, timeout: Duration | None) -> Hold[Any]: ...
    def exceeded(self, key: Key) -> LimitExceeded: ...


class Hold(Generic[L]):
    """The result of ``Concurrency.hold``: waits for permits, holds them in the block, and releases them.

    `L` is the class of leases.
    `lease_taken` makes the lease of the permits that a ``wait`` of this process has just taken.
    """

    __slots__ = ("_arguments", "_lease_taken", "_leases", "_limiter")

    def __init__(
        self,
        limiter: Holdable,
        lease_taken: Callable[[Any, Key, int], L],
        key: Key,
        cost: int,
        timeout: Duration | None,
    ) -> None:
        self._limiter = limiter
        self._lease_taken = lease_taken
        self._arguments = key, cost, timeout
        # One lease per entry, by several threads or nested: every lease is as good as another.
        self._leases: list[Any] = []

    def __enter__(self) -> L:
        key, cost, timeout = self._arguments
        if not self._limiter.wait(key, cost, timeout):
            raise self._limiter.exceeded(key)
        return self._held()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leases.pop().__exit__(kind, error, trace)

    async def __aenter__(self) -> L:
        key, cost, timeout = self._arguments
        if not await self._limiter.wait_async(key, cost, timeout):
            raise self._limiter.exceeded(key)
        return self._held()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leases.pop().__exit__(kind, error, trace)

    def __bool__(self) -> NoReturn:
        raise NotAwaited(
            f"the result of hold() of {self._limiter!r} is neither true nor false: it waits in a with block or an "
            "async with block"
        )

    def _held(self) -> L:
        key, cost, _ = self._arguments
        lease = self._lease_taken(self._limiter, key, cost)
        self._leases.append(lease)
        return lease


def limited(limiter: Holdable, key: Key | Callable[..., Key], cost: int, timeout: Duration | None) -> Callable[[F], F]:
    """The decorator that ``Concurrency.limited`` returns."""

    def hold(*args: object, **kwargs: object) -> Hold[Any]:
        return limiter.hold(key(*args, **kwargs) if callable(key) else key, cost, timeout)

    def decorate(function: F | None = None, /, *args: object, **kwargs: object) -> F:
        # With `@limiter.limited` alone the function is taken for a key, and its calls come here.
        if not callable(function) or args or kwargs:
            raise TypeError(
                f"limiter {limiter.name!r} limits a function by @limiter.limited(key) above it, with a key or a "
                f"function that makes one of the arguments; not by @limiter.limited alone"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"{function!r} is a generator, which runs after its call: use hold() inside it")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def held_async(*args: object, **kwargs: object) -> object:
                async with hold(*args, **kwargs):
                    return await function(*args, **kwargs)

            return cast(F, held_async)

        @functools.wraps(function)
        def held(*args: object, **kwargs: object) -> object:
            with hold(*args, **kwargs):
                return function(*args, **kwargs)

        return cast(F, held)

    return decorate
