"""Words of shared memory that one CAS replaces: the measurements of a load shedder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.segment import layout
from forebay.segment.extents import Purpose, open_extent

if TYPE_CHECKING:
    from forebay.store import Store

__all__ = ["SharedWords"]


class SharedWords:
    """`SHEDDER_WORDS` words of 64 bits, which begin as 0, for all processes of a store.

    They are an extent of the store, for a limiter of the name ``"<name>, measured"``, and shared by all who give the
    same arguments: `kind` is 0 or 1, `limit` the slots of the shedder, `period_ns` its interval. They stay until the
    store is unlinked. A limiter's number is taken for them.

    Raises ``SegmentSpaceError``, ``TooManyLimiters``, ``StoreClosed``. Thread-safe, fork-safe; each call is one load or
    one CAS, O(1).
    """

    def __init__(self, store: Store, name: str, kind: int, limit: int, period_ns: int) -> None:
        purpose = Purpose(layout.ALGORITHM_SHEDDER, layout.SHEDDER_WORDS, kind, limit, period_ns)
        extent = open_extent(store.attachment, f"{name}, measured", purpose, keys=1)
        self.load = extent.word
        """The value of the word of this number."""
        self.replace = extent.replace_word
        """Takes a word's number, the value that was seen, and a new one. Whether the word had the value that was seen.
        """
