"""What `forebay_server` is answered about limits that Python charges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

__all__ = ["Answer", "Decided", "Numbers"]

Numbers: TypeAlias = tuple[bool, int, int, int, int, bool, int]
"""A decision: whether it allows, its limit, what remains, when to ask again and when the key is as fresh, whether the
store has no room, and the time until the request may proceed. Times are in nanoseconds.
"""


class Decided(NamedTuple):
    """Whether a request is allowed, and the decisions of its uses."""

    allowed: bool
    each: Sequence[Numbers | None]
    """If the request is denied, None stands for a limit that was not asked. A limit below the cost never allows it."""
    charge: str | None = None
    """By which it can be given back."""
    lease: str | None = None
    """By which its permits can be renewed and given back."""
    is_first: bool = True
    """Whether it was decided now, and not when the question was sent before."""

    def given_again(self) -> Decided:
        """For a question that is sent again."""
        return self._replace(is_first=False)

    def with_charge(self, charge: str) -> Decided:
        """The same, with an id."""
        return self._replace(charge=charge)

    def with_lease(self, lease: str) -> Decided:
        """The same, with an id."""
        return self._replace(lease=lease)


Answer: TypeAlias = Decided | str | None
"""A text is an error of the asking service. None: the store can't be asked."""
