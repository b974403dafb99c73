from typing import Self, final

from forebay.tuning.columns import Columns

@final
class CombinedLines:
    lines: int
    def __new__(cls, columns: Columns) -> Self: ...
    def add(self, block: bytes) -> list[tuple[int, bytes]]: ...
