"""All exceptions and warnings of forebay. A denial is none: these mean that a call can't be carried out."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

__all__ = [
    "ClockMismatch",
    "CostExceedsLimit",
    "CountsPerWorkerWarning",
    "DamagedSegment",
    "FallbackWarning",
    "ForebayError",
    "ForeignSegment",
    "ForeignState",
    "InvalidCost",
    "InvalidKey",
    "InvalidLimiter",
    "InvalidRate",
    "InvalidRuleFile",
    "InvalidURL",
    "LimitExceeded",
    "LimiterNameWarning",
    "LimitsDisabledWarning",
    "NeedsCompiledCore",
    "NotAwaited",
    "SegmentBusy",
    "SegmentError",
    "SegmentMissing",
    "SegmentRemovedWarning",
    "SegmentSizeWarning",
    "SegmentSpaceError",
    "SegmentVersionMismatch",
    "StoreClosed",
    "StoreFallbackWarning",
    "StoreFull",
    "StoreUnavailable",
    "TooManyLimiters",
    "TruncatedSegment",
    "UnknownClientsWarning",
    "UnseenPathsWarning",
    "UntrustedSegment",
]


def short_repr(value: object) -> str:
    """A value that was refused, for a message: short, and never an error itself."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def redacted_repr(value: object) -> str:
    """As ``short_repr``, of what stands in a store's place: a text may be a URL with a password in it."""
    return f"a {type(value).__name__}" if isinstance(value, (str, bytes)) else short_repr(value)


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor or change its colours, as ``repr`` does."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


class ForebayError(Exception):
    """Base of every exception of forebay."""


class InvalidRate(ForebayError, ValueError):
    """A rate that can't be read, or that the clock or the arithmetic can't represent."""


class InvalidURL(ForebayError, ValueError):
    """A URL that names no store, or options that its store can't take."""


class RuleFileProblem(NamedTuple):
    """A place in a rule file, its line and column counted from 1, and what is wrong there."""

    line: int
    column: int
    message: str


class InvalidRuleFile(ForebayError, ValueError):
    """A rule file that can't be used.

    Attributes: ``path``, and ``problems``, all that were found, in their order in the file.
    """

    def __init__(self, path: str, problems: tuple[RuleFileProblem, ...]) -> None:
        super().__init__(path, problems)
        self.path, self.problems = path, problems

    def __str__(self) -> str:
        return "\n".join(f"{self.path}:{line}:{column}: {message}" for line, column, message in self.problems)


class InvalidKey(ForebayError, TypeError):
    """A key of a type that is not str, bytes, int or a tuple of them."""


class InvalidCost(ForebayError, ValueError):
    """A cost, or a number of permits to add, that is not a whole number of at least 0, or too large."""


class InvalidLimiter(ForebayError, ValueError):
    """A limiter's name or parameters that can't be used."""


class CostExceedsLimit(ForebayError, ValueError):
    """A cost that is higher than the limit, so no wait can make it fit.

    Attributes: ``cost``, ``limit`` (the most that can be allowed at once), ``limiter`` (its name).
    """

    def __init__(self, cost: int, limit: int, limiter: str) -> None:
        super().__init__(cost, limit, limiter)
        self.cost, self.limit, self.limiter = cost, limit, limiter

    def __str__(self) -> str:
        return (
            f"a cost of {short_repr(self.cost)} can never be allowed by limiter {self.limiter!r}, which allows at most "
            f"{self.limit} at once: raise its limit (a bucket's burst, initial or capacity) or split the request"
        )


class LimitExceeded(ForebayError):
    """Raised by a ``with`` block or a decorator when there was no permit in time.

    Attributes: ``limiter`` (its name), ``limit``, ``retry_after`` (seconds after which a retry may succeed;
    infinity for ``Credits``, whose ``limit`` is what the key has left).
    """

    def __init__(self, limiter: str, limit: int, retry_after: float) -> None:
        super().__init__(limiter, limit, retry_after)
        self.limiter, self.limit, self.retry_after = limiter, limit, retry_after

    def __str__(self) -> str:
        if math.isinf(self.retry_after):
            return (
                f"limiter {self.limiter!r} had no permit: the key has {self.limit} left, and no time brings more: give "
                "it more by add()"
            )
        when = (
            f"after {self.retry_after:.3g} s" if self.retry_after else "now, unless the store has no room for the key"
        )
        return f"limiter {self.limiter!r} had no permit in time: it allows {self.limit}, and a retry may succeed {when}"


class StoreClosed(ForebayError):
    """A limiter or a store was used after ``Store.close()``."""


class StoreFull(ForebayError):
    """A store had no room for the key that permits were to be added to, so none were.

    Attributes: ``limiter`` (its name).
    """

    def __init__(self, limiter: str) -> None:
        super().__init__(limiter)
        self.limiter = limiter

    def __str__(self) -> str:
        return (
            f"limiter {self.limiter!r} got no permits for the key, as its store has no room for another key: make the "
            "store for more keys, or free the places of those that are not needed any more: if take_up_to() takes all "
            "of a key's Credits, its place is free 5 minutes later, and reset() frees that of any other limiter's key"
        )


class TooManyLimiters(ForebayError):
    """A store has no place for another limiter."""


class SegmentError(ForebayError):
    """A segment that can't be used.

    Attributes: ``path``, ``found`` and ``expected`` (what was there, what should have been), ``remedy``.
    """

    def __init__(self, path: str | os.PathLike[str], found: str, expected: str, remedy: str) -> None:
        super().__init__(path, found, expected, remedy)
        self.path, self.found, self.expected, self.remedy = os.fspath(path), found, expected, remedy

    def __str__(self) -> str:
        return f"{self.path}: found {self.found}, expected {self.expected}; {self.remedy}"


class SegmentMissing(SegmentError):
    """There is no segment at the place, and the call makes none."""


class ForeignSegment(SegmentError):
    """The file is not a forebay segment."""


class SegmentVersionMismatch(SegmentError):
    """The segment was made by a forebay with another layout."""


class TruncatedSegment(SegmentError):
    """The file's size is not the one that its header states."""


class DamagedSegment(SegmentError):
    """The header or the list of limiters contradicts itself."""


class UntrustedSegment(SegmentError):
    """A user who isn't trusted could have made or changed the file."""


class ClockMismatch(SegmentError):
    """The segment has another kind of clock than the store, or this process's clock can't show its time."""


class SegmentSpaceError(SegmentError):
    """There is no space for the whole segment, or for the memory that a limiter needs."""


class SegmentBusy(SegmentError):
    """Another process has been creating the segment for too long; it may be stopped."""


class SegmentSizeWarning(UserWarning):
    """The existing segment was made for another number of keys than the store's or the limiter's `keys`."""


class SegmentRemovedWarning(UserWarning):
    """A segment was removed while processes use it. Processes that start later make another, with separate limits."""


class LimiterNameWarning(UserWarning):
    """A process has limiters of one name that count apart, or limiters of several classes that share one state."""


class StoreFallbackWarning(UserWarning):
    """The place that a URL names can't be had, so limits are kept in its fallback."""


class CountsPerWorkerWarning(UserWarning):
    """Each of several workers has a store of its own, so each admits as many requests as all should together."""


class FallbackWarning(UserWarning):
    """forebay runs without its compiled core: for development, as limits then count in one process only."""


class NeedsCompiledCore(ForebayError, ImportError):
    """A part of forebay that only its compiled core has, used where ``forebay.native`` is false."""


class UnseenPathsWarning(UserWarning):
    """No request of many has matched the path of a rule or body limit: the path may lack a prefix."""


class LimitsDisabledWarning(UserWarning):
    """The limits of a web application are switched off, so every request is handled."""


class NotAwaited(ForebayError, TypeError):
    """The result of an asyncio method of a limiter was used as true or false before it was awaited.

    Also the result of ``limited`` and ``hold``, which wait only in a ``with`` or ``async with`` block.
    """


class UnknownClientsWarning(UserWarning):
    """The server listens at a Unix socket, so clients have no addresses, by which the limits here distinguish them."""


class StoreUnavailable(ForebayError):
    """A remote store has not decided: it is unreachable, too slow, or refuses. ``__cause__`` is the client's error.

    Whether the request was charged is unknown: it may have been, if only the reply was lost.
    """


class ForeignState(ForebayError):
    """A limiter's key in Redis holds a value that no limiter of its kind has written.

    Attributes: ``key``, the key in Redis.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"the Redis key {self.key!r} holds a value that is no limiter's state: give the store another "
            "namespace, or delete that key"
        )
