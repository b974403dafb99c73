"""Which of the objects that a module remembers by weak references are alive."""

from __future__ import annotations

from typing import TypeVar
from weakref import WeakSet, ref

__all__ = ["alive_in"]

T = TypeVar("T")


def alive_in(objects: WeakSet[T]) -> list[T]:
    """The objects of a set to which other threads may add at any time. O(n).

    An iteration could miss one without the GIL, if one object comes and another ends meanwhile, so that the set is as
    large as before. A copy of the set's references is one atomic step.
    """
    references: set[ref[T]] = vars(objects)["data"].copy()
    return [each for reference in references if (each := reference()) is not None]
