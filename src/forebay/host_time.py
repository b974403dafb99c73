"""The host's time since some start, for what must not follow a test that freezes Python's time."""

from __future__ import annotations

import time

__all__ = ["host_ns"]

if hasattr(time, "clock_gettime_ns"):

    def host_ns() -> int:
        """``CLOCK_MONOTONIC``."""
        # Not time.monotonic_ns: a test may have frozen it.
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)

else:
    host_ns = time.perf_counter_ns  # Windows; its time.monotonic_ns advances in steps of 15 ms
