"""What of a limit can be borrowed, how much and for how long, and what calls of its scripts look like."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter, shown
from forebay.rate import as_period_ns
from forebay.redis.algorithms import Algorithm, Charge, Gcra, Seen, Window
from forebay.redis.commands import Command, CommandFlow, LimiterCommands, _nothing, encode_args
from forebay.redis.keys import digest
from forebay.redis.scripts import script
from forebay.segment import layout
from forebay.store import Store

__all__ = ["OVERTAKEN", "BucketTerms", "Granted", "Place", "Terms", "WindowTerms", "checked_options", "terms_of"]

T = TypeVar("T")

MS: Final = 1_000_000
LEAST_LEASE_NS: Final = 10 * MS
MOST_LEASE_NS: Final = 60_000 * MS
# Of a lease's state, besides the permits.
GENERATION_BITS: Final = 9
MOST_PERMIT_BITS: Final = 30
OVERTAKEN: Final = 2
# Of what the words of leases and gates mean.
CELLS_VERSION: Final = 2


class Options(NamedTuple):
    lease_ns: int
    share: float


class Place(NamedTuple):
    """Where a key's state is in Redis."""

    redis_key: bytes
    arguments: Sequence[int | bytes]


class Granted(NamedTuple):
    """What became of a borrow."""

    status: int
    permits: int
    left_ns: int
    """So long after it was granted, the lease ends."""
    retry_ns: int
    """So long after that, there may be what was needed; or, after less than was wanted, anything."""
    window_us: int = 0
    """The end of the window for which it was granted."""
    dropped: int = 0
    """Of the permits that were reported, so many don't count any more."""


def checked_options(lease: Any, share: Any) -> Options:
    lease_ns = as_period_ns(lease)
    if not LEAST_LEASE_NS <= lease_ns <= MOST_LEASE_NS:
        raise ValueError(f"a lease is from 10 ms to a minute, not {shown(lease)}")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"share is a number above 0 and up to 1, not {shown(share)}")
    return Options(lease_ns, float(share))


class Terms(ABC):
    """The terms on which a host borrows permits of one limit."""

    host_algorithm: int
    """What the host's list of limiters says, see native/layout.toml."""
    longest_ns: int
    """No lease is longer."""
    same_ns: int
    """Ends of leases that differ by so much are of different windows; 0 if a grant lets all permits last longer."""
    reset_ns: int
    """So long after the end of a lease, a key is as good as fresh."""
    early_ns: int
    """More is borrowed if all was used so long before the end."""
    pause_ns: int
    """After a grant of less than was wanted, so long nobody of the host asks again, if there isn't more only later."""

    def __init__(
        self, strict: LimiterCommands, algorithm: Algorithm, store: Store, options: Options, deadline_ns: int
    ) -> None:
        self.strict, self.limit = strict, algorithm.limit
        self.parameters = strict._parameters
        self.lease_ns = options.lease_ns
        self.timeout_ns = deadline_ns
        # Overtaken fetches are told apart by less than a 64th of a lease, see core/leased.pyx.
        self.deadline_ns = max(deadline_ns, self.lease_ns // 64)
        self.longest_fetch_ns = 2 * self.lease_ns + self.deadline_ns
        self.share = options.share
        self.on_full = store.on_full
        where = strict._store.server_identity
        # Whoever reads cells in another way, or has borrowed elsewhere, is another host.
        what = repr(
            (
                CELLS_VERSION,
                where,
                strict._key("key"),
                algorithm.script,
                algorithm.unit,
                self.limit,
                options,
                deadline_ns,
            )
        )
        self.encoding = blake2b(what.encode(), digest_size=16).hexdigest().encode()
        self.host = store._segment.secret(b"lease " + self.encoding).hex()[:16]

    def _set_most(self, finest: int) -> None:
        """The most permits that a host has: its share, and no more than leave room for a time that is fine enough."""
        quantum_bits = (self.longest_ns // finest).bit_length() + 1
        bits = min(quantum_bits - GENERATION_BITS, MOST_PERMIT_BITS)
        self.most_on_loan = max(min(int(self.limit * self.share), 2**bits - 1), 1)

    @abstractmethod
    def place(self, key: Key) -> Place: ...

    @abstractmethod
    def borrow(
        self, place: Place, asked_us: int, left: int, unspent: int, need: int, want: int
    ) -> Command[Granted]: ...

    @abstractmethod
    def charge(self, place: Place, permits: int) -> Command[Granted]:
        """Spend so many at once, of which none are on loan meanwhile, as a call that is made until `left_ns` later."""

    @abstractmethod
    def give_back(self, place: Place, asked_us: int, permits: int, window_us: int) -> Command[None]: ...

    @abstractmethod
    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        """The permits that there are, and after how many ns there would be so many."""

    @abstractmethod
    def reset(self, key: Key) -> CommandFlow[None]: ...


class BucketTerms(Terms):
    """Of a token bucket: a state of its own, which knows what is on loan."""

    host_algorithm = layout.ALGORITHM_LEASED_TOKEN_BUCKET

    def __init__(
        self, strict: LimiterCommands, algorithm: Gcra, store: Store, options: Options, deadline_ns: int
    ) -> None:
        super().__init__(strict, algorithm, store, options, deadline_ns)
        # However the rate is written, its bucket is the same.
        divisor = math.gcd(algorithm.period_us, algorithm.rate.limit)
        period_us, per = algorithm.period_us // divisor, algorithm.rate.limit // divisor
        self.longest_ns = max(self.lease_ns, self.deadline_ns)
        self.same_ns = 0
        self.reset_ns = 1000 * algorithm.tolerance_us
        self.early_ns = self.lease_ns // 2
        self.pause_ns = min(self.lease_ns, self.reset_ns) // 8
        self._set_most(8)
        suffix = f"lent-{digest(per, period_us)}".encode()
        self._head, self._tail = strict._store._key_affixes(strict.name, suffix)
        self._script = script("lease_bucket")
        self._rate = (per, period_us, algorithm.tolerance_us)

    def place(self, key: Key) -> Place:
        return Place(self._head + self.strict._encode_key(key) + self._tail, self._rate)

    def _asked(self, place: Place, *arguments: int | bytes | str) -> Command[Granted]:
        sent = encode_args((*place.arguments, *arguments))
        return Command(self._script, [place.redis_key], sent, 6, _of_bucket)

    def borrow(self, place: Place, asked_us: int, left: int, unspent: int, need: int, want: int) -> Command[Granted]:
        return self._report(place, asked_us, left, unspent, need, want, 0)

    def _report(self, place: Place, *numbers: int) -> Command[Granted]:
        *report, undone = numbers
        return self._asked(place, b"borrow", self.host, *report, self.lease_ns // 1000, undone)

    def charge(self, place: Place, permits: int) -> Command[Granted]:
        command = self._asked(place, b"charge", permits)

        def read(reply: list[int]) -> Granted:
            return Granted(reply[0], reply[2], self.timeout_ns, 1000 * reply[4])

        return Command(command.script, command.keys, command.arguments, command.size, read)

    def refund(self, place: Place, asked_us: int, left: int, unspent: int, permits: int) -> Command[Granted]:
        """A report, so that what was spent can be given back: what is on loan can't."""
        return self._report(place, asked_us, left, unspent, 0, 0, permits)

    def give_back(self, place: Place, asked_us: int, permits: int, window_us: int) -> Command[None]:
        command = self.borrow(place, asked_us, 0, permits, 0, 0)
        return Command(command.script, command.keys, command.arguments, command.size, _nothing)

    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        command = self._asked(place, b"peek", permits)

        def read(reply: list[int]) -> tuple[int, int]:
            return reply[2], 1000 * reply[4]

        return Command(command.script, command.keys, command.arguments, command.size, read)

    def reset(self, key: Key) -> CommandFlow[None]:
        yield self._asked(self.place(key), b"reset")


def _of_bucket(reply: list[int]) -> Granted:
    status, _, permits, left_us, retry_us, dropped = reply
    return Granted(status, permits, 1000 * left_us, 1000 * retry_us, dropped=dropped)


class WindowTerms(Terms):
    """Of a window: what is borrowed is charged in the state that strict limiters use, until the window's end."""

    def __init__(
        self, strict: LimiterCommands, algorithm: Window, store: Store, options: Options, deadline_ns: int
    ) -> None:
        super().__init__(strict, algorithm, store, options, deadline_ns)
        self.algorithm = algorithm
        slides = algorithm.script == "sliding"
        self.host_algorithm = layout.ALGORITHM_LEASED_SLIDING_WINDOW if slides else layout.ALGORITHM_LEASED_FIXED_WINDOW
        period_ns = 1000 * algorithm.period_us
        self.longest_ns = max(period_ns, self.deadline_ns)
        self.same_ns = period_ns // 2
        self.reset_ns = period_ns if slides else 0
        self.early_ns = min(self.lease_ns, period_ns) // 2
        self.pause_ns = min(self.lease_ns, period_ns) // 8
        self._set_most(64)
        self._script = script("lease_window", algorithm.script)

    def place(self, key: Key) -> Place:
        return Place(self.strict._key(key), self.strict._charge_for(key, 0).arguments)

    def _asked(self, place: Place, what: bytes, need: int, want: int, read: Callable[[list[int]], T]) -> Command[T]:
        arguments = encode_args((what, need, want, self.algorithm.script, *place.arguments))
        return Command(self._script, [place.redis_key], arguments, 3 + self.algorithm.told, read)

    def _retry_ns(self, need: int, reply: list[int]) -> int:
        charge = Charge(need, ())
        return 1000 * self.algorithm.times_us(charge, Seen(False, reply[1], reply[3:]))[1]

    def borrow(self, place: Place, asked_us: int, left: int, unspent: int, need: int, want: int) -> Command[Granted]:
        def read(reply: list[int]) -> Granted:
            left_us = min(reply[3] - reply[1], self.algorithm.period_us)
            retry_ns = self._retry_ns(1 if reply[0] else need, reply) if reply[2] < want else 0
            return Granted(reply[0], reply[2], 1000 * left_us, retry_ns, reply[3])

        return self._asked(place, b"borrow", need, want, read)

    def charge(self, place: Place, permits: int) -> Command[Granted]:
        """As who borrows, who then spends it outside of the host's table."""
        return self.borrow(place, 0, 0, 0, permits, permits)

    def give_back(self, place: Place, asked_us: int, permits: int, window_us: int) -> Command[None]:
        """As a cancellation, which counts only in its window."""
        arguments = encode_args((b"cancel", 0, self.algorithm.script, permits, window_us, *place.arguments[2:]))
        return Command(script("decide", self.algorithm.script), [place.redis_key], arguments, 2, _nothing)

    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        def read(reply: list[int]) -> tuple[int, int]:
            return reply[2], 0 if reply[2] >= permits else self._retry_ns(permits, reply)

        return self._asked(place, b"peek", permits, 0, read)

    def refund(self, key: Key, permits: int) -> CommandFlow[None]:
        yield from self.strict._refund(key, permits)

    def reset(self, key: Key) -> CommandFlow[None]:
        yield self.strict._ask_reset(key)


def terms_of(kind: type, strict: LimiterCommands, store: Store, options: Options, deadline_ns: int) -> Terms:
    """Raises ``InvalidLimiter`` for what can't be borrowed."""
    algorithm = strict._algorithm
    if kind is TokenBucket and isinstance(algorithm, Gcra):
        return BucketTerms(strict, algorithm, store, options, deadline_ns)
    if kind in (FixedWindow, SlidingWindow) and isinstance(algorithm, Window):
        return WindowTerms(strict, algorithm, store, options, deadline_ns)
    raise InvalidLimiter(
        f"of {strict!r} nothing can be lent: TokenBucket with refill='continuous', FixedWindow and SlidingWindow can "
        "be leased; make this one over the RedisStore itself, where every decision is exact and a round trip"
    )
