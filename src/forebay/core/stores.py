"""Types of stores that keep limiters elsewhere than in shared memory, and make limiters of their own for that."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

__all__ = ["MakesLimiters"]

K_contra = TypeVar("K_contra", contravariant=True)
L_co = TypeVar("L_co", covariant=True)


class MakesLimiters(Protocol[K_contra, L_co]):
    """A store that makes an `L` for the public class `K`: ``K(store, ...)`` is an `L`.

    A store that makes several types has one overload of ``make_limiter`` for each.
    """

    def make_limiter(self, kind: type[K_contra], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> L_co:
        """Make the limiter of ``kind(*args, **kwargs)``. One of the arguments is the store: the first, or `store`."""
        ...
