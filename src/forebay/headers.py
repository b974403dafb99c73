"""Where the C API's header is."""

from __future__ import annotations

import os

from forebay._native import need_compiled_core

__all__ = ["get_include"]


def get_include() -> str:
    """The directory of ``forebay.h``, for extensions in C, C++ and Cython that decide without the GIL.

    Raises ``NeedsCompiledCore`` where ``forebay.native`` is false.
    """
    need_compiled_core("forebay.h", "build native code on Linux")
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")
