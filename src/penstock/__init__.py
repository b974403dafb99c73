"""Rate limits shared by all processes of a host, decided in nanoseconds over shared memory."""

from penstock.core.decision import Decision
from penstock.core.token_bucket import TokenBucket
from penstock.errors import *  # noqa: F403
from penstock.errors import __all__ as _errors
from penstock.rate import Rate
from penstock.store import LimiterStats, Store, StoreStats

from penstock._version import __version__
__all__ = ["Decision", "LimiterStats", "Rate", "Store", "StoreStats", "TokenBucket", *_errors]
