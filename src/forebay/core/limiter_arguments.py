"""The arguments of limiters' constructors, checked, and the figures that follow from them.

The compiled core and the pure-Python fallback take them from here, and the limiters over Redis their checks: the same
errors, and states of the same format.
"""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from inspect import Parameter, Signature
from typing import Any, Final, NamedTuple

from forebay.errors import InvalidLimiter, redacted_repr, short_repr
from forebay.rate import Rate
from forebay.segment import layout
from forebay.segment.sizes import ExtentShape

__all__ = [
    "SlidingBits",
    "bound_arguments",
    "bucket_bits",
    "bucketed_shape",
    "check_align",
    "check_limiters",
    "check_refill",
    "concurrency_shape",
    "fixed_bits",
    "interval_refill_ns",
    "interval_start_ns",
    "log_bits",
    "log_shape",
    "not_a_store",
    "rounds_up",
    "signature_of",
    "sliding_bits",
    "words_for",
]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND: Final = timedelta(microseconds=1)
# The default size of the records of all keys.
DEFAULT_WORDS: Final = 2**16

# The bits below a count that show how much of it is used: as in core/table/table.pxd.
USED_BITS: Final = 3
# Bits above those of a limiter's own limit, for tiers with larger limits; fewer if a quantum would be too long.
TIER_BITS: Final = 10
# A quantum is at most 2**-FINE_BITS of a window, where the counts leave enough bits.
FINE_BITS: Final = 16
LEAST_PREVIOUS_BITS: Final = 4
# The largest limit for which a sliding window rounds up by default: there one permit is a fifth of it, or more.
MOST_ROUNDED_UP: Final = 5


@lru_cache  # as this takes longer than all the rest of making a limiter
def signature_of(kind: type) -> Signature:
    """The parameters of a limiter of this class, without annotations: the compiled classes have none."""
    _, *parameters = inspect.signature(kind.__init__).parameters.values()  # type: ignore[misc]
    return Signature([parameter.replace(annotation=Parameter.empty) for parameter in parameters])


def bound_arguments(kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, Any]:
    """The arguments of a limiter of this class, by name.

    Its TypeError names the class. Cython's own would name ``__cinit__``.
    """
    signature = signature_of(kind)
    try:
        return signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(f"{kind.__name__}{signature}: {error}") from None


def not_a_store(kind: type, given: object) -> TypeError:
    return TypeError(
        f"the first argument of {kind.__name__} is a Store, or a RedisStore(url) of forebay.redis, not "
        f"{redacted_repr(given)}"
    )


def check_refill(refill: Any, initial: Any, start: Any, burst: int, name: str) -> None:
    """Raise ``InvalidLimiter`` for arguments of a token bucket that don't go together."""
    if refill != "continuous" and refill != "interval":
        raise InvalidLimiter(f"refill is 'continuous' or 'interval', not {short_repr(refill)}")
    if start is not None:
        if not isinstance(start, datetime) or start.utcoffset() is None:
            raise InvalidLimiter(
                f"the start of limiter {name!r} is a datetime with a time zone, not {short_repr(start)}"
            )
        if refill != "interval":
            raise InvalidLimiter(f"limiter {name!r} refills all the time: start= is for refill='interval'")
    if initial is None:
        return
    if isinstance(initial, bool) or not isinstance(initial, int) or not 1 <= initial <= burst:
        raise InvalidLimiter(
            f"the initial permits of limiter {name!r} are a whole number from 1 to its burst, {burst}, not "
            f"{short_repr(initial)}"
        )
    if refill == "interval":
        raise InvalidLimiter(
            f"limiter {name!r} refills in intervals, so its keys start with the whole burst: take "
            "refill='continuous' with initial=, or a lower burst"
        )


def interval_start_ns(start: datetime | None) -> int:
    """The wall clock time at which one of the periods of a refill in intervals begins."""
    return 0 if start is None else (start - EPOCH) // MICROSECOND * 1000


def interval_refill_ns(rate: Rate, burst: int, most_ahead_ns: int, name: str) -> int:
    """The longest time in which an empty bucket fills in intervals, plus a period, which is at least a quantum."""
    refill_ns = (-(-burst // rate.limit) + 1) * rate.period_ns
    if refill_ns > most_ahead_ns:
        raise InvalidLimiter(
            f"limiter {name!r} would take too long to refill a burst of {short_repr(burst)} at {rate}: "
            "lower the burst or raise the rate"
        )
    return refill_ns


def check_align(align: Any, timezone: Any) -> None:
    """Raise ``InvalidLimiter`` for arguments of a fixed window that don't go together."""
    if not isinstance(align, str) or align not in ("clock", "first", "stagger", "calendar"):
        raise InvalidLimiter(f"align is 'clock', 'first', 'stagger' or 'calendar', not {short_repr(align)}")
    if timezone is not None and align != "calendar":
        raise InvalidLimiter(
            f"a time zone is for windows by the calendar: align='calendar', timezone={short_repr(timezone)}"
        )


def fixed_bits(limit: int, period_ns: int, align: str) -> tuple[int, int]:
    """The bits below the time in a fixed window's state, and those of them below the count."""
    low_bits, window_bits = limit.bit_length(), period_ns.bit_length()
    used_bits = USED_BITS if align in ("first", "stagger") and low_bits + USED_BITS <= window_bits else 0
    low_bits += used_bits
    if align != "first":
        low_bits = max(low_bits, min(limit.bit_length() + TIER_BITS, window_bits - FINE_BITS))
    return low_bits, used_bits


def rounds_up(rounding: Any, limit: int) -> bool:
    """Whether a sliding window with this limit rounds up the previous window's part of the estimate."""
    if rounding is not None and (not isinstance(rounding, str) or rounding not in ("up", "down")):
        raise InvalidLimiter(
            f"rounding is 'up' or 'down', not {short_repr(rounding)}; left out, it depends on the limit"
        )
    return limit <= MOST_ROUNDED_UP if rounding is None else rounding == "up"


class SlidingBits(NamedTuple):
    """The format of a sliding window's state."""

    low_bits: int
    """Both counts."""
    previous_bits: int
    previous_shift: int
    """The previous window's count is in units of 2 to this power."""


def sliding_bits(rate: Rate) -> SlidingBits:
    """Raises ``InvalidLimiter`` if the counts don't fit."""
    # A quantum, 2**(low_bits - 2) ns, is at most half a window.
    count_bits, room = rate.limit.bit_length(), rate.period_ns.bit_length()
    count_bits += max(0, min(TIER_BITS, (room - FINE_BITS - 2 * count_bits) // 2))
    previous_bits, shift = min(count_bits, room - count_bits), 0
    if previous_bits < min(count_bits, LEAST_PREVIOUS_BITS):
        raise InvalidLimiter(
            f"{rate} is too much for a sliding window to count in one cell: take a longer period, or a token bucket"
        )
    if previous_bits < count_bits:
        while rate.limit > ((1 << previous_bits) - 1) << shift:
            shift += 1
    return SlidingBits(count_bits + previous_bits, previous_bits, shift)


def bucketed_shape(buckets: Any, keys: Any, name: str) -> ExtentShape:
    """The memory of a bucketed window. `keys` is None for the default. Raises ``InvalidLimiter``."""
    if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= layout.MAX_BUCKETS:
        raise InvalidLimiter(
            f"the buckets of limiter {name!r} are a whole number from 1 to 2**16, not {short_repr(buckets)}"
        )
    return ExtentShape.checked(max(64, DEFAULT_WORDS // buckets) if keys is None else keys, buckets, name)


def bucket_bits(rate: Rate, buckets: int) -> tuple[int, int]:
    """The length of a bucket in ns, and the bits of a running total below the time in a state.

    Raises ``InvalidLimiter`` for buckets that are too short.
    """
    if buckets > rate.period_ns:
        raise InvalidLimiter(f"{rate} in {buckets} buckets: none is shorter than 1 ns, so take fewer buckets")
    period_ns = -(-rate.period_ns // buckets)
    # As many as there can be: a process that was stopped distinguishes an old total from a new one unless half of
    # what these bits hold was allowed meanwhile. A quantum, 2**(low_bits - 2) ns, is at most half a bucket.
    low_bits = min(period_ns.bit_length(), layout.MAX_KEPT_BITS)
    if rate.limit.bit_length() + 2 > low_bits:
        raise InvalidLimiter(
            f"{rate} in {buckets} buckets: with buckets of {period_ns} ns a limit can be at most "
            f"{2 ** max(low_bits - 2, 0) - 1}; take fewer buckets, or a token bucket"
        )
    return period_ns, low_bits


def log_shape(rate: Rate, keys: Any, name: str) -> ExtentShape:
    """The memory of a sliding log. Raises ``InvalidLimiter``."""
    if rate.limit > layout.MAX_LOG_LIMIT:
        raise InvalidLimiter(f"a sliding log takes limits up to 2**23, not {rate.limit}: take a sliding window")
    return ExtentShape.checked(keys, rate.limit, name)


def log_bits(rate: Rate) -> int:
    """The bits below the time in a sliding log's state. Raises ``InvalidLimiter`` if they leave too few for it."""
    low_bits = 1 + (rate.limit - 1).bit_length()
    # A quantum, 2**(low_bits - 2) ns, is at most half a window.
    if low_bits > rate.period_ns.bit_length():
        raise InvalidLimiter(f"{rate} is too fast for a sliding log: take a token bucket")
    return low_bits


def words_for(limit: int) -> int:
    """Words of one key of a ``Concurrency``: a bit and two words for each slot, in whole cache lines."""
    return -(-((limit + 127) // 128 * 2 + 2 * limit) // 8) * 8


def concurrency_shape(limit: Any, keys: Any, name: str) -> ExtentShape:
    """The memory of a ``Concurrency``. `keys` is None for the default. Raises ``InvalidLimiter``."""
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= layout.MAX_CONCURRENCY_LIMIT:
        raise InvalidLimiter(
            f"the limit of limiter {name!r} is a whole number from 1 to 2**24, not {short_repr(limit)}"
        )
    words = words_for(limit)
    return ExtentShape.checked(max(64, DEFAULT_WORDS // words) if keys is None else keys, words, name)


def check_limiters(limiters: tuple[Any, ...], kind: type[Any], most: int) -> None:
    """Raise ``InvalidLimiter`` unless they are 1 to `most` limiters of one store. `kind` is their base class."""
    if not 1 <= len(limiters) <= most:
        raise InvalidLimiter(f"AllOf takes 1 to {most} limiters, not {len(limiters)}")
    for limiter in limiters:
        if not isinstance(limiter, kind):
            if isinstance(limiter, (list, tuple)):
                raise InvalidLimiter(
                    f"AllOf takes limiters one by one, AllOf(a, b), not a {type(limiter).__name__} of them: write "
                    f"AllOf(*limiters)"
                )
            beside = f" beside {limiters[0]!r}" if limiter is not limiters[0] else ""
            raise InvalidLimiter(f"AllOf takes limiters of one store, not {short_repr(limiter)}{beside}")
        if limiter.store is not limiters[0].store:
            raise InvalidLimiter(
                f"AllOf takes limiters of one store, but {limiter!r} is in another than {limiters[0]!r}"
            )
