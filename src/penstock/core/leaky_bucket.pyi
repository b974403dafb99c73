from typing import final

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.store import Store

@final
class LeakyBucket(GcraLimiter):
    def __init__(self, store: Store, name: str, rate: str | Rate, capacity: int) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def capacity(self) -> int: ...
