"""What stands in for which compiled module, while a process runs without the compiled core.

The import of ``forebay.core.decision`` returns ``forebay.fallback.decision``. A module that needs shared memory has no
stand-in, and its import raises ``NeedsCompiledCore``. The fallback's own modules import each other by their own names.
So tests can import them beside the compiled core, and compare both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

STAND_INS: Final = {
    "forebay.awaited": "forebay.fallback.awaited",
    "forebay.core.algorithms.bucketed_window": "forebay.fallback.bucketed_window",
    "forebay.core.algorithms.concurrency": "forebay.fallback.concurrency",
    "forebay.core.algorithms.credits": "forebay.fallback.credits",
    "forebay.core.algorithms.gcra": "forebay.fallback.gcra",
    "forebay.core.algorithms.leaky_bucket": "forebay.fallback.gcra",
    "forebay.core.algorithms.min_interval": "forebay.fallback.gcra",
    "forebay.core.algorithms.sliding_log": "forebay.fallback.sliding_log",
    "forebay.core.algorithms.token_bucket": "forebay.fallback.token_bucket",
    "forebay.core.algorithms.window": "forebay.fallback.window",
    "forebay.core.all_of": "forebay.fallback.all_of",
    "forebay.core.cell_limiter": "forebay.fallback.cell_limiter",
    "forebay.core.decision": "forebay.fallback.decision",
    "forebay.core.kinds": "forebay.fallback.kinds",
    "forebay.core.leased": "forebay.fallback.tiers",
    "forebay.core.limiter": "forebay.fallback.limiter",
    "forebay.core.reservation": "forebay.fallback.reservation",
    "forebay.core.shared_words": "forebay.fallback.shared_words",
    "forebay.core.synced.token_bucket": "forebay.fallback.tiers",
    "forebay.core.synced.window": "forebay.fallback.tiers",
    "forebay.core.table.keys": "forebay.fallback.keys",
    "forebay.redis.transport.replies": "forebay.fallback.redis.replies",
    "forebay.redis.transport.timed_socket": "forebay.fallback.redis.timed_socket",
    "forebay.store": "forebay.fallback.store",
    "forebay.web.fastpath": "forebay.fallback.web.fastpath",
    "forebay.web.native_requests": "forebay.fallback.web.native_requests",
}
"""Modules that are compiled, or need shared memory, and those that stand in for them."""

WITHOUT_STAND_IN: Final = {
    "forebay.core.c_api": "the C API",
    "forebay.limits": "the storage for the limits library, whose memory:// serves for development,",
    "forebay.snapshots": "forebay snapshot",
    "forebay.tuning": "forebay tune",
    "forebay.verification": "forebay verify",
}
"""The names that have no stand-in, by their package."""


class StandIns(MetaPathFinder, Loader):
    """Finds the modules of `STAND_INS`, and refuses those of `WITHOUT_STAND_IN` by what they are, and a remedy."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        self.refuse = refuse

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name in STAND_INS:
            return ModuleSpec(name, self)
        for package, what in WITHOUT_STAND_IN.items():
            if name == package or name.startswith(package + "."):
                self.refuse(what, "use it on Linux")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(STAND_INS[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name."""
