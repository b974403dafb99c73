from collections.abc import Iterable

from typing_extensions import disjoint_base

from penstock.core.decision import Decision
from penstock.core.keys import Key
from penstock.core.limiter import Limiter
from penstock.core.reservation import Reservation
from penstock.rate import Duration, Rate

@disjoint_base
class CellLimiter(Limiter):
    def hit(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration = "5 minutes",
    ) -> Decision: ...
    def peek(
        self, key: Key, cost: int = 1, *, rate: str | Rate | None = None, burst: int | None = None
    ) -> Decision: ...
    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> Reservation: ...
    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> None: ...
    def reset(self, key: Key) -> None: ...
    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]: ...
