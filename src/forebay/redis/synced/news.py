"""News of hot lists, between exchanges: a host publishes which lists its exchange has changed, and others read these.

A message has no counts. It is a reason to read the hot lists that it names, as the next exchange would, and to query
the keys of which this host knows less. So a message that is lost, late, repeated or forged changes what a host knows
only to what Redis has, and the next exchange does all that a lost message would have done.

State: the limiter `TURNS` in the host's store has one permit for each exchange. The process that holds it listens for
the host. It renews the lease at every turn.

Crash and stall: the permit of a process that ends is free at once, and that of a process that is stopped at the end of
its lease. If two processes listen, both read. That is only more work.

A lost connection is no failure of the store: the thread connects again after a pause, which doubles up to some seconds.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, ClassVar, Final

import redis

from forebay.core.algorithms.concurrency import Concurrency
from forebay.rate import NS
from forebay.redis.store import RedisStore
from forebay.redis.synced.background import Background
from forebay.redis.synced.exchange import Exchange
from forebay.redis.synced.exchanger import Exchanger
from forebay.redis.transport.clients import connection_that_listens
from forebay.segment.layout import LIMITER_CAPACITY
from forebay.store import Store

__all__ = ["Listener", "check_can_listen"]

TURNS: Final = "forebay.news"
LEASE: Final = timedelta(minutes=1)
TURN_S: Final = 1.0
"""The time between two looks whether this process has to listen."""
TICK_S: Final = 0.1
"""The longest wait for a message, and so for the end of the thread."""
FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 5.0
SILENCE_S: Final = 10.0
"""After this time without a message the server is pinged. After twice this time, the connection is lost."""
READS_PER_INTERVAL: Final = 16
LONGEST_GAP_S: Final = 0.1
"""The longest time between two reads of one limiter's lists, if they change all the time."""
LONGEST_MESSAGE: Final = 64


def check_can_listen(store: RedisStore) -> None:
    """Raise ``ValueError`` for servers whose news can't be heard."""
    if store.executor.has_slots:
        raise ValueError(
            "push=True is for a single Redis server: the nodes of a cluster would pass each message on to all others. "
            "Take a shorter interval"
        )
    if hasattr(store.executor.client.connection_pool, "service_name"):
        raise ValueError(
            "push=True is for a single Redis server, and not for the master of a Sentinel, which may become another "
            "server unnoticed. Take a shorter interval"
        )


class Listener(Background):
    """Publishes the news of one ``SyncedStore``, and listens to that of other hosts.

    *Threads*: safe. *Fork*: the child starts a thread of its own, with a connection of its own. It leaves the parent's
    connection and permits to the parent.
    """

    thread_name: ClassVar[str] = "forebay-news"

    def __init__(self, redis_store: RedisStore, host_store: Store, exchanger: Exchanger, interval_ns: int) -> None:
        self._redis_store, self._host_store, self._exchanger = redis_store, host_store, exchanger
        self._gap_s = min(interval_ns / NS / READS_PER_INTERVAL, LONGEST_GAP_S)
        self._permits = Concurrency(host_store, TURNS, 1, LEASE, keys=LIMITER_CAPACITY)
        self.heard = self.ignored = 0
        super().__init__()

    def _begin(self) -> None:
        super()._begin()
        self._connection: Any = None
        self._pause_s = 0.0
        self._turn_at_s = 0.0
        self._turns: dict[bytes, Any] = {}
        self._channels: dict[bytes, Exchange] = {}
        self._silent_since_s = 0.0
        self._was_pinged = False
        self._changed: dict[bytes, set[int]] = {}
        self._read_at_s: dict[bytes, float] = {}

    @property
    def is_usable(self) -> bool:
        return not self.closed and self._exchanger.is_usable

    def channel_of(self, exchange: Exchange) -> bytes:
        """Messages know no databases, so the channel's name has the database's number."""
        database = self._redis_store.executor.client.connection_pool.connection_kwargs.get("db") or 0
        return b"%bnews-%b:%d" % (exchange.prefixes[0], exchange.suffix, database)

    def step(self) -> float | None:
        """Wait for a message, and read what it is about. No error ends the thread."""
        if not self.is_usable:
            self.disconnect()
            return None
        try:
            self._take_turns()
            if not self._channels:
                return TURN_S
            self._receive()
            self._read_lists()
        except Exception:
            self.disconnect()
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LAST_PAUSE_S)
            return self._pause_s
        self._pause_s = 0.0
        return 0.0

    def _take_turns(self) -> None:
        """Listen for the exchanges for which no other process of the host listens."""
        now_s = time.monotonic()
        if now_s < self._turn_at_s and len(self._channels) == len(self._exchanger.exchanges):
            return
        self._turn_at_s = now_s + TURN_S
        mine: dict[bytes, Exchange] = {}
        for exchange in list(self._exchanger.exchanges):
            lease = self._turns.get(exchange.id)
            if lease is None or not lease.renew():
                lease = self._turns[exchange.id] = self._permits.acquire(exchange.id)
            if lease.allowed:
                mine[self.channel_of(exchange)] = exchange
        if mine.keys() != self._channels.keys():
            self.disconnect()
            self._channels = mine

    def _receive(self) -> None:
        """Take a message, if one comes soon."""
        now_s = time.monotonic()
        if self._connection is None:
            connection = connection_that_listens(self._redis_store.executor.client.connection_pool)
            self._connection = connection
            connection.connect()
            connection.send_command("SUBSCRIBE", *self._channels)
            self._silent_since_s, self._was_pinged = now_s, False
        if self._connection.can_read(timeout=self._left_s(now_s)):
            self._take(self._connection.read_response())
            self._silent_since_s, self._was_pinged = now_s, False
        elif now_s - self._silent_since_s > 2 * SILENCE_S:
            raise redis.ConnectionError("the server sends nothing")
        elif now_s - self._silent_since_s > SILENCE_S and not self._was_pinged:
            self._was_pinged = True
            self._connection.send_command("PING")

    def _left_s(self, now_s: float) -> float:
        """The time until a list has to be read, at most a tick."""
        due_s = min((self._read_at_s.get(one, now_s) for one in self._changed), default=now_s + TICK_S)
        return min(max(due_s - now_s, 0.0), TICK_S)

    def _take(self, reply: Any) -> None:
        """Note what has changed. The server's other replies confirm a subscription or a ping."""
        if not isinstance(reply, list) or len(reply) != 3 or reply[0] != b"message":
            return
        exchange = self._channels.get(reply[1])
        shards = None
        if exchange is not None and len(reply[2]) <= LONGEST_MESSAGE:
            shards = exchange.news_in(reply[2])
        if exchange is None or shards is None:
            self.ignored += 1
        elif shards:
            self._changed.setdefault(exchange.id, set()).update(shards)

    def _read_lists(self) -> None:
        """Read the lists that have changed: at once, but those of one limiter only so often in an interval."""
        now_s = time.monotonic()
        for exchange in self._channels.values():
            if exchange.id in self._changed and now_s >= self._read_at_s.get(exchange.id, 0.0):
                self._read_at_s[exchange.id] = now_s + self._gap_s
                # The next exchange does what fails here.
                exchange.catch_up(sorted(self._changed.pop(exchange.id)))
                self.heard += 1

    def disconnect(self) -> None:
        """Called by the thread, or after its end."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()

    def finish(self) -> None:
        """Let another process of the host listen."""
        self.disconnect()
        for lease in self._turns.values():
            lease.release()
