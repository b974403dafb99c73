"""A segment's file, opened and mapped read-only."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from forebay.core.audit import LATEST_NS
from forebay.segment import attachment_locks, host_clock, layout
from forebay.segment.reading import open_to_read, read_header, spec_to_look
from forebay.store import default_path

__all__ = ["MEANWHILE_NS", "MappedSegment"]

MEANWHILE_NS: Final = 1_000_000_000  # how long one check may use its reading of the clock


class MappedSegment:
    """The bytes of a segment whose header can be read. A context manager that closes it."""

    def __init__(self, name_or_path: str | os.PathLike[str]) -> None:
        path = os.fspath(name_or_path)
        if isinstance(name_or_path, str) and "/" not in path:
            path = default_path(path)
        spec = spec_to_look(path)
        self.path: Final = spec.path
        self._offset_ns: Final = spec.offset_ns
        self._fd = open_to_read(spec)
        try:
            self.header: Final = read_header(spec, self._fd)
            self.memory = mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise
        self.is_monotonic: Final = self.header.clock_kind == layout.CLOCK_MONOTONIC
        self.is_of_this_boot: Final = not self.is_monotonic or self.header.boot_id == spec.boot_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()
        os.close(self._fd)

    def map_what_was_added(self) -> None:
        """Map bytes that a process has appended since: it may have made an extent."""
        if os.fstat(self._fd).st_size > len(self.memory):
            before, self.memory = self.memory, mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
            before.close()

    def is_any_attached(self) -> bool:
        """Whether a process has the segment attached. One that closed all its files isn't seen."""
        return attachment_locks.is_any_attached(self._fd)

    def u64(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 8], "little")

    def records(self, size: int, offset: int, count: int) -> Iterator[tuple[int, bytes]]:
        """The records that are not all zero, with their numbers."""
        raw = self.memory[offset : offset + count * size]
        zero = bytes(size)
        for number in range(count):
            record = raw[number * size : (number + 1) * size]
            if record != zero:
                yield number, record

    def now_ns(self) -> int:
        header = self.header
        if not self.is_monotonic:
            return self.u64(layout.HEADER_MANUAL_NS)
        if self.is_of_this_boot:
            return (host_clock.monotonic_ns(self._offset_ns) - header.epoch_ns) % 2**64
        return max(0, time.time_ns() - header.wall_epoch_ns)

    def latest_ns(self, ahead_ns: int = 0) -> int:
        """A time later than every valid one that is at most `ahead_ns` ahead of now.

        With a clock that tests move, it is the latest that there is: the clock may have been set back.
        """
        if not self.is_monotonic:
            return LATEST_NS
        return min(LATEST_NS, self.now_ns() + ahead_ns + MEANWHILE_NS)
