from typing import Literal, final

from typing_extensions import disjoint_base

from penstock.core.cell_limiter import CellLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.store import Store

@disjoint_base
class WindowLimiter(CellLimiter):
    @property
    def rate(self) -> Rate: ...

@final
class FixedWindow(WindowLimiter):
    def __init__(
        self, store: Store, name: str, rate: str | Rate, align: Literal["clock", "first", "stagger"] = "clock"
    ) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def align(self) -> str: ...

@final
class SlidingWindow(WindowLimiter):
    def __init__(self, store: Store, name: str, rate: str | Rate) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
