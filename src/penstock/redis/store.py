"""A store in Redis, and its limiters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from penstock import holding, waiting
from penstock.core.decision import Decision
from penstock.core.keys import Key
from penstock.errors import LimitExceeded
from penstock.rate import Rate
from penstock.redis.all_of import AskingAll, Costs, Keys
from penstock.redis.asking import ONE, Asked, Asking, AskingStaggered, BookingView, Talk, checked
from penstock.redis.base import CHUNK, RedisStoreBase, checked_client, checked_limiters, deadlines, replaced, unknown
from penstock.redis.held import AskingHeld, Permit, Taken
from penstock.redis.scripts import Script

__all__ = ["RedisAllOf", "RedisConcurrency", "RedisLease", "RedisLimiter", "RedisReservation", "RedisStore"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class RedisReservation(BookingView):
    """Permits booked for later. True when they were. As ``penstock.Reservation``; ``due_ns`` is in the time of
    ``time.monotonic_ns``."""

    __slots__ = ()
    _store: RedisStore

    def cancel(self) -> None:
        """Give the permits back, once, as far as they still count."""
        self._store._run(self._booked.cancel())


class RedisLimiter(Asking):
    """A limiter whose state is in Redis. What the methods mean is written at ``penstock.TokenBucket`` and its like.

    *Threads*: every method may be called from any thread. *Processes*: whoever makes a limiter of the same name and
    parameters over the same Redis and namespace shares its state. *Fork*: works in parent and child.

    Each method is one round trip. Any may raise ``StoreUnavailable`` and ``ForeignState``.
    """

    _store: RedisStore

    @property
    def store(self) -> RedisStore:
        return self._store

    def allow(self, key: Key, /) -> bool:
        if self._usual is None:
            return self._store._do(self._ask_allow(key))
        return (self._store._call(self._script, (self._key(key),), self._usual, self._size))[0] != 0

    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: str | float | timedelta = "5 minutes",
    ) -> Decision:
        if self._usual and cost is ONE and rate is None and burst is None and request_id is None:
            reply = self._store._call(self._script, (self._key(key),), self._usual, self._size)
            return self._usual_decision(self._name, reply)
        return self._store._do(self._ask_hit(key, cost, rate, burst, request_id, request_ttl))

    def peek(self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None) -> Decision:
        return self._store._do(self._ask_peek(key, cost, rate, burst))

    def reserve(self, key: Key, cost: int = 1, max_delay: float | None = None) -> RedisReservation:
        return RedisReservation(self._store, self._store._do(self._ask_reserve(key, cost, max_delay)))

    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None:
        self._store._run(self._refund(key, cost, rate, burst, request_id))

    def reset(self, key: Key) -> None:
        self._store._do(self._ask_reset(key))

    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        return self._store._do_many(self._ask_many(keys, costs))

    def wait(self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(self, key: Key, cost: int = 1, timeout: float | None = None, *, jitter: float = 0.0) -> NoReturn:
        raise would_block(self)

    def _make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RedisAllOf:
        """For ``AllOf``, when a limiter of this kind is its first argument."""
        return RedisAllOf(checked_limiters(kind, args, kwargs, RedisLimiter))


class RedisStaggeredWindow(AskingStaggered, RedisLimiter):
    """A fixed window that begins at a time of each key's own."""


def would_block(limiter: object) -> TypeError:
    return TypeError(
        f"wait_async of {limiter!r} would stop the event loop for each round trip to Redis: make the limiter over an "
        "AsyncRedisStore, and await its wait"
    )


class RedisLease:
    """Permits that are held, as ``penstock.Lease``: given back by ``release`` or at the end of a ``with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ("_key", "_limiter", "_permits", "_released", "_taken")

    def __init__(self, limiter: RedisConcurrency, key: Key, taken: Taken) -> None:
        self._limiter, self._key, self._taken = limiter, key, taken
        self._permits: list[Permit] = taken.permits
        self._released = False

    @property
    def allowed(self) -> bool:
        return self._taken.allowed

    def release(self) -> bool:
        """Give the permits back. Whether any was still held."""
        self._released = True
        permits, self._permits = self._permits, []
        if not permits or not self._taken.is_own:
            return False
        held = self._limiter._store._do(self._limiter._ask_release(self._taken.key, permits))
        waiting.released(self._limiter, self._key)
        return held > 0

    def renew(self) -> bool:
        """Let the lease begin anew. False if any of the permits was not held any more."""
        permits = self._permits
        if not permits or not self._taken.is_own:
            return False
        return self._limiter._store._do(self._limiter._ask_renew(self._taken.key, permits)) == len(permits)

    def __bool__(self) -> bool:
        return self._taken.allowed

    def __enter__(self) -> Self:
        if not self._taken.allowed:
            raise self._limiter.exceeded(self._key)
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<RedisLease of {self._limiter.name!r}: {'held' if self._permits else 'not held'}>"


class RedisConcurrency(AskingHeld, RedisLimiter):
    """Permits that are held for a while, as ``penstock.Concurrency``; but nobody notices that a process has ended: its
    permits come back at the end of their leases. So take a short lease, and renew it."""

    def acquire(self, key: Key, cost: int = 1) -> RedisLease:
        return RedisLease(self, key, self._store._do(self._ask_acquire(key, cost)))

    def hold(self, key: Key, cost: int = 1, timeout: float | None = None) -> holding.Hold:
        return holding.Hold(cast(Any, self), key, cost, timeout)

    def limited(self, key: Key | Callable[..., Key], cost: int = 1, timeout: float | None = None) -> Callable[[F], F]:
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
        self._store._run(self._refund(key, cost, rate, burst, request_id))
        waiting.released(self, key)

    def _take_loose(self, key: Key, cost: int) -> RedisLease:
        """For ``Hold``: a lease for the permits that a ``wait`` of this process has just taken."""
        return RedisLease(self, key, self._take_loose_permits(key, cost))


class RedisAllOf(AskingAll):
    """Several limits of one ``RedisStore`` at once, as ``penstock.AllOf``: one round trip, all or none."""

    _store: RedisStore

    @property
    def store(self) -> RedisStore:
        return self._store

    @property
    def limiters(self) -> tuple[Asking, ...]:
        return self._limiters

    def allow(self, key: Keys, /) -> bool:
        return self._store._do(self._ask_allow(key))

    def hit(self, key: Keys, cost: Costs = 1) -> Decision:
        return self._store._do(self._ask_hit(key, cost))

    def hit_each(self, key: Keys, cost: Costs = 1) -> list[Decision]:
        return self._store._do(self._ask_hit_each(key, cost))

    def peek(self, key: Keys, cost: Costs = 1) -> Decision:
        return self._store._do(self._ask_peek(key, cost))

    def reserve(self, key: Keys, cost: Costs = 1, max_delay: float | None = None) -> RedisReservation:
        return RedisReservation(self._store, self._store._do(self._ask_reserve(key, cost, max_delay)))

    def refund(self, key: Keys, cost: Costs = 1) -> None:
        self._store._run(self._refund(key, cost))

    def reset(self, key: Keys) -> None:
        self._store._do(self._ask_reset(key))

    def allow_many(self, keys: Iterable[Keys], costs: Iterable[Costs] | None = None) -> list[bool]:
        return self._store._do_many(self._ask_many(keys, costs))

    def wait(self, key: Keys, cost: Costs = 1, timeout: float | None = None, *, jitter: float = 0.0) -> bool:
        return waiting.wait(self, key, cost, timeout, jitter)

    def wait_async(self, key: Keys, cost: Costs = 1, timeout: float | None = None, *, jitter: float = 0.0) -> NoReturn:
        raise would_block(self)


class RedisStore(RedisStoreBase):
    """Redis as the place where limiters keep their state.

    ``TokenBucket(RedisStore("redis://localhost"), "api", "100/minute")``. `server` is a URL as ``redis.Redis.from_url``
    takes it (``rediss://`` for TLS, a user and a password for ACLs), or a client of your own with a ``socket_timeout``.
    With a URL every operation on the socket has the deadline `timeout`, in seconds, by default 0.5, and none is
    repeated: a decision that is asked for again might be charged again.

    `namespace` begins the name of everything that is written. Keys are stored as fingerprints; with `plain_keys` as
    they are.

    *Threads*: safe. *Fork*: safe. Close a store that was made from a URL; it is a context manager.
    """

    _clock: ClassVar[None] = None  # for waiters: they sleep, and don't move one

    def __init__(
        self,
        server: str | redis.Redis,
        *,
        namespace: str = "penstock",
        plain_keys: bool = False,
        timeout: float | None = None,
    ) -> None:
        super().__init__(namespace, plain_keys)
        self._owns_client = isinstance(server, str)
        if isinstance(server, str):
            options = deadlines(timeout)
            self._client = redis.Redis.from_url(server, retry=Retry(NoBackoff(), 0), **options)
        else:
            self._client = checked_client(server, redis.Redis, "RedisStore", timeout)
        self._execute: Any = self._client.execute_command

    def close(self) -> None:
        """End the connections, if the store has made them. Its limiters can't be used any more."""
        self.closed = True
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _now_ns() -> int:
        """For waiters: the time of reservations."""
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

    def _call(self, script: Script, keys: Sequence[bytes], arguments: Sequence[Any], size: int) -> list[int]:
        if self.closed:
            raise self._was_closed()
        try:
            try:
                reply = self._execute("EVALSHA", script.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                reply = self._execute("EVAL", script.text, len(keys), *keys, *arguments)
        except RedisError as error:
            raise self._unavailable(error) from error
        return checked(reply, size, keys)

    def _do(self, asked: Asked[T]) -> T:
        return asked.read(self._call(asked.script, asked.keys, asked.arguments, asked.size))

    def _run(self, talk: Talk[T]) -> T:
        try:
            asked = next(talk)
            while True:
                asked = talk.send(self._do(asked))
        except StopIteration as end:
            return cast(T, end.value)

    def _do_many(self, asked: list[Asked[T]]) -> list[T]:
        """In order, but not as one: others' requests may come between."""
        if self.closed:
            raise self._was_closed()
        answers: list[T] = []
        for start in range(0, len(asked), CHUNK):
            chunk = asked[start : start + CHUNK]
            try:
                replies = self._send(chunk)
                if unsent := unknown(chunk, replies):
                    self._client.script_load(chunk[0].script.text)
                    replies = replaced(replies, self._send(unsent))
            except RedisError as error:
                raise self._unavailable(error) from error
            answers += self._answers(chunk, replies)
        return answers

    def _send(self, asked: list[Asked[T]]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for one in asked:
                pipeline.evalsha(one.script.sha, len(one.keys), *one.keys, *one.arguments)
            return list(pipeline.execute(raise_on_error=False))

    _limiter = RedisLimiter
    _staggered = RedisStaggeredWindow
    _concurrency = RedisConcurrency
