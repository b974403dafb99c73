"""One limiter's exchange with Redis: this host's reports of its keys, and what it merges from the replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, StoreClosed, StoreUnavailable
from forebay.redis.commands import Command, encode_args
from forebay.redis.executor_base import CHUNK, UNAVAILABLE_ERRORS, raise_if_server_failed, replaced, unknown
from forebay.redis.keys import digest, fingerprint
from forebay.redis.scripts import script
from forebay.redis.store import RedisStore

__all__ = ["ALL_KEYS", "UNREPORTED_ONLY", "BucketExchange", "Exchange", "WindowExchange", "name_of"]

# In place of a round's number: all keys that count; only keys with unreported counts; those, without reporting them.
ALL_KEYS: Final = -1
UNREPORTED_ONLY: Final = -2
LOOK_ONLY: Final = -3
# Cells read at once, while other threads wait: some tenths of a millisecond.
CELLS_AT_ONCE: Final = 512
# The index of the key's incarnation in a report's place.
INCARNATION: Final = 2


def name_of(key: Key) -> bytes:
    """The 16 bytes that name a key in Redis. The host's store keeps them behind the key's cell."""
    return bytes.fromhex(fingerprint(key).decode())


class Exchange(ABC):
    """The exchange of one limiter.

    Reports may be repeated, delayed, or sent by several processes at once: see ``forebay.core.synced.limiter``.
    """

    main: ClassVar[str]
    """The main part of its script."""
    limiter: SyncedTokenBucket | SyncedWindow

    def __init__(self, store: RedisStore, name: str, suffix: bytes, host: bytes) -> None:
        self.store, self.host = store, host
        self.script = script(self.main, "sync")
        self.head, self.tail = store.keyspace.affixes(name, suffix)
        self.id = self.head + self.tail + host
        """The same in all processes of the host."""
        self.done_ns: int | None = None
        """When this process last exchanged everything, by ``time.monotonic_ns``. None: never."""

    @abstractmethod
    def message(self, report: tuple[Any, ...]) -> Command[None]:
        """The command that sends one key's report. Decoding its reply merges the reply into the key's cell."""

    def run(self, round_number: int) -> ForebayError | None:
        """Exchange this round's keys. Return the first key's error, if any; the other keys have been exchanged.

        Raises ``StoreUnavailable`` if Redis can't be reached.
        """
        failed: ForebayError | None = None
        messages = self.messages(round_number)
        while batch := list(islice(messages, CHUNK)):
            for message, reply in zip(batch, self.send(batch), strict=True):
                try:
                    if isinstance(reply, Exception):
                        raise self.store.executor.unavailable(reply) from reply
                    message.result(reply)
                except ForebayError as error:
                    failed = failed or error
        return failed

    def messages(self, round_number: int) -> Iterator[Command[None]]:
        for first in range(0, self.limiter.cell_count, CELLS_AT_ONCE):
            reports, _ = self.limiter.reports(first, first + CELLS_AT_ONCE, round_number)
            yield from map(self.message, reports)

    def send(self, messages: list[Command[None]]) -> Sequence[Any]:
        store = self.store
        if store.closed:
            raise StoreClosed(f"{store!r} was closed, so nothing can be exchanged")
        try:
            with store.executor.breaker.passage():
                replies = store.executor.send(messages)
                if unsent := unknown(messages, replies):
                    store.executor.client.script_load(self.script.text)
                    replies = replaced(replies, store.executor.send(unsent))
                if all(isinstance(reply, Exception) for reply in replies):
                    raise_if_server_failed(replies)
        except UNAVAILABLE_ERRORS as error:
            raise store.executor.unavailable(error) from error
        return replies

    def pending(self) -> tuple[int, int]:
        """The number of keys with unreported counts, and of keys without a name."""
        pending = unnamed = 0
        for first in range(0, self.limiter.cell_count, CELLS_AT_ONCE):
            reports, without_name = self.limiter.reports(first, first + CELLS_AT_ONCE, LOOK_ONLY)
            pending, unnamed = pending + len(reports), unnamed + without_name
        return pending, unnamed

    def redis_key(self, name: bytes, suffix: bytes = b"") -> bytes:
        return self.head + name.hex().encode() + self.tail + suffix


# The kinds of a window's reply: see sync_window.lua.
OVER: Final = 1
LOST: Final = 2
FULL: Final = 3
FAR: Final = 4
# The error for each reply that shows a wrong clock.
CLOCKS: Final = {
    OVER: "ended long ago: this host's clock is late, or that of Redis is fast",
    FAR: "is still far in the future: this host's clock is fast, or that of Redis is late",
}


class WindowExchange(Exchange):
    main = "sync_window"
    limiter: SyncedWindow

    def __init__(self, store: RedisStore, limiter: SyncedWindow, host: bytes) -> None:
        self.limiter = limiter
        self.windows = 2 if limiter.slides else 1
        self.period_ns = limiter.rate.period_ns
        # Limits with different cells count separately: each is a host of its own.
        host = b"%s-%d" % (host, limiter.low_bits)
        super().__init__(store, limiter.name, f"synced-{digest(self.windows, self.period_ns)}".encode(), host)

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, end_ns, *rest = report
        number = end_ns // self.period_ns
        counts = rest[::3][: self.windows]
        period_us = self.period_ns // 1000
        keys, arguments = [], [self.host, b"%x" % place[INCARNATION], read_us, period_us]
        for ago, count in enumerate(counts):
            keys.append(self.redis_key(name, b"-%d" % (number - ago)))
            reported, others = rest[3 * ago + 1 : 3 * ago + 3]
            arguments += [count, reported, others, (number - ago) * period_us]

        def merge(reply: list[int]) -> None:
            answers = [
                None if how in CLOCKS else (known, max(sum_of_all - known, 0), how == LOST)
                for sum_of_all, known, how in zip(reply[2::3], reply[3::3], reply[4::3], strict=True)
            ]
            self.limiter.merge(place, end_ns, *answers)
            if reply[4] in CLOCKS:
                raise StoreUnavailable(
                    f"by the clock of Redis, a window of {self.limiter!r} on this host {CLOCKS[reply[4]]}"
                )
            if FULL in reply[4::3]:
                raise StoreUnavailable(
                    f"1000 hosts have reported a key of {self.limiter!r} to Redis in one window, so it has no room for "
                    "this host's count: take fewer hosts, or a RedisStore, where Redis makes each decision"
                )

        return Command(self.script, keys, encode_args(arguments), 2 + 3 * self.windows, merge)


class BucketExchange(Exchange):
    main = "sync_bucket"
    limiter: SyncedTokenBucket

    def __init__(self, store: RedisStore, limiter: SyncedTokenBucket, host: bytes) -> None:
        self.limiter = limiter
        super().__init__(store, limiter.name, b"synced-tat", host)

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, charged, reported_us, read_ns, reported_until_ns = report
        silence_us = -((reported_until_ns - read_ns) // 1000)
        arguments = [self.host, b"%x" % place[INCARNATION], read_us, charged // 1000, reported_us, silence_us]

        def merge(reply: list[int]) -> None:
            _, _, ahead_us, known_us = reply
            # Less one, because the reported total was rounded down: its latest change may have been rounded up.
            self.limiter.merge(place, charged, known_us, read_ns, 1000 * max(ahead_us - 1, 0))

        return Command(self.script, [self.redis_key(name)], encode_args(arguments), 4, merge)
