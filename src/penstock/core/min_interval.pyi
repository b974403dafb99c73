from datetime import timedelta
from typing import final

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.store import Store

@final
class MinInterval(GcraLimiter):
    def __init__(self, store: Store, name: str, interval: str | float | timedelta) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def interval_ns(self) -> int: ...
