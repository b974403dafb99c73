"""What forebay raises. A denial is never an exception; these say that something can't be done at all."""

from __future__ import annotations

import os

__all__ = [
    "ClockMismatch",
    "CostExceedsLimit",
    "CountsPerWorkerWarning",
    "DamagedSegment",
    "ForebayError",
    "ForeignSegment",
    "ForeignState",
    "InvalidCost",
    "InvalidKey",
    "InvalidLimiter",
    "InvalidRate",
    "LimitExceeded",
    "NotAwaited",
    "SegmentBusy",
    "SegmentError",
    "SegmentRemovedWarning",
    "SegmentSizeWarning",
    "SegmentSpaceError",
    "SegmentVersionMismatch",
    "StoreClosed",
    "StoreUnavailable",
    "TooManyLimiters",
    "TruncatedSegment",
    "UnknownClientsWarning",
    "UnseenPathsWarning",
    "UntrustedSegment",
]


def shown(value: object) -> str:
    """A value that was refused, for a message: short, and never an error itself."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 100 else f"{text[:97]}..."


def without_url(value: object) -> str:
    """As ``shown``, of what stands in a store's place: a text may be a URL with a password in it."""
    return f"a {type(value).__name__}" if isinstance(value, (str, bytes)) else shown(value)


class ForebayError(Exception):
    """Base of every exception of forebay."""


class InvalidRate(ForebayError, ValueError):
    """A rate that can't be read, or that the clock or the arithmetic can't represent."""


class InvalidKey(ForebayError, TypeError):
    """A key of a type that is not str, bytes, int or a tuple of them."""


class InvalidCost(ForebayError, ValueError):
    """A cost that is not a whole number of at least 0."""


class InvalidLimiter(ForebayError, ValueError):
    """A limiter's name or parameters that can't be used."""


class CostExceedsLimit(ForebayError, ValueError):
    """A cost that no waiting will ever make fit.

    Attributes: ``cost``, ``limit`` (the most that can be allowed at once), ``limiter`` (its name).
    """

    def __init__(self, cost: int, limit: int, limiter: str) -> None:
        super().__init__(cost, limit, limiter)
        self.cost, self.limit, self.limiter = cost, limit, limiter

    def __str__(self) -> str:
        return (
            f"a cost of {shown(self.cost)} can never be allowed by limiter {self.limiter!r}, which allows at most "
            f"{self.limit} at once: raise its limit (a bucket's burst or capacity) or split the request"
        )


class LimitExceeded(ForebayError):
    """What a ``with`` block or a decorator raises when there was no permit in time.

    Attributes: ``limiter`` (its name), ``limit``, ``retry_after`` (seconds after which asking again may succeed).
    """

    def __init__(self, limiter: str, limit: int, retry_after: float) -> None:
        super().__init__(limiter, limit, retry_after)
        self.limiter, self.limit, self.retry_after = limiter, limit, retry_after

    def __str__(self) -> str:
        return (
            f"limiter {self.limiter!r} had no permit in time: it allows {self.limit}, and asking again may succeed "
            f"after {self.retry_after:.3g} s"
        )


class StoreClosed(ForebayError):
    """A limiter or a store was used after ``Store.close()``."""


class TooManyLimiters(ForebayError):
    """A store has no room for another limiter's name."""


class SegmentError(ForebayError):
    """A segment that can't be used.

    Attributes: ``path``, ``found`` and ``expected`` (what was there, what should have been), ``remedy``.
    """

    def __init__(self, path: str | os.PathLike[str], found: str, expected: str, remedy: str) -> None:
        super().__init__(path, found, expected, remedy)
        self.path, self.found, self.expected, self.remedy = os.fspath(path), found, expected, remedy

    def __str__(self) -> str:
        return f"{self.path}: found {self.found}, expected {self.expected}; {self.remedy}"


class ForeignSegment(SegmentError):
    """The file is not a forebay segment."""


class SegmentVersionMismatch(SegmentError):
    """The segment was made by a forebay with another layout."""


class TruncatedSegment(SegmentError):
    """The file's size is not the one that its header states."""


class DamagedSegment(SegmentError):
    """The header or the list of limiters contradicts itself."""


class UntrustedSegment(SegmentError):
    """The file could have been planted or changed by somebody who isn't trusted."""


class ClockMismatch(SegmentError):
    """The segment runs on another kind of clock than the one asked for, or this process's clock can't tell its time."""


class SegmentSpaceError(SegmentError):
    """There is no room for the whole segment, or for all that a limiter needs."""


class SegmentBusy(SegmentError):
    """Another process has been creating the segment for too long; it may be stopped."""


class SegmentSizeWarning(UserWarning):
    """The segment that exists was made for another number of keys than the one asked for."""


class SegmentRemovedWarning(UserWarning):
    """A segment was removed while processes use it: those that start meanwhile have another, with limits of its own."""


class CountsPerWorkerWarning(UserWarning):
    """Each of several workers has a store of its own, so each lets as many requests in as all should together."""


class UnseenPathsWarning(UserWarning):
    """No rule that has a path has matched a request yet, and there have been many: the paths may lack a prefix."""


class NotAwaited(ForebayError, TypeError):
    """The answer of a limiter over an asyncio store was taken for true or false before it was awaited."""


class UnknownClientsWarning(UserWarning):
    """The server listens at a Unix socket, so it can't tell clients by their addresses, as limits here do."""


class StoreUnavailable(ForebayError):
    """A store elsewhere has not decided: it is away, too slow, or refuses. The cause is what its client has raised.

    Whether the request was charged is not known: it may have been, if the answer was lost.
    """


class ForeignState(ForebayError):
    """Under a limiter's key in Redis is something that no limiter of its kind has written.

    Attributes: ``key``, the key in Redis.
    """

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

    def __str__(self) -> str:
        return (
            f"the Redis key {self.key!r} holds something else than a limiter's state: give the store another "
            "namespace, or delete that key"
        )
