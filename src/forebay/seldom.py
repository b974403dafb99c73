"""Chooses the one of several threads that warns or logs, where each would."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable

from forebay import forking

__all__ = ["Seldom"]


class Seldom:
    """Chooses one of the calls for a subject, and then none for `every_s` seconds; by default none ever after.

    *Threads*: safe. *Fork*: safe; a child goes on with its parent's times. O(1).
    """

    def __init__(self, every_s: float = math.inf) -> None:
        self._every_s = every_s
        self._chosen_s: dict[Hashable, float] = {}

    def is_due(self, subject: Hashable = None) -> bool:
        """Whether this call is the chosen one."""
        now_s = time.monotonic()
        with _lock:
            if now_s - self._chosen_s.get(subject, -math.inf) < self._every_s:
                return False
            self._chosen_s[subject] = now_s
            return True


# Reentrant, because a signal handler may log, too.
_lock = threading.RLock()


def _reset_in_child() -> None:
    global _lock
    _lock = threading.RLock()


# A forked child doesn't have the thread that holds the lock.
forking.in_child(_reset_in_child)
