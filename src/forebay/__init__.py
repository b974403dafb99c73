"""Rate limits shared by all processes of a host, decided in nanoseconds over shared memory."""

from forebay import errors
from forebay._version import __version__
from forebay.core.algorithms.concurrency import Lease
from forebay.core.decision import Decision
from forebay.core.kinds import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    TokenBucket,
)
from forebay.core.reservation import Reservation
from forebay.errors import *  # noqa: F403
from forebay.rate import Rate
from forebay.store import LimiterStats, Store, StoreStats

__all__ = [
    "AllOf",
    "BucketedWindow",
    "Concurrency",
    "Decision",
    "FixedWindow",
    "LeakyBucket",
    "Lease",
    "LimiterStats",
    "MinInterval",
    "Rate",
    "Reservation",
    "SlidingLog",
    "SlidingWindow",
    "Store",
    "StoreStats",
    "TokenBucket",
    "__version__",
]
__all__ += errors.__all__
