"""Synchronous calls of the asyncio storage and strategies, so that each test covers both."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import limits.aio.strategies
import limits.strategies
from limits.storage import storage_from_string

import forebay.limits  # noqa: F401  # registers the URI schemes with the library

SCHEMES = ("forebay", "async+forebay")
STRATEGIES = ("fixed-window", "sliding-window-counter", "moving-window", "gcra")


class Blocking:
    """A wrapper that runs the coroutine of each asynchronous method and returns its result."""

    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.wrapped, name)
        return _blocking(attribute) if inspect.ismethod(attribute) else attribute


def _blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return call


def open_storage(uri: str, **options: Any) -> Any:
    return Blocking(storage_from_string(uri, **options))


def limiter(strategy: str, storage: Any) -> Any:
    """The strategy with that name over a storage from `open_storage`."""
    asynchronous = isinstance(storage.wrapped, limits.aio.storage.Storage)
    strategies = limits.aio.strategies.STRATEGIES if asynchronous else limits.strategies.STRATEGIES
    return Blocking(strategies[strategy](storage.wrapped))
