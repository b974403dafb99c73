"""What is to be awaited at a request's end, by tasks of its event loop: also if its own task has been cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForeignState, StoreClosed, StoreUnavailable

if TYPE_CHECKING:
    from forebay.redis.transport.deadline import Patience

__all__ = ["Afterwards"]

_log: Final = logging.getLogger("forebay.web")
# An event loop doesn't keep its tasks.
_tasks: Final[set[asyncio.Task[None]]] = set()


class Afterwards:
    """Of one request, whose event loop is the running one.

    What can't be given back, as its store is away, stays charged or ends by itself: no answer fails of it, and none
    waits for it longer than its `patience` lasts; None is as long as it takes.
    """

    __slots__ = ("_loop", "_patience", "_tasks")

    def __init__(self, patience: Patience | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """From any thread: frameworks close answers in threads."""
        if asyncio._get_running_loop() is self._loop:
            self._start(work)
        else:
            try:
                self._loop.call_soon_threadsafe(self._start, work)
            except RuntimeError:
                # The loop has ended: what is held ends by itself.
                work.close()

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(_done(work))
        for tasks in (self._tasks, _tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def settled(self) -> None:
        """When all that was started is done, or nobody waits any more: then it goes on."""
        if self._tasks and (self._patience is None or self._patience.left_s > 0):
            since_s = self._loop.time()
            await asyncio.wait(self._tasks, timeout=None if self._patience is None else self._patience.left_s)
            if self._patience is not None:
                self._patience.left_s -= self._loop.time() - since_s


async def _done(work: Coroutine[Any, Any, object]) -> None:
    try:
        with suppress(StoreUnavailable, StoreClosed):
            await work
    except ForeignState as error:
        _log.warning("of a request's end nothing was given back: %s", error)
