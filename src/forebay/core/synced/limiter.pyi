from typing import Any

from typing_extensions import disjoint_base

from forebay.core.cell_limiter import CellLimiter
from forebay.redis.synced.store import SyncedStore

@disjoint_base
class SyncedLimiter(CellLimiter):
    @property
    def synced_store(self) -> SyncedStore: ...
    @property
    def keys(self) -> int: ...
    def reports(self, first: int, last: int, round_number: int) -> tuple[list[tuple[Any, ...]], int]: ...
    @property
    def cell_count(self) -> int: ...
