from typing import NoReturn, Self, TypeVar, final, overload

from forebay.core.cell_limiter import CellLimiter
from forebay.core.stores import MakesLimiters
from forebay.core.table.keys import Key
from forebay.store import Store

_L = TypeVar("_L")

@final
class Credits(CellLimiter):
    @overload
    def __new__(cls, store: Store, name: str) -> Self: ...
    @overload
    def __new__(cls, store: MakesLimiters[Credits, _L], name: str) -> _L: ...  # type: ignore[misc]
    def allow(self, key: Key, /) -> bool: ...
    def add(self, key: Key, permits: int) -> int: ...
    def reset(self, key: Key) -> NoReturn: ...
