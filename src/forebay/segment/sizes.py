"""How many cells and bytes so many keys take, in a store's table and in an extent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.errors import InvalidLimiter, short_repr
from forebay.segment import layout

__all__ = ["BYTES_PER_KEY", "CELLS_PER_GROUP", "MAX_KEYS", "ExtentShape"]

BYTES_PER_KEY: Final = 21
MAX_KEYS: Final = 2**32
CELLS_PER_GROUP: Final = layout.CELLS_PER_LINE * layout.LINES_PER_GROUP


@dataclass(frozen=True, slots=True)
class ExtentShape:
    """Room for `keys` live keys with `words_per_key` words each."""

    keys: int
    words_per_key: int

    @classmethod
    def checked(cls, keys: int, words_per_key: int, limiter: str) -> ExtentShape:
        """Raises ``InvalidLimiter`` if `keys` isn't a whole number from 1 to 2**32."""
        if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
            raise InvalidLimiter(
                f"the keys of limiter {limiter!r} are a whole number from 1 to 2**32, not {short_repr(keys)}"
            )
        return cls(keys, words_per_key)

    @property
    def group_count(self) -> int:
        # A probe set holds this few keys, so they need no spare cells.
        if self.keys <= layout.GROUPS_PER_KEY * CELLS_PER_GROUP:
            return -(-self.keys // CELLS_PER_GROUP)
        return -(-self.keys * BYTES_PER_KEY // layout.GROUP_BYTES)

    @property
    def used_cells(self) -> int:
        """The cells that hold keys and have words; the others are blocked."""
        if self.keys <= layout.GROUPS_PER_KEY * CELLS_PER_GROUP:
            return self.keys
        return self.group_count * CELLS_PER_GROUP

    @property
    def bytes(self) -> int:
        return self.group_count * layout.GROUP_BYTES + self.used_cells * self.words_per_key * 8
