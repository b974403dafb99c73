from threading import local
from typing import Any, Generic

from typing_extensions import TypeVar, disjoint_base

from forebay.core.cell_limiter import CellLimiter

# The type of the store that made it.
_S = TypeVar("_S", default=Any)

class Names(local):
    by_tag: dict[int, bytes]

    def __init__(self) -> None: ...

@disjoint_base
class SyncedLimiter(CellLimiter, Generic[_S]):
    @property
    def synced_store(self) -> _S: ...
    @property
    def keys(self) -> int: ...
    def reports(
        self, first: int, last: int, round_number: int, learned: bytearray | None = None
    ) -> tuple[list[tuple[Any, ...]], int]: ...
    @property
    def cell_count(self) -> int: ...
