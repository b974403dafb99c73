from collections.abc import Callable
from typing import Self, final

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.redis.synced import SyncedStore
from penstock.store import Store

@final
class SyncedTokenBucket(GcraLimiter):
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        burst: int | None,
        synced_store: SyncedStore,
        keys: int,
        name_of: Callable[[Key], bytes],
    ) -> Self: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def burst(self) -> int: ...
    @property
    def synced_store(self) -> SyncedStore: ...
    @property
    def keys(self) -> int: ...
    def _cells(self) -> int: ...
    def _usages(
        self, first: int, last: int, turn: int
    ) -> tuple[int, list[tuple[int, int, bytes, int, int, int, int, int]], int]: ...
    def _learn(
        self, index: int, tag: int, birth: int, charged: int, told: int, read_ns: int, ahead_ns: int
    ) -> None: ...
