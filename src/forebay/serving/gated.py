"""The plan of rules whose limits aren't in the memory of a host: those of Redis, leased and synced ones.

`forebay_server` matches the rules, and asks Python to charge the limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.rules.building import Built, BuiltRule
from forebay.serving.charging import Charging, redis_of
from forebay.serving.remembered import Remembered
from forebay.web.charging_once import check_together

__all__ = ["GatePlan", "charging_of"]

_THREADS: Final = 8
"""Threads that charge limits. While one waits for Redis, others use the processor."""
_PATIENCE_S: Final = 0.5
"""In addition to the deadlines of a question: of the one before it in its thread, and its own."""


@dataclass(frozen=True, slots=True)
class GatePlan:
    """What `forebay_server` decides by, where Python charges the limits."""

    document: str
    """The rules, as in a ``Plan``."""
    of_bans: tuple[Any, ...]
    """The limiters of its first limits, which are in the memory of the host."""
    charging: Charging
    store: Any
    trusts_unix: bool
    """Whether a peer behind a Unix socket may name a client. True if no rule needs one."""

    def compiled(self, server: Any) -> Any:
        """As the module `forebay_server` takes it."""
        timeout_s = redis_of(self.store).timeout_s
        return server.Gate(
            self.document,
            self.of_bans,
            self.charging,
            books=self.charging.books,
            threads=_THREADS,
            within_s=2 * timeout_s + _PATIENCE_S,
            takes_s=timeout_s,
        )


def charging_of(built: Iterable[Built], limiters: Sequence[Any], store: Any, remembered: Remembered) -> Charging:
    """What charges the `limiters` of a plan of these rules.

    Raises ``InvalidLimiter`` for rules with a `request_id` that can't be charged as one.
    """
    groups = [own for one in built if isinstance(one, BuiltRule) for own in one.rules.values()]
    # With `bytes` it would be another kind, which is refused before.
    rules: list[Any] = [rule for own in groups for rule in own]
    check_together(rules)
    return Charging(limiters, rules, store, remembered)
