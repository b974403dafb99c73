"""Checks the arguments of the public limiter classes, and chooses the algorithm of each over Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.concurrency import Concurrency
from forebay.core.algorithms.credits import Credits
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.limiter_arguments import bound_arguments, check_align
from forebay.errors import InvalidLimiter, short_repr
from forebay.redis import algorithms
from forebay.redis.commands import LimiterSpec

__all__ = ["spec_for"]


def spec_for(kind: type, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[str, LimiterSpec]:
    """A limiter's name, algorithm and parameters. Raises ``TypeError``, ``InvalidLimiter`` and ``InvalidRate``."""
    if kind not in _KINDS:
        raise TypeError(f"{kind.__name__} is none of the limiters that can be made over Redis")
    if kind is SlidingLog:
        # Over shared memory this argument is required.
        kwargs = {"keys": None, **kwargs}
    arguments = bound_arguments(kind, args, kwargs)
    keys = arguments.pop("keys", None)
    for what in ("self", "store"):
        arguments.pop(what, None)
    name = arguments["name"]
    if not isinstance(name, str) or not 1 <= len(name.encode("utf-8", "replace")) <= 100 or not is_text(name):
        raise InvalidLimiter(f"a limiter's name is text of 1 to 100 UTF-8 bytes, not {short_repr(name)}")
    if keys is not None and (isinstance(keys, bool) or not isinstance(keys, int) or keys < 1):
        raise InvalidLimiter(
            f"keys of limiter {name!r} is a whole number of at least 1, not {short_repr(keys)}; over "
            f"Redis it needs none"
        )
    return name, _KINDS[kind](**arguments)


def is_text(name: str) -> bool:
    """Whether a name has no half of a surrogate pair and no null character, which would end it in C.

    Limiters in shared memory have the same rule.
    """
    return "\0" not in name and not any("\ud800" <= letter <= "\udfff" for letter in name)


def _token_bucket(
    name: str, rate: Any, burst: Any = None, refill: Any = "continuous", initial: Any = None, start: Any = None
) -> LimiterSpec:
    if refill not in ("continuous", "interval"):
        raise InvalidLimiter(f"refill is 'continuous' or 'interval', not {short_repr(refill)}")
    if initial is not None:
        raise InvalidLimiter(
            f"limiter {name!r} would start with some of its permits, which only limiters over a Store do: over Redis "
            "leave initial= out, or take a lower burst"
        )
    if start is not None:
        raise InvalidLimiter(
            f"limiter {name!r} would refill from a time of its own, which only limiters over a Store do: over Redis "
            "leave start= out, and its periods start at multiples of their length by the wall clock"
        )
    algorithm = (algorithms.Gcra if refill == "continuous" else algorithms.IntervalBucket)(name, rate, burst)
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "burst": algorithm.limit, "refill": refill})


def _leaky_bucket(name: str, rate: Any, capacity: Any) -> LimiterSpec:
    algorithm = algorithms.LeakyBucket(name, rate, algorithms.whole(capacity, "capacity", name))
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "capacity": algorithm.limit})


def _min_interval(name: str, interval: Any) -> LimiterSpec:
    algorithm = algorithms.MinInterval.of(name, interval)
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "interval_ns": algorithm.rate.period_ns})


def _fixed_window(name: str, rate: Any, align: Any = "clock", timezone: Any = None) -> LimiterSpec:
    check_align(align, timezone)
    if align == "calendar":
        raise InvalidLimiter(
            f"limiter {name!r} would follow a calendar, which only limiters over a Store do: over Redis take windows "
            "of one length, align='clock', or a TokenBucket in intervals"
        )
    algorithm = algorithms.FixedWindow(rate, align)
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "align": align})


def _sliding_window(name: str, rate: Any, rounding: Any = None) -> LimiterSpec:
    algorithm = algorithms.SlidingWindow(rate, rounding)
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "rounding": algorithm.rounding})


def _bucketed_window(name: str, rate: Any, buckets: Any = 60) -> LimiterSpec:
    algorithm = algorithms.BucketedWindow(name, rate, buckets)
    return LimiterSpec(algorithm, {"rate": algorithm.rate, "buckets": buckets})


def _sliding_log(name: str, rate: Any) -> LimiterSpec:
    algorithm = algorithms.SlidingLog(rate)
    return LimiterSpec(algorithm, {"rate": algorithm.rate})


def _concurrency(name: str, limit: Any, lease: Any = "30s") -> LimiterSpec:
    algorithm = algorithms.Concurrency(name, limit, lease)
    return LimiterSpec(algorithm, {"limit": algorithm.limit, "lease_ns": 1000 * algorithm.lease_us})


def _credits(name: str) -> LimiterSpec:
    return LimiterSpec(algorithms.Credits(), {})


_KINDS: Final[dict[type, Callable[..., LimiterSpec]]] = {
    TokenBucket: _token_bucket,
    LeakyBucket: _leaky_bucket,
    MinInterval: _min_interval,
    FixedWindow: _fixed_window,
    SlidingWindow: _sliding_window,
    BucketedWindow: _bucketed_window,
    SlidingLog: _sliding_log,
    Concurrency: _concurrency,
    Credits: _credits,
}
