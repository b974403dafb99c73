"""Single flight for the tasks of one event loop: of all tasks that lack permits of one key, one fetches for all.

The fetching task decides the waiting tasks' requests by the lease that it has fetched, in the order in which they came.
So each waiting task wakes once: when its request is decided, or when it fetches next.

At the end of its flight, the fetching task also ends the requests that have waited too long. As at the fetch slot, no
request is ended before two flights have ended, even if its time is over. A loop that starts a hundred thousand tasks
may do nothing else for seconds, and then the first flight ends by its deadline. A flight whose task was cancelled shows
nothing about Redis, and counts as neither of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final

from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError
from forebay.redis.leased.fetch import Steps, patience_s, timed_out

__all__ = ["SingleFlight"]

LEAST_FLIGHTS: Final = 2


@dataclass(slots=True)
class Waiter:
    permits: Permits
    key: Key
    cost: int
    since_s: float
    since_flight: int
    decision: asyncio.Future[Decision | None]
    """None: this task fetches next."""


@dataclass(slots=True)
class WaitQueue:
    """The tasks that wait for one key's permits, while another task fetches."""

    waiters: deque[Waiter] = field(default_factory=deque)
    flights: int = 0
    """How many fetches have ended since the queue began."""
    answered_s: float = -math.inf
    """When Redis last answered one of these fetches."""


class SingleFlight:
    """The wait queues of one event loop, by limiter and key.

    No other task runs between two awaits. The fetching task hands on in every case, however its fetch ends. If the loop
    is closed meanwhile, no waiting task goes on: the queue is dropped when the fetching task is collected.
    """

    def __init__(self) -> None:
        self.queues: dict[Hashable, WaitQueue] = {}

    def decided(
        self, permits: Permits, key: Key, cost: int, fetch: Callable[[Permits, Key, int], Steps[Decision]]
    ) -> Steps[Decision]:
        """Decide a request that exceeds the lease: by another task's fetch, or by its own, which `fetch` makes."""
        decision: Decision | None = yield self.wait(permits, key, cost)
        if decision is not None:
            return decision
        is_answered = None
        try:
            decision = yield from fetch(permits, key, cost)
            is_answered = True
            return decision
        except ForebayError:
            is_answered = False
            raise
        finally:
            self.hand_on(permits, key, is_answered)

    async def wait(self, permits: Permits, key: Key, cost: int) -> Decision | None:
        """Return a decision, or None if the caller fetches next and then calls ``hand_on``.

        Raises ``StoreUnavailable``.
        """
        tag = permits.tag(key)
        queue = self.queues.get((permits.name, tag))
        if queue is None:
            self.queues[permits.name, tag] = WaitQueue()
            return None
        future = asyncio.get_running_loop().create_future()
        queue.waiters.append(Waiter(permits, key, cost, time.monotonic(), queue.flights, future))
        try:
            decision: Decision | None = await future
        except BaseException:
            # Cancelled, perhaps after the decision came, or closed with its loop.
            if not future.done():
                # In a closed loop a future has no callbacks to run.
                with contextlib.suppress(RuntimeError):
                    future.cancel()
            elif not future.cancelled() and future.exception() is None and future.result() is None:
                self.hand_on(permits, key, None)
            raise
        return decision

    def hand_on(self, permits: Permits, key: Key, is_answered: bool | None) -> None:
        """Decide the waiting requests that the lease now covers. The first that it doesn't cover fetches next.

        `is_answered` is whether Redis has answered the fetch. None: the fetch was cancelled.
        """
        tag = permits.tag(key)
        queue = self.queues[permits.name, tag]
        now_s = time.monotonic()
        if is_answered is not None:
            queue.flights += 1
        if is_answered:
            queue.answered_s = now_s
        while queue.waiters:
            waiter = queue.waiters.popleft()
            if waiter.decision.done() or waiter.decision.get_loop().is_closed():
                # Its task was cancelled, or never goes on.
                continue
            try:
                decision = waiter.permits.hit_now(waiter.key, waiter.cost)
                is_late = now_s - waiter.since_s > patience_s(waiter.permits.terms)
                has_outlasted = queue.flights - waiter.since_flight >= LEAST_FLIGHTS
                if decision is None and is_late and has_outlasted:
                    outcome = timed_out(waiter.permits, tag, queue.answered_s > waiter.since_s)
                    decision = outcome.decision(waiter.permits)
            except ForebayError as error:
                waiter.decision.set_exception(error)
                continue
            except BaseException:
                # A signal handler's exception, for one: it ends this task, and the next one fetches.
                waiter.decision.set_result(None)
                raise
            waiter.decision.set_result(decision)
            if decision is None:
                return
        del self.queues[permits.name, tag]
