"""Methods that have to be awaited, so that whoever forgets it is told instead of let in."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from forebay.redis.awaited import Awaited

__all__ = ["awaited", "awaited_method"]

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


def awaited(method: F) -> F:
    """A coroutine function whose coroutines refuse to be truth values.

    Type checkers see coroutines: of these they know that one is always true, and that one that nobody awaits does
    nothing. Others ask whether it is a coroutine function before they call it, as frameworks do of background tasks.
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
