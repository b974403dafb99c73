"""Single flight for the tasks of one event loop: of all tasks that lack permits of one key, one fetches for all.

The fetching task decides the waiting tasks' requests by what it has brought, in the order in which they came. So each
waiting task wakes once: when its request is decided, or when it fetches next.

The fetching task also ends the requests that have waited too long, at the end of its flight. Each request outlasts two
flights, as at the fetch slot, however long they took: a loop that starts a hundred thousand tasks may do nothing else
for seconds, and then the first flight ends by its deadline. A flight whose task was cancelled shows nothing about
Redis, and counts as none of the two.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError
from forebay.redis.leased.fetch import patience_s, timed_out

__all__ = ["Turns"]

LEAST_TURNS: Final = 2


@dataclass(slots=True)
class Waiter:
    permits: Permits
    key: Key
    cost: int
    since_s: float
    since_turn: int
    outcome: asyncio.Future[Decision | None]
    """None: it is the next one to ask."""


@dataclass(slots=True)
class Line:
    waiters: deque[Waiter] = field(default_factory=deque)
    turn: int = 0
    brought_s: float = -math.inf
    """When Redis has last answered one of these."""


class Turns:
    """By key those who wait for the one that asks.

    Of one event loop, as its Redis store. Steps are not interrupted by other tasks, and whoever has the turn hands it
    on, however it ends. If the loop is closed meanwhile, nobody who waits will ever go on: as the one that had the turn
    is collected, its line goes with it.
    """

    def __init__(self) -> None:
        self._lines: dict[Hashable, Line] = {}

    async def wait(self, permits: Permits, key: Key, cost: int) -> Decision | None:
        """A decision; or None: it is the caller's turn, and it is to call ``hand_on``. Raises ``StoreUnavailable``."""
        tag = permits.tag(key)
        line = self._lines.get((permits.name, tag))
        if line is None:
            self._lines[permits.name, tag] = Line()
            return None
        outcome = asyncio.get_running_loop().create_future()
        line.waiters.append(Waiter(permits, key, cost, time.monotonic(), line.turn, outcome))
        try:
            decision: Decision | None = await outcome
        except BaseException:
            # Cancelled, perhaps just when it was decided, or closed by who ran it.
            if not outcome.done():
                # Of a loop that is closed, nobody is to be told.
                with contextlib.suppress(RuntimeError):
                    outcome.cancel()
            elif not outcome.cancelled() and outcome.exception() is None and outcome.result() is None:
                self.hand_on(permits, key, None)
            raise
        return decision

    def hand_on(self, permits: Permits, key: Key, has_brought: bool | None) -> None:
        """Decide what can be decided now. The first that can't be is the next one to ask.

        Whether Redis has brought an answer; None: the turn was given up.
        """
        tag = permits.tag(key)
        line = self._lines[permits.name, tag]
        now_s = time.monotonic()
        if has_brought is not None:
            line.turn += 1
        if has_brought:
            line.brought_s = now_s
        while line.waiters:
            waiter = line.waiters.popleft()
            if waiter.outcome.done() or waiter.outcome.get_loop().is_closed():
                # Its task was cancelled, or will never go on.
                continue
            try:
                decision = waiter.permits.hit_now(waiter.key, waiter.cost)
                is_late = now_s - waiter.since_s > patience_s(waiter.permits.terms)
                has_outlasted = line.turn - waiter.since_turn >= LEAST_TURNS
                if decision is None and is_late and has_outlasted:
                    answer = timed_out(waiter.permits, tag, line.brought_s > waiter.since_s)
                    decision = answer.decision(waiter.permits)
            except ForebayError as error:
                waiter.outcome.set_exception(error)
                continue
            except BaseException:
                # A signal's handler, say: it ends this turn, and not the line.
                waiter.outcome.set_result(None)
                raise
            waiter.outcome.set_result(decision)
            if decision is None:
                return
        del self._lines[permits.name, tag]
