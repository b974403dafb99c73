"""Synced limits: each host counts in its own memory and exchanges its counts with the other hosts at intervals.

The counts are a state-based CRDT, as a G-counter is: each host has a component of its own. core/synced/limiter.pyx has
the protocol.
"""

from __future__ import annotations

from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Self, overload

from forebay._native import need_compiled_core
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.limiter_arguments import bound_arguments, check_align
from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.errors import InvalidLimiter, StoreClosed, redacted_repr, short_repr
from forebay.rate import NS, Duration, as_period_ns
from forebay.redis.algorithms import Gcra, rate_us
from forebay.redis.store import RedisStore
from forebay.redis.synced.exchange import ALL_KEYS, BucketExchange, Exchange, WindowExchange, name_of
from forebay.redis.synced.exchanger import Exchanger, SyncStatus
from forebay.redis.synced.news import Listener, check_can_listen
from forebay.store import Store

__all__ = ["SyncStatus", "SyncedStore"]

MIN_INTERVAL_NS: Final = 10_000_000
HOST_BYTES: Final = 8


class SyncedStore:
    """A store for limits that each host decides in its own memory and exchanges with the others every `interval`.

    ``SlidingWindow(SyncedStore(RedisStore("redis://..."), Store("shop", keys=...), keys=...), "api", "1000/minute")``.
    ``FixedWindow`` by the clock, ``SlidingWindow`` and ``TokenBucket`` with continuous refill can be synced. `interval`
    is a duration of at least 10 ms and at most the window of each limit. `keys` is how many keys of each limiter can be
    live at once; each takes 105 bytes of the host's store. A further key evicts another, which begins anew:
    ``Store.stats`` counts evictions.

    No decision waits for Redis. A host learns what other hosts have admitted at its exchanges, also of keys that it has
    not counted, once a quarter of their limit is used. So all hosts together may exceed the limit by what the others
    admit within two intervals and round trips, and for a key that the host has not counted by less than a quarter of
    the limit. docs/redis-synced.md has the bound. While Redis is unavailable, each host goes on
    counting, and reports its counts when Redis is back.

    With `push`, a host publishes which hot lists its exchange has changed, and the others read these lists at once, at
    most sixteen times within an interval. So they learn of hot keys milliseconds after the exchange, and not within
    their own interval. It needs a single Redis server, not a cluster or a Sentinel's master. Messages may get lost.

    One process of each host exchanges for all: the first that finds the interval over. If that process is killed,
    another takes over. A thread exchanges: it starts with the first limiter and ends with ``close()``. ``close()`` and
    the end of the interpreter exchange once more. ``status()`` shows failures: a failed exchange raises nothing where
    requests are decided.

    Raises ``TypeError`` and ``ValueError``. *Threads*: safe. *Processes*: each makes its own over the same stores.
    *Fork*: works in both; the child starts a thread of its own. ``close()`` closes the two stores, too, if
    `owns_stores` is true.
    """

    def __init__(
        self,
        redis_store: RedisStore,
        host_store: Store,
        interval: Duration = "1 second",
        *,
        keys: int,
        push: bool = False,
        owns_stores: bool = False,
    ) -> None:
        need_compiled_core("A synced limit", "for development make the limiters over the RedisStore itself")
        if not isinstance(redis_store, RedisStore):
            raise TypeError(
                f"the first argument of SyncedStore is a RedisStore, not {redacted_repr(redis_store)}: a thread of its "
                "own uses it, so the limiters can be used in an event loop all the same"
            )
        if not isinstance(host_store, Store):
            raise TypeError(f"the second argument of SyncedStore is a forebay.Store, not {short_repr(host_store)}")
        if redis_store.keyspace.is_plain:
            raise ValueError(
                "synced limits know keys by their fingerprints only, so a RedisStore with plain_keys=True can't be "
                "used for them: make one without"
            )
        if push:
            check_can_listen(redis_store)
        interval_ns = as_period_ns(interval)
        if interval_ns < MIN_INTERVAL_NS:
            raise ValueError(f"the interval of a SyncedStore is at least 10 ms, not {short_repr(interval)}")
        self.interval_ns = interval_ns
        self.keys = keys
        self._owns_stores = owns_stores
        self.redis_store, self.host_store = redis_store, host_store
        self.names = redis_store.names
        secret = host_store.segment.secret(b"synced host")
        self._host = blake2b(secret, digest_size=HOST_BYTES, person=b"forebay synced").hexdigest().encode()
        self._exchanger = Exchanger(redis_store, host_store, interval_ns)
        self._listener: Listener | None = None
        if push:
            listener = self._listener = Listener(redis_store, host_store, self._exchanger, interval_ns)
            self._exchanger.publish = lambda exchange: exchange.publish(listener.channel_of(exchange))

    @property
    def closed(self) -> bool:
        return self._exchanger.closed

    @overload
    def make_limiter(
        self, kind: type[TokenBucket], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SyncedTokenBucket[SyncedStore]: ...
    @overload
    def make_limiter(
        self, kind: type[FixedWindow | SlidingWindow], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> SyncedWindow[SyncedStore]: ...
    def make_limiter(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        if kind not in (FixedWindow, SlidingWindow, TokenBucket):
            raise InvalidLimiter(
                f"{kind.__name__} can't be synced: take FixedWindow by the clock, SlidingWindow or TokenBucket with "
                "continuous refill, or make it over the RedisStore, where Redis makes each decision"
            )
        if self.closed:
            raise StoreClosed(f"{self!r} takes no limiters any more")
        arguments = bound_arguments(kind, args, kwargs)
        name, rate = arguments["name"], arguments["rate"]
        exchange: Exchange
        if kind is TokenBucket:
            if arguments.get("refill", "continuous") != "continuous":
                raise InvalidLimiter(
                    f"a token bucket that is synced is refilled continuously, not {short_repr(arguments['refill'])}: a "
                    "FixedWindow can be synced"
                )
            if arguments.get("initial") is not None:
                raise InvalidLimiter(
                    "a key of a token bucket that is synced starts with its burst: "
                    "leave initial= out, or take a lower burst"
                )
            Gcra(name, rate, arguments.get("burst"))
            bucket = SyncedTokenBucket(self.host_store, name, rate, arguments.get("burst"), self, self.keys, name_of)
            exchange = BucketExchange(self.redis_store, bucket, self._host)
        else:
            check_align(arguments.get("align", "clock"), arguments.get("timezone"))
            if arguments.get("align", "clock") != "clock":
                raise InvalidLimiter(
                    "a fixed window that is synced begins by the clock, which all hosts have, not "
                    f"{short_repr(arguments['align'])}: leave align out"
                )
            checked, _ = rate_us(rate)
            if checked.period_ns < self.interval_ns:
                raise InvalidLimiter(
                    f"a window of {checked} is over before the next exchange, {self.interval_ns / NS:g} s later: take "
                    "a shorter interval or a longer window"
                )
            window = SyncedWindow(
                self.host_store,
                name,
                checked,
                self,
                kind is SlidingWindow,
                self.keys,
                name_of,
                arguments.get("rounding"),
            )
            exchange = WindowExchange(self.redis_store, window, self._host)
        self._exchanger.add(exchange)
        if self._listener is not None:
            self._listener.start()
        return exchange.limiter

    def exchange(self) -> None:
        """Exchange all keys of this process's limiters now. Calling it is never necessary.

        Raises ``StoreUnavailable`` and ``ForeignState``; counts that are pending stay so until the next exchange.
        """
        if self.closed:
            raise StoreClosed(f"{self!r} was used after it was closed")
        self._check_host()
        failed = self._exchanger.exchange(ALL_KEYS, elected=False)
        if failed is not None:
            raise failed

    def _check_host(self) -> None:
        if self.host_store.closed:
            raise StoreClosed(f"{self!r} was used after its host's store was closed")

    def status(self) -> SyncStatus:
        """When this host last exchanged, and what is pending. O(cells): some ms for 100,000 keys.

        Raises ``StoreClosed`` if the host's store was closed.
        """
        self._check_host()
        listener = self._listener
        return self._exchanger.status(*(0, 0) if listener is None else (listener.heard, listener.ignored))

    def close(self) -> None:
        """Exchange once more, if Redis answers, and end the threads. This process exchanges no more."""
        if self._listener is not None:
            self._listener.close()
        self._exchanger.close()
        if self._owns_stores:
            self.redis_store.close()
            self.host_store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SyncedStore {self.host_store!r} with {self.redis_store!r} every {self.interval_ns / NS:g} s>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores")
