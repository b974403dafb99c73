"""Types of stores that keep limiters elsewhere than in shared memory, and make limiters of their own for that."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

__all__ = ["Combinable", "Joinable", "MakesLimiters"]

K_contra = TypeVar("K_contra", contravariant=True)
L_co = TypeVar("L_co", covariant=True)
K = TypeVar("K")
A = TypeVar("A")
O_contra = TypeVar("O_contra", contravariant=True)


class MakesLimiters(Protocol[K_contra, L_co]):
    """A store that makes an `L` for the public class `K`: ``K(store, ...)`` is an `L`.

    A store that makes several types has one overload of ``make_limiter`` for each.
    """

    def make_limiter(self, kind: type[K_contra], args: tuple[Any, ...], kwargs: dict[str, Any], /) -> L_co:
        """Make the limiter of ``kind(*args, **kwargs)``. One of the arguments is the store: the first, or `store`."""
        ...


class Combinable(Protocol[K, A]):
    """A limiter over such a store that `K`, which is ``AllOf``, combines with others into an `A`.

    All limiters of an `A` have this type with the same `A`, so type checkers refuse limiters of different stores.
    """

    def make_limiter(self, kind: type[K], args: tuple[Combinable[K, A], ...], kwargs: dict[str, Any], /) -> A:
        """Make the object for ``kind(*args)``. The limiter is the first argument."""
        ...


class Joinable(Protocol[K, O_contra, A]):
    """A limiter over such a store that `K`, which is ``AllOf``, combines with its like and with others of type `O`."""

    def make_limiter(
        self, kind: type[K], args: tuple[Joinable[K, O_contra, A] | O_contra, ...], kwargs: dict[str, Any], /
    ) -> A:
        """Make the object for ``kind(*args)``. The limiter is one of the arguments."""
        ...
