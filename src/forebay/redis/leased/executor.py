"""Executors that drive the steps of leases, over the executor of a Redis store: one blocks, one is awaited.

Each decorates an ``Executor`` or ``AsyncExecutor``. It decides a request by the host's lease, fetches what the lease
lacks, and gives back unused leases in the background. ``LeaseExecutor`` returns a result. The same method of
``AsyncLeaseExecutor`` returns a coroutine of that result.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from forebay.alive import alive_in
from forebay.core.arguments import costs_of, keys_of
from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, ForeignState, StoreClosed, StoreUnavailable
from forebay.rate import NS, Duration
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.commands import Command, noop
from forebay.redis.executor import Executor
from forebay.redis.leased.fetch import (
    CHECKS_PER_LEASE,
    Holdings,
    Steps,
    alone,
    cancelled,
    is_alone,
    peeked,
    refunded,
    reset,
    shared,
)
from forebay.redis.leased.single_flight import SingleFlight

__all__ = ["AsyncLeaseExecutor", "LeaseExecutor"]

T = TypeVar("T")


class LeaseExecutorBase(ABC):
    """The base of both executors: the steps of each operation. `owner` names the store in errors."""

    redis: Any
    """The executor of the Redis store."""

    def __init__(self, owner: str, lease_ns: int) -> None:
        self._owner = owner
        self.check_every_s = lease_ns / CHECKS_PER_LEASE / NS
        self.closed = False

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosed(f"{self._owner} was used after it was closed")

    @property
    @abstractmethod
    def holdings(self) -> Holdings:
        """The leases that this process has fetched."""

    @abstractmethod
    def share(self, permits: Permits, key: Key, cost: int) -> Steps[Decision]:
        """Decide a request together with the others that lack permits of `key`."""

    def fetch(self, permits: Permits, key: Key, cost: int, **more: Any) -> Steps[Decision]:
        """Decide a request that exceeds the lease, or fall back. The fallback gets `more` arguments."""
        try:
            decision = (yield from alone(permits, key, cost)) if is_alone(permits, cost) else None
            if decision is None:
                decision = yield from self.share(permits, key, cost)
        except StoreUnavailable as error:
            decision = self.redis.fall_back(error, lambda: permits.terms.fallback.hit(key, cost, **more))
        return decision

    def hit(self, permits: Permits, key: Key, cost: int, **more: Any) -> Steps[Decision]:
        """Decide a request, from the lease if it suffices."""
        decision: Decision | None = permits.hit_now(key, cost)
        if decision is not None:
            return decision
        cost = permits.checked(cost)
        return (yield from self.fetch(permits, key, cost, **more) if cost else self.peek(permits, key, 0))

    def hit_many(self, permits: Permits, keys: Iterable[Key], costs: Iterable[int] | None) -> Steps[list[bool]]:
        """Decide a batch in order. All keys and costs are checked before any is charged."""
        listed = keys_of(keys)
        checked = [permits.checked(cost) for cost in costs_of(costs, len(listed))]
        for key in listed:
            permits.tag(key)
        allowed = []
        for key, cost in zip(listed, checked, strict=True):
            decided = permits.allow_now(key) if cost == 1 else None
            if decided is None:
                decided = (yield from self.hit(permits, key, cost)).allowed
            allowed.append(decided)
        return allowed

    def peek(self, permits: Permits, key: Key, cost: int) -> Steps[Decision]:
        try:
            decision = yield from peeked(permits, key, cost)
        except StoreUnavailable as error:
            decision = self.redis.fall_back(error, lambda: permits.terms.fallback.peek(key, cost))
        return decision

    def refund(self, permits: Permits, key: Key, cost: int) -> Steps[None]:
        try:
            yield from refunded(permits, key, cost)
        except StoreUnavailable as error:
            self.redis.fall_back(error, lambda: permits.terms.fallback.refund(key, cost))

    def give_back_charged(self, permits: Permits, key: Key, cost: int) -> Steps[None]:
        """As ``refund``, of permits that no fallback has charged."""
        try:
            yield from refunded(permits, key, cost)
        except StoreUnavailable as error:
            self.redis.fall_back(error, noop)

    def cancel(self, permits: Permits, key: Key, cost: int, since_ns: int, decision: Decision) -> Steps[None]:
        """Give back the charge of a request that was decided after `since_ns`."""
        if decision.degraded:
            # The fallback charged it, if anything did.
            permits.terms.fallback.refund(key, cost)
        elif decision.allowed and not decision.full and cost:
            # A request that was allowed because the host's store was full has left no charge.
            try:
                yield from cancelled(permits, key, cost, since_ns)
            except StoreUnavailable as error:
                self.redis.fall_back(error, noop)

    def reset(self, permits: Permits, key: Key) -> Steps[None]:
        """Forget a key. Has no fallback: a state in Redis can't be deleted while Redis is unavailable."""
        try:
            yield from reset(permits, key)
        except StoreUnavailable as error:
            self.redis.fall_back(error, None)


class LeaseExecutor(LeaseExecutorBase):
    """Drives steps and blocks until they end. *Threads*: safe. *Fork*: safe; each process has holdings of its own."""

    redis: Executor

    def __init__(self, redis: Executor, owner: str, lease_ns: int) -> None:
        super().__init__(owner, lease_ns)
        self.redis = redis
        self._keepers: dict[int, Keeper] = {}
        _executors.add(self)

    @property
    def keeper(self) -> Keeper:
        """The keeper of this process. Takes no lock, because a signal handler may run this code meanwhile."""
        self._check_open()
        keeper = self._keepers.get(os.getpid())
        if keeper is None:
            made = Keeper(self)
            keeper = self._keepers.setdefault(os.getpid(), made)
            if keeper is made:
                made.start()
            if self.closed:
                # ``finish`` may have looked for a keeper just before.
                keeper.holdings.closed = True
        return keeper

    @property
    def holdings(self) -> Holdings:
        return self.keeper.holdings

    def share(self, permits: Permits, key: Key, cost: int) -> Steps[Decision]:
        return shared(permits, self.holdings, key, cost)

    def run(self, steps: Steps[T]) -> T:
        self._check_open()
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    time.sleep(step)
                    step = steps.send(None)
                    continue
                try:
                    # A string, as CPython 3.12 imports a module to make the type, which it can't while it ends.
                    result = self.redis.execute(cast("Command[Any]", step))
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    def run_to_end(self, steps: Steps[T]) -> T:
        """As ``run``: no task can be cancelled meanwhile."""
        return self.run(steps)

    def wait(self, limiter: Any, key: Key, cost: int, timeout: Duration | None, jitter: float) -> bool:
        return self.redis.wait(limiter, key, cost, timeout, jitter)

    def give_back(self, commands: Iterator[Command[Any]]) -> None:
        """Send a query, which Redis must answer, and then all others together."""
        query = next(commands, None)
        if query is None:
            return
        with contextlib.suppress(ForeignState):
            self.redis.execute(query)
        self.redis.run_many(list(commands), give_nothing_back)

    def close(self) -> None:
        """Give back the remaining permits of the leases that this process has fetched."""
        if not self.closed:
            self.closed = True
            self.finish()

    def finish(self) -> None:
        """Stop the keeper's thread and give back all leases: at the end of the process or of the store."""
        keeper = self._keepers.pop(os.getpid(), None)
        if keeper:
            # First, so that a fetch that ends meanwhile gives back its lease, or this does.
            keeper.holdings.closed = True
            keeper.end()
            with contextlib.suppress(ForebayError):
                self.give_back(keeper.holdings.unused(everything=True))


class Keeper:
    """The leases that a process has fetched, and the thread that gives back the unused ones."""

    def __init__(self, executor: LeaseExecutor) -> None:
        self.holdings = Holdings()
        self._executor = weakref.ref(executor)
        self._check_every_s = executor.check_every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._check, name="forebay-leases", daemon=True)

    def start(self) -> None:
        # At the end of the interpreter no thread starts any more: leases then end by themselves.
        if not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def _check(self) -> None:
        while not self._ended.wait(self._check_every_s):
            executor = self._executor()
            if executor is None or executor.closed:
                return
            # After any error, a lease that was withdrawn comes back at its end, and the others at the next check.
            with contextlib.suppress(Exception):
                executor.give_back(self.holdings.unused())
            del executor

    def end(self) -> None:
        self._ended.set()
        # A thread that is just starting ends by itself, and can't be joined yet.
        if self._thread.is_alive():
            self._thread.join()


_executors: weakref.WeakSet[LeaseExecutor] = weakref.WeakSet()


def _finish_all() -> None:
    for executor in alive_in(_executors):
        with contextlib.suppress(Exception):
            executor.finish()


atexit.register(_finish_all)


class AsyncLeaseExecutor(LeaseExecutorBase):
    """Drives steps in the tasks of one event loop. A task of its own gives back unused leases."""

    redis: AsyncExecutor

    def __init__(self, redis: AsyncExecutor, owner: str, lease_ns: int) -> None:
        super().__init__(owner, lease_ns)
        self.redis = redis
        self._holdings = Holdings()
        self.flight = SingleFlight()
        self.checking: asyncio.Task[None] | None = None

    @property
    def holdings(self) -> Holdings:
        return self._holdings

    def share(self, permits: Permits, key: Key, cost: int) -> Steps[Decision]:
        # No task may wait for a task of a loop that has ended.
        self.redis.check_use()
        return self.flight.decided(permits, key, cost, self._fetch_for_all)

    def _fetch_for_all(self, permits: Permits, key: Key, cost: int) -> Steps[Decision]:
        # The store may have been closed while the task waited.
        self._check_open()
        return (yield from shared(permits, self._holdings, key, cost))

    async def run(self, steps: Steps[T]) -> T:
        self._check_open()
        if self.checking is None:
            self.checking = asyncio.create_task(check(weakref.ref(self), self.check_every_s))
        try:
            step = next(steps)
            while True:
                try:
                    result = None
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    elif isinstance(step, Command):
                        result = await self.redis.execute(step)
                    else:
                        result = await step
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    async def run_to_end(self, steps: Steps[T]) -> T:
        """As ``run``, for steps that give permits back: they go on if this task is cancelled."""
        return await self.redis.to_end(self.run(steps))

    async def wait(self, limiter: Any, key: Key, cost: int, timeout: Duration | None, jitter: float) -> bool:
        return await self.redis.wait(limiter, key, cost, timeout, jitter)

    async def give_back(self, commands: Iterator[Command[Any]]) -> None:
        """As ``LeaseExecutor.give_back``. A cancelled task still gives back what it has withdrawn from a lease."""
        query = next(commands, None)
        if query is None:
            return
        with contextlib.suppress(ForeignState):
            await self.redis.execute(query)
        await self.redis.to_end(self.redis.run_many(list(commands), give_nothing_back))

    async def close(self) -> None:
        """As ``LeaseExecutor.close``."""
        if self.closed:
            return
        # First, so that a fetch that ends meanwhile gives back its lease, or this does.
        self.closed = self._holdings.closed = True
        if self.checking:
            self.checking.cancel()
            await asyncio.wait([self.checking])
        with contextlib.suppress(ForebayError):
            await self.give_back(self._holdings.unused(everything=True))


async def check(executor_of: weakref.ref[AsyncLeaseExecutor], every_s: float) -> None:
    """The task that gives back unused leases. It doesn't keep the executor alive."""
    while True:
        await asyncio.sleep(every_s)
        executor = executor_of()
        if executor is None:
            return
        # As in a thread.
        with contextlib.suppress(Exception):
            await executor.give_back(executor.holdings.unused())
        del executor


def give_nothing_back(number: int) -> None:
    """The fallback for giving back: while Redis is unavailable, the permits come back at their lease's end."""
