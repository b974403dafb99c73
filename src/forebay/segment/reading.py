"""Opening a segment's file that must exist already, and reading its header, without changing either.

``verify``, the ``forebay`` command and ``Store.attach`` read files by this module. None of them makes a file, changes
its owner, its mode or its clock, or takes the creation lock. A header that another process is writing right now looks
damaged, so a refusal counts only if repeated looks agree.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import replace
from typing import Final

from forebay.errors import ForeignSegment, SegmentBusy, SegmentError, SegmentMissing
from forebay.segment import layout
from forebay.segment.header import Header, check_consistency, check_identity, is_unfinished
from forebay.segment.opening import OPEN_FLAGS, opening_error
from forebay.segment.spec import SegmentSpec

__all__ = ["LOOKS", "PAUSE_S", "open_to_read", "open_to_write", "read_header", "spec_to_look"]

LOOKS: Final = 3  # after the first one
PAUSE_S: Final = 0.002


def spec_to_look(path: str) -> SegmentSpec:
    """The spec of a process that uses the file at the path as it is. It trusts no group."""
    return SegmentSpec.for_this_process(
        os.path.abspath(path), keys=0, clock_kind=layout.CLOCK_MONOTONIC, mode=0o600, gid=os.getegid()
    )


def open_to_read(spec: SegmentSpec) -> int:
    """Open the regular file at the path for reading. Raises ``SegmentMissing`` if there is none."""
    try:
        return _regular(spec, os.open(spec.path, OPEN_FLAGS & ~os.O_ACCMODE | os.O_RDONLY))
    except OSError as error:
        raise _refused(spec, error) from None


def open_to_write(spec: SegmentSpec) -> tuple[int, bool]:
    """As ``open_to_read``, for reading and writing if this user may write the file. Returns whether it may, too."""
    try:
        return _regular(spec, os.open(spec.path, OPEN_FLAGS)), True
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return open_to_read(spec), False
        raise _refused(spec, error) from None


def _refused(spec: SegmentSpec, error: OSError) -> SegmentError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return spec.refuse(SegmentMissing, "no such file", "a segment", "check the name; see `forebay ls`")
    return opening_error(spec, error)


def _regular(spec: SegmentSpec, fd: int) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise spec.refuse(ForeignSegment, "no regular file", "a regular file", "choose another path")
    return fd


def read_header(spec: SegmentSpec, fd: int) -> Header:
    """The header of a ready segment with any clock, of this boot or another. Raises if there is none."""
    for look in range(LOOKS + 1):
        raw = os.pread(fd, layout.HEADER.size, 0)
        try:
            if raw:
                check_identity(spec, raw)
            if not raw or is_unfinished(raw):
                raise spec.refuse(
                    SegmentBusy,
                    "a segment that is being created, or whose creator was killed",
                    "one that is ready",
                    "try again; if this persists, the next Store of that name creates it again",
                )
            # Any clock will do: no limiter uses this mapping.
            kind = int.from_bytes(raw[layout.HEADER_CLOCK_KIND : layout.HEADER_CLOCK_KIND + 4], "little")
            return check_consistency(replace(spec, clock_kind=kind), raw, os.fstat(fd).st_size)
        except SegmentError:
            # A process may be creating it, or rebasing it to this boot.
            if look == LOOKS:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError
