"""The first steps of a forked child. On Windows no process forks."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__ = ["in_child"]


def in_child(function: Callable[[], object]) -> None:
    """Call the function in each child that this process forks from now on."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
