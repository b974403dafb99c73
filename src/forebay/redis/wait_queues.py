"""Waiting for permits in Redis with asyncio.

In each event loop, one task at a time sends requests for a key. The other tasks that wait for permits of that key wait
in a queue. ``forebay.waiting`` has the same for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

from forebay.errors import ForebayError
from forebay.rate import Duration, is_never
from forebay.waiting import FIRST_BACKOFF_NS, LAST_BACKOFF_NS, check_pauses, jittered

__all__ = ["WaitQueues", "wait"]

# Some hundred years. A longer time may be too large for the arithmetic of floats.
LONGEST_TIMEOUT_NS: Final = 10**19


class AwaitedBooking(Protocol):
    """The result of ``reserve`` of a limiter over an ``AsyncRedisStore``."""

    @property
    def allowed(self) -> bool: ...
    @property
    def delay(self) -> float: ...
    @property
    def delay_ns(self) -> int: ...
    @property
    def due_ns(self) -> int: ...
    def cancel(self) -> Awaitable[None]: ...


class WaitQueues:
    """A lock for each key of each limiter. The tasks of an event loop acquire it in the order in which they came."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: object) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


async def wait(
    reserve: Callable[[float | None], Awaitable[AwaitedBooking]],
    queue: asyncio.Lock,
    may_free_early: bool,
    timeout: Duration | None,
    jitter: float,
) -> bool:
    """The ``wait`` of every limiter. Only the first task of the queue sends requests."""
    timeout_ns = check_pauses(timeout, jitter)
    timeout_s = None if timeout_ns is None or timeout_ns > LONGEST_TIMEOUT_NS else timeout_ns / 1e9
    deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
    task = asyncio.current_task()
    assert task
    is_cancelled = functools.partial(_is_cancelled, task, task.cancelling())
    try:
        async with asyncio.timeout(timeout_s):
            await queue.acquire()
    except TimeoutError:
        return False
    try:
        booked = await _reserve_until(reserve, is_cancelled, may_free_early, deadline_s, jitter)
    finally:
        queue.release()
    if booked is None:
        return False
    booked_s = booked.due_ns / 1e9 - booked.delay
    due_s = booked_s + jittered(booked.delay_ns, jitter, _ns(deadline_s - booked_s)) / 1e9
    try:
        if is_cancelled():
            raise asyncio.CancelledError
        while (left_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
    except BaseException:
        with contextlib.suppress(ForebayError):
            await booked.cancel()
        raise
    return True


def _is_cancelled(task: asyncio.Task[Any], before: int) -> bool:
    """Whether the task was cancelled while a reply came: redis-py then returns the reply and drops the cancellation."""
    return task.cancelling() > before


def _ns(seconds: float) -> int:
    """A time in ns; for an infinite one the longest timeout."""
    return min(round(min(seconds, LONGEST_TIMEOUT_NS) * 1e9), LONGEST_TIMEOUT_NS)


async def _reserve_until(
    reserve: Callable[[float | None], Awaitable[AwaitedBooking]],
    is_cancelled: Callable[[], bool],
    may_free_early: bool,
    deadline_s: float,
    jitter: float,
) -> AwaitedBooking | None:
    backoff_ns = FIRST_BACKOFF_NS
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        booked = await reserve(None if deadline_s == math.inf else left_s)
        if booked.allowed:
            return booked
        if is_cancelled():
            raise asyncio.CancelledError
        if left_s == 0 or is_never(booked.delay_ns) or (booked.delay > left_s and not may_free_early):
            return None
        # A denial without a time must not lead to a loop without sleep.
        delay_ns = booked.delay_ns or FIRST_BACKOFF_NS
        left_ns = _ns(left_s)
        pause_s = jittered(delay_ns, jitter, left_ns) / 1e9
        if may_free_early:
            # Nothing wakes this task when a permit is given back.
            pause_s = min(pause_s, jittered(backoff_ns, jitter, left_ns) / 1e9, left_s)
            backoff_ns = min(2 * backoff_ns, LAST_BACKOFF_NS)
        await asyncio.sleep(pause_s)
