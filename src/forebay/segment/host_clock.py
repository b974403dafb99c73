"""The host's clock and boot id, for processes that may see other ones.

A time namespace moves ``CLOCK_MONOTONIC`` by an offset that never changes once a process is in it. Segments use the
clock of the host's own namespace, so processes of all time namespaces agree on a segment's time.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Final

from forebay.errors import ClockMismatch, SegmentError, SegmentSpaceError
from forebay.rate import NS
from forebay.segment.kernel_files import read_kernel_file

__all__ = ["monotonic_ns", "read_boot_id", "read_offset_ns", "time_namespace"]

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
OFFSETS: Final = "/proc/self/timens_offsets"
OWN_NAMESPACE: Final = "/proc/self/ns/time"
CHILDRENS_NAMESPACE: Final = "/proc/self/ns/time_for_children"


def monotonic_ns(offset_ns: int) -> int:
    """The host's ``CLOCK_MONOTONIC``, for a process whose own is `offset_ns` ahead of it."""
    # Not time.monotonic_ns: a test that freezes it would freeze the segment's time at its start.
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) - offset_ns


def time_namespace() -> int | None:
    """The number of this process's time namespace. None if that isn't known."""
    try:
        return os.stat(OWN_NAMESPACE).st_ino
    except OSError:
        return None


def read_boot_id() -> bytes:
    """The id of this boot. System containers may have an id of their own."""
    try:
        return bytes.fromhex(read_kernel_file(BOOT_ID).decode().strip().replace("-", ""))
    except OSError as error:
        raise _not_read(BOOT_ID, error) from None


def read_offset_ns() -> int:
    """How far this process's ``CLOCK_MONOTONIC`` is ahead of the host's; 0 outside of time namespaces.

    Raises ``ClockMismatch`` if the process's children will be in another time namespace than the process itself. They
    would read another clock, and the kernel shows only the offsets of the children's namespace.
    """
    try:
        lines = read_kernel_file(OFFSETS).decode().splitlines()
        if not os.path.samefile(OWN_NAMESPACE, CHILDRENS_NAMESPACE):
            raise ClockMismatch(
                OWN_NAMESPACE,
                "a process whose children will be in another time namespace",
                "one time namespace for a process and its children",
                "make the store in a child of the process that called unshare (unshare --time --fork)",
            )
    except FileNotFoundError:
        return 0  # a kernel without time namespaces
    except OSError as error:
        raise _not_read(OFFSETS, error) from None
    for line in lines:
        clock, seconds, nanoseconds = line.split()
        if clock == "monotonic":
            return int(seconds) * NS + int(nanoseconds)
    return 0


def _not_read(path: str, error: OSError) -> SegmentError:
    exhausted = error.errno in (errno.EMFILE, errno.ENFILE)
    return (SegmentSpaceError if exhausted else SegmentError)(
        path,
        f"a file that can't be opened ({error.strerror})",
        "the id of this boot" if path == BOOT_ID else "the offsets of this process's clocks",
        "raise the limit of open files (ulimit -n)" if exhausted else "mount /proc",
    )
