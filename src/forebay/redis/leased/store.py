"""A host's own table in front of Redis: permits are borrowed in batches, and spent at the speed of memory."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

from forebay import waiting
from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.errors import (
    ForebayError,
    ForeignState,
    InvalidLimiter,
    StoreClosed,
    StoreUnavailable,
    shown,
    without_url,
)
from forebay.rate import Duration
from forebay.redis.commands import Command, LimiterCommands, costs_of, keys_of
from forebay.redis.leased.fetch import LOOKS, Holdings, Steps, admitted, decided, looked, refunded, reset
from forebay.redis.leased.terms import Terms, checked_options, terms_of
from forebay.redis.store import RedisStore, would_block
from forebay.store import Store

__all__ = ["LeasedLimiter", "LeasedStore", "LeasedStoreBase"]

T = TypeVar("T")
NS = 1_000_000_000


class LeasedStoreBase:
    """What both kinds of leased stores are: a store in Redis, one of the host, and the terms between them."""

    _of_redis: ClassVar[type]
    redis_store: Any

    def __init__(self, redis_store: Any, host_store: Store, lease: Duration, share: float) -> None:
        name = type(self).__name__
        if not isinstance(redis_store, self._of_redis):
            raise TypeError(
                f"the first argument of {name} is its {self._of_redis.__name__}, not {without_url(redis_store)} (a "
                "LeasedStore is over a RedisStore, an AsyncLeasedStore over an AsyncRedisStore)"
            )
        if not isinstance(host_store, Store):
            raise TypeError(f"the second argument of {name} is the host's Store, not {shown(host_store)}")
        self.redis_store, self.host_store = redis_store, host_store
        self._options = checked_options(lease, share)
        self.closed = False

    def _terms(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Terms]:
        # The strict limiter checks all else.
        if args:
            args = (self.redis_store, *args[1:])
        else:
            kwargs = {**kwargs, "store": self.redis_store}
        strict: LimiterCommands = self.redis_store._make_limiter(kind, args, kwargs)
        terms = terms_of(kind, strict, self.host_store, self._options, round(self.redis_store.executor.timeout_s * NS))
        return strict.name, terms

    def _was_closed(self) -> StoreClosed:
        return StoreClosed(f"{self!r} was used after it was closed")

    def __repr__(self) -> str:
        lease_s = self._options.lease_ns / NS
        return f"<{type(self).__name__} {self.redis_store!r} {self.host_store!r} lease={lease_s:g}s>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores")


class LeasedLimiter(Permits):
    """A limiter whose permits a host borrows from Redis. What the methods mean is written at ``forebay.TokenBucket``
    and its like.

    *Threads*: every method may be called from any thread. *Processes*: all of a host that make a limiter of the same
    name and parameters over the same stores share its leases; over other host stores, its limit. *Fork*: works in
    parent and child.

    Any method may raise ``ForeignState``, and ``StoreUnavailable`` unless the Redis store's policy answers instead;
    ``reset`` always does, if Redis is away. Nobody waits for other workers of the host for longer than twice the Redis
    store's deadline, and then for as long as a call of its own may take.
    """

    terms: Terms
    _leased_store: LeasedStore

    @property
    def store(self) -> LeasedStore:  # type: ignore[override]
        return self._leased_store

    @property
    def limit(self) -> int:
        """The most permits that can be allowed at once."""
        return self.terms.limit

    def __getattr__(self, name: str) -> Any:
        """What it was made of: rate, burst, ..."""
        try:
            return self.terms.parameters[name]
        except KeyError:
            raise AttributeError(f"a leased limiter has no attribute {name!r}") from None

    def _lacking(self, key: Key, cost: int) -> bool:
        store, fallback = self._leased_store, self.terms.strict._fallback
        steps = admitted(self, store._keeper().holdings, key, cost)
        return store._run(steps, lambda fallback: fallback.allow(key, cost), fallback)

    def _lacking_hit(self, key: Key, cost: int) -> Decision:
        if not (cost := self.checked(cost)):
            return self.peek(key, 0)
        store, fallback = self._leased_store, self.terms.strict._fallback
        steps = decided(self, store._keeper().holdings, key, cost)
        return store._run(steps, lambda fallback: fallback.hit(key, cost), fallback)

    def peek(self, key: Key, cost: int = 1) -> Decision:
        """What ``hit`` would say. From the lease if it suffices, else one round trip, of which nothing is borrowed."""
        return self._leased_store._run(
            looked(self, key, cost), lambda fallback: fallback.peek(key, cost), self.terms.strict._fallback
        )

    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """Decide a batch in order: a list of bools, one per key.

        All keys and costs are checked before any is charged. What the leases lack is fetched key by key.
        """
        listed = keys_of(keys)
        checked = [self.checked(cost) for cost in costs_of(costs, len(listed))]
        for key in listed:
            self.tag(key)
        return [
            self.allow(key) if cost == 1 else self.hit(key, cost).allowed
            for key, cost in zip(listed, checked, strict=True)
        ]

    def refund(self, key: Key, cost: int = 1) -> None:
        """Give back what an allowed ``hit`` charged; one round trip. Never more than a fresh key has."""
        self._leased_store._run(
            refunded(self, key, cost), lambda fallback: fallback.refund(key, cost), self.terms.strict._fallback
        )

    def reset(self, key: Key) -> None:
        """Forget `key`: in Redis and on this host. What other hosts have on loan, they may spend until it ends."""
        self._leased_store._run(reset(self, key))

    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> NoReturn:
        raise InvalidLimiter(
            f"{self!r} can't book ahead: wait for a permit, or reserve by a limiter over the RedisStore itself"
        )

    def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        return waiting.wait(cast(waiting.WaitedFor, _Waited(self)), key, cost, timeout, jitter)

    def wait_async(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> NoReturn:
        raise would_block(self)

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        raise InvalidLimiter(
            f"{self!r} can't be one of several limits: make them all over the RedisStore itself, or ask one after the "
            "other"
        )


class _Waited:
    """A leased limiter for those who wait: what is charged is charged now, or it is said when to ask again."""

    may_free_early = False

    def __init__(self, limiter: LeasedLimiter) -> None:
        self.limiter, self.store, self.name = limiter, limiter.store, limiter.name

    def reserve(self, key: Key, cost: int, max_delay: Duration | None) -> _Charged:
        return _Charged(self.limiter, key, cost, self.limiter.hit(key, cost))


class _Charged:
    def __init__(self, limiter: LeasedLimiter, key: Key, cost: int, decision: Decision) -> None:
        self._limiter, self._key, self._cost = limiter, key, cost
        self.allowed, self.delay_ns = decision.allowed, decision.retry_after_ns
        self.due_ns = LeasedStore.now_ns() + self.delay_ns

    def cancel(self) -> None:
        with contextlib.suppress(ForebayError):
            self._limiter.refund(self._key, self._cost)


class _Keeper:
    """What a process has fetched, and the thread that gives back what nobody uses."""

    def __init__(self, store: LeasedStore) -> None:
        self.holdings = Holdings()
        self._store = weakref.ref(store)
        self._every_s = store._options.lease_ns / LOOKS / NS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="forebay-leases", daemon=True)

    def start(self) -> None:
        # At the end of an interpreter nothing begins any more: leases then end by themselves.
        if not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):
                self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(self._every_s):
            store = self._store()
            if store is None or store.closed:
                return
            # Whatever it is: what is on loan now comes back at the end of its lease, and the rest can be given back.
            with contextlib.suppress(Exception):
                store._give_back(self.holdings.unused())
            del store

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()


class LeasedStore(LeasedStoreBase):
    """A host's shared memory in front of Redis: a limit across hosts that costs a round trip only now and then.

    ``TokenBucket(LeasedStore(redis_store, host_store), "api", "10000/second")``. A host borrows permits of a key in
    batches, and its workers spend them as if the limit were the host's own. Never more than the limit over all hosts;
    less by what is on loan to hosts that don't need it. ``TokenBucket`` with continuous refill, ``FixedWindow`` and
    ``SlidingWindow`` can be made over it.

    `redis_store` is a ``RedisStore``, `host_store` the ``Store`` that all workers of the host share. `lease`, from
    10 ms to a minute: so long a token bucket's permits stay borrowed at the most; permits of any limit that nobody has
    used for a quarter of it are given back. `share`: a host has no more than this part of a limit on loan.

    *Threads*, *fork*: safe. A thread of its own gives back what isn't used. ``close`` gives back what is left, as does
    the end of the interpreter; the two stores stay open. It is a context manager.
    """

    _of_redis = RedisStore
    manual_clock: ClassVar[None] = None  # for waiters: they sleep, and don't move one
    redis_store: RedisStore

    def __init__(
        self,
        redis_store: RedisStore,
        host_store: Store,
        *,
        lease: Duration = "1 second",
        share: float = 0.1,
    ) -> None:
        super().__init__(redis_store, host_store, lease, share)
        self._keepers: dict[int, _Keeper] = {}
        _stores.add(self)

    def close(self) -> None:
        """Give back what is left of the leases that this process has fetched. Its limiters can't be used any more."""
        if self.closed:
            return
        self.closed = True
        self._finish()

    def _finish(self) -> None:
        keeper = self._keepers.pop(os.getpid(), None)
        if keeper:
            # First, so that what is fetched meanwhile is given back here or there.
            keeper.holdings.closed = True
            keeper.end()
            with contextlib.suppress(ForebayError):
                self._give_back(keeper.holdings.unused(everything=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def now_ns() -> int:
        """For waiters."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LeasedLimiter:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        name, terms = self._terms(kind, args, kwargs)
        limiter = LeasedLimiter(self.host_store, name, terms)
        limiter._leased_store = self
        return limiter

    def _run(self, steps: Steps[T], fall_back: Callable[[Any], T] | None = None, fallback: Any = None) -> T:
        """What the steps come to; if Redis is away, what its store's policy says."""
        if self.closed:
            raise self._was_closed()
        try:
            step = next(steps)
            while True:
                if isinstance(step, float):
                    time.sleep(step)
                    step = steps.send(None)
                    continue
                try:
                    answer = self._ask(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return cast(T, end.value)
        except StoreUnavailable as error:
            return self.redis_store.executor.fall_back(error, fall_back and functools.partial(fall_back, fallback))

    def _ask(self, command: Command[T]) -> T:
        return self.redis_store.executor.execute(command)

    def _give_back(self, command: Iterator[Command[Any]]) -> None:
        """A question first, to which Redis must answer, and then all others together."""
        question = next(command, None)
        if question is None:
            return
        with contextlib.suppress(ForeignState):
            self._ask(question)
        self.redis_store.executor.run_many(list(command), nothing)

    def _keeper(self) -> _Keeper:
        """This process's; not one that was inherited. Without a lock: a signal's handler may come here meanwhile."""
        if self.closed:
            raise self._was_closed()
        keeper = self._keepers.get(os.getpid())
        if keeper is None:
            made = _Keeper(self)
            keeper = self._keepers.setdefault(os.getpid(), made)
            if keeper is made:
                made.start()
        return keeper


_stores: weakref.WeakSet[LeasedStore] = weakref.WeakSet()


def _finish() -> None:
    for store in list(_stores):
        with contextlib.suppress(Exception):
            store._finish()


atexit.register(_finish)


def nothing(number: int) -> None:
    """What is to be given back to Redis while it is away is not given back."""
