from typing import Self, final

from typing_extensions import Buffer

@final
class ReplySizes:
    def __new__(cls, *, of_cluster: bool = False) -> Self: ...
    def take(self, received: Buffer, size: int) -> None: ...
