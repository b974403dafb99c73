"""Making a file a usable segment: creating it, or giving it this boot's clock."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from dataclasses import replace
from typing import Final

from forebay.errors import (
    ClockMismatch,
    SegmentBusy,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSpaceError,
    UntrustedSegment,
)
from forebay.segment import attachment_locks, free_space, host_clock, layout, ofd_locks
from forebay.segment.header import Header, check_consistency, check_identity, is_unfinished
from forebay.segment.mapping import use_huge_pages
from forebay.segment.removal import is_at, removal_message
from forebay.segment.spec import START_AGAIN, SegmentSpec

__all__ = ["busy_error", "create", "make_usable", "refuse_unusable", "usable_header"]

MAX_AGE_NS: Final = 2**61
CLEARED_AT_ONCE: Final = 2**20


def usable_header(spec: SegmentSpec, fd: int) -> Header | None:
    """The header, if the segment is ready for this process. None if ``make_usable`` must act or raise first."""
    with contextlib.suppress(SegmentError):
        header = _read_header(spec, fd)
        return None if header.is_of_another_boot(spec) else header
    return None


def refuse_unusable(spec: SegmentSpec, fd: int, place: int) -> bool:
    """For a process that changes no file, in place of ``make_usable``: raise why the segment can't be used as it is."""
    if _read_header(spec, fd).is_of_another_boot(spec):
        raise spec.refuse(
            ClockMismatch,
            "a segment of an earlier boot",
            "one of this boot",
            "start a process that uses the store: its Store gives the segment this boot's clock",
        )
    return True


def _read_header(spec: SegmentSpec, fd: int) -> Header:
    raw = os.pread(fd, layout.HEADER.size, 0)
    check_identity(spec, raw)
    header = check_consistency(spec, raw, os.fstat(fd).st_size)
    if header.name_hash != spec.name_hash:
        raise spec.refuse(
            UntrustedSegment,
            "the segment of another store: it was made under another file name",
            f"one that was made as {os.path.basename(spec.path)!r}",
            "if the file was linked here, remove this name; if it was renamed, give it back its own",
        )
    if not header.is_of_another_boot(spec):
        _check_age(spec, header)
    return header


def _check_age(spec: SegmentSpec, header: Header) -> None:
    """Raise if a segment of this boot seems to be made in the future: all its limits would admit everything.

    Then another clock made it: that of a host restored from a snapshot, or of another boot with the same id.
    """
    age_ns = (host_clock.monotonic_ns(spec.offset_ns) - header.epoch_ns) % 2**64
    if header.clock_kind == layout.CLOCK_MONOTONIC and age_ns >= MAX_AGE_NS:
        raise spec.refuse(
            ClockMismatch,
            f"a segment that was made {(2**64 - age_ns) / 1e9:.0f} s after now by this host's clock",
            "one that was made before now",
            START_AGAIN,
        )


def make_usable(spec: SegmentSpec, fd: int, place: int) -> bool:
    """Create the segment if it has never been ready, or give it this boot's clock.

    False if the path no longer leads to the file. Raises the reason if the segment can't be used.
    """
    if not ofd_locks.succeeds_in_time(lambda: ofd_locks.try_lock(fd, 0, layout.HEADER.size)):
        raise busy_error(spec)
    try:
        if not is_at(spec.path, os.fstat(fd)):  # unlinked while this process waited for the lock
            return False
        raw = os.pread(fd, layout.HEADER.size, 0)
        if raw:
            check_identity(spec, raw)
        if not raw or is_unfinished(raw):
            # Its creator is gone, or it would hold the lock.
            create(spec, fd)
            if attachment_locks.is_removed_segment_attached(fd, place):
                warnings.warn(removal_message(spec.path), SegmentRemovedWarning, stacklevel=5)
            return True
        header = _read_header(spec, fd)
        if not header.is_of_another_boot(spec):
            return True  # another process gave it this boot's clock while this one waited for the lock
        if not attachment_locks.exclude_all(fd):
            import uuid  # seldom needed, and slow to import

            raise spec.refuse(
                ClockMismatch,
                f"a segment of boot {uuid.UUID(bytes=header.boot_id)}, which some process has attached or locked",
                f"one of this boot, {uuid.UUID(bytes=spec.boot_id)}",
                "system containers have boot ids of their own: give those that share a store one "
                f"({host_clock.BOOT_ID}), or each a store; `fuser` lists the processes that have the file open",
            )
        return _rebase(spec, fd, header)
    finally:
        ofd_locks.unlock(fd, 0, 0)


def busy_error(spec: SegmentSpec) -> SegmentError:
    return spec.refuse(
        SegmentBusy,
        f"a segment that another process has been creating for {ofd_locks.TIMEOUT_S:.0f} s",
        "a creation that ends",
        "look for a stopped process that has the file open (fuser), or remove the file",
    )


def create(spec: SegmentSpec, fd: int, header: Header | None = None) -> Header:
    """Make a segment in a file that has never been ready; without a `header` with a new one.

    The file may have grown already. It never shrinks: if a process were attached after all, because of damage, that
    would kill it.
    """
    size = os.fstat(fd).st_size
    header = header or Header.new(spec, at_least=size)
    try:
        free_space.refuse_what_does_not_fit(fd, spec.file_path, header.segment_size - _bytes_taken(fd))
        # One small write first: whatever a killed creator leaves is empty, or marked as not ready.
        os.pwrite(fd, header.pack(layout.STATE_CREATING), 0)
        if size == 0:
            os.ftruncate(fd, header.segment_size)
            with contextlib.suppress(OSError):
                use_huge_pages(fd, header.segment_size)
        os.posix_fallocate(fd, 0, header.segment_size)
        for start in range(layout.HEADER_MANUAL_NS, size, CLEARED_AT_ONCE):
            os.pwrite(fd, bytes(min(CLEARED_AT_ONCE, size - start)), start)
    except OSError as error:
        with contextlib.suppress(OSError):
            if is_at(spec.path, os.fstat(fd)):
                os.unlink(spec.path)
        if not free_space.is_shortage(error):
            raise
        found, remedy = free_space.shortage(
            error, fd, spec.file_path, header.segment_size, taken=_bytes_taken(fd), or_else="ask for fewer keys"
        )
        expected = f"{header.segment_size} bytes for {spec.keys} keys"
        raise spec.refuse(SegmentSpaceError, found, expected, remedy) from None
    os.pwrite(fd, header.pack(layout.STATE_READY)[layout.HEADER_CHECKSUM :], layout.HEADER_CHECKSUM)
    return header


def _bytes_taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def _rebase(spec: SegmentSpec, fd: int, header: Header) -> bool:
    """After a reboot, continue the segment's time by the wall clock. No process is attached.

    If the wall clock says that the segment is made in the future, or 73 years ago, the age of its states is unknown.
    To keep them could lock keys out for as long as the machine was up. So the file is removed, and False returned.
    """
    elapsed_ns = time.time_ns() - header.wall_epoch_ns
    if not 0 <= elapsed_ns < MAX_AGE_NS:
        warnings.warn(
            f"{spec.path} was made {elapsed_ns // 10**9} s ago by the wall clock, which can't be, and starts empty",
            RuntimeWarning,
            stacklevel=6,
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(spec.path)
        return False
    epoch_ns = (host_clock.monotonic_ns(spec.offset_ns) - elapsed_ns) % 2**64
    rebased = replace(header, epoch_ns=epoch_ns, boot_id=spec.boot_id)
    os.pwrite(fd, rebased.pack(layout.STATE_READY), 0)
    return True
