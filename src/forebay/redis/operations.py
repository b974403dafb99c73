"""Operations: methods that are written once for both executors.

Over a ``RedisStore`` an operation returns a result, over an ``AsyncRedisStore`` a coroutine of that result.

An *operation* gives commands to ``self._executor`` and returns what the executor returns. Its annotation names that
``Pending[T]``, and the type checker resolves it by the class: ``T`` where the class is of an ``Executor``,
``Coroutine[Any, Any, T]`` where it is of an ``AsyncExecutor``.

At run time an operation is a plain function. ``asyncio_operations`` makes coroutine functions of a class's operations.
A call then raises for a wrong argument when it is awaited, and a coroutine that is not awaited refuses to be a truth
value.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from forebay.awaited import Awaited
from forebay.redis.commands import Command, CommandFlow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from forebay.rate import Duration, Rate
    from forebay.redis.async_executor import AsyncExecutor
    from forebay.redis.executor import Executor
    from forebay.redis.scripts import Script
    from forebay.redis.transport.deadline import Patience

__all__ = ["Operated", "Pending", "asyncio_operations", "awaited", "awaited_method", "operation"]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E_co = TypeVar("E_co", covariant=True)
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


class Pending(Generic[T_co]):
    """For annotations only: a result, or a coroutine of it."""


class AnyExecutor(Protocol):
    """The methods of both executors that operations call."""

    has_slots: bool

    def decide(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[Any],
        size: int,
        read: Callable[[list[int]], T],
        fall_back: Callable[[], T],
    ) -> Pending[T]: ...
    def run_command(self, command: Command[T], fall_back: Callable[[], T] | None = None) -> Pending[T]: ...
    def run(self, flow: CommandFlow[T], fall_back: Callable[[], T] | None = None) -> Pending[T]: ...
    def run_to_end(self, flow: CommandFlow[T], fall_back: Callable[[], T]) -> Pending[T]: ...
    def run_within(
        self,
        patience: Patience,
        flow: CommandFlow[T],
        fall_back: Callable[[], T],
        if_cancelled: Callable[[T], Iterable[CommandFlow[None]]] | None = None,
    ) -> Pending[T]: ...
    def run_each(self, flows: list[CommandFlow[T]], fall_back: Callable[[int], T]) -> Pending[list[T]]: ...
    def run_many(self, commands: list[Command[T]], fall_back: Callable[[int], T]) -> Pending[list[T]]: ...
    def wait(
        self,
        limiter: Any,
        key: Any,
        cost: Any,
        timeout: Duration | None,
        jitter: float,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Pending[bool]: ...
    def permits_came_back(self, limiter: Any, key: Any) -> None: ...


class Operated(Generic[E_co]):
    """An object of the executor `E_co`."""

    __slots__ = ()
    _executor: AnyExecutor


if TYPE_CHECKING:

    class operation(Generic[P, T]):  # noqa: N801  # it is a decorator
        """A method whose result the object's executor returns or is awaited for."""

        def __init__(self, method: Callable[Concatenate[Any, P], Pending[T]]) -> None: ...
        @overload
        def __get__(self, instance: None, owner: type) -> Self: ...
        @overload
        def __get__(self, instance: Operated[Executor], owner: type) -> Callable[P, T]: ...
        @overload
        def __get__(self, instance: Operated[AsyncExecutor], owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
        @overload
        def __get__(self, instance: Operated[Any], owner: type) -> Callable[P, Pending[T]]: ...
        def __get__(self, instance: object, owner: type) -> Any: ...

else:

    def operation(method):
        method.is_operation = True
        return method


def awaited(method: F) -> F:
    """A coroutine function whose coroutines refuse to be truth values.

    Type checkers see coroutines: a checker knows that a coroutine is always true, and that one that is not awaited does
    nothing. Frameworks check whether it is a coroutine function before they call it, as they do with background tasks.
    """

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Awaited[Any]:
        return Awaited(method(*args, **kwargs))

    if sys.version_info >= (3, 12):
        return cast(F, inspect.markcoroutinefunction(call))
    call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
    return cast(F, call)


def awaited_method(method: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """A sync class's method, for an asyncio class whose executor returns a coroutine of the same result."""
    return awaited(cast(Callable[P, Coroutine[Any, Any, T]], method))


def asyncio_operations(kind: C) -> C:
    """A class decorator: the operations of a class, and of those that it derives from, are coroutine functions."""
    for name in dir(kind):
        method = getattr(kind, name)
        if inspect.isfunction(method) and getattr(method, "is_operation", False):
            setattr(kind, name, _awaited_operation(kind, name, method))
    return kind


def _awaited_operation(kind: type, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    async def operate(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    # As tracebacks, tasks and warnings show it.
    functools.update_wrapper(operate, method)
    operate.__qualname__ = f"{kind.__qualname__}.{name}"
    operate.is_operation = False  # type: ignore[attr-defined]
    return awaited(operate)
