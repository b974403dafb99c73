"""Runs the exchanges of a synced store's limiters in a thread: elects one process of the host."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Final

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow
from forebay.errors import ForebayError, StoreUnavailable
from forebay.rate import NS, Rate
from forebay.redis.store import RedisStore
from forebay.redis.synced.background import Background
from forebay.redis.synced.exchange import UNREPORTED_ONLY, Exchange
from forebay.store import Store

__all__ = ["Exchanger", "SyncStatus"]

ELECTION: Final = "forebay.sync"
"""The limiter in a host's store that elects the process that exchanges."""
LAST: Final = "forebay.synced"
"""The limiter that records when the last exchange was."""
WHOLE: Final = 2
"""The permits of either, which are taken together."""
LAST_INTERVAL: Final = timedelta(days=365)
ROUNDS: Final = "forebay.turns"
"""The limiter that counts the rounds. Each round queries some of the idle keys, by its number. A number derived from a
clock would skip the same keys again and again if an exchange takes as long as an interval."""
MOST_ROUNDS: Final = 2**32


@dataclass(frozen=True, slots=True)
class SyncStatus:
    """The state of a ``SyncedStore``'s exchanges."""

    exchanged_ago: float | None
    """Seconds since a process of this host last exchanged everything; None if none did within a year."""
    pending_keys: int
    """Keys with counts of this host that Redis doesn't know."""
    unnamed_keys: int
    """Keys without a name, which can't be exchanged until they have another cell: see docs/redis-synced.md."""
    error: str | None
    """The error of this process's last exchange; None if it succeeded."""
    news_heard: int
    """How often this process has read hot lists because another host had published a change: with ``push=True``."""
    news_ignored: int
    """The messages that this process could not read."""


class Exchanger(Background):
    """Exchanges the limiters of one ``SyncedStore``, in all processes of a host once per interval.

    State: three limiters in the host's store. *election* admits one process per interval, *rounds* counts the rounds,
    *last* records when the last complete exchange was. Every step on them is one CAS.

    Crash and stall: a process that is killed after its election has used up one interval; the next election is free. A
    process that is stopped during an exchange and goes on later changes nothing: see ``core/synced/limiter.pyx``.

    *Threads*, *fork*: safe.
    """

    thread_name: ClassVar[str] = "forebay-sync"

    def __init__(self, redis_store: RedisStore, host_store: Store, interval_ns: int) -> None:
        self._redis_store, self._host_store, self._interval_ns = redis_store, host_store, interval_ns
        # A little shorter than the interval, so that a thread that has waited for an interval finds it over.
        # No limits of one permit, which find no room in a full store; and no window that tells how little of it is
        # used, which a full store evicts first.
        self._election = TokenBucket(host_store, ELECTION, Rate.per_ns(WHOLE, interval_ns // 1000 * 9 // 10 * 1000))
        self._last = TokenBucket(host_store, LAST, Rate(WHOLE, LAST_INTERVAL))
        self._rounds = FixedWindow(host_store, ROUNDS, Rate(MOST_ROUNDS, LAST_INTERVAL))
        self.exchanges: list[Exchange] = []
        self.publish: Callable[[Exchange], ForebayError | None] = _publish_nothing
        self.error: str | None = None
        """The error of this process's last exchange."""
        self.first_pause_s = interval_ns / NS
        super().__init__()

    def add(self, exchange: Exchange) -> None:
        """Exchange a limiter from now on, once for all limiters with the same cells."""
        with self._lock:
            if all(exchange.id != other.id for other in self.exchanges):
                self.exchanges.append(exchange)
            self.start()

    @property
    def is_usable(self) -> bool:
        """Whether both stores are open."""
        return not self._redis_store.closed and not self._host_store.closed

    def step(self) -> float | None:
        """Exchange if elected. No error ends the thread: the next exchange still reports what is pending."""
        if not self.is_usable:
            return None
        try:
            self.exchange(None, elected=True)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        return self.first_pause_s

    def exchange(self, round_number: int | None, *, elected: bool) -> ForebayError | None:
        """Exchange all limiters, or those for which this process is `elected`. Return the first error, if any.

        `round_number` applies to all of them; with None, each limiter takes its next round.
        """
        failed: ForebayError | None = None
        has_tried = False
        for exchange in list(self.exchanges):
            try:
                if elected and not self._is_elected(exchange):
                    continue
                has_tried = True
                error = exchange.run(self._next_round(exchange) if round_number is None else round_number)
                if round_number is None:
                    self._rounds.hit(self._election_key(exchange))
                if error is None:
                    exchange.done_ns = time.monotonic_ns()
                    self._last.reset(exchange.id)
                    self._last.hit(exchange.id, WHOLE)
                error = error or self.publish(exchange)
            except StoreUnavailable as unavailable:
                if elected:
                    # Another process may be able to exchange.
                    self._election.reset(self._election_key(exchange))
                # The other limiters would fail, too, each after a deadline.
                failed = failed or unavailable
                break
            except ForebayError as closed:
                failed = failed or closed
                break
            failed = failed or error
        if has_tried:
            self.error = None if failed is None else str(failed)
        return failed

    def _election_key(self, exchange: Exchange) -> bytes:
        """The key of the election. It has the interval, as a new deployment may change that."""
        return exchange.id + b":%d" % self._interval_ns

    def _is_elected(self, exchange: Exchange) -> bool:
        # Denied though the permit is free: the host's store has no room. Then every process exchanges: only more work.
        key = self._election_key(exchange)
        return bool(self._election.hit(key, WHOLE) or self._election.peek(key, WHOLE))

    def _next_round(self, exchange: Exchange) -> int:
        """The number of the next round; from the clock if the host's store has no room for the counter."""
        counted = MOST_ROUNDS - self._rounds.peek(self._election_key(exchange)).remaining
        return counted or time.monotonic_ns() // self._interval_ns

    def status(self, news_heard: int, news_ignored: int) -> SyncStatus:
        pending = unnamed = 0
        ages: list[float | None] = []
        for exchange in list(self.exchanges):
            found = exchange.pending()
            pending, unnamed = pending + found[0], unnamed + found[1]
            ages.append(self._exchanged_ago(exchange))
        known = [age for age in ages if age is not None]
        ago = max(known) if known and len(known) == len(ages) else None
        return SyncStatus(ago, pending, unnamed, self.error, news_heard, news_ignored)

    def _exchanged_ago(self, exchange: Exchange) -> float | None:
        """Seconds since the last exchange by any process of the host. A full host store may forget the others'."""
        ago: list[float] = []
        if exchange.done_ns is not None:
            ago.append((time.monotonic_ns() - exchange.done_ns) / NS)
        if left_ns := self._last.peek(exchange.id).reset_after_ns:
            ago.append(max(LAST_INTERVAL // timedelta(microseconds=1) * 1000 - left_ns, 0) / NS)
        return min(ago, default=None)

    def finish(self) -> None:
        """Exchange once more."""
        self.exchange(UNREPORTED_ONLY, elected=False)


def _publish_nothing(exchange: Exchange) -> None:
    return None
