from typing import final

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.extents import ExtentShape
from penstock.rate import Rate
from penstock.store import Store

@final
class SlidingLog(CellLimiter):
    def __init__(self, store: Store, name: str, rate: str | Rate, *, keys: int) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def keys(self) -> int: ...
    @staticmethod
    def extent_shape(rate: Rate, keys: int, name: str) -> ExtentShape: ...
    @staticmethod
    def bytes_needed(rate: str | Rate, *, keys: int) -> int: ...
