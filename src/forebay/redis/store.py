# mypy: disable-error-code="no-any-return,union-attr"
"""A store in Redis, and its limiters."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, cast

import redis
import redis.cluster
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay import holding, waiting
from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.errors import LimitExceeded
from forebay.rate import Duration, Rate
from forebay.redis.all_of import AllOfCommands, Costs, Keys
from forebay.redis.base import (
    RedisStoreBase,
    check_options,
    checked_client,
    checked_limiters,
    checked_url,
    client_options,
    none_held,
    noop,
)
from forebay.redis.commands import (
    ONE,
    BookingView,
    CommandFlow,
    LimiterCommands,
    StaggeredCommands,
    costs_of,
    keys_of,
    was_allowed,
)
from forebay.redis.executor import Executor
from forebay.redis.held import ConcurrencyCommands, HeldView, Taken, unimportant_after
from forebay.redis.transport.cluster import Cluster, TimedPool, cluster_url
from forebay.redis.transport.deadline import Patience, keep_deadlines
from forebay.redis.transport.servers import Server
from forebay.store import Store

__all__ = ["RedisAllOf", "RedisConcurrency", "RedisLease", "RedisLimiter", "RedisReservation", "RedisStore"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class RedisReservation(BookingView):
    """Permits booked for later. True when they were. As ``forebay.Reservation``; ``due_ns`` is in the time of
    ``time.monotonic_ns``."""

    __slots__ = ()
    _store: RedisStore

    def cancel(self) -> None:
        """Give the permits back, as far as they still count.

        Once: if it raises ``StoreUnavailable``, they may have come back, or may yet, and calling it again does nothing;
        or else they might come back twice. What a ``Concurrency`` then still holds, its ``refund`` gives back.
        """
        # What Redis has booked stays booked, if it is away.
        self._store._run(self._booked.cancel(), noop)


class RedisLimiter(LimiterCommands):
    """A limiter whose state is in Redis. What the methods mean is written at ``forebay.TokenBucket`` and its like.

    *Threads*: every method may be called from any thread. *Processes*: whoever makes a limiter of the same name and
    parameters over the same Redis and namespace shares its state. *Fork*: works in parent and child. A call that an
    interrupt ends, as ``KeyboardInterrupt`` does, may have been charged.

    Each method is one round trip. Any may raise ``ForeignState``, and ``StoreUnavailable`` unless the store's policy
    answers instead; ``reset`` always does, if Redis is away.
    """

    _store: RedisStore

    @property
    def store(self) -> RedisStore:
        return self._store

    def allow(self, key: Key, /) -> bool:
        if self._usual is None:
            return self._store._do(self._ask_allow(key), lambda fallback: fallback.allow(key), self._fallback)
        return self._store.executor.decide(
            self._script, (self._key(key),), self._usual, self._size, was_allowed, lambda: self._fallback.allow(key)
        )

    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Decision:
        if self._usual and cost is ONE and rate is None and burst is None and request_id is request_ttl is None:
            return self._store.executor.decide(
                self._script,
                (self._key(key),),
                self._usual,
                self._size,
                lambda reply: self._usual_decision(self._name, reply),
                lambda: self._fallback.hit(key),
            )
        command = self._ask_hit(key, cost, rate, burst, request_id, request_ttl)
        more = {"rate": rate, "burst": burst, "request_id": request_id, "request_ttl": request_ttl}
        return self._store._do(command, lambda fallback: fallback.hit(key, cost, **more), self._fallback)

    def peek(self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None) -> Decision:
        command = self._ask_peek(key, cost, rate, burst)
        return self._store._do(
            command, lambda fallback: fallback.peek(key, cost, rate=rate, burst=burst), self._fallback
        )

    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> RedisReservation:
        command = self._ask_reserve(key, cost, max_delay)
        booked = self._store._do(command, lambda fallback: fallback.reserve(key, cost, max_delay), self._fallback)
        return RedisReservation(self._store, booked)

    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        flow = self._refund(key, cost, rate, burst, request_id)
        more = {"rate": rate, "burst": burst, "request_id": request_id}
        self._store._run(flow, lambda fallback: fallback.refund(key, cost, **more), self._fallback)

    def reset(self, key: Key) -> None:
        self._store._do(self._ask_reset(key))

    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        return self._store._do_many(
            self._ask_many(keys, costs),
            lambda number, fallback: fallback.allow(keys[number], costs[number]),
            self._fallback,
        )

    def wait(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(self, key: Key, cost: int = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> NoReturn:
        raise would_block(self)

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        return RedisAllOf(checked_limiters(kind, args, kwargs, RedisLimiter))


class RedisStaggeredWindow(StaggeredCommands, RedisLimiter):
    """A fixed window that begins at a time of each key's own."""


def would_block(limiter: object) -> TypeError:
    return TypeError(
        f"wait_async of {limiter!r} would stop the event loop for each round trip to Redis: make the limiter over an "
        "AsyncRedisStore, and await its wait"
    )


class RedisLease(HeldView):
    """Permits that are held, as ``forebay.Lease``: given back by ``release`` or at the end of a ``with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ()
    _limiter: RedisConcurrency

    @property
    def full(self) -> bool:
        return self._taken.full

    def release(self) -> bool:
        """Give the permits back. Whether any was still held. If it raises, it may be called again."""
        self._released = True
        local = self._taken.local
        held = local is not None and local.release()
        if self._permits and self._taken.is_own:
            command = self._limiter._ask_release(self._taken.key, self._permits)
            held |= self._limiter._store._do(command, none_held) > 0
            waiting.released(self._limiter, self._key)
        self._permits = []
        return held

    def renew(self) -> bool:
        """Let the lease begin anew. False if any of the permits was not held any more."""
        permits, local = self._permits, self._taken.local
        if local is not None and not local.renew():
            return False
        if not permits or not self._taken.is_own:
            return local is not None
        command = self._limiter._ask_renew(self._taken.key, permits)
        return self._limiter._store._do(command, none_held) == len(permits)

    def give_back_flow(self) -> CommandFlow[None]:
        yield from super().give_back_flow()
        waiting.released(self._limiter, self._key)

    def __enter__(self) -> Self:
        if not self._taken.allowed:
            raise self._limiter.exceeded(self._key)
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's outcome counts: what can't be released comes back by itself.
        with contextlib.suppress(unimportant_after(error)):
            self.release()


class RedisConcurrency(ConcurrencyCommands, RedisLimiter):
    """Permits that are held for a while, as ``forebay.Concurrency``; but nobody notices that a process has ended: its
    permits come back at the end of their leases. So take a short lease, and renew it."""

    def acquire(self, key: Key, cost: int = 1) -> RedisLease:
        command = self._ask_acquire(key, cost)
        return RedisLease(
            self, key, self._store._do(command, lambda fallback: fallback.acquire(key, cost), self._fallback)
        )

    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> holding.Hold:
        return holding.Hold(cast(Any, self), key, cost, timeout)

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None
    ) -> Callable[[F], F]:
        return holding.limited(cast(Any, self), key, cost, timeout)

    def exceeded(self, key: Key) -> LimitExceeded:
        return self._exceeded(self.peek(key).retry_after)

    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        """Give back what ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process."""
        self._store._run(self._refund(key, cost, rate, burst, request_id), noop)
        waiting.released(self, key)

    def _take_unleased(self, key: Key, cost: int) -> RedisLease:
        """For ``Hold``: a lease for the permits that a ``wait`` of this process has just taken."""
        return self._lease_of(key, self._take_unleased_permits(key, cost))

    def _lease_of(self, key: Key, taken: Taken) -> RedisLease:
        return RedisLease(self, key, taken)


class RedisAllOf(AllOfCommands):
    """Several limits of one ``RedisStore`` at once, as ``forebay.AllOf``: all or none.

    One round trip; but of keys that lie in several slots of a cluster, one for each slot and those that give back.
    """

    _store: RedisStore

    @property
    def store(self) -> RedisStore:
        return self._store

    @property
    def limiters(self) -> tuple[LimiterCommands, ...]:
        return self._limiters

    def allow(self, key: Keys, /) -> bool:
        flow = self._allow(self._parts(key, 1))
        return self._store._run(flow, lambda fallback: fallback.allow(key), self._fallback)

    def hit(self, key: Keys, cost: Costs = 1) -> Decision:
        return self._store._run(self._hit(key, cost), lambda fallback: fallback.hit(key, cost), self._fallback)

    def hit_each(self, key: Keys, cost: Costs = 1) -> list[Decision]:
        return self._store._run(
            self._hit_each(key, cost), lambda fallback: fallback.hit_each(key, cost), self._fallback
        )

    def peek(self, key: Keys, cost: Costs = 1) -> Decision:
        return self._store._run(self._peek(key, cost), lambda fallback: fallback.peek(key, cost), self._fallback)

    def reserve(self, key: Keys, cost: Costs = 1, max_delay: Duration | None = None) -> RedisReservation:
        flow = self._reserve(key, cost, max_delay)
        booked = self._store._run(flow, lambda fallback: fallback.reserve(key, cost, max_delay), self._fallback)
        return RedisReservation(self._store, booked)

    def _hit_each_for(self, patience: Patience, key: Keys, cost: Costs) -> list[Decision]:
        """For the web."""
        flow = self._hit_each(key, cost)
        return self._store.executor.run_within(patience, flow, lambda: self._fallback.hit_each(key, cost))

    def _admit(
        self, key: list[Key], cost: list[int], patience: Patience
    ) -> tuple[list[Decision], list[RedisReservation | RedisLease]]:
        """For the web: what ``hit_each`` says; and for each limiter, if all allow it, what gives back what it took."""
        flow = self._admit_all(key, cost)
        decisions, taken = self._store.executor.run_within(patience, flow, lambda: self._fallback.admit(key, cost))
        return decisions, [
            cast(RedisConcurrency, limiter)._lease_of(its_key, its)
            if isinstance(its, Taken)
            else RedisReservation(self._store, its)
            for limiter, its_key, its in zip(self._limiters, key, taken, strict=False)
        ]

    def refund(self, key: Keys, cost: Costs = 1) -> None:
        self._store._run(self._refund(key, cost), lambda fallback: fallback.refund(key, cost), self._fallback)

    def reset(self, key: Keys) -> None:
        self._store._run(self._reset(key))

    def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> list[bool]:
        keys = keys_of(keys)
        costs = costs_of(costs, len(keys))
        many = self._many(keys, costs)

        def fall_back(number: int, fallback: Any) -> bool:
            return bool(fallback.allow(keys[number], costs[number]))

        if self._is_apart(many):
            return [
                self._store._run(self._allow(parts), functools.partial(fall_back, number), self._fallback)
                for number, parts in enumerate(many)
            ]
        return self._store._do_many([self._ask_allow(parts) for parts in many], fall_back, self._fallback)

    def wait(self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0) -> bool:
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(
        self, key: Keys, cost: Costs = 1, timeout: Duration | None = None, *, jitter: float = 0.0
    ) -> NoReturn:
        raise would_block(self)


class RedisStore(RedisStoreBase):
    """Redis as the place where limiters keep their state.

    ``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``. `server` is a URL as ``redis.Redis.from_url``
    takes it (``rediss://`` for TLS, a user and a password for ACLs), of any node of a cluster with ``redis+cluster://``
    or ``rediss+cluster://``; or a client of your own with a ``socket_timeout``: a ``redis.Redis``, also a
    ``Sentinel``'s, or a ``redis.cluster.RedisCluster``. With a URL every call has the deadline `timeout`
    (text like ``"500 ms"``, the default; seconds; a ``timedelta``; of a cluster, at the node of its key), and none is
    repeated: a decision that is asked for again might be charged again. Of a client of your own, and of a cluster over
    asyncio, each operation on a socket has one.

    When Redis is slow, gone, or can't do its work, `when_unavailable` answers: ``"deny"`` raises ``StoreUnavailable``
    (for a web service 503, not 429), ``"allow"`` allows everything, and ``"local"`` goes on with the host's share of
    each limit, in the shared memory of the store `host`: a limit of 100 is one of 25 on each of four `hosts`. The
    decisions are then ``degraded``, and Redis is never told of them.

    After three calls in a row that failed, no call waits for Redis but one each second, until that one is answered.
    `host` lets all processes of the host know it together; without it, each process finds it out for itself.
    ``status()`` tells what is known. docs/redis-failures.md says what happens when.

    `namespace` begins the name of everything that is written. Keys are stored as fingerprints; with `plain_keys` as
    they are.

    *Threads*: safe. *Fork*: safe. Close a store that was made from a URL; it is a context manager.
    """

    manual_clock: ClassVar[None] = None  # for waiters: they sleep, and don't move one

    def __init__(
        self,
        server: str | redis.Redis | redis.cluster.RedisCluster,
        *,
        namespace: str = "forebay",
        plain_keys: bool = False,
        timeout: Duration | None = None,
        when_unavailable: Literal["deny", "allow", "local"] = "deny",
        host: Store | None = None,
        hosts: int | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys, when_unavailable, host, hosts)
        client: Any
        if isinstance(server, str):
            checked_url(server)
            options = {"retry": Retry(NoBackoff(), 0), **client_options(timeout)}
            if nodes_url := cluster_url(server):
                options["connection_pool_class"] = TimedPool
                client = Cluster(functools.partial(redis.cluster.RedisCluster.from_url, nodes_url, **options))
            else:

                def make() -> redis.Redis:
                    made = redis.Redis.from_url(server, **options)
                    keep_deadlines(made.connection_pool, options["socket_timeout"])
                    return made

                own = make()
                check_options(own.connection_pool)
                client = Server(own, make)
        else:
            given = checked_client(server, (redis.Redis, redis.cluster.RedisCluster), "RedisStore", timeout)
            is_cluster = isinstance(given, redis.cluster.RedisCluster)
            client = Cluster(lambda: given) if is_cluster else Server(given)
        self.executor: Executor = self._make_executor(Executor, client, server, timeout, host)

    def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more."""
        self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def now_ns() -> int:
        """For waiters: the time of reservations."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    _limiter = RedisLimiter
    _all_of = RedisAllOf
    _staggered = RedisStaggeredWindow
    _concurrency = RedisConcurrency
