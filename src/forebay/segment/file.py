"""Creating a segment's file, or attaching to one that may hold anything.

``open_or_create`` checks a file step by step. Each failed check has its own exception:

1. opened without following links, regular, owned by a trusted user, not writable by others: ``UntrustedSegment``
   (``opening``, ``trust``)
2. empty, or unfinished because its creator died: it is created now; no space: ``SegmentSpaceError`` (``creation``)
3. it has our magic number: ``ForeignSegment``; our layout: ``SegmentVersionMismatch`` (``header``)
4. complete: ``TruncatedSegment``; consistent: ``DamagedSegment``; of the requested clock, and not made in the future
   by it: ``ClockMismatch``
5. of this boot; else its clock is rebased, or ``ClockMismatch`` if a process is still attached

**State.** A file is unfinished (empty, or without a checksum), or ready. A ready file is of this boot, or of another
boot for the process that looks at it. There are three kinds of locks (see ``attachment_locks``):

* the creation lock: exclusive, on the header
* an attachment lock for each attached process: shared, on a byte of its own
* the exclusion of all attached processes: exclusive, on the whole range of those bytes

**Transitions.** The holder of the creation lock makes an unfinished file ready. The holder of the creation lock that
also excludes all attached processes rebases a file of another boot to this boot, or removes it if its clock makes no
sense. Nothing else changes a ready header.

**Invariant.** The clock of an attached segment never moves. To attach, a process takes neither lock: it reads a ready
header of this boot, takes its attachment lock, and reads the header again. If both readings are equal, no process
changes the header while the attachment lock is held. A rebasing process has excluded attachments either before the
lock was taken, or after. In the first case the lock was granted when the rebasing was over, and the second reading
shows its result. In the second case the attachment lock prevents the exclusion. A process that takes an attached
segment for one of another boot, as in a system container with a boot id of its own, is refused. A process that closed
all descriptors, as daemons do, holds no lock: it counts as not attached, though it goes on with its mapping.

**Attaching without making.** ``open_existing`` reads a ready header of this boot, takes its attachment lock, and reads
the header again, as above. It makes no transition, and raises where one is needed.

**Crash and stall.** All locks end with their process. A killed creator leaves an unfinished file, which the next
process creates. A killed rebasing process leaves the header from before or after its one write. A stopped creator or
rebasing process delays others for ``ofd_locks.TIMEOUT_S``, then they raise ``SegmentBusy``. A process that is stopped
while it attaches delays no other.

**Read permission.** A process that may only read the file can take shared locks. They prevent no attachment. They could
delay a creation, but no stranger can open an unfinished file: its mode is 0600, or 0660 for a trusted group. They can
delay the rebasing after a reboot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from forebay.errors import SegmentSizeWarning
from forebay.segment import attachment_locks, layout, ofd_locks, trust
from forebay.segment.creation import busy_error, create, make_usable, refuse_unusable, usable_header
from forebay.segment.header import Header
from forebay.segment.names import check_name
from forebay.segment.opening import open_or_make_empty, opening_error
from forebay.segment.reading import open_to_write, read_header, spec_to_look
from forebay.segment.removal import is_at
from forebay.segment.spec import PRIVATE, SegmentSpec
from forebay.segment.table_place import TablePlace

__all__ = ["SegmentFile", "create_anonymous", "open_existing", "open_or_create"]


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """An open, validated segment."""

    fd: int
    header: Header
    epoch_ns: int
    """Segment time 0 by this process's clock."""
    attachment_id: int
    """The byte that this process has locked: see ``attachment_locks``."""
    is_new: bool = False
    """Whether this process made the file."""
    may_grow: bool = True
    """Whether this process may add limiters and extents."""
    is_writable: bool = True
    """Whether this process may write at all."""

    @classmethod
    def of(cls, spec: SegmentSpec, fd: int, header: Header, attachment_id: int) -> SegmentFile:
        return cls(fd, header, (header.epoch_ns + spec.offset_ns) % 2**64, attachment_id)


def open_or_create(path: str, *, keys: int, clock_kind: int, mode: int, gid: int, own_directory: bool) -> SegmentFile:
    """Attach to the segment at the path, and create it first if needed.

    Any number of processes may call this at once; all attach to the same segment.

    A new file gets `mode`. With group write permission in it, files made by members of `gid` are trusted too.
    With `own_directory`, no other user may be able to make files in the directory.
    """
    check_name(path)
    spec = SegmentSpec.for_this_process(path, keys=keys, clock_kind=clock_kind, mode=mode, gid=gid)
    if spec.trusts_group or own_directory:
        try:
            status = os.stat(os.path.dirname(path))
        except OSError as error:
            raise opening_error(spec, error) from None
        trust.check_directory(spec, status, is_own=own_directory)
    file = None
    while file is None:
        fd, is_new = open_or_make_empty(spec)
        try:
            if not is_new:
                trust.check_file(spec, fd)
            file = _attach(spec, fd, partial(make_usable, spec, fd))
            if file is None:
                _close(fd)
            elif (made_for := _keys_of(fd, file.header)) != keys:
                warnings.warn(
                    f"{path} was made for {made_for} keys and keeps that size, although this "
                    f"store has keys={keys}; to change it, use `forebay resize`",
                    SegmentSizeWarning,
                    stacklevel=3,
                )
            else:
                file = replace(file, is_new=is_new)
        except OSError as error:
            _close(fd)
            raise opening_error(spec, error) from None
        except BaseException:
            _close(fd)
            raise
    return file


def open_existing(path: str) -> SegmentFile:
    """Attach to the segment at the path as it is, for a process that only looks and changes states.

    Raises ``SegmentMissing`` if there is none, and for one that isn't ready for a process of this boot. Takes one lock:
    the attachment lock. Root may open the file of any user, and any user a file that it may only read.
    """
    while True:
        spec = spec_to_look(path)
        fd, is_writable = open_to_write(spec)
        try:
            if is_writable:
                spec = trust.trusting_its_users(spec, fd)
                trust.check_file(spec, fd, of_any_owner=os.geteuid() == 0)
            header = read_header(spec, fd)
            spec = replace(spec, clock_kind=header.clock_kind)
            file = _attach(spec, fd, partial(refuse_unusable, spec, fd))
            if file is not None:
                return replace(file, may_grow=False, is_writable=is_writable)
            _close(fd)
        except OSError as error:
            _close(fd)
            raise opening_error(spec, error) from None
        except BaseException:
            _close(fd)
            raise


def _attach(spec: SegmentSpec, fd: int, make_usable: Callable[[int], bool]) -> SegmentFile | None:
    """Attach this process. None if the path now leads elsewhere.

    If the segment isn't usable, `make_usable` makes it so first, or raises. It gets the segment's place, and returns
    False if the path leads elsewhere.
    """
    place = attachment_locks.place_of(spec.path)
    deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + ofd_locks.TIMEOUT_S
    while True:
        header = usable_header(spec, fd)
        if header is None:
            if not make_usable(place):
                return None
            continue
        attachment_id = attachment_locks.attach(fd, place)
        if attachment_id is None:
            if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
                raise busy_error(spec)
            time.sleep(0.005)
        elif not is_at(spec.path, os.fstat(fd)):
            return None
        elif usable_header(spec, fd) == header:
            return SegmentFile.of(spec, fd, header, attachment_id)
        # Another process has changed the header since. An attachment lock that isn't used ends with the file, too.


def _keys_of(fd: int, header: Header) -> int:
    """The live keys that the segment's table is made for now."""
    words = os.pread(fd, 16, layout.HEADER_MOVED_TABLE)
    moved = TablePlace.read(
        int.from_bytes(words[:8], "little"),
        int.from_bytes(words[8:], "little"),
        group_count=header.group_count,
        keys=header.advertised_keys,
    )
    is_sound = moved.lies_within(os.fstat(fd).st_size) and moved.agrees_with_its_keys()
    return moved.keys if is_sound else header.advertised_keys


def _close(fd: int) -> None:
    """Unlock and close. A close alone would leave the lock with a child that another thread forked meanwhile."""
    with contextlib.suppress(OSError):
        ofd_locks.unlock(fd, 0, 0)
    os.close(fd)


def create_anonymous(*, keys: int, clock_kind: int) -> SegmentFile:
    """Create a segment without a name: it belongs to this process and to the children that it forks."""
    spec = SegmentSpec.for_this_process(PRIVATE, keys=keys, clock_kind=clock_kind, mode=0o600, gid=os.getegid())
    try:
        fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise opening_error(spec, error) from None
    try:
        header = create(spec, fd)
        attachment_id = attachment_locks.attach(fd, place=0)
        assert attachment_id is not None  # no other process has the file open
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        os.close(fd)
        raise opening_error(spec, error) from None
    except BaseException:
        os.close(fd)
        raise
    return SegmentFile.of(spec, fd, header, attachment_id)
