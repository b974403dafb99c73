"""Where the C API's header is."""

from __future__ import annotations

import os

__all__ = ["get_include"]


def get_include() -> str:
    """The directory of ``forebay.h``, for extensions in C, C++ and Cython that decide without the GIL."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "include")
