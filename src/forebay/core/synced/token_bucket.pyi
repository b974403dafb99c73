from collections.abc import Callable
from typing import NoReturn, Self, final

from forebay.core.synced.limiter import _S, SyncedLimiter
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

@final
class SyncedTokenBucket(SyncedLimiter[_S]):
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        burst: int | None,
        synced_store: _S,
        keys: int,
        name_of: Callable[[Key], bytes],
    ) -> Self: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def burst(self) -> int: ...
    def add(self, key: Key, permits: int, *, rate: str | Rate | None = None, burst: int | None = None) -> NoReturn: ...
    def reports(
        self, first: int, last: int, round_number: int, learned: bytearray | None = None
    ) -> tuple[list[tuple[tuple[int, int, int, int], bytes, int, int, int, int, int]], int]: ...
    def merge(
        self, place: tuple[int, int, int, int], charged: int, known_us: int, read_ns: int, ahead_ns: int
    ) -> None: ...
    def learn(self, name: bytes, tat_ns: int) -> None: ...
