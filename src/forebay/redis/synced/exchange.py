"""One limiter's exchange with Redis: this host's reports of its keys, and what it merges from the replies."""

from __future__ import annotations

import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Final, NamedTuple

from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, StoreClosed, StoreUnavailable
from forebay.redis.commands import Command, checked, encode_args, read_nothing
from forebay.redis.executor_base import CHUNK, UNAVAILABLE_ERRORS, raise_if_server_failed, replaced, unknown
from forebay.redis.keys import FINGERPRINT_BYTES, digest, fingerprint
from forebay.redis.scripts import script
from forebay.redis.store import RedisStore

__all__ = ["ALL_KEYS", "UNREPORTED_ONLY", "BucketExchange", "Exchange", "WindowExchange", "name_of"]

# In place of a round's number: all keys that count; only keys with unreported counts; those, without reporting them;
# only keys of which the host knows less than is published.
ALL_KEYS: Final = -1
UNREPORTED_ONLY: Final = -2
LOOK_ONLY: Final = -3
BEHIND_ONLY: Final = -4
# One round in so many reads all hot lists, also those that were read before.
WHOLE_ROUNDS: Final = 8
# The parts of a limiter's keys, each in one slot of a cluster and with a hot list of its own.
SHARDS: Final = 16
# The part of its limit from which on a key is hot: one in so many.
SHARE: Final = 4
NO_VERSION: Final = 0
# A filter of names has a bit for each value of their first two bytes.
FILTER_BYTES: Final = 2**16 // 8
# Cells read at once, while other threads wait: some tenths of a millisecond.
CELLS_AT_ONCE: Final = 512
# The index of the key's incarnation in a report's place.
INCARNATION: Final = 2
# A message: its layout, the host, and a bit for each shard whose hot lists its exchange has changed.
NEWS: Final = re.compile(rb"1 ([0-9a-f]{16}(?:-[0-9]{1,2})?) ([0-9a-f]{1,4})")


def name_of(key: Key) -> bytes:
    """The 16 bytes that name a key in Redis. The host's store keeps them behind the key's cell."""
    return bytes.fromhex(fingerprint(key).decode())


class ListsReply(NamedTuple):
    """Hot lists: for each its version, and the name and the sum of each key."""

    server_us: int
    lists: list[tuple[int, list[tuple[bytes, int]]]]

    @classmethod
    def decoded(cls, reply: Any, size: int) -> ListsReply:
        """Raises ``ValueError``, ``TypeError`` or ``OverflowError`` if it isn't a reply about `size` lists."""
        _, server_us, *values = reply
        rest = iter(values)
        lists = []
        for _ in range(size):
            version, count = map(operator.index, islice(rest, 2))
            flat = list(islice(rest, 2 * count))
            names = [int(name, 16).to_bytes(FINGERPRINT_BYTES) for name in flat[::2]]
            lists.append((version, list(zip(names, map(operator.index, flat[1::2]), strict=True))))
        if list(rest):
            raise ValueError(reply)
        return cls(operator.index(server_us), lists)


class ListsCommand(Command[None]):
    """A query of hot lists. Its reply has names beside the numbers."""

    def result(self, reply: Any) -> Any:
        try:
            decoded = ListsReply.decoded(reply, self.size)
        except (ValueError, TypeError, OverflowError):
            return checked(reply, self.size, self.keys)  # which raises
        keep: Any = self.read
        return keep(decoded)


class Exchange(ABC):
    """The exchange of one limiter.

    Reports may be repeated, delayed, or sent by several processes at once: see ``forebay.core.synced.limiter``.
    """

    main: ClassVar[str]
    """The main part of its script."""
    limiter: SyncedTokenBucket | SyncedWindow

    def __init__(self, store: RedisStore, name: str, suffix: bytes, host: bytes) -> None:
        self.store, self.host, self.suffix = store, host, suffix
        self.script, self.lists_script = script(self.main, "sync"), script("sync_hot", "sync")
        self.prefixes = [store.keyspace.shard_prefix(name, shard) for shard in range(SHARDS)]
        self.versions: dict[bytes, int] = {}
        """The versions of the lists that this process has caught up with. Replaced as a whole: exchanges of several
        threads may run at once."""
        self.changed: set[int] = set()
        """The shards whose hot lists this process's reports have changed since it last published that."""
        self.id = self.prefixes[0] + suffix + host
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
        if round_number < ALL_KEYS:
            return self.exchange(self.messages(round_number))
        is_whole = round_number == ALL_KEYS or round_number % WHOLE_ROUNDS == 0
        return self.run_on(range(SHARDS), {} if is_whole else self.versions, round_number)

    def catch_up(self, shards: Iterable[int]) -> ForebayError | None:
        """Read the hot lists of these shards, and what Redis knows of their keys where the host knows less."""
        return self.run_on(shards, self.versions, BEHIND_ONLY)

    def run_on(self, shards: Iterable[int], known: dict[bytes, int], round_number: int) -> ForebayError | None:
        learned = bytearray(FILTER_BYTES)
        versions: dict[bytes, int] = {}
        # All published sums are kept before the first cell is read.
        failed = self.exchange(self.lists(shards, known, learned, versions))
        failed = self.exchange(self.messages(round_number, learned)) or failed
        if versions and failed is None:
            # Otherwise the next exchange reads these lists again, and so finds the names that it has to catch up with.
            self.versions = versions if round_number >= ALL_KEYS else self.versions | versions
        return failed

    def publish(self, channel: bytes) -> ForebayError | None:
        """Publish the shards whose hot lists the reports of this process have changed."""
        changed, self.changed = self.changed, set()
        if not changed:
            return None
        news = b"1 %b %x" % (self.host, sum(1 << shard for shard in changed))
        return self.exchange(iter([Command(script("sync_news"), [], [channel, news], 2, read_nothing)]))

    def news_in(self, message: Any) -> list[int] | None:
        """The shards of another host's message, none of this host's own. None: no message of this layout."""
        found = NEWS.fullmatch(message) if isinstance(message, bytes) else None
        if found is None:
            return None
        changed = int(found[2], 16) if found[1] != self.host else 0
        return [shard for shard in range(SHARDS) if changed >> shard & 1]

    def exchange(self, messages: Iterator[Command[None]]) -> ForebayError | None:
        """Send messages and decode their replies. Return the first error of one, if any."""
        failed: ForebayError | None = None
        while batch := list(islice(messages, CHUNK)):
            for message, reply in zip(batch, self.send(batch), strict=True):
                try:
                    if isinstance(reply, Exception):
                        raise self.store.executor.unavailable(reply) from reply
                    message.result(reply)
                except ForebayError as error:
                    failed = failed or error
        return failed

    def messages(self, round_number: int, learned: bytearray | None = None) -> Iterator[Command[None]]:
        """The reports of a round, and of keys of the filter of which the host knows less than is published."""
        for first in range(0, self.limiter.cell_count, CELLS_AT_ONCE):
            reports, _ = self.limiter.reports(first, first + CELLS_AT_ONCE, round_number, learned)
            yield from map(self.message, reports)

    @abstractmethod
    def lists_at(self, now_ns: int) -> list[tuple[bytes, int]]:
        """The hot lists of each shard at this time: the end of its name, and of its window."""

    @abstractmethod
    def learn(self, name: bytes, total: int, end_ns: int, server_us: int, read_ns: int) -> None:
        """Keep the published sum of a key. The server's time was `server_us` when the host's was at least `read_ns`."""

    def lists(
        self, shards: Iterable[int], known: dict[bytes, int], learned: bytearray, versions: dict[bytes, int]
    ) -> Iterator[Command[None]]:
        """The commands that read the hot lists of shards which have another version than the `known` one. Decoding a
        reply keeps its sums, and adds its names to the filter `learned` and its version to `versions`.
        """
        read_ns = self.limiter.store.now_ns()
        ends, end_times = zip(*self.lists_at(read_ns), strict=True)

        def keep(keys: list[bytes], reply: Any) -> None:
            for key, end_ns, (version, sums) in zip(keys, end_times, reply.lists, strict=True):
                for name, total in sums:
                    self.learn(name, total, end_ns, reply.server_us, read_ns)
                    learned[int.from_bytes(name[:2], "little") >> 3] |= 1 << (name[0] & 7)
                versions[key] = version

        for shard in shards:
            keys = [self.prefixes[shard] + end for end in ends]
            arguments = encode_args(known.get(key, NO_VERSION) for key in keys)
            yield ListsCommand(self.lists_script, keys, arguments, len(keys), partial(keep, keys))

    def send(self, messages: list[Command[None]]) -> Sequence[Any]:
        store = self.store
        if store.closed:
            raise StoreClosed(f"{store!r} was closed, so nothing can be exchanged")
        try:
            with store.executor.breaker.passage():
                replies = store.executor.send(messages)
                if unsent := unknown(messages, replies):
                    store.executor.client.script_load(unsent[0].script.text)
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

    def redis_keys(self, name: bytes, ends: Sequence[bytes] = (b"",)) -> list[bytes]:
        """The keys of a report: for each of these ends of names the key's hash, then the lists of its shard."""
        prefix = self.prefixes[name[0] % SHARDS]
        key = prefix + name.hex().encode() + b":synced-"
        return [
            *[key + self.suffix + end for end in ends],
            *[prefix + b"hot-" + self.suffix + end for end in ends],
        ]


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
        super().__init__(store, limiter.name, digest(self.windows, self.period_ns).encode(), host)
        self.hot_from = -(-limiter.rate.limit // SHARE)

    def lists_at(self, now_ns: int) -> list[tuple[bytes, int]]:
        number = self.limiter.window_number(now_ns)
        return [
            (b"hot-%b-%d" % (self.suffix, number - ago), (number - ago) * self.period_ns) for ago in range(self.windows)
        ]

    def learn(self, name: bytes, total: int, end_ns: int, server_us: int, read_ns: int) -> None:
        self.limiter.learn(name, end_ns, total)

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, end_ns, *rest = report
        number = end_ns // self.period_ns
        counts = rest[::3][: self.windows]
        period_us = self.period_ns // 1000
        keys = self.redis_keys(name, [b"-%d" % (number - ago) for ago in range(self.windows)])
        arguments = [self.host, b"%x" % place[INCARNATION], read_us, period_us, self.hot_from]
        for ago, count in enumerate(counts):
            reported, others = rest[3 * ago + 1 : 3 * ago + 3]
            arguments += [count, reported, others, (number - ago) * period_us]

        def merge(reply: list[int]) -> None:
            answers = [
                None if how in CLOCKS else (known, max(sum_of_all - known, 0), how == LOST)
                for sum_of_all, known, how in zip(reply[2::3], reply[3::3], reply[4::3], strict=True)
            ]
            self.limiter.merge(place, end_ns, *answers)
            if any(
                count not in (-1, reported) and sum_of_all >= self.hot_from
                for count, reported, sum_of_all in zip(counts, rest[1::3], reply[2::3], strict=False)
            ):
                self.changed.add(name[0] % SHARDS)
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
        super().__init__(store, limiter.name, b"tat", host)
        self.hot_from_us = limiter.burst * limiter.rate.period_ns // limiter.rate.limit // 1000 // SHARE

    def lists_at(self, now_ns: int) -> list[tuple[bytes, int]]:
        return [(b"hot-" + self.suffix, 0)]

    def learn(self, name: bytes, total: int, end_ns: int, server_us: int, read_ns: int) -> None:
        self.limiter.learn(name, read_ns + 1000 * max(total - server_us - 1, 0))

    def message(self, report: tuple[Any, ...]) -> Command[None]:
        place, name, read_us, charged, reported_us, read_ns, reported_until_ns = report
        silence_us = -((reported_until_ns - read_ns) // 1000)
        arguments = [self.host, b"%x" % place[INCARNATION], read_us, charged // 1000, reported_us, silence_us]
        arguments.append(self.hot_from_us)

        def merge(reply: list[int]) -> None:
            _, _, ahead_us, known_us = reply
            if charged // 1000 != reported_us and ahead_us >= self.hot_from_us:
                self.changed.add(name[0] % SHARDS)
            # Less one, because the reported total was rounded down: its latest change may have been rounded up.
            self.limiter.merge(place, charged, known_us, read_ns, 1000 * max(ahead_us - 1, 0))

        return Command(self.script, self.redis_keys(name), encode_args(arguments), 4, merge)
