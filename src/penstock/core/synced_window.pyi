from collections.abc import Callable
from typing import Self, final

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.redis.synced import SyncedStore
from penstock.store import Store

@final
class SyncedWindow(CellLimiter):
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        synced_store: SyncedStore,
        slides: bool,
        keys: int,
        name_of: Callable[[Key], bytes],
    ) -> Self: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def synced_store(self) -> SyncedStore: ...
    @property
    def slides(self) -> bool: ...
    @property
    def keys(self) -> int: ...
    @property
    def _low_bits(self) -> int: ...
    def _cells(self) -> int: ...
    def _usages(
        self, first: int, last: int, turn: int
    ) -> tuple[int, list[tuple[int, int, bytes, int, int, int, int, int, int, int, int]], int]: ...
    def _learn(
        self,
        index: int,
        tag: int,
        birth: int,
        end_ns: int,
        *answers: tuple[int | None, int | None, bool],
    ) -> None: ...
