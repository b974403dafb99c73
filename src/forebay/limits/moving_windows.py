"""The memory of moving windows: what each limit takes, and whether the file system has room for all of them.

The store's own checks see one limiter at a time. A start that fails for lack of memory must name the room for all the
limits that it needs, or the next start fails again.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.errors import SegmentSpaceError
from forebay.rate import Rate
from forebay.segment import free_space
from forebay.segment.header import segment_bytes
from forebay.store import Store

__all__ = ["PARTS", "bytes_needed", "is_log", "refuse_without_room", "refuse_without_room_for_store"]

PARTS: Final = 100
"""The parts of a moving window's period, if a log of each request would take more memory than that."""
MOST_LOG_BYTES: Final = 16 * 2**20
"""A log of up to so many bytes is used all the same."""


def is_log(limit: int, expiry: float, keys: int) -> bool:
    """Whether a moving window for so many keys records each request."""
    if limit <= PARTS + 1:
        return True
    if limit * 8 > MOST_LOG_BYTES:
        return False
    return SlidingLog.bytes_needed(Rate(limit, expiry), keys=keys) <= MOST_LOG_BYTES


def bytes_needed(limit: int, expiry: float, keys: int) -> int:
    """The bytes that a moving window for so many keys takes of the file system."""
    if is_log(limit, expiry, keys):
        return _in_pages(SlidingLog.bytes_needed(Rate(limit, expiry), keys=keys))
    return _in_pages(BucketedWindow.bytes_needed(PARTS + 1, keys=keys))


def refuse_without_room(store: Store, sizes: list[int], described: str = "") -> None:
    """Raise ``SegmentSpaceError`` if moving windows of so many bytes each don't fit together.

    `described` says which; by default those of the option.
    """
    attachment = store.attachment
    with attachment.lock():
        fd = attachment.own_file()
        # Without the file, no room was the reason.
        if fd is not None:
            _refuse(fd, attachment.path, attachment.label, sum(sizes), described or _described(sizes))


def refuse_without_room_for_store(path: str, keys: int, sizes: list[int], taken: int = 0) -> None:
    """As ``refuse_without_room``, with a store for so many keys, which isn't there yet.

    `taken` bytes count as free: those of a removed file that is still open.
    """
    store_size = _in_pages(segment_bytes(keys))
    described = f"{store_size} for a store of {keys} keys and {_described(sizes)}"
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _refuse(fd, path, path, store_size + sum(sizes), described, taken)
    finally:
        os.close(fd)


def _described(sizes: list[int]) -> str:
    return f"{sum(sizes)} for the limits of moving_windows that aren't made yet ({len(sizes)} of them)"


def _refuse(fd: int, path: str | None, label: str, needed: int, described: str, taken: int = 0) -> None:
    """Raise if the `needed` bytes, of which `taken` are in use already, don't fit into the file system of `fd`."""
    try:
        free_space.refuse_what_does_not_fit(fd, path, needed - taken)
    except OSError as error:
        or_else = "ask for fewer keys or smaller limits"
        found, remedy = free_space.shortage(error, fd, path, needed, taken=taken, or_else=or_else)
        raise SegmentSpaceError(label, found, f"{needed} bytes: {described}", remedy) from None


def _in_pages(size: int) -> int:
    """The bytes that a file system gives out for that size."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
