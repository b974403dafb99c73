"""Storages and strategies of the library, those of asyncio behind blocking methods."""

from __future__ import annotations

from typing import Any

import limits.aio.strategies
import limits.strategies
from blocking import Blocking
from limits.storage import storage_from_string

import forebay.limits  # noqa: F401  # registers the URI schemes with the library

SCHEMES = ("forebay", "async+forebay")
STRATEGIES = ("fixed-window", "sliding-window-counter", "moving-window", "gcra")


def open_storage(uri: str, **options: Any) -> Any:
    storage: Any = storage_from_string(uri, **options)
    return Blocking(storage, store=storage.store)


def limiter(strategy: str, storage: Any) -> Any:
    """The strategy with that name over a storage from `open_storage`."""
    asynchronous = isinstance(storage.wrapped, limits.aio.storage.Storage)
    strategies = limits.aio.strategies.STRATEGIES if asynchronous else limits.strategies.STRATEGIES
    return Blocking(strategies[strategy](storage.wrapped))
