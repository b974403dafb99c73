"""Waiting for permits before a block or a call: ``limited`` of every limiter, and ``hold`` of ``Concurrency``.

``Concurrency`` holds its permits during the block or the call, and releases them at the end. Other permits are spent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, cast

from forebay.errors import InvalidLimiter, LimitExceeded, NotAwaited

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


class Spendable(Protocol):
    """A limiter whose permits are spent, in memory or over Redis."""

    @property
    def name(self) -> str: ...
    @property
    def wait(self) -> Callable[..., Any]: ...
    @property
    def wait_async(self) -> Callable[..., Awaitable[bool]]: ...
    @property
    def exceeded(self) -> Callable[..., Any]:
        """Takes a key and a cost; returns a ``LimitExceeded``, or a coroutine of it."""
        ...


async def done(result: L) -> L:
    """The coroutine of what was done before it: ``async with`` a lease waits for nothing.

    In Python, because a compiled module with a coroutine is 8 kB larger in the wheel. The lease is released before this
    is called, so no signal handler runs in between.
    """
    return result


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

    def decorate(function: F | None = None, /, *args: object, **kwargs: object) -> F:
        checked = decorated(limiter.name, "hold()", function, args, kwargs)
        return in_block(checked, key, lambda its_key: limiter.hold(its_key, cost, timeout))

    return decorate


def never_back(limiter: object) -> InvalidLimiter:
    """The exception for ``limited`` of several limits, one of which is a ``Concurrency``."""
    return InvalidLimiter(
        f"limited() of {limiter!r} would not release the permits of its Concurrency at the end: use hold() of that "
        "one, and limited() of the others inside it"
    )


class AsyncLimited:
    """The result of ``limited`` of a limiter in asyncio: a decorator of coroutines, and an ``async with`` block."""

    __slots__ = ("_arguments", "_key", "_limiter")

    def __init__(
        self,
        limiter: Spendable,
        key: Key | list[Any] | Callable[..., Any],
        cost: int | list[int],
        timeout: Duration | None,
        jitter: float,
    ) -> None:
        self._limiter, self._key, self._arguments = limiter, key, (cost, timeout, jitter)

    async def __aenter__(self) -> None:
        cost, timeout, jitter = self._arguments
        key = self._key_of_block()
        if not await self._limiter.wait_async(key, cost, timeout, jitter=jitter):
            exceeded = self._limiter.exceeded(key, cost)
            raise (await exceeded if inspect.isawaitable(exceeded) else exceeded)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The permits are spent, however the block ends."""

    def __call__(self, function: F | None = None, /, *args: object, **kwargs: object) -> F:
        checked = decorated(self._limiter.name, "wait()", function, args, kwargs)
        self._check_function(checked)
        return in_block(checked, self._key, lambda key: type(self)(self._limiter, key, *self._arguments))

    def _check_function(self, function: Callable[..., Any]) -> None:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"limiter {self._limiter.name!r} over an asyncio store limits coroutines, not {function!r}")

    def _key_of_block(self) -> Any:
        if callable(self._key):
            raise TypeError(
                f"a with block of limiter {self._limiter.name!r} has no arguments to make a key of: pass the key"
            )
        return self._key

    def __bool__(self) -> NoReturn:
        raise NotAwaited(
            f"the result of limited() of {self._limiter!r} is neither true nor false: it is a decorator, or waits in a "
            "with block or an async with block"
        )


class Limited(AsyncLimited):
    """The result of ``limited``: a decorator, and a ``with`` or ``async with`` block, which waits for permits."""

    __slots__ = ()

    def __enter__(self) -> None:
        cost, timeout, jitter = self._arguments
        key = self._key_of_block()
        if not self._limiter.wait(key, cost, timeout, jitter=jitter):
            raise self._limiter.exceeded(key, cost)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The permits are spent, however the block ends."""

    def _check_function(self, function: Callable[..., Any]) -> None:
        """Functions and coroutines are limited."""


def decorated(name: str, inside: str, function: F | None, args: tuple[object, ...], kwargs: dict[str, object]) -> F:
    """The function that a decorator was called with. Raises ``TypeError`` if it can't be limited."""
    if isinstance(function, (classmethod, staticmethod)):
        raise TypeError(
            f"limiter {name!r} limits functions: write @limiter.limited(key) below @{type(function).__name__}"
        )
    # With `@limiter.limited` alone the function is taken for a key, and its calls come here.
    if not callable(function) or args or kwargs:
        raise TypeError(
            f"limiter {name!r} limits a function by @limiter.limited(key) above it, with a key or a function that "
            "makes one of the arguments; not by @limiter.limited alone"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{function!r} is a generator, which runs after its call: use {inside} inside it")
    return function


def in_block(function: F, key: Any, block: Callable[[Any], Any]) -> F:
    """The function, each call of which runs in the block for its key."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def limited_async(*args: object, **kwargs: object) -> object:
            async with block(key(*args, **kwargs) if callable(key) else key):
                return await function(*args, **kwargs)

        return cast(F, limited_async)

    @functools.wraps(function)
    def limited_sync(*args: object, **kwargs: object) -> object:
        with block(key(*args, **kwargs) if callable(key) else key):
            return function(*args, **kwargs)

    return cast(F, limited_sync)
