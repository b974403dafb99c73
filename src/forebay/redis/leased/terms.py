"""The terms on which a host borrows permits: which limits, how much, how long, and the commands for it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.table.keys import Key
from forebay.errors import InvalidLimiter, short_repr
from forebay.own_counts import LEASE_FETCHES, own_count
from forebay.rate import as_period_ns
from forebay.redis.algorithms import Algorithm, Charge, Gcra, Seen, Window
from forebay.redis.commands import Command, CommandFlow, LimiterCommands, encode_args, read_nothing
from forebay.redis.keys import digest
from forebay.redis.scripts import script
from forebay.segment import layout
from forebay.store import Store

__all__ = ["OVERTAKEN", "BucketTerms", "Granted", "Place", "Terms", "WindowTerms", "checked_options", "terms_of"]

T = TypeVar("T")

MS: Final = 1_000_000
LEAST_LEASE_NS: Final = 10 * MS
MOST_LEASE_NS: Final = 60_000 * MS
STATE_BITS_BESIDES_PERMITS: Final = layout.LEASE_GENERATION_BITS + 1
MOST_PERMIT_BITS: Final = 30
OVERTAKEN: Final = 2
# The version of the meaning of the words of leases and fetch slots.
CELLS_VERSION: Final = 2


class Options(NamedTuple):
    lease_ns: int
    share: float


class Place(NamedTuple):
    """The Redis key of a state, and the first arguments of its scripts."""

    redis_key: bytes
    arguments: Sequence[int | bytes]


class Granted(NamedTuple):
    """The reply to a borrow."""

    status: int
    permits: int
    left_ns: int
    """From the grant to the end of the lease."""
    retry_ns: int
    """From the grant until the need may be met; after a partial grant, until any permit may be free."""
    window_us: int = 0
    """The end of the window in which the permits were charged; 0 for a token bucket."""
    dropped: int = 0
    """How many of the reported permits have no loan any more: the host drops them."""


def checked_options(lease: Any, share: Any) -> Options:
    lease_ns = as_period_ns(lease)
    if not LEAST_LEASE_NS <= lease_ns <= MOST_LEASE_NS:
        raise ValueError(f"a lease is from 10 ms to a minute, not {short_repr(lease)}")
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
        raise ValueError(f"share is a number above 0 and up to 1, not {short_repr(share)}")
    return Options(lease_ns, float(share))


class Terms(ABC):
    """The terms on which a host borrows permits of one limit."""

    host_algorithm: int
    """The algorithm's number in the host's list of limiters, see native/layout.toml."""
    longest_ns: int
    """The length of the longest lease."""
    same_ns: int
    """Leases whose ends differ by this time belong to different windows. 0 if a grant extends all permits' lease."""
    reset_ns: int
    """The time after the end of a lease at which a key's state is as good as fresh."""
    early_ns: int
    """If all permits are used this time before the lease's end, the next fetch borrows more."""
    pause_ns: int
    """The shortest time from a partial grant to the host's next fetch."""

    def __init__(
        self, strict: LimiterCommands, algorithm: Algorithm, store: Store, options: Options, timeout_ns: int
    ) -> None:
        self.strict, self.limit = strict, algorithm.limit
        self.parameters = strict.parameters
        self.fallback = strict.fallback
        self.lease_ns = options.lease_ns
        self.timeout_ns = timeout_ns
        # Overtaking fetches must differ in their generation, which lasts about a 64th of a lease: see core/leased.pyx.
        self.fetch_deadline_ns = max(timeout_ns, self.lease_ns // 64)
        self.longest_fetch_ns = 2 * self.lease_ns + self.fetch_deadline_ns
        self.share = options.share
        self.on_full = store.on_full
        self.count_fetch = own_count(store, LEASE_FETCHES)
        """Counts a call that asked Redis for permits and got a reply."""
        where = strict.keyspace.server_identity
        # A process that reads cells differently, or borrows elsewhere, is another host.
        what = repr(
            (
                CELLS_VERSION,
                where,
                strict.key("key"),
                algorithm.script,
                algorithm.unit,
                self.limit,
                options,
                timeout_ns,
            )
        )
        self.encoding = blake2b(what.encode(), digest_size=16).hexdigest().encode()
        self.host = store.segment.secret(b"lease " + self.encoding).hex()[:16]

    def _set_most(self, finest: int) -> None:
        """Set the most permits that a host may have on loan: its share, and what a lease's state has bits for."""
        quantum_bits = (self.longest_ns // finest).bit_length() + 1
        bits = min(quantum_bits - STATE_BITS_BESIDES_PERMITS, MOST_PERMIT_BITS)
        self.most_on_loan = max(min(int(self.limit * self.share), 2**bits - 1), 1)

    @abstractmethod
    def place(self, key: Key) -> Place: ...

    @abstractmethod
    def borrow(
        self, place: Place, stamp_us: int, left: int, unspent: int, need: int, want: int
    ) -> Command[Granted]: ...

    @abstractmethod
    def charge(self, place: Place, permits: int) -> Command[Granted]:
        """Spend permits at once, without a loan. The request may use them until the reply's `left_ns`."""

    @abstractmethod
    def give_back(self, place: Place, stamp_us: int, permits: int, window_us: int) -> Command[None]: ...

    @abstractmethod
    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        """The permits that Redis could grant, and after how many ns it could grant `permits`."""

    @abstractmethod
    def reset(self, key: Key) -> CommandFlow[None]: ...


class BucketTerms(Terms):
    """The terms of a token bucket. Its state in Redis records the loans; strict limiters have another."""

    host_algorithm = layout.ALGORITHM_LEASED_TOKEN_BUCKET

    def __init__(
        self, strict: LimiterCommands, algorithm: Gcra, store: Store, options: Options, timeout_ns: int
    ) -> None:
        super().__init__(strict, algorithm, store, options, timeout_ns)
        # Equal rates share a bucket, however they are written.
        divisor = math.gcd(algorithm.period_us, algorithm.rate.limit)
        period_us, per = algorithm.period_us // divisor, algorithm.rate.limit // divisor
        self.longest_ns = max(self.lease_ns, self.fetch_deadline_ns)
        self.same_ns = 0
        self.reset_ns = 1000 * algorithm.tolerance_us
        self.early_ns = self.lease_ns // 2
        self.pause_ns = min(self.lease_ns, self.reset_ns) // 8
        self._set_most(8)
        suffix = f"lent-{digest(per, period_us)}".encode()
        self._head, self._tail = strict.keyspace.affixes(strict.name, suffix)
        self._script = script("lease_bucket")
        self._rate = (per, period_us, algorithm.tolerance_us)

    def place(self, key: Key) -> Place:
        return Place(self._head + self.strict.keyspace.encode(key) + self._tail, self._rate)

    def _command(self, place: Place, *arguments: int | bytes | str) -> Command[Granted]:
        sent = encode_args((*place.arguments, *arguments))
        return Command(self._script, [place.redis_key], sent, 6, _of_bucket)

    def borrow(self, place: Place, stamp_us: int, left: int, unspent: int, need: int, want: int) -> Command[Granted]:
        return self._report(place, stamp_us, left, unspent, need, want)

    def _report(self, place: Place, *numbers: int, undone: int = 0) -> Command[Granted]:
        return self._command(place, b"borrow", self.host, *numbers, self.lease_ns // 1000, undone)

    def charge(self, place: Place, permits: int) -> Command[Granted]:
        return self._command(place, b"charge", permits).then(
            lambda granted: Granted(granted.status, granted.permits, self.timeout_ns, granted.retry_ns)
        )

    def refund(self, place: Place, stamp_us: int, left: int, unspent: int, permits: int) -> Command[Granted]:
        """Report the remaining permits, and refund spent ones: Redis refunds only permits that aren't on loan."""
        return self._report(place, stamp_us, left, unspent, 0, 0, undone=permits)

    def still_missing(self, elapsed_ns: int) -> int:
        """The most permits of a charge that are not refilled after that time: what an empty bucket then lacks."""
        per, period_us, _ = self._rate
        return max(self.reset_ns - elapsed_ns, 0) * per // (1000 * period_us)

    def give_back(self, place: Place, stamp_us: int, permits: int, window_us: int) -> Command[None]:
        return self.borrow(place, stamp_us, 0, permits, 0, 0).then(lambda granted: None)

    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        return self._command(place, b"peek", permits).then(lambda granted: (granted.permits, granted.retry_ns))

    def reset(self, key: Key) -> CommandFlow[None]:
        yield self._command(self.place(key), b"reset")


def _of_bucket(reply: list[int]) -> Granted:
    status, _, permits, left_us, retry_us, dropped = reply
    return Granted(status, permits, 1000 * left_us, 1000 * retry_us, dropped=dropped)


class WindowTerms(Terms):
    """The terms of a window. A borrow is charged until the window's end, in the state that strict limiters share."""

    def __init__(
        self, strict: LimiterCommands, algorithm: Window, store: Store, options: Options, timeout_ns: int
    ) -> None:
        super().__init__(strict, algorithm, store, options, timeout_ns)
        self.algorithm = algorithm
        slides = algorithm.script == "sliding"
        self.host_algorithm = layout.ALGORITHM_LEASED_SLIDING_WINDOW if slides else layout.ALGORITHM_LEASED_FIXED_WINDOW
        self.period_ns = period_ns = 1000 * algorithm.period_us
        self.longest_ns = max(period_ns, self.fetch_deadline_ns)
        self.same_ns = period_ns // 2
        self.reset_ns = period_ns if slides else 0
        self.early_ns = min(self.lease_ns, period_ns) // 2
        self.pause_ns = min(self.lease_ns, period_ns) // 8
        self._set_most(64)
        self._script = script("lease_window", algorithm.script)

    def place(self, key: Key) -> Place:
        return Place(self.strict.key(key), self.strict.charge_for(key, 0).arguments)

    def _command(self, place: Place, what: bytes, need: int, want: int, read: Callable[[list[int]], T]) -> Command[T]:
        arguments = encode_args((what, need, want, self.algorithm.script, *place.arguments))
        return Command(self._script, [place.redis_key], arguments, 3 + self.algorithm.number_count, read)

    def _retry_ns(self, need: int, reply: list[int]) -> int:
        charge = Charge(need, ())
        return 1000 * self.algorithm.times_us(charge, Seen(False, reply[1], reply[3:]))[1]

    def borrow(self, place: Place, stamp_us: int, left: int, unspent: int, need: int, want: int) -> Command[Granted]:
        def read(reply: list[int]) -> Granted:
            left_us = min(reply[3] - reply[1], self.algorithm.period_us)
            retry_ns = self._retry_ns(1 if reply[0] else need, reply) if reply[2] < want else 0
            return Granted(reply[0], reply[2], 1000 * left_us, retry_ns, reply[3])

        return self._command(place, b"borrow", need, want, read)

    def charge(self, place: Place, permits: int) -> Command[Granted]:
        """As a borrow, whose permits the request spends without the host's table."""
        return self.borrow(place, 0, 0, 0, permits, permits)

    def give_back(self, place: Place, stamp_us: int, permits: int, window_us: int) -> Command[None]:
        """As a cancellation: it counts only in its own window."""
        arguments = encode_args((b"cancel", 0, self.algorithm.script, permits, window_us, *place.arguments[2:]))
        return Command(script("decide", self.algorithm.script), [place.redis_key], arguments, 2, read_nothing)

    def peek(self, place: Place, permits: int) -> Command[tuple[int, int]]:
        def read(reply: list[int]) -> tuple[int, int]:
            return reply[2], 0 if reply[2] >= permits else self._retry_ns(permits, reply)

        return self._command(place, b"peek", permits, 0, read)

    def refund(self, key: Key, permits: int) -> CommandFlow[None]:
        yield from self.strict.refund(key, permits)

    def reset(self, key: Key) -> CommandFlow[None]:
        yield self.strict.reset(key)


def terms_of(kind: type, strict: LimiterCommands, store: Store, options: Options, timeout_ns: int) -> Terms:
    """The terms of a limiter. Raises ``InvalidLimiter`` if its permits can't be lent."""
    algorithm = strict.algorithm
    if kind is TokenBucket and isinstance(algorithm, Gcra):
        return BucketTerms(strict, algorithm, store, options, timeout_ns)
    if kind in (FixedWindow, SlidingWindow) and isinstance(algorithm, Window):
        return WindowTerms(strict, algorithm, store, options, timeout_ns)
    raise InvalidLimiter(
        f"of {strict!r} nothing can be lent: TokenBucket with refill='continuous', FixedWindow and SlidingWindow can "
        "be leased; make this one over the RedisStore itself, where every decision is exact and a round trip"
    )
