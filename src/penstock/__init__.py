"""Rate limits shared by all processes of a host, decided in nanoseconds over shared memory."""

from penstock._version import __version__
from penstock.core.all_of import AllOf
from penstock.core.bucketed_window import BucketedWindow
from penstock.core.concurrency import Concurrency, Lease
from penstock.core.decision import Decision
from penstock.core.leaky_bucket import LeakyBucket
from penstock.core.min_interval import MinInterval
from penstock.core.reservation import Reservation
from penstock.core.sliding_log import SlidingLog
from penstock.core.token_bucket import TokenBucket
from penstock.core.window import FixedWindow, SlidingWindow
from penstock.errors import (
    ClockMismatch,
    CostExceedsLimit,
    CountsPerWorkerWarning,
    DamagedSegment,
    ForeignSegment,
    ForeignState,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    LimitExceeded,
    NotAwaited,
    PenstockError,
    SegmentBusy,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSizeWarning,
    SegmentSpaceError,
    SegmentVersionMismatch,
    StoreClosed,
    StoreUnavailable,
    TooManyLimiters,
    TruncatedSegment,
    UnknownClientsWarning,
    UnseenPathsWarning,
    UntrustedSegment,
)
from penstock.rate import Rate
from penstock.store import LimiterStats, Store, StoreStats

__all__ = [
    "AllOf",
    "BucketedWindow",
    "ClockMismatch",
    "Concurrency",
    "CostExceedsLimit",
    "CountsPerWorkerWarning",
    "DamagedSegment",
    "Decision",
    "FixedWindow",
    "ForeignSegment",
    "ForeignState",
    "InvalidCost",
    "InvalidKey",
    "InvalidLimiter",
    "InvalidRate",
    "LeakyBucket",
    "Lease",
    "LimitExceeded",
    "LimiterStats",
    "MinInterval",
    "NotAwaited",
    "PenstockError",
    "Rate",
    "Reservation",
    "SegmentBusy",
    "SegmentError",
    "SegmentRemovedWarning",
    "SegmentSizeWarning",
    "SegmentSpaceError",
    "SegmentVersionMismatch",
    "SlidingLog",
    "SlidingWindow",
    "Store",
    "StoreClosed",
    "StoreStats",
    "StoreUnavailable",
    "TokenBucket",
    "TooManyLimiters",
    "TruncatedSegment",
    "UnknownClientsWarning",
    "UnseenPathsWarning",
    "UntrustedSegment",
    "__version__",
]
