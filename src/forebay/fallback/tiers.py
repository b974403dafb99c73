"""Leased and synced limits, which need a host's shared memory: what refuses to be made."""

from __future__ import annotations

from typing import Any, Final, Generic, NoReturn, TypeVar

from forebay.errors import NeedsCompiledCore

__all__ = ["Permits", "SyncedTokenBucket", "SyncedWindow", "decide_now"]

S = TypeVar("S")

ENTERED: Final = 0
BUSY: Final = 1
CLOSED: Final = 2
FULL: Final = 3
FETCH_SLOT_QUANTUM_NS: Final = 1
UNKNOWN_SIZE: Final = 31


def _refused() -> NeedsCompiledCore:
    return NeedsCompiledCore(
        "leased and synced limits put a host's shared memory in front of Redis, which only forebay's compiled core has: "
        "for development make the limiters over the RedisStore itself, which decides each request in Redis"
    )


class Permits:
    def __init__(self, *args: Any) -> NoReturn:
        raise _refused()


class SyncedTokenBucket(Generic[S]):
    def __init__(self, *args: Any) -> NoReturn:
        raise _refused()


class SyncedWindow(Generic[S]):
    def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _refused()


def decide_now(*args: Any) -> NoReturn:
    raise _refused()
