"""Where a segment's table is: where it was made, or where a resize has moved it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from forebay.segment import layout
from forebay.segment.header import segment_bytes

__all__ = ["TablePlace"]


@dataclass(frozen=True, slots=True)
class TablePlace:
    """The place of a table for `keys` live keys in the segment's file."""

    offset: int
    group_count: int
    keys: int

    @classmethod
    def read(cls, moved_table: int, moved_keys: int, *, group_count: int, keys: int) -> Self:
        """By the two words of the header, and the size that it was made in. It may be damaged: see ``lies_within``."""
        if not moved_table:
            return cls(layout.TABLE_OFFSET, group_count, keys)
        units, group_count = divmod(moved_table, 2**layout.MOVED_GROUPS_BITS)
        return cls(units * layout.EXTENT_ALIGNMENT, group_count, moved_keys)

    @classmethod
    def behind(cls, end: int, keys: int) -> Self:
        """The first place behind `end` for a table of so many keys."""
        return cls(-(-end // layout.EXTENT_ALIGNMENT) * layout.EXTENT_ALIGNMENT, _groups_for(keys), keys)

    @property
    def word(self) -> int:
        """The header's `moved_table` for this place."""
        return self.offset // layout.EXTENT_ALIGNMENT << layout.MOVED_GROUPS_BITS | self.group_count

    @property
    def bytes(self) -> int:
        return self.group_count * layout.GROUP_BYTES

    def lies_within(self, file_size: int) -> bool:
        return self.group_count >= layout.MIN_GROUPS and self.offset + self.bytes <= file_size

    def agrees_with_its_keys(self) -> bool:
        """Whether a table for so many keys is as large. Not so if one of the header's words is damaged."""
        return self.group_count == _groups_for(self.keys)


def _groups_for(keys: int) -> int:
    return (segment_bytes(keys) - layout.TABLE_OFFSET) // layout.GROUP_BYTES
