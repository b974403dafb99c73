"""Which of the objects that a module remembers by weak references are alive."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet

__all__ = ["alive_in"]

T = TypeVar("T")


def alive_in(objects: WeakSet[T]) -> list[T]:
    """The objects of a set to which other threads may add at any time. O(n)."""
    while True:
        try:
            return list(objects)
        except RuntimeError:  # one was added, or has ended, meanwhile
            continue
