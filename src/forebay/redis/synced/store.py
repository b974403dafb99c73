"""Limits that each host counts by itself and exchanges with the others at intervals."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Self

from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.limiter import bound_arguments
from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.errors import ForebayError, InvalidLimiter, StoreClosed, StoreUnavailable, shown, without_url
from forebay.rate import Duration, Rate, as_period_ns
from forebay.redis.algorithms import Gcra, rate_us
from forebay.redis.keys import fingerprint
from forebay.redis.store import RedisStore
from forebay.redis.synced.exchange import (
    ALL_TURNS,
    UNTOLD_ONLY,
    BucketExchange,
    Exchange,
    WindowExchange,
    name_of,
)
from forebay.store import Store

__all__ = ["SyncStatus", "SyncedStore"]

NS: Final = 1_000_000_000
MIN_INTERVAL_NS: Final = 10_000_000
ELECTION: Final = "forebay.sync"
"""The limiter in a host's store that elects who exchanges."""
LAST: Final = "forebay.synced"
"""And the one that tells when it was last done."""
LAST_INTERVAL: Final = timedelta(days=365)
TURNS: Final = "forebay.turns"
"""And the one that counts how often it was. Whose turn it is to be asked for can't be told by a clock: exchanges that
take as long as an interval would leave out the same keys again and again."""
MOST_TURNS: Final = 2**32
HOST_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """What ``SyncedStore.status()`` has found."""

    exchanged_ago: float | None
    """Seconds since this host, whichever of its processes, has last exchanged all it had; None: not within a year."""
    pending_keys: int
    """Keys of which Redis doesn't know all that this host has counted."""
    unnamed_keys: int
    """Keys that can't be exchanged until they have another cell: see docs/redis-synced.md."""
    error: str | None
    """Why this process's last exchange has failed; None if it hasn't."""


class SyncedStore:
    """A place for limits that each host decides in its own memory and exchanges with the others every `interval`.

    ``SlidingWindow(SyncedStore(RedisStore("redis://..."), Store("shop", keys=...), keys=...), "api", "1000/minute")``.
    ``FixedWindow`` by the clock, ``SlidingWindow`` and ``TokenBucket`` with continuous refill can be synced. `interval`
    is a duration of at least 10 ms and at most each window; `keys` how many keys of each limiter can be live at once,
    for 105 bytes of the host's store each. One more takes another one's place, which begins anew: `Store.stats` counts
    them.

    A decision never waits for Redis. What other hosts have admitted is known after an exchange, so all together may
    admit more than the limit by what the others admit within two intervals and round trips, or nine of a key of which
    the host had nothing to tell; docs/redis-synced.md has the bound. When Redis is away, each host goes on counting,
    and what it has counted is told when Redis is back.

    One process of each host exchanges for all: the first that finds the interval over. If it is killed, another one
    does. It does so in a thread, which begins with the first limiter and ends with ``close()``, which exchanges once
    more, as does the end of the interpreter. ``status()`` tells how it goes: an exchange that fails raises nothing
    where requests are decided.

    Raises ``TypeError`` and ``ValueError``. *Threads*: safe. *Processes*: each makes its own over the same stores.
    *Fork*: works in both; the child has a thread of its own. The two stores stay open when it is closed.
    """

    def __init__(
        self,
        redis_store: RedisStore,
        host_store: Store,
        interval: Duration = "1 second",
        *,
        keys: int,
    ) -> None:
        if not isinstance(redis_store, RedisStore):
            raise TypeError(
                f"the first argument of SyncedStore is a RedisStore, not {without_url(redis_store)}: a thread of its "
                "own asks it, so the limiters can be used in an event loop all the same"
            )
        if not isinstance(host_store, Store):
            raise TypeError(f"the second argument of SyncedStore is a forebay.Store, not {shown(host_store)}")
        if redis_store._encode_key is not fingerprint:
            raise ValueError(
                "synced limits know keys by their fingerprints only, so a RedisStore with plain_keys=True can't be "
                "used for them: make one without"
            )
        interval_ns = as_period_ns(interval)
        if interval_ns < MIN_INTERVAL_NS:
            raise ValueError(f"the interval of a SyncedStore is at least 10 ms, not {shown(interval)}")
        self.interval_ns = interval_ns
        self.keys = keys
        self.closed = False
        self._redis, self._host_store = redis_store, host_store
        secret = host_store._segment.secret(b"synced host")
        self._host = blake2b(secret, digest_size=HOST_BYTES, person=b"forebay synced").hexdigest().encode()
        # A little less than the interval, so that whoever waits for one finds it over.
        self._election = MinInterval(host_store, ELECTION, timedelta(microseconds=interval_ns // 1000 * 9 // 10))
        self._last = MinInterval(host_store, LAST, LAST_INTERVAL)
        self._turns = FixedWindow(host_store, TURNS, Rate(MOST_TURNS, LAST_INTERVAL), "first")
        self._exchanges: list[Exchange] = []
        self._error: str | None = None
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """What belongs to one process."""
        # Reentrant: a signal's handler may close the store while its thread makes a limiter. No exchange holds it:
        # nobody who makes a limiter, or closes the store, waits for Redis by it.
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def _make_limiter(self, kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """For the public classes of limiters, when a store of this kind is their first argument."""
        if kind not in (FixedWindow, SlidingWindow, TokenBucket):
            raise InvalidLimiter(
                f"{kind.__name__} can't be synced: take FixedWindow by the clock, SlidingWindow or TokenBucket with "
                "continuous refill, or make it over the RedisStore, where each decision is Redis's"
            )
        if self.closed:
            raise StoreClosed(f"{self!r} takes no limiters any more")
        arguments = bound_arguments(kind, args, kwargs)
        name, rate = arguments["name"], arguments["rate"]
        exchange: Exchange
        if kind is TokenBucket:
            if arguments.get("refill", "continuous") != "continuous":
                raise InvalidLimiter(
                    f"a token bucket that is synced is refilled continuously, not {shown(arguments['refill'])}: a "
                    "FixedWindow can be synced"
                )
            Gcra(name, rate, arguments.get("burst"))
            bucket = SyncedTokenBucket(self._host_store, name, rate, arguments.get("burst"), self, self.keys, name_of)
            exchange = BucketExchange(self._redis, bucket, self._host)
        else:
            if arguments.get("align", "clock") != "clock":
                raise InvalidLimiter(
                    "a fixed window that is synced begins by the clock, which all hosts have, not "
                    f"{shown(arguments['align'])}: leave align out"
                )
            checked, _ = rate_us(rate)
            if checked.period_ns < self.interval_ns:
                raise InvalidLimiter(
                    f"a window of {checked} is over before the next exchange, {self.interval_ns / NS:g} s later: take "
                    "a shorter interval or a longer window"
                )
            window = SyncedWindow(
                self._host_store,
                name,
                checked,
                self,
                kind is SlidingWindow,
                self.keys,
                name_of,
                arguments.get("rounding"),
            )
            exchange = WindowExchange(self._redis, window, self._host)
        with self._lock:
            if all(exchange.id != other.id for other in self._exchanges):
                self._exchanges.append(exchange)
            self._start()
        return exchange.limiter

    def _start(self) -> None:
        if self._thread is None and not self.closed:
            thread = threading.Thread(
                target=_run,
                args=(weakref.ref(self), self._stop, self.interval_ns / NS),
                name="forebay-sync",
                daemon=True,
            )
            thread.start()
            self._thread = thread

    def exchange(self) -> None:
        """Exchange now, all keys of all limiters that this process has. Nobody has to call it.

        Raises ``StoreUnavailable`` and ``ForeignState``; what is pending stays so until the next exchange.
        """
        if self.closed:
            raise StoreClosed(f"{self!r} was used after it was closed")
        self._check_host()
        failed = self._exchange(ALL_TURNS, elected=False)
        if failed is not None:
            raise failed

    def _check_host(self) -> None:
        if self._host_store.closed:
            raise StoreClosed(f"{self!r} was used after its host's store was closed")

    def status(self) -> SyncStatus:
        """When this host has last exchanged, and what is pending. Looks at all cells: some ms for 100,000 keys.

        Raises ``StoreClosed`` if the host's store was closed.
        """
        self._check_host()
        pending = unnamed = 0
        ages: list[float | None] = []
        for exchange in list(self._exchanges):
            found = exchange.pending()
            pending, unnamed = pending + found[0], unnamed + found[1]
            ages.append(self._exchanged_ago(exchange))
        known = [age for age in ages if age is not None]
        return SyncStatus(max(known) if known and len(known) == len(ages) else None, pending, unnamed, self._error)

    def _exchanged_ago(self, exchange: Exchange) -> float | None:
        """By this process, or by another of the host: that is forgotten if the host's store is full."""
        ago: list[float] = []
        if exchange.done_ns is not None:
            ago.append((time.monotonic_ns() - exchange.done_ns) / NS)
        if left_ns := self._last.peek(exchange.id).reset_after_ns:
            ago.append(max(LAST_INTERVAL // timedelta(microseconds=1) * 1000 - left_ns, 0) / NS)
        return min(ago, default=None)

    def _exchange(self, turn: int | None, *, elected: bool) -> ForebayError | None:
        """All limiters, or those for which this process is `elected`; without a turn, each at its next. What has gone
        wrong, if anything."""
        failed: ForebayError | None = None
        has_tried = False
        for exchange in list(self._exchanges):
            try:
                if elected and not self._is_elected(exchange):
                    continue
                has_tried = True
                error = exchange.run(self._next_turn(exchange) if turn is None else turn)
                if turn is None:
                    self._turns.hit(self._turn_of(exchange))
                if error is None:
                    exchange.done_ns = time.monotonic_ns()
                    self._last.reset(exchange.id)
                    self._last.allow(exchange.id)
            except StoreUnavailable as away:
                if elected:
                    # Another process may be able to ask.
                    self._election.reset(self._turn_of(exchange))
                # It wouldn't answer for the other limiters either, each after a deadline.
                failed = failed or away
                break
            except ForebayError as closed:
                failed = failed or closed
                break
            failed = failed or error
        if has_tried:
            self._error = None if failed is None else str(failed)
        return failed

    def _turn_of(self, exchange: Exchange) -> bytes:
        """What is elected for: by processes with the same interval, as a deployment may change it."""
        return exchange.id + b":%d" % self.interval_ns

    def _next_turn(self, exchange: Exchange) -> int:
        """By the clock if none is counted: the host's store may have no room for that."""
        counted = MOST_TURNS - self._turns.peek(self._turn_of(exchange)).remaining
        return counted or time.monotonic_ns() // self.interval_ns

    def _is_elected(self, exchange: Exchange) -> bool:
        # Denied though nobody has it: the host's store has no room. All exchange then, which is only more work.
        turn = self._turn_of(exchange)
        return self._election.allow(turn) or self._election.peek(turn).allowed

    def close(self) -> None:
        """Exchange once more, as far as Redis answers, and end the thread. This process takes no part any more."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._exchange(UNTOLD_ONLY, elected=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SyncedStore {self._host_store!r} with {self._redis!r} every {self.interval_ns / NS:g} s>"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} can't be pickled: make it again from the same stores")


_stores: weakref.WeakSet[SyncedStore] = weakref.WeakSet()


def _run(ref: weakref.ref[SyncedStore], stop: threading.Event, interval_s: float) -> None:
    """What the thread does. It doesn't keep its store alive."""
    while not stop.wait(interval_s):
        store = ref()
        if store is None or store._redis.closed or store._host_store.closed:
            return
        try:
            store._exchange(None, elected=True)
        except Exception as error:
            # Whatever it is: what is pending can still be told the next time.
            store._error = f"{type(error).__name__}: {error}"
        del store


def _begin_in_child() -> None:
    """A fork takes no threads along, and locks as they were."""
    for store in list(_stores):
        had_thread = store._thread is not None
        store._begin()
        if had_thread:
            store._start()


def _finish() -> None:
    for store in list(_stores):
        with contextlib.suppress(Exception):
            store.close()


os.register_at_fork(after_in_child=_begin_in_child)
atexit.register(_finish)
