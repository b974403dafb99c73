"""A segment's file, opened and mapped read-only."""

from __future__ import annotations

import mmap
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType
from typing import Final, Self

from forebay.core.audit import LATEST_NS
from forebay.errors import ForeignSegment, SegmentBusy, SegmentError
from forebay.segment import host_clock, layout
from forebay.segment.header import Header, check_consistency, check_identity, is_unfinished
from forebay.segment.opening import opening_error
from forebay.segment.spec import SegmentSpec
from forebay.store import default_path
from forebay.verification.findings import LOOKS, PAUSE_S

__all__ = ["MEANWHILE_NS", "MappedSegment"]

MEANWHILE_NS: Final = 1_000_000_000  # how long one check may use its reading of the clock


class MappedSegment:
    """The bytes of a segment whose header can be read. A context manager that closes it."""

    def __init__(self, name_or_path: str | os.PathLike[str]) -> None:
        path = os.fspath(name_or_path)
        if isinstance(name_or_path, str) and "/" not in path:
            path = default_path(path)
        spec = SegmentSpec.for_this_process(
            os.path.abspath(path), keys=0, clock_kind=layout.CLOCK_MONOTONIC, mode=0o600, gid=os.getegid()
        )
        self.path: Final = spec.path
        self._offset_ns: Final = spec.offset_ns
        self._fd = _open(spec)
        try:
            self.header: Final = _read_header(spec, self._fd)
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


def _open(spec: SegmentSpec) -> int:
    try:
        fd = os.open(spec.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise spec.refuse(SegmentError, "no such file", "a segment", "check the name; `ls /dev/shm`") from None
    except OSError as error:
        raise opening_error(spec, error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise spec.refuse(ForeignSegment, "no regular file", "a regular file", "choose another path")
    return fd


def _read_header(spec: SegmentSpec, fd: int) -> Header:
    for look in range(LOOKS + 1):
        raw = os.pread(fd, layout.HEADER.size, 0)
        try:
            check_identity(spec, raw)
            if is_unfinished(raw):
                raise spec.refuse(
                    SegmentBusy,
                    "a segment that is being created, or whose creator was killed",
                    "one that is ready",
                    "try again; if this persists, the next Store of that name creates it again",
                )
            # Any clock will do: no limiter uses this mapping.
            kind = int.from_bytes(raw[layout.HEADER_CLOCK_KIND : layout.HEADER_CLOCK_KIND + 4], "little")
            of_its_clock = replace(spec, clock_kind=kind)
            return check_consistency(of_its_clock, raw, os.fstat(fd).st_size)
        except SegmentError:
            # A process may be creating it, or rebasing it to this boot.
            if look == LOOKS:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError
