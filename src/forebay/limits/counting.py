"""The operations of a storage, by limiters over one store.

The library passes a key, and in some calls a limit and a period in seconds. Limiters are made for these, never for
single keys. Their names in the store:

* ``limits fixed-window 60 4``: one for each period and number of digits. The library itself compares the count with the
  limit, and passes the limit only in the key. The more digits, the further a window may begin before a key's first
  request. Limits of fewer than `LEAST_DIGITS` digits share one.
* ``limits sliding-window 60``: one for each period, as some calls come without the limit; a charge passes it along.
  A limit above `most_exact` has one of its own, ``limits sliding-window 60 1000000``.
* ``limits moving-window 60 10``: a sliding log for each period and limit.
* ``limits moving-window 60 10000 parts``: a bucketed window instead, if the log would take too much memory.
* ``limits gcra``: one token bucket for all.

By these names each process finds the limiters of the others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from limits.errors import ConfigurationError

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.cell_limiter import CellLimiter
from forebay.core.decision import Decision
from forebay.errors import CostExceedsLimit, SegmentSpaceError, TooManyLimiters, short_repr
from forebay.limits import moving_windows
from forebay.limits.options import StorageOptions
from forebay.rate import NS, Rate
from forebay.segment import layout
from forebay.segment.limiter_list import LIST_BYTES
from forebay.store import Store
from forebay.testing import reset_store

__all__ = ["NOT_COUNTED", "Counting", "whole_cost"]

NOT_COUNTED: Final = sys.maxsize
"""The count of a key whose request could not be counted: above every limit."""

_log: Final = logging.getLogger("forebay.limits")

# Two reads of a key that other processes charge may differ, and a read may be interrupted: so often it is repeated.
READS: Final = 100
STEADY_NS: Final = 2_000

LEAST_DIGITS: Final = 4
USUAL_DIGITS: Final = 6
MOST_DIGITS: Final = 12


def digits_of(key: str) -> int:
    """How many digits the limit of a fixed window has, by the end of the library's key, such as ``/100/1/minute``.

    For any other key, `USUAL_DIGITS`.
    """
    parts = key.rsplit("/", 3)
    if len(parts) < 4 or not parts[1].isdecimal():
        return USUAL_DIGITS
    return min(max(len(parts[1]), LEAST_DIGITS), MOST_DIGITS)


def most_counted(digits: int, period_ns: int) -> int:
    """The greatest count of a fixed window for limits of so many digits: at most half a permit per nanosecond."""
    most: int = 10**digits
    return (1 << min(most.bit_length(), period_ns.bit_length() - 1)) - 1


def most_exact(period_ns: int) -> int:
    """The greatest limit whose two windows are counted exactly: 32,767 a second, 262,143 a minute."""
    return (1 << period_ns.bit_length() // 2) - 1


class Counting:
    """The operations of both storages, without the library's classes.

    *Threads*, *processes*, *fork*: safe as its store and limiters are. If two threads make a limiter at once, both have
    one name, and so share their state.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._moving_window_keys = options.moving_window_keys
        self.store = self._open(options)
        self._fixed_windows: dict[tuple[float, int], FixedWindow] = {}
        self._sliding_windows: dict[tuple[float, int], tuple[SlidingWindow, Rate]] = {}
        self._moving_windows: dict[tuple[float, int], SlidingLog | BucketedWindow] = {}
        self._token_buckets: dict[tuple[float, int], TokenBucket] = {}
        self._moving_windows_known: set[tuple[float, int]] = set()
        self._names = b""
        self._inode = self._inode_now()
        try:
            self._make_moving_windows(options)
        except BaseException as error:
            self.store.attachment.remove_if_new()
            self.store.close()
            if isinstance(error, ValueError):
                raise ConfigurationError(f"the option moving_windows of a forebay storage: {error}") from None
            raise
        self._warn_without_room()

    def _open(self, options: StorageOptions) -> Store:
        """The store. If there is no room to make it, the error counts the moving windows that are to be made, too."""
        try:
            return options.open_store()
        except SegmentSpaceError:
            # A moving window that can't be is an error once there is room for the store.
            with contextlib.suppress(ValueError):
                if options.moving_windows and not os.path.exists(options.path):
                    self._refuse_without_room_for_all(options)
            raise

    def _make_moving_windows(self, options: StorageOptions) -> None:
        """Make all of them. If there is no room, the error counts all that are missing.

        If this process made the store, its file is removed, and the error counts the store and all moving windows: the
        next start makes them all again.

        The room is not checked beforehand: of the bytes in use, some may be of a moving window that another process is
        just making, and that this one then need not make.
        """
        try:
            for limit, expiry in options.moving_windows:
                self.make_moving_window(limit, expiry)
        except SegmentSpaceError:
            attachment = self.store.attachment
            if attachment.remove_if_new():
                self._refuse_without_room_for_all(options, attachment.bytes_taken())
            else:
                made = {name for name, _ in attachment.limiters().values()}
                missing = [one for one in set(options.moving_windows) if made.isdisjoint(_moving_names(*one))]
                with self._naming_the_option():
                    moving_windows.refuse_without_room(self.store, [self._size(*one) for one in missing])
            raise

    def _warn_without_room(self) -> None:
        """Log a warning if there is no room for a moving window of a usual size.

        The library passes neither strategy nor limits before the first request, so this start can't fail for them.
        """
        if any(name.startswith("limits moving-window ") for name, _ in self.store.attachment.limiters().values()):
            # They may be all that the service needs.
            return
        try:
            with self._naming_the_option():
                moving_windows.refuse_without_room(self.store, [self._size(100, 60)], "a moving window of 100/minute")
        except SegmentSpaceError as error:
            _log.warning("a request of the strategy moving-window would be an error: %s", error)

    def _refuse_without_room_for_all(self, options: StorageOptions, taken: int = 0) -> None:
        """Raise if the store and all moving windows don't fit together. `taken` bytes are about to become free."""
        sizes = [self._size(limit, expiry) for limit, expiry in set(options.moving_windows)]
        with self._naming_the_option():
            moving_windows.refuse_without_room_for_store(options.path, options.keys, sizes, taken)

    # Fixed window

    def incr(self, key: str, expiry: float, amount: float = 1) -> int:
        """Count `amount` for `key`, in a window of `expiry` seconds from its first request. Returns the count."""
        try:
            window = self._fixed_windows[expiry, digits := digits_of(key)]
        except KeyError:
            window = self._fixed_window(expiry, digits)
        try:
            decision = window.hit(key, whole_cost(amount))
        except CostExceedsLimit:
            return NOT_COUNTED
        return decision.limit - decision.remaining if decision.allowed else NOT_COUNTED

    def get(self, key: str) -> int:
        """The count of `key`; 0 when its window is over."""
        decision = self._counted(key)
        return decision.limit - decision.remaining if decision else 0

    def get_expiry(self, key: str) -> float:
        """When the window of `key` ends, in seconds since 1970; now if there is none."""
        decision = self._counted(key)
        return _time_after(decision.reset_after_ns if decision else 0)

    def _counted(self, key: str) -> Decision | None:
        for known in (True, False):
            if known or self._learn():
                for window in tuple(self._fixed_windows.values()):
                    decision = window.peek(key, 0)
                    if decision.remaining < decision.limit:
                        return decision
        return None

    def _fixed_window(self, expiry: float, digits: int) -> FixedWindow:
        name = f"limits fixed-window {_text(expiry)} {digits}"
        most = most_counted(digits, Rate(1, expiry).period_ns)
        window = FixedWindow(self.store, name, Rate(most, expiry), align="first")
        return self._fixed_windows.setdefault((expiry, digits), window)

    # Moving window

    def acquire_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        """Take `amount` of the `limit` entries that `key` may have in any `expiry` seconds."""
        amount = whole_cost(amount)
        if amount > limit:
            return False
        try:
            window = self._moving_windows[expiry, limit]
        except KeyError:
            window = self._moving_window(expiry, limit)
        return window.allow(key) if amount == 1 else window.hit(key, amount).allowed

    def has_moving_window(self, limit: int, expiry: float) -> bool:
        """Whether the memory of a moving window has been taken here."""
        return (expiry, limit) in self._moving_windows

    def make_moving_window(self, limit: int, expiry: float) -> None:
        """Take it."""
        self._moving_window(expiry, limit)

    def get_moving_window(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        """When the oldest entry was taken that counts, in seconds since 1970, and how many count."""
        if limit < 1:
            return time.time(), 0
        window = self._moving_windows.get((expiry, limit)) or self._moving_window(expiry, limit)
        freed_after_ns, remaining = _next_freed(window, key, limit)
        since_ns = freed_after_ns - Rate(1, expiry).period_ns if remaining < limit else 0
        return _time_after(since_ns), limit - remaining

    def _moving_window(self, expiry: float, limit: int) -> SlidingLog | BucketedWindow:
        log, parts = _moving_names(limit, expiry)
        window: SlidingLog | BucketedWindow | None = None
        with self._naming_the_option():
            while True:
                # A process with other moving_window_keys may choose the other kind. The first that was made has the
                # lower number; the process that makes the second sees that afterwards at the latest.
                number, other = (
                    self._number(log, layout.ALGORITHM_SLIDING_LOG),
                    self._number(parts, layout.ALGORITHM_BUCKETED_WINDOW),
                )
                name = log if number < other or (number == other and self._is_log(limit, expiry)) else parts
                if window is not None and window.name == name:
                    break
                window = self._log(log, expiry, limit) if name == log else self._parts(parts, expiry, limit)
        return self._moving_windows.setdefault((expiry, limit), window)

    def _is_log(self, limit: int, expiry: float) -> bool:
        return moving_windows.is_log(limit, expiry, self._moving_window_keys)

    def _size(self, limit: int, expiry: float) -> int:
        return moving_windows.bytes_needed(limit, expiry, self._moving_window_keys)

    @contextlib.contextmanager
    def _naming_the_option(self) -> Iterator[None]:
        """Add what this storage can do about it to the remedy of an error for lack of memory."""
        try:
            yield
        except SegmentSpaceError as error:
            remedy = (
                f"each limit of the strategy moving-window takes memory of its own, for {self._moving_window_keys} "
                "keys by the storage's option moving_window_keys; limits that moving_windows names take it all at the "
                "start; the strategies gcra and sliding-window-counter take none"
            )
            raise SegmentSpaceError(error.path, error.found, error.expected, f"{error.remedy}; {remedy}") from None

    def _log(self, name: str, expiry: float, limit: int) -> SlidingLog:
        return SlidingLog(self.store, name, Rate(limit, expiry), keys=self._moving_window_keys)

    def _parts(self, name: str, expiry: float, limit: int) -> BucketedWindow:
        # Any span of one period lies within one part more.
        period_ns = -(-Rate(limit, expiry).period_ns // moving_windows.PARTS) * (moving_windows.PARTS + 1)
        rate = Rate.per_ns(limit, period_ns)
        return BucketedWindow(self.store, name, rate, moving_windows.PARTS + 1, keys=self._moving_window_keys)

    def _number(self, name: str, algorithm: int) -> int:
        """The number of a limiter in the store, or the number that it would get."""
        try:
            return self.store.attachment.limiter_number(name, algorithm, add=False)
        except TooManyLimiters:
            return layout.LIMITER_CAPACITY

    # Sliding window counter

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        """Count `amount` for `key` unless that brings the estimate for the last `expiry` seconds above `limit`."""
        amount = whole_cost(amount)
        if amount > limit:
            return False
        try:
            window, rate = self._sliding_windows[expiry, limit]
        except KeyError:
            window, rate = self._sliding_window(expiry, limit)
        return window.hit(key, amount, rate=rate).allowed

    def get_sliding_window(self, key: str, expiry: float) -> tuple[int, float, int, float]:
        """The previous window's count and how long it still counts, and the same of the current window.

        The remaining number follows from them exactly. The counts are computed from two decisions: exactly up to about
        a thousand a second or ten thousand a minute, and to within two thousandths above.
        """
        for window in self._sliding_windows_of(expiry):
            previous, left_ns, current = self._two_counts(window, key)
            if previous or current:
                break
        period_ns = window.rate.period_ns
        return previous, left_ns / NS if previous else 0.0, current, (left_ns + period_ns) / NS

    def clear_sliding_window(self, key: str, expiry: float) -> None:
        """Let the sliding windows of so many seconds forget `key`."""
        for window in self._sliding_windows_of(expiry):
            window.reset(key)

    def _sliding_window(self, expiry: float, limit: int) -> tuple[SlidingWindow, Rate]:
        rate = Rate(limit, expiry)
        most = most_exact(rate.period_ns)
        name = f"limits sliding-window {_text(expiry)}"
        if limit > most:
            window = SlidingWindow(self.store, f"{name} {limit}", rate)
        elif limit > 1:
            window = self._exact_sliding_window(expiry)
        else:
            window = SlidingWindow(self.store, name, Rate(most, expiry))
        return self._sliding_windows.setdefault((expiry, limit), (window, rate))

    def _exact_sliding_window(self, expiry: float) -> SlidingWindow:
        window, _ = self._sliding_windows.get((expiry, 1)) or self._sliding_window(expiry, 1)
        return window

    def _sliding_windows_of(self, expiry: float) -> Iterator[SlidingWindow]:
        exact = self._exact_sliding_window(expiry)
        yield exact
        self._learn()
        for (period, _), (window, _) in self._sliding_windows.copy().items():
            if period == expiry and window is not exact:
                yield window

    def _two_counts(self, window: SlidingWindow, key: str) -> tuple[int, int, int]:
        """The previous count, how many ns are left of the current window, and the current count."""
        period_ns, most = window.rate.period_ns, window.rate.limit
        left_ns, decision = self._read(window, key, most)
        estimate = most - decision.remaining
        if estimate == 0 or most > most_exact(period_ns):
            return 0, left_ns, estimate
        # A count c weighs less than 1 once period // c is left of the window after its own. Then the estimate is 0
        # again: in the current window, if only the previous one has a count, or in the next one.
        least_ns = period_ns // most
        if decision.reset_after_ns < left_ns - least_ns // 2:
            previous = round(period_ns / (left_ns - decision.reset_after_ns))
        else:
            current = round(period_ns / (left_ns + period_ns - decision.reset_after_ns))
            # The wait until all permits are free but those that the current window has counted.
            left_ns, decision = self._read(window, key, max(0, most - current))
            previous = 0 if decision.allowed else round(period_ns / max(1, left_ns - decision.retry_after_ns))
        estimate = most - decision.remaining
        # Neither inexactness nor a charge between the reads brings the counts above the estimate.
        previous = min(previous, ((estimate + 1) * period_ns - 1) // left_ns)
        return previous, left_ns, max(0, estimate - math.floor(previous * (left_ns / NS) / (period_ns / NS)))

    def _read(self, window: SlidingWindow, key: str, cost: int) -> tuple[int, Decision]:
        """How much of the window was left when a decision was made, and the decision."""
        segment, period_ns = self.store.segment, window.rate.period_ns
        for _ in range(READS):
            before_ns = segment.now_ns()
            decision = window.peek(key, cost)
            took_ns = segment.now_ns() - before_ns
            left_ns = period_ns - (before_ns + segment.wall_epoch_ns) % period_ns - took_ns // 2
            if took_ns < STEADY_NS and took_ns < left_ns:
                break
        return max(1, left_ns), decision

    # GCRA

    def acquire_gcra(self, key: str, limit: int, expiry: float, amount: float = 1) -> bool:
        """Take `amount` of the `limit` permits of `key`, of which `limit` come back in `expiry` seconds."""
        amount = whole_cost(amount)
        if amount > limit:
            return False
        try:
            bucket = self._token_buckets[expiry, limit]
        except KeyError:
            bucket = self._token_bucket(expiry, limit)
        return bucket.allow(key) if amount == 1 else bucket.hit(key, amount).allowed

    def get_gcra(self, key: str, limit: int, expiry: float) -> tuple[float, int]:
        """When `key` gets its next permit back, in seconds since 1970, and how many it has."""
        if limit < 1:
            return time.time(), 0
        bucket = self._token_buckets.get((expiry, limit)) or self._token_bucket(expiry, limit)
        freed_after_ns, remaining = _next_freed(bucket, key, limit)
        return _time_after(freed_after_ns), remaining

    def _token_bucket(self, expiry: float, limit: int) -> TokenBucket:
        return self._token_buckets.setdefault(
            (expiry, limit), TokenBucket(self.store, "limits gcra", Rate(limit, expiry))
        )

    # All

    def check(self) -> bool:
        """Whether the store can decide, and its segment is the one that another process would open now."""
        return not self.store.closed and self._inode_now() == self._inode

    def clear(self, key: str) -> None:
        """Forget `key`, whatever the strategy."""
        self._learn()
        for expiry, limit in self._moving_windows_known - self._moving_windows.keys():
            # One without memory has nothing to forget.
            with contextlib.suppress(SegmentSpaceError):
                self._moving_window(expiry, limit)
        for limiter in self._limiters():
            limiter.reset(key)

    def reset(self) -> int | None:
        """Forget all keys. Returns how many were live, without those of moving windows."""
        live = self.store.stats().live_keys
        reset_store(self.store)
        return live

    def _limiters(self) -> Iterator[CellLimiter]:
        yield from tuple(self._fixed_windows.values())
        yield from {window for window, _ in tuple(self._sliding_windows.values())}
        yield from tuple(self._moving_windows.values())
        yield self._token_buckets.get((1, 1)) or self._token_bucket(1, 1)

    def _learn(self) -> bool:
        """Make the limiters that other processes have made meanwhile. Returns whether there may be any."""
        names = self.store.segment.read(layout.LIMITERS_OFFSET, LIST_BYTES)
        if names == self._names:
            return False
        for name, _ in self.store.attachment.limiters().values():
            match name.split(" "):
                case ["limits", "fixed-window", expiry, *digits]:
                    self._fixed_window(_seconds(expiry), int(digits[0]) if digits else LEAST_DIGITS)
                case ["limits", "sliding-window", expiry, *limit]:
                    self._sliding_window(_seconds(expiry), int(limit[0]) if limit else 1)
                case ["limits", "moving-window", expiry, limit, *_]:
                    # Made only when it is needed, since its memory has to be mapped.
                    self._moving_windows_known.add((_seconds(expiry), int(limit)))
        self._names = names
        return True

    def _inode_now(self) -> Any:
        if self.store.path is None:
            return None
        try:
            status = os.stat(self.store.path)
        except OSError as error:
            return error.errno
        return status.st_dev, status.st_ino


def _moving_names(limit: int, expiry: float) -> tuple[str, str]:
    """The names of a moving window: of a log, and of parts."""
    log = f"limits moving-window {_text(expiry)} {limit}"
    return log, f"{log} parts"


def _next_freed(limiter: CellLimiter, key: str, limit: int) -> tuple[int, int]:
    """After how many ns more remains of `limit` than now (0 if nothing is taken), and how much remains now."""
    remaining = limiter.peek(key, 0).remaining
    for _ in range(READS):
        if remaining == limit:
            return 0, limit
        decision = limiter.peek(key, remaining + 1)
        if decision.remaining == remaining:
            break
        remaining = decision.remaining
    return decision.retry_after_ns, remaining


def _time_after(ns: int) -> float:
    """The wall clock's time in `ns` from now, in seconds since 1970; computed in whole ns, so a whole second is one."""
    # A double holds today's time to the microsecond only.
    return (round(time.time() * 1e6) * 1000 + ns) / NS


def whole_cost(amount: Any) -> int:
    """A cost as a whole number, fractions rounded up. `NOT_COUNTED`, which denies, for one that is no number from 0 up.

    An exception would count as an outage: with ``swallow_errors`` the frameworks then allow the request, and with a
    fallback each process counts by itself from then on. A client may influence the cost of its request.
    """
    if type(amount) is int and amount >= 0:
        return amount
    # A number's own comparison may raise anything: that of Decimal("NaN") raises an ArithmeticError.
    with contextlib.suppress(Exception):
        if amount >= 0:
            return operator.index(math.ceil(amount))
    _log.error("a cost is a number of at least 0, not %s: the request is denied", short_repr(amount))
    return NOT_COUNTED


def _text(expiry: float) -> str:
    return repr(expiry).removesuffix(".0")


def _seconds(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
