"""A segment's file, opened and mapped read-only."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Final, Self

from forebay.core.audit import LATEST_NS, look_at_unused
from forebay.core.table.segment_view import Segment
from forebay.errors import DamagedSegment
from forebay.segment import attachment_locks, host_clock, layout
from forebay.segment.mapping import is_in_memory
from forebay.segment.reading import open_to_read, read_header, spec_to_look
from forebay.segment.table_place import TablePlace
from forebay.store import default_path

__all__ = ["MEANWHILE_NS", "MappedSegment", "path_of"]

BLOCK_BYTES: Final = 512
"""The unit of ``st_blocks``."""
READ_BYTES: Final = 2**20
MEANWHILE_NS: Final = 1_000_000_000  # how long one check may use its reading of the clock


def path_of(name_or_path: str | os.PathLike[str]) -> str:
    """The path of a store's file, given the store's name or a path: a ``Path``, or text with a slash."""
    path = os.fspath(name_or_path)
    return default_path(path) if isinstance(name_or_path, str) and "/" not in path else os.path.abspath(path)


class MappedSegment:
    """The bytes of a segment whose header can be read. A context manager that closes it."""

    def __init__(self, name_or_path: str | os.PathLike[str], *, fd: int | None = None) -> None:
        """`fd` is a descriptor of the file, if this process has it open already: it may have lost its path since."""
        spec = spec_to_look(path_of(name_or_path))
        self.path: Final = spec.path
        self._offset_ns: Final = spec.offset_ns
        self._fd = open_to_read(spec) if fd is None else os.dup(fd)
        try:
            self.header: Final = read_header(spec, self._fd)
            self.refuse_holes(self.header.segment_size)
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
        self.close()

    def close(self) -> None:
        self.memory.close()
        os.close(self._fd)

    def map_what_was_added(self) -> None:
        """Map bytes that a process has appended since: it may have made an extent."""
        if self.status.st_size > len(self.memory):
            before, self.memory = self.memory, mmap.mmap(self._fd, 0, prot=mmap.PROT_READ)
            before.close()

    def refuse_holes(self, needed: int) -> None:
        """Raises ``DamagedSegment`` if fewer bytes of the file take memory: to look at the others would take some.

        Where there is none left, it would end the process. forebay makes no such file.
        """
        taken = self.status.st_blocks * BLOCK_BYTES
        if taken < needed and is_in_memory(self._fd):
            raise DamagedSegment(
                self.path,
                f"a file with holes, of which {taken} bytes take memory",
                f"at least {needed} bytes",
                "remove it (forebay rm), and start with an empty store or a snapshot",
            )

    def look_at_unused(self, first: int, last: int) -> tuple[int, int]:
        """As the function of that name. It reads the file, as memory that was given back comes back if it is mapped."""
        blocked = 0
        # Cells are told from other words by where they lie.
        before = first % layout.CELL.size
        for begin in range(first, last, READ_BYTES):
            raw = bytes(before) + os.pread(self._fd, min(READ_BYTES, last - begin), begin)
            more, used = look_at_unused(raw, before, len(raw))
            blocked += more
            if used >= 0:
                return blocked, begin + used - before
        return blocked, -1

    @property
    def table(self) -> TablePlace:
        """Where the table is now; where it was made, if the header's words for that are damaged."""
        header = self.header
        moved_table, moved_keys = self.u64(layout.HEADER_MOVED_TABLE), self.u64(layout.HEADER_MOVED_KEYS)
        place = TablePlace.read(moved_table, moved_keys, group_count=header.group_count, keys=header.advertised_keys)
        self.map_what_was_added()
        if not place.lies_within(len(self.memory)):
            return TablePlace(layout.TABLE_OFFSET, header.group_count, header.advertised_keys)
        return place

    @property
    def is_resizing(self) -> bool:
        """Whether a resize is under way, or was killed and not ended since: it may have frozen cells."""
        return bool(self.u64(layout.HEADER_RESIZE_PROGRESS) & 1)

    @property
    def status(self) -> os.stat_result:
        """The file's status, with its size now."""
        return os.fstat(self._fd)

    def secret(self, purpose: bytes) -> bytes:
        """As ``Segment.secret``."""
        header = self.header
        view = Segment(
            self._fd,
            size=header.segment_size,
            group_count=header.group_count,
            epoch_ns=header.epoch_ns,
            wall_epoch_ns=header.wall_epoch_ns,
            clock_kind=header.clock_kind,
            hash_key=header.hash_key,
            on_full=None,
            is_writable=False,
        )
        return view.secret(purpose)

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
        if self.is_monotonic and not self.is_of_this_boot:
            return max(0, time.time_ns() - self.header.wall_epoch_ns)
        return self.now_and_host_ns()[0]

    def now_and_host_ns(self) -> tuple[int, int]:
        """The time of a segment of this boot, and the host's clock, in one reading."""
        host_ns = host_clock.monotonic_ns(self._offset_ns)
        if not self.is_monotonic:
            return self.u64(layout.HEADER_MANUAL_NS), host_ns
        return (host_ns - self.header.epoch_ns) % 2**64, host_ns

    def latest_ns(self, ahead_ns: int = 0) -> int:
        """A time later than every valid one that is at most `ahead_ns` ahead of now.

        With a clock that tests move, it is the latest that there is: the clock may have been set back.
        """
        if not self.is_monotonic:
            return LATEST_NS
        return min(LATEST_NS, self.now_ns() + ahead_ns + MEANWHILE_NS)
