from collections.abc import Callable
from typing import Literal, Self, final

from forebay.core.synced.limiter import _S, SyncedLimiter
from forebay.core.table.keys import Key
from forebay.rate import Rate
from forebay.store import Store

@final
class SyncedWindow(SyncedLimiter[_S]):
    def __new__(
        cls,
        store: Store,
        name: str,
        rate: str | Rate,
        synced_store: _S,
        slides: bool,
        keys: int,
        name_of: Callable[[Key], bytes],
        rounding: Literal["up", "down"] | None = None,
    ) -> Self: ...
    def allow(self, key: Key, /) -> bool: ...
    @property
    def rate(self) -> Rate: ...
    @property
    def rounding(self) -> str | None: ...
    @property
    def slides(self) -> bool: ...
    @property
    def low_bits(self) -> int: ...
    def reports(
        self, first: int, last: int, round_number: int, learned: bytearray | None = None
    ) -> tuple[list[tuple[tuple[int, int, int, int], bytes, int, int, int, int, int, int, int, int]], int]: ...
    def merge(
        self,
        place: tuple[int, int, int, int],
        end_ns: int,
        reply: tuple[int, int, bool] | None,
        reply_before: tuple[int, int, bool] | None = None,
    ) -> None: ...
    def window_number(self, now_ns: int) -> int: ...
    def learn(self, name: bytes, end_ns: int, count: int) -> None: ...
