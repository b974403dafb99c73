"""Names of leased and synced limits. Their stores can't be made without the compiled core, so nothing uses these."""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

__all__ = ["Permits", "SyncedTokenBucket", "SyncedWindow", "decide_now", "repeated_each"]

S = TypeVar("S")

ENTERED: Final = 0
BUSY: Final = 1
CLOSED: Final = 2
FULL: Final = 3
FETCH_SLOT_QUANTUM_NS: Final = 1_048_576
UNKNOWN_SIZE: Final = 31


class Permits:
    """The permits that a host has on loan."""


class SyncedTokenBucket(Generic[S]):
    """A token bucket of several hosts."""


class SyncedWindow(Generic[S]):
    """A window of several hosts."""


def decide_now(*args: Any) -> None:
    """Decides leased limits together with those of the host."""


def repeated_each(*args: Any) -> None:
    """Decides the host's limits of a request that was charged before."""
