from array import array
from typing import Self, final

from typing_extensions import Buffer

from forebay.core.cell_limiter import CellLimiter
from forebay.tuning.requests import Keys

def demand(requests: Buffer, span_ns: int, peaks: array[int]) -> int: ...
def exact_log(requests: Buffer, keys: int, limit: int, period_ns: int) -> bytearray: ...

@final
class Replay:
    admitted: int
    largest: int
    differing: int
    wrongly_allowed: int
    wrongly_denied: int
    decision_ns: int
    denied_by_key: array[int]
    denied_by_bin: array[int]
    def __new__(
        cls,
        limiter: CellLimiter,
        requests: Buffer,
        keys: Keys,
        exact: bytearray,
        limit: int,
        period_ns: int,
        bin_ns: int,
        bins: int,
    ) -> Self: ...
    def run(self, count: int) -> int: ...
    def close(self) -> None: ...
