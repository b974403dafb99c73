"""Rate limits shared by all processes of a host, decided in nanoseconds over shared memory."""

from forebay._version import __version__
from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.all_of import AllOf
from forebay.core.decision import Decision
from forebay.core.reservation import Reservation
from forebay.errors import (
    ClockMismatch,
    CostExceedsLimit,
    CountsPerWorkerWarning,
    DamagedSegment,
    ForebayError,
    ForeignSegment,
    ForeignState,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    LimitExceeded,
    NotAwaited,
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
from forebay.rate import Rate
from forebay.store import LimiterStats, Store, StoreStats

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
    "ForebayError",
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
