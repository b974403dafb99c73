"""The storages as subclasses of the library's: one for threads, one for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from limits.aio.storage import MovingWindowSupport as AsyncMovingWindowSupport
from limits.aio.storage import SlidingWindowCounterSupport as AsyncSlidingWindowCounterSupport
from limits.aio.storage import Storage as AsyncStorage
from limits.errors import StorageError
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage
from limits.storage.base import TimestampedSlidingWindow

from forebay.errors import SegmentError, StoreClosed, TooManyLimiters
from forebay.limits.counting import Counting
from forebay.limits.options import StorageOptions
from forebay.store import Store

__all__ = ["AsyncForebayStorage", "ForebayStorage"]

P = ParamSpec("P")
R = TypeVar("R")

# Outages, which the library may wrap. A limit that can't be used is the caller's error, and is not wrapped.
BASE_EXCEPTIONS = (SegmentError, StoreClosed, TooManyLimiters, OSError)


def _wrap_errors(method: Callable[P, R]) -> Callable[P, R]:
    """For methods that the library doesn't know, and so doesn't wrap."""

    @wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except BASE_EXCEPTIONS as error:
            if cast(Storage | AsyncStorage, args[0]).wrap_exceptions:
                raise StorageError(error) from error
            raise

    return wrapped


class ForebayStorage(Counting, Storage, MovingWindowSupport, SlidingWindowCounterSupport, TimestampedSlidingWindow):
    """``forebay:///shop?keys=100_000``: counts in shared memory, for all processes of the host.

    ``shm:///shop?keys=100_000``, the URL of ``forebay.connect``, means the same.

    Options are in the URI's query or keywords, see ``forebay.limits.options``. The store is opened at once, and works
    in children that are forked later. A pickled storage opens the same store where it is unpickled.

    Raises ``limits.errors.ConfigurationError`` for a URI and options that can't be used, and ``SegmentError``.
    """

    STORAGE_SCHEME = ["forebay", "shm"]  # noqa: RUF012  # as the library declares it

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any) -> None:
        Storage.__init__(self, uri, wrap_exceptions)
        Counting.__init__(self, StorageOptions.of(uri, options))
        self._arguments = (uri, wrap_exceptions, options)

    @property
    def storage(self) -> Store:
        """The store, by the name that the library's own storages use."""
        return self.store

    @property
    def base_exceptions(self) -> tuple[type[Exception], ...]:
        return BASE_EXCEPTIONS

    acquire_gcra = _wrap_errors(Counting.acquire_gcra)
    get_gcra = _wrap_errors(Counting.get_gcra)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (type(self), *self._arguments)


class AsyncForebayStorage(
    AsyncStorage, AsyncMovingWindowSupport, AsyncSlidingWindowCounterSupport, TimestampedSlidingWindow
):
    """``async+forebay:///shop``: the same limits for asyncio.

    It waits only for the memory of a moving window, at the first request of a limit, and in a thread.
    """

    STORAGE_SCHEME = ["async+forebay", "async+shm"]  # noqa: RUF012

    def __init__(self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions)
        self._counting = Counting(StorageOptions.of(uri, options))
        self._arguments = (uri, wrap_exceptions, options)

    @property
    def store(self) -> Store:
        return self._counting.store

    @property
    def storage(self) -> Store:
        """The store, by the name that the library's own storages use."""
        return self.store

    @property
    def base_exceptions(self) -> tuple[type[Exception], ...]:
        return BASE_EXCEPTIONS

    async def incr(self, key: str, expiry: float, amount: float = 1) -> int:
        return self._counting.incr(key, expiry, amount)

    async def get(self, key: str) -> int:
        return self._counting.get(key)

    async def get_expiry(self, key: str) -> float:
        return self._counting.get_expiry(key)

    async def check(self) -> bool:
        return self._counting.check()

    async def reset(self) -> int | None:
        return self._counting.reset()

    async def clear(self, key: str) -> None:
        self._counting.clear(key)

    async def acquire_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        await self._make_moving_window(limit, expiry)
        return self._counting.acquire_entry(key, limit, expiry, amount)

    async def get_moving_window(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        await self._make_moving_window(limit, expiry)
        return self._counting.get_moving_window(key, limit, expiry)

    async def _make_moving_window(self, limit: int, expiry: float) -> None:
        """In a thread: it may wait for a lock, and it writes the memory."""
        if limit >= 1 and not self._counting.has_moving_window(limit, expiry):
            await asyncio.to_thread(self._counting.make_moving_window, limit, expiry)

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return self._counting.acquire_sliding_window_entry(key, limit, expiry, amount)

    async def get_sliding_window(self, key: str, expiry: float) -> tuple[int, float, int, float]:
        return self._counting.get_sliding_window(key, expiry)

    async def clear_sliding_window(self, key: str, expiry: float) -> None:
        self._counting.clear_sliding_window(key, expiry)

    async def acquire_gcra(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        return self._acquire_gcra(key, limit, expiry, amount)

    async def get_gcra(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        return self._get_gcra(key, limit, expiry)

    @_wrap_errors
    def _acquire_gcra(self, key: str, limit: int, expiry: float, amount: float) -> bool:
        return self._counting.acquire_gcra(key, limit, expiry, amount)

    @_wrap_errors
    def _get_gcra(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        return self._counting.get_gcra(key, limit, expiry)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_again, (type(self), *self._arguments)


def _opened_again(kind: Callable[..., R], uri: str | None, wrap_exceptions: bool, options: dict[str, Any]) -> R:
    return kind(uri, wrap_exceptions, **options)
