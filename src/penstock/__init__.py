"""Rate limits shared by all processes of a host, decided in nanoseconds over shared memory."""

from penstock._version import __version__
from penstock.core.decision import Decision
from penstock.core.token_bucket import TokenBucket
from penstock.errors import (
    ClockMismatch,
    CostExceedsLimit,
    DamagedSegment,
    ForeignSegment,
    InvalidCost,
    InvalidKey,
    InvalidLimiter,
    InvalidRate,
    PenstockError,
    SegmentBusy,
    SegmentError,
    SegmentSizeWarning,
    SegmentSpaceError,
    SegmentVersionMismatch,
    StoreClosed,
    TooManyLimiters,
    TruncatedSegment,
    UntrustedSegment,
)
from penstock.rate import Rate
from penstock.store import LimiterStats, Store, StoreStats

__all__ = [
    "ClockMismatch",
    "CostExceedsLimit",
    "DamagedSegment",
    "Decision",
    "ForeignSegment",
    "InvalidCost",
    "InvalidKey",
    "InvalidLimiter",
    "InvalidRate",
    "LimiterStats",
    "PenstockError",
    "Rate",
    "SegmentBusy",
    "SegmentError",
    "SegmentSizeWarning",
    "SegmentSpaceError",
    "SegmentVersionMismatch",
    "Store",
    "StoreClosed",
    "StoreStats",
    "TokenBucket",
    "TooManyLimiters",
    "TruncatedSegment",
    "UntrustedSegment",
    "__version__",
]
