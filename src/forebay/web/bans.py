"""Bans: a key with too many denials is denied for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.window import FixedWindow
from forebay.errors import InvalidLimiter, short_repr
from forebay.rate import Duration, Rate
from forebay.store import Store

if TYPE_CHECKING:
    from forebay.core.decision import Decision
    from forebay.core.table.keys import Key

__all__ = ["Ban", "names_of_limiters"]


def names_of_limiters(name: str) -> tuple[str, str]:
    """The names of the limiters of a ban: of the one that holds bans, and of the one that counts denials."""
    return f"{name} bans", f"{name} denials"


class Ban:
    """Denies a key for a while after so many denials: ``Ban(store, "guessers", "20/minute", lasts="10 minutes")``.

    Given to one or several rules as `ban`. Their denials are counted for each key in the memory of this host, for the
    period of the rate from a key's first denial on. The last one, here the twentieth, bans the key for the time
    `lasts`. These rules then deny the key at once: no limiter is charged, and nothing is counted. After the ban the
    count begins anew.

    `store` is a ``Store``, also for rules over Redis, whose bans then hold on this host. `denials` is a rate, `lasts` a
    length of time as text, seconds or a ``timedelta``. `name` names the ban in denials, and in ``Store.stats``
    its limiters ``"<name> bans"`` and ``"<name> denials"``. Bans of one name are one, in all processes.

    Raises ``InvalidLimiter``, ``InvalidRate``, ``TooManyLimiters``. Threads, processes, fork: see ``Limiter``. A check
    is one decision that writes nothing. A key takes up to two cells of the store. If a full store has no room for one
    of them, the key isn't banned.
    """

    def __init__(self, store: Store, name: str, denials: str | Rate, *, lasts: Duration) -> None:
        if not isinstance(name, str):
            raise InvalidLimiter(f'a Ban has a name such as "guessers", not {short_repr(name)}')
        if not isinstance(store, Store):
            raise InvalidLimiter(
                f"a Ban is kept in the memory of a host, and {short_repr(store)} is no Store: write "
                'Ban(Store("bans", keys=100_000), ...), which rules over Redis may have, too'
            )
        self.name = name
        bans_name, denials_name = names_of_limiters(name)
        self._bans = MinInterval(store, bans_name, lasts)
        self._denials = FixedWindow(store, denials_name, denials, align="first")

    def __repr__(self) -> str:
        return f"<Ban {self.name!r} after {self._denials.rate}>"

    @property
    def limiters(self) -> tuple[MinInterval, FixedWindow]:
        """The limiter that holds the bans, and the one that counts denials."""
        return self._bans, self._denials

    def peek(self, key: Key) -> Decision:
        """The ban of `key`: denied, with ``retry_after`` until its end; or allowed. Writes nothing."""
        return self._bans.peek(key)

    def count_denial(self, key: Key) -> None:
        """Count a denial of `key`, and ban it if there are too many. A ban isn't prolonged."""
        decision = self._denials.hit(key)
        if decision.remaining == 0 and decision.reason != "no room" and self._bans.allow(key):
            self._denials.reset(key)

    def lift(self, key: Key) -> None:
        """End the ban of `key`, and forget its denials. O(1). Any process of the host may do it."""
        self._bans.reset(key)
        self._denials.reset(key)
