"""The public classes of limiters. No class derives from them, as none derives from the compiled ones."""

from __future__ import annotations

from typing import NoReturn

from forebay.core.limiter_arguments import signature_of
from forebay.fallback.all_of import AllOf
from forebay.fallback.bucketed_window import BucketedWindow
from forebay.fallback.concurrency import Concurrency
from forebay.fallback.credits import Credits
from forebay.fallback.gcra import LeakyBucket, MinInterval
from forebay.fallback.sliding_log import SlidingLog
from forebay.fallback.token_bucket import TokenBucket
from forebay.fallback.window import FixedWindow, SlidingWindow

__all__ = [
    "AllOf",
    "BucketedWindow",
    "Concurrency",
    "Credits",
    "FixedWindow",
    "LeakyBucket",
    "MinInterval",
    "SlidingLog",
    "SlidingWindow",
    "TokenBucket",
]


def _refuse(cls: type) -> NoReturn:
    raise TypeError(f"no class derives from {cls.__base__.__name__ if cls.__base__ else cls.__name__}")


for kind in (
    AllOf, BucketedWindow, Concurrency, Credits, FixedWindow, LeakyBucket, MinInterval, SlidingLog, SlidingWindow,
    TokenBucket,
):  # fmt: skip
    kind.__init_subclass__ = classmethod(_refuse)  # type: ignore[assignment]
    # inspect and help() would find that of __new__.
    kind.__signature__ = signature_of(kind)
