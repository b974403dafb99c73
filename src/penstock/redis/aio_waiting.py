"""Waiting for permits in Redis with asyncio: of an event loop, one task for each key asks."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from penstock.errors import PenstockError
from penstock.waiting import FIRST_BACKOFF_NS, LAST_BACKOFF_NS, check_pauses

if TYPE_CHECKING:
    from penstock.redis.aio_limiters import AsyncRedisReservation

__all__ = ["Lines", "wait"]

# Some hundred years. What is longer may be too large for the arithmetic of floats.
LONGEST_TIMEOUT_S: Final = 1e10


class Lines:
    """Of each key of each limiter a lock, which lets those who wait in this event loop in as they came."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[object, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: object) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock


async def wait(
    reserve: Callable[[float | None], Awaitable[AsyncRedisReservation]],
    line: asyncio.Lock,
    may_free_early: bool,
    timeout: float | None,
    jitter: float,
) -> bool:
    """What ``wait`` of every limiter does. Only the first of the line asks."""
    check_pauses(timeout, jitter)
    if timeout is not None and timeout > LONGEST_TIMEOUT_S:
        timeout = None
    deadline_s = math.inf if timeout is None else time.monotonic() + timeout
    task = asyncio.current_task()
    assert task
    cancelled_before = task.cancelling()
    try:
        async with asyncio.timeout(timeout):
            await line.acquire()
    except TimeoutError:
        return False
    try:
        booked = await _ask_until(reserve, may_free_early, deadline_s, jitter)
    finally:
        line.release()
    if booked is None:
        return False
    due_s = booked.due_ns / 1e9
    due_s = max(due_s, min(due_s + booked.delay * (_factor(jitter) - 1), deadline_s))
    try:
        if task.cancelling() > cancelled_before:
            # While the answer came, which redis-py then returns as if nothing had been.
            raise asyncio.CancelledError
        while (left_s := due_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
    except BaseException:
        with contextlib.suppress(PenstockError):
            await booked.cancel()
        raise
    return True


async def _ask_until(
    reserve: Callable[[float | None], Awaitable[AsyncRedisReservation]],
    may_free_early: bool,
    deadline_s: float,
    jitter: float,
) -> AsyncRedisReservation | None:
    backoff_s = FIRST_BACKOFF_NS / 1e9
    while True:
        left_s = max(deadline_s - time.monotonic(), 0.0)
        booked = await reserve(None if deadline_s == math.inf else left_s)
        if booked.allowed:
            return booked
        if left_s == 0 or (booked.delay > left_s and not may_free_early):
            return None
        # A denial that names no time must not become a loop without sleep; and jitter never makes it too early.
        delay_s = booked.delay or FIRST_BACKOFF_NS / 1e9
        pause_s = max(delay_s, min(delay_s * _factor(jitter), left_s))
        if may_free_early:
            # Nothing wakes this one when a permit is given back.
            pause_s = min(pause_s, backoff_s * _factor(jitter), left_s)
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_NS / 1e9)
        await asyncio.sleep(pause_s)


def _factor(jitter: float) -> float:
    return random.uniform(1 - jitter, 1 + jitter) if jitter else 1.0
