from typing import Literal, final

from penstock.core.gcra import GcraLimiter
from penstock.core.keys import Key
from penstock.rate import Rate
from penstock.store import Store

@final
class TokenBucket(GcraLimiter):
    def __init__(
        self,
        store: Store,
        name: str,
        rate: str | Rate,
        burst: int | None = None,
        refill: Literal["continuous", "interval"] = "continuous",
    ) -> None: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def burst(self) -> int: ...
    @property
    def refill(self) -> str: ...
