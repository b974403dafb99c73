"""Chooses the compiled core or the pure-Python fallback, before any other module of forebay is imported.

| | compiled modules are there | they are missing |
| --- | --- | --- |
| Linux | compiled core | ImportError: pip has chosen the wheel for other systems |
| macOS, Windows and others | compiled core | fallback |
| anywhere, with ``FOREBAY_FALLBACK=1`` | ImportError: the wheel has no fallback | fallback |

With the fallback, an import of a compiled module gets the module that stands in for it: see
``forebay.fallback.stand_ins``.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import PathFinder
from typing import Final

from forebay.errors import FallbackWarning, NeedsCompiledCore

__all__ = ["native", "need_compiled_core"]

VARIABLE: Final = "FOREBAY_FALLBACK"

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
NO_FALLBACK: Final = (
    f"{VARIABLE} is 1, and this forebay has the compiled core, but no fallback: unset the variable, or run "
    f"`{VARIABLE}=1 pip install --force-reinstall --no-binary forebay forebay`, which installs the fallback alone"
)


def choose() -> bool:
    """Whether the compiled core is used. If it isn't, its modules are those of the fallback from now on."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        raise ImportError(f"{VARIABLE} is 1 for forebay's pure-Python fallback, or 0, not {asked!r}")
    here = os.path.dirname(os.path.abspath(__file__))
    if asked != "1":
        if PathFinder.find_spec("kinds", [os.path.join(here, "core")]) is not None:
            return True
        if sys.platform == "linux":
            raise ImportError(NOT_ON_LINUX)
    elif PathFinder.find_spec("fallback", [here]) is None:
        raise ImportError(NO_FALLBACK)
    from forebay.fallback.stand_ins import StandIns

    sys.meta_path.insert(0, StandIns(need_compiled_core))
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
