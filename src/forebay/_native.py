"""Chooses the compiled core or the pure-Python fallback, before any other module of forebay is imported.

| | compiled modules are there | they are missing |
| --- | --- | --- |
| Linux | compiled core | ImportError: pip has chosen the wheel for other systems |
| macOS, Windows and others | compiled core | fallback |
| anywhere, with ``FOREBAY_FALLBACK=1`` | fallback | fallback |

With the fallback, an import of a compiled module gets the module of ``forebay.fallback`` that stands in for it: the
import of ``forebay.core.decision`` returns ``forebay.fallback.decision``. `STAND_INS` lists all of them. A module that
needs shared memory has none, and its import raises ``NeedsCompiledCore``. The fallback's own modules import each other
by their own names. So with the compiled core they can be imported, too, and tests compare both.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

from forebay.errors import FallbackWarning, NeedsCompiledCore

__all__ = ["native", "need_compiled_core"]

VARIABLE: Final = "FOREBAY_FALLBACK"

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
    "forebay.tuning": "forebay tune",
    "forebay.verification": "forebay verify",
}
"""The names that have no stand-in, by their package."""

WARNING: Final = (
    "forebay runs without its compiled core: decisions are the same, but slow, and every process counts alone, so "
    "several workers together allow several times each limit. That is for development on one process; in production "
    "run it on 64-bit Linux on x86-64 or aarch64, where pip installs the compiled core"
)
NOT_ON_LINUX: Final = (
    "this forebay has no compiled core, without which every process would count its limits alone. Either pip has found "
    "no wheel for this Python and this processor, and took the one for macOS and Windows: install a C compiler and "
    "Python's headers, then run `pip install --force-reinstall --no-binary forebay forebay`, or take CPython 3.11 to "
    "3.14 on x86-64 or aarch64. Or this is a checkout that isn't built. For development in one process, set "
    f"{VARIABLE}=1"
)


class StandIns(MetaPathFinder, Loader):
    """Finds the modules of `STAND_INS`, and refuses those of `WITHOUT_STAND_IN`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name in STAND_INS:
            return ModuleSpec(name, self)
        for package, what in WITHOUT_STAND_IN.items():
            if name == package or name.startswith(package + "."):
                need_compiled_core(what, "use it on Linux")
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return import_module(STAND_INS[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """It was executed under its own name."""


def choose() -> bool:
    """Whether the compiled core is used. If it isn't, its modules are those of the fallback from now on."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ImportError(f"{VARIABLE} is 1 for forebay's pure-Python fallback, or 0, not {asked!r}")
    if asked != "1":
        core = os.path.join(os.path.dirname(os.path.abspath(__file__)), "core")
        if PathFinder.find_spec("kinds", [core]) is not None:
            return True
        if sys.platform == "linux":
            raise ImportError(NOT_ON_LINUX)
    sys.meta_path.insert(0, StandIns())
    # Shown where the program imports forebay.
    warnings.warn(WARNING, FallbackWarning, stacklevel=4)
    return False


def need_compiled_core(what: str, instead: str) -> None:
    """Raise ``NeedsCompiledCore`` where the fallback is used. `instead` is the remedy."""
    if not native:
        raise NeedsCompiledCore(f"{what} needs forebay's compiled core, which this process runs without: {instead}")


native: Final = choose()
"""Whether decisions are made by the compiled core, over shared memory. If not, the pure-Python fallback makes them, for
this process alone."""
