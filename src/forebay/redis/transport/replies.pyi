from typing import final

from typing_extensions import Buffer

@final
class ReplySizes:
    def take(self, received: Buffer, size: int) -> None: ...
