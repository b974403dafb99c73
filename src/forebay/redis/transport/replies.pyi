from typing import final

from typing_extensions import Buffer

@final
class ReplySizes:
    def __init__(self, *, of_cluster: bool = False) -> None: ...
    def take(self, received: Buffer, size: int) -> None: ...
