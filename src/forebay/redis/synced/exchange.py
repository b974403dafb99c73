"""One limiter's exchange with Redis: what this host tells of its keys, and what it learns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Final

from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, StoreClosed, StoreUnavailable
from forebay.redis.base import CHUNK, UNAVAILABLE_ERRORS, raise_if_server_failed, replaced, unknown
from forebay.redis.commands import Command, encode_args
from forebay.redis.keys import digest, fingerprint
from forebay.redis.scripts import script
from forebay.redis.store import RedisStore

__all__ = ["ALL_TURNS", "UNTOLD_ONLY", "BucketExchange", "Exchange", "WindowExchange", "name_of"]

# In place of a turn: all keys that count, or only those of which Redis doesn't know all.
ALL_TURNS: Final = -1
UNTOLD_ONLY: Final = -2
LOOK_ONLY: Final = -3
# Other threads wait while so many are looked at: some tenths of a millisecond.
CELLS_AT_ONCE: Final = 512
# In the place of a report.
BIRTH: Final = 2


def name_of(key: Key) -> bytes:
    """The 16 bytes by which the host's store knows what Redis calls a key."""
    return bytes.fromhex(fingerprint(key).decode())


class Exchange(ABC):
    """Whatever is exchanged may be so again, later, or by several at once: see ``forebay.core.synced.limiter``."""

    main: ClassVar[str]
    """Of its script."""
    limiter: SyncedTokenBucket | SyncedWindow

    def __init__(self, store: RedisStore, name: str, suffix: bytes, host: bytes) -> None:
        self.store, self.host = store, host
        self.script = script(self.main, "sync")
        self.head, self.tail = store._key_affixes(name, suffix)
        self.id = self.head + self.tail + host
        """Of all processes of the host the same."""
        self.done_ns: int | None = None
        """When this process has last exchanged all, in the time of ``time.monotonic_ns``."""

    @abstractmethod
    def message(self, report: tuple[Any, ...]) -> Command[None]:
        """What is told of one key; read, its answer is learned."""

    def run(self, turn: int) -> ForebayError | None:
        """Tell what is to be told at this turn. The first key's error, if any: all others have been exchanged.

        Raises ``StoreUnavailable`` if Redis can't be asked.
        """
        failed: ForebayError | None = None
        messages = self.messages(turn)
        while batch := list(islice(messages, CHUNK)):
            for message, reply in zip(batch, self.send(batch), strict=True):
                try:
                    if isinstance(reply, Exception):
                        raise self.store._unavailable(reply) from reply
                    message.answer(reply)
                except ForebayError as error:
                    failed = failed or error
        return failed

    def messages(self, turn: int) -> Iterator[Command[None]]:
        for first in range(0, self.limiter.cell_count, CELLS_AT_ONCE):
            reports, _ = self.limiter.reports(first, first + CELLS_AT_ONCE, turn)
            yield from map(self.message, reports)

    def send(self, messages: list[Command[None]]) -> Sequence[Any]:
        store = self.store
        if store.closed:
            raise StoreClosed(f"{store!r} was closed, so nothing can be exchanged")
        try:
            with store._breaker.passage():
                replies = store._send(messages)
                if unsent := unknown(messages, replies):
                    store._client.script_load(self.script.text)
                    replies = replaced(replies, store._send(unsent))
                if all(isinstance(reply, Exception) for reply in replies):
                    raise_if_server_failed(replies)
        except UNAVAILABLE_ERRORS as error:
            raise store._unavailable(error) from error
        return replies

    def pending(self) -> tuple[int, int]:
        """How many keys there are of which Redis doesn't know all; and how many without a name."""
        pending = unnamed = 0
        for first in range(0, self.limiter.cell_count, CELLS_AT_ONCE):
            reports, without_name = self.limiter.reports(first, first + CELLS_AT_ONCE, LOOK_ONLY)
            pending, unnamed = pending + len(reports), unnamed + without_name
        return pending, unnamed

    def redis_key(self, name: bytes, suffix: bytes = b"") -> bytes:
        return self.head + name.hex().encode() + self.tail + suffix


# How a window's answer is to be taken: see sync_window.lua.
OVER: Final = 1
LOST: Final = 2
FULL: Final = 3
FAR: Final = 4
# Whose clock is wrong, as the host sees it.
CLOCKS: Final = {
    OVER: "has long been over: this host's clock is late, or Redis's is fast",
    FAR: "is still far off: this host's clock is fast, or Redis's is late",
}


class WindowExchange(Exchange):
    main = "sync_window"
    limiter: SyncedWindow

    def __init__(self, store: RedisStore, limiter: SyncedWindow, host: bytes) -> None:
        self.limiter = limiter
        self.windows = 2 if limiter.slides else 1
        self.period_ns = limiter.rate.period_ns
        # Limits that don't share their cells have each counted something else.
        host = b"%s-%d" % (host, limiter.low_bits)
        super().__init__(store, limiter.name, f"synced-{digest(self.windows, self.period_ns)}".encode(), host)

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, end_ns, *rest = report
        number = end_ns // self.period_ns
        counts = rest[::3][: self.windows]
        period_us = self.period_ns // 1000
        keys, arguments = [], [self.host, b"%x" % place[BIRTH], read_us, period_us]
        for ago, count in enumerate(counts):
            keys.append(self.redis_key(name, b"-%d" % (number - ago)))
            told, others = rest[3 * ago + 1 : 3 * ago + 3]
            arguments += [count, told, others, (number - ago) * period_us]

        def learn(reply: list[int]) -> None:
            answers = [
                None if how in CLOCKS else (known, max(sum_of_all - known, 0), how == LOST)
                for sum_of_all, known, how in zip(reply[2::3], reply[3::3], reply[4::3], strict=True)
            ]
            self.limiter.merge(place, end_ns, *answers)
            if reply[4] in CLOCKS:
                raise StoreUnavailable(
                    f"Redis says that a window that {self.limiter!r} counts in on this host {CLOCKS[reply[4]]}"
                )
            if FULL in reply[4::3]:
                raise StoreUnavailable(
                    f"1000 hosts have told Redis of a key of {self.limiter!r} in one window, so it has no room for "
                    "what this one has counted: take fewer hosts, or a RedisStore, where each decision is Redis's"
                )

        return Command(self.script, keys, encode_args(arguments), 2 + 3 * self.windows, learn)


class BucketExchange(Exchange):
    main = "sync_bucket"
    limiter: SyncedTokenBucket

    def __init__(self, store: RedisStore, limiter: SyncedTokenBucket, host: bytes) -> None:
        self.limiter = limiter
        super().__init__(store, limiter.name, b"synced-tat", host)

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, charged, told_us, read_ns, told_until_ns = report
        silence_us = -((told_until_ns - read_ns) // 1000)
        arguments = [self.host, b"%x" % place[BIRTH], read_us, charged // 1000, told_us, silence_us]

        def learn(reply: list[int]) -> None:
            _, _, ahead_us, known_us = reply
            # Less one: what was told was rounded down, so what was told since the time before may have been rounded up.
            self.limiter.merge(place, charged, known_us, read_ns, 1000 * max(ahead_us - 1, 0))

        return Command(self.script, [self.redis_key(name)], encode_args(arguments), 4, learn)
