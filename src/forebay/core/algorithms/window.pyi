from typing import Literal, Self, TypeVar, final, overload

from typing_extensions import disjoint_base

from forebay.core.cell_limiter import CellLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

_L = TypeVar("_L")

@disjoint_base
class WindowLimiter(CellLimiter):
    """Base class of the limiters that count in windows; not used by itself."""
    @property
    def rate(self) -> Rate: ...
    def convert(
        self,
        key: Key,
        old_rate: str | Rate,
        *,
        rate: str | Rate | None = None,
        keep: Literal["permits", "share", "used"] = "used",
    ) -> int:
        """Carry what `key` has used of its window over to another limit. Returns how many permits remain under it.

        A state is what was used, and says nothing of the limit. So without this, a key keeps what it has ``"used"``.
        The other values of `keep` make something else stay the same: ``"permits"``, the number that remain, at most the
        new limit; ``"share"``, their share of the limit, rounded against the key. Call it once for each key that moves.
        The new limit is the limiter's own, or that of `rate`, as in ``hit``. Both rates have the limiter's period. A
        key that has used nothing is as a new one: it has the new limit. To give a key the whole limit, ``reset`` it. A
        ``refund`` or ``cancel`` of an earlier request gives back as many permits as it was charged.

        In a sliding window, ``"share"`` converts both counts. With ``"permits"``, the estimate of now leaves as many
        permits as before, by another count of the current window, or of the previous one if that alone is too much.

        Raises ``InvalidKey``, ``InvalidRate``, ``InvalidLimiter`` and ``StoreClosed``. Threads and processes may charge
        the key meanwhile: each charge counts by the limit before or after. O(1), one CAS.
        """

@final
class FixedWindow(WindowLimiter):
    """At most as many permits in each window as the rate allows per period.

    ``FixedWindow(store, "login", "5/minute")``. Each window is exactly a period long. Windows begin at multiples of the
    period by the wall clock. With ``align="first"`` a key's window begins with its first request after the last window
    ended (up to 10 ns earlier for each permit of the limit, so that the state fits in one cell). With
    ``align="stagger"`` each key's windows begin at an offset of its own, so that not all keys start afresh at once.

    ``FixedWindow(store, "quota", "1000/month", align="calendar", timezone="Europe/Berlin")`` has the days, weeks (from
    Monday), months or years of the calendar in that time zone, by the rules of Python's ``zoneinfo``. Where clocks
    change, a day has 23 or 25 hours. ``rate`` is then per the longest usual window: 1, 7, 31 or 366 days. A decision
    takes some nanoseconds longer, as it first looks whether the edges of its windows are known. Other windows have no
    `timezone`.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: never more than the limit in a window; so up to twice the limit within one period that overlaps two
    windows.
    """
    @overload
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        align: Literal["clock", "first", "stagger", "calendar"] = "clock",
        *,
        timezone: str | None = None,
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[FixedWindow, _L],
        name: str,
        rate: str | Rate,
        align: Literal["clock", "first", "stagger", "calendar"] = "clock",
        *,
        timezone: str | None = None,
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def align(self) -> str: ...
    @property
    def timezone(self) -> str | None: ...

@final
class SlidingWindow(WindowLimiter):
    """At most as many permits as the rate allows, in an estimate of the period up to now.

    ``SlidingWindow(store, "api", "1000/hour")``. A window begins at a multiple of the period by the wall clock. The
    estimate is the current window's count, plus the previous window's count times the share of that window that the
    last period still covers. So the previous window's requests count as if they had come evenly. `rounding` (``"up"``
    or ``"down"``) rounds their part; the default is up for limits to 5, down for larger ones. Limiters of one name and
    rate share their state, however they round. A rate for one call is rounded like the limiter's own.

    Raises ``InvalidRate``, ``InvalidLimiter``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``.

    A decision is O(1), usually one CAS on one cache line; a denial writes no shared memory. 21 bytes of the store per
    key. Guarantee: never more than the limit in a window by the clock, and never an estimate above it. So any period
    of which the time t lies behind a window's edge has at most ``limit * (1 + t / period)`` permits; rounded down, one
    more. Rounded up, a key that always requests more gets up to one permit less in each period. Both counts are exact
    as long as the limit squared is below about the period in ns (250,000 a minute, 30,000 a second). Above that the
    previous count is rounded up, by less than a seventh of the limit, so slightly fewer permits are allowed than by the
    formula. A limit up to a sixteenth of the period in ns is accepted (62 million a second), one above an eighth is
    refused.
    """
    @overload
    def __new__(
        cls, store: Store, name: str, rate: str | Rate, *, rounding: Literal["up", "down"] | None = None
    ) -> Self: ...
    @overload
    def __new__(  # type: ignore[misc]
        cls,
        store: MakesLimiters[SlidingWindow, _L],
        name: str,
        rate: str | Rate,
        *,
        rounding: Literal["up", "down"] | None = None,
    ) -> _L: ...
    def allow(self, key: Key, /) -> bool:
        """Charge one permit to `key` and return whether it was allowed: the fast path of ``hit``.

        Raises ``InvalidKey`` and ``StoreClosed``. O(1), lock-free.
        """
    @property
    def rounding(self) -> str: ...
