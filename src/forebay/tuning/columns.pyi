from collections.abc import Sequence
from io import RawIOBase
from typing import BinaryIO, Final, Self, final

from forebay.tuning.keys import Keys

REQUEST_BYTES: Final[int]

@final
class Columns:
    keys: Keys
    count: int
    reordered: int
    late: int
    def __new__(cls, file: BinaryIO | RawIOBase, window: int = 131_072) -> Self: ...
    def extend(self, times: Sequence[object], keys: Sequence[object]) -> list[int]: ...
    def finish(self) -> None: ...
