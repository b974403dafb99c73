from collections.abc import Callable
from typing import Self, final

from penstock.core.keys import Key
from penstock.core.segment import Extent

@final
class SyncedMemory:
    def __new__(cls, extent: Extent, name_of: Callable[[Key], bytes]) -> Self: ...
