"""Creating a segment's file, or attaching to one that may be anything.

A file climbs a ladder, and each rung that it fails has an exception of its own:

1. opened without following links, regular, of a trusted owner, not writable by others: ``UntrustedSegment``
2. empty, or left by a creator that died: it is made now; no room: ``SegmentSpaceError``
3. our magic: ``ForeignSegment``; our layout: ``SegmentVersionMismatch``
4. whole: ``TruncatedSegment``; consistent: ``DamagedSegment``; of the clock asked for, and of the past by this one:
   ``ClockMismatch``
5. of this boot: else its clock is rebased; still attached by somebody: ``ClockMismatch``

*States.* A file is unfinished (empty, or not sealed), or ready; ready, it is of this boot or, for the process that
looks, of another. Locks are of three kinds: the creation lock, exclusive, on the header; a user's mark, shared, on a
byte of its own; and the exclusion of all users, exclusive, on the whole range of marks (see ``attachments``).

*Transitions.* Unfinished to ready: by the holder of the creation lock. From another boot to this boot, or removed for a
clock that makes no sense: by the holder of the creation lock that excludes all users. Otherwise a ready header is never
changed.

*Attaching* takes neither: a process reads a ready header of this boot, takes its mark, and reads the header again. If
it is still the same, nobody changes it as long as the mark is held. For who rebases has excluded users either before
the mark was taken, so it wasn't taken until that was over, and the second reading shows what has become of the header;
or after, which the mark forbids. So the clock of a segment in use is never moved; a process that takes it for one of
another boot, as in a system container with a boot id of its own, is refused.

*Crash and stop.* All locks end with their process. A killed creator leaves an unfinished file, which the next one
makes; a killed rebaser leaves the header of before or after its one write. A creator or rebaser that is stopped keeps
others waiting for ``LOCK_TIMEOUT``, then ``SegmentBusy``; one that is stopped while it attaches keeps nobody.

*Readers.* A process that may only read the file can take shared locks. They keep nobody from attaching. A creation they
could hold up, but an unfinished file can be opened by nobody else: it is made with mode 0600, or 0660 for a trusted
group. They can hold up what comes first after a reboot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import struct
import time
import uuid
import warnings
import zlib
from dataclasses import dataclass, replace
from typing import Final

from forebay.core.table.segment_view import use_huge_pages
from forebay.errors import (
    ClockMismatch,
    DamagedSegment,
    ForeignSegment,
    SegmentBusy,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSizeWarning,
    SegmentSpaceError,
    SegmentVersionMismatch,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.segment import attachments, free_space, host_clock, layout, ofd_locks

__all__ = [
    "Header",
    "SegmentFile",
    "Wanted",
    "check_consistency",
    "check_identity",
    "create_anonymous",
    "is_at",
    "is_unfinished",
    "not_opened",
    "open_or_create",
    "removed",
]

BYTES_PER_KEY: Final = 21
PRIVATE: Final = "private store"  # instead of a path
LOCK_TIMEOUT: Final = 30.0
MAX_AGE_NS: Final = 2**61
CLEARED_AT_ONCE: Final = 2**20
CLOCK_NAMES: Final = {
    layout.CLOCK_MONOTONIC: "monotonic",
    layout.CLOCK_MANUAL: "manual",
    layout.CLOCK_PYTHON: "Python (time.time)",
}
MOUNTS: Final = "/proc/self/mountinfo"
SEAL: Final = struct.Struct("<II")  # the header's checksum and state
OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the caller asked for."""

    path: str
    keys: int
    clock_kind: int
    mode: int
    gid: int
    boot_id: bytes
    offset_ns: int
    """Of this process's clock: see ``host_clock``."""

    @classmethod
    def here(cls, path: str, *, keys: int, clock_kind: int, mode: int, gid: int) -> Wanted:
        """For this process."""
        return cls(path, keys, clock_kind, mode, gid, host_clock.read_boot_id(), host_clock.read_offset_ns())

    @property
    def name_hash(self) -> int:
        """Of the file's name alone: containers may have the directory elsewhere."""
        name = os.fsencode(os.path.basename(self.path))
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    @property
    def file_path(self) -> str | None:
        return None if self.path == PRIVATE else self.path

    def refuse(self, kind: type[SegmentError], found: str, expected: str, remedy: str) -> SegmentError:
        return kind(self.path, found, expected, remedy)


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a segment's header that mean something to an attached process."""

    segment_size: int
    advertised_keys: int
    group_count: int
    clock_kind: int
    epoch_ns: int
    wall_epoch_ns: int
    hash_key: tuple[int, int]
    boot_id: bytes
    name_hash: int

    @classmethod
    def new(cls, wanted: Wanted, at_least: int) -> Header:
        size = max(wanted.keys * BYTES_PER_KEY, at_least - layout.TABLE_OFFSET)
        group_count = max(layout.MIN_GROUPS, -(-size // layout.GROUP_BYTES))
        return cls(
            segment_size=layout.TABLE_OFFSET + group_count * layout.GROUP_BYTES,
            advertised_keys=wanted.keys,
            group_count=group_count,
            clock_kind=wanted.clock_kind,
            epoch_ns=host_clock.monotonic_ns(wanted.offset_ns),
            wall_epoch_ns=time.time_ns(),
            hash_key=(secrets.randbits(64), secrets.randbits(64)),
            boot_id=wanted.boot_id,
            name_hash=wanted.name_hash,
        )

    def pack(self, state: int) -> bytes:
        """Everything up to the state; with a checksum only once the segment is ready."""
        head = layout.HEADER.pack(
            layout.MAGIC,
            layout.LAYOUT_VERSION,
            self.clock_kind,
            self.segment_size,
            self.advertised_keys,
            self.group_count,
            self.epoch_ns % 2**64,
            self.wall_epoch_ns,
            *self.hash_key,
            self.boot_id,
            self.name_hash,
            *(0, 0, b"", 0, 0, b""),
        )[: layout.HEADER_CHECKSUM]
        return head + SEAL.pack(zlib.crc32(head) if state == layout.STATE_READY else 0, state)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        _, _, clock_kind, segment_size, keys, group_count, epoch_ns, wall_epoch_ns, *rest = layout.HEADER.unpack(raw)
        key0, key1, boot_id, name_hash, *_ = rest
        hash_key = (key0, key1)
        return cls(segment_size, keys, group_count, clock_kind, epoch_ns, wall_epoch_ns, hash_key, boot_id, name_hash)


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """An open, validated segment."""

    fd: int
    header: Header
    epoch_ns: int
    """Segment time 0 by this process's clock."""
    mark: int
    """As a user of the segment: see ``attachments``."""

    @classmethod
    def of(cls, wanted: Wanted, fd: int, header: Header, mark: int) -> SegmentFile:
        return cls(fd, header, (header.epoch_ns + wanted.offset_ns) % 2**64, mark)


def open_or_create(path: str, *, keys: int, clock_kind: int, mode: int, gid: int, own_directory: bool) -> SegmentFile:
    """Climb the ladder. Any number of processes may do so at once; all end up with the same segment.

    `mode` is that of a new file, and says whom to trust: with group write permission, also what members of `gid` made.
    With `own_directory`, nobody else may make files where it is.
    """
    wanted = Wanted.here(path, keys=keys, clock_kind=clock_kind, mode=mode, gid=gid)
    if mode & 0o020 or own_directory:
        _check_directory(wanted, own_directory)
    file = None
    while file is None:
        fd = _open(wanted)
        try:
            _check_trust(wanted, os.fstat(fd))
            file = _attach(wanted, fd)
            if file is None:
                _let_go(fd)
            elif file.header.advertised_keys != keys:
                warnings.warn(
                    f"{path} was made for {file.header.advertised_keys} keys and is used as it is, not for the {keys} "
                    f"asked for; to change that, stop its users and call Store.unlink",
                    SegmentSizeWarning,
                    stacklevel=3,
                )
        except OSError as error:
            _let_go(fd)
            raise not_opened(wanted, error) from None
        except BaseException:
            _let_go(fd)
            raise
    return file


def _attach(wanted: Wanted, fd: int) -> SegmentFile | None:
    """Become a user of the segment, which is made usable first if it isn't. None if the path leads elsewhere by now."""
    place = attachments.place_of(wanted.path)
    deadline = time.clock_gettime(time.CLOCK_MONOTONIC) + LOCK_TIMEOUT
    while True:
        header = _usable_header(wanted, fd)
        if header is None:
            if not _make_usable(wanted, fd, place):
                return None
            continue
        mark = attachments.join(fd, place)
        if mark is None:
            if time.clock_gettime(time.CLOCK_MONOTONIC) >= deadline:
                raise _busy(wanted)
            time.sleep(0.005)
        elif not _is_current(wanted, fd):
            return None
        elif _usable_header(wanted, fd) == header:
            return SegmentFile.of(wanted, fd, header, mark)
        # Another process has changed the header since. A mark that isn't used ends with the file, too.


def _busy(wanted: Wanted) -> SegmentError:
    return wanted.refuse(
        SegmentBusy,
        f"a segment that another process has been creating for {LOCK_TIMEOUT:.0f} s",
        "a creation that ends",
        "look for a stopped process that has the file open (fuser), or remove the file",
    )


def removed(path: str) -> str:
    """What to warn of where processes go on with a segment that no new one will find."""
    return (
        f"{path} was removed while processes use it: they go on with the removed segment, those that start make a new "
        f"one, and each lets its whole limit in; restart the older ones. If it wasn't Store.unlink, see "
        f"docs/operations.md for what removes files"
    )


def _let_go(fd: int) -> None:
    """Unlock and close: were it only closed, a child that another thread forked meanwhile would keep the lock."""
    with contextlib.suppress(OSError):
        ofd_locks.unlock(fd, 0, 0)
    os.close(fd)


def create_anonymous(*, keys: int, clock_kind: int) -> SegmentFile:
    """A segment without a name: it belongs to this process and to the children that it forks."""
    wanted = Wanted.here(PRIVATE, keys=keys, clock_kind=clock_kind, mode=0o600, gid=os.getegid())
    try:
        fd = os.memfd_create("forebay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise not_opened(wanted, error) from None
    try:
        header = _create(wanted, fd)
        mark = attachments.join(fd, place=0)
        assert mark is not None  # nobody else has the file open
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    except OSError as error:
        os.close(fd)
        raise not_opened(wanted, error) from None
    except BaseException:
        os.close(fd)
        raise
    return SegmentFile.of(wanted, fd, header, mark)


def _open(wanted: Wanted) -> int:
    """Open the file, or make an empty one."""
    while True:
        try:
            return os.open(wanted.path, OPEN_FLAGS)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise not_opened(wanted, error) from None
        with contextlib.suppress(FileExistsError):
            return _make_empty(wanted)


def _make_empty(wanted: Wanted) -> int:
    """An empty file at the path, from its first moment on with the group and the mode that it is to have.

    Made without a name and then linked: a creator that is killed before leaves nothing, least of all a file that the
    other members of the group may not open. Raises FileExistsError if another was first.
    """
    try:
        fd = os.open(os.path.dirname(wanted.path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise not_opened(wanted, error) from None
    try:
        if os.fstat(fd).st_gid != wanted.gid and wanted.mode & 0o070:
            os.fchown(fd, -1, wanted.gid)
        os.fchmod(fd, wanted.mode)
        descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.link(str(fd), wanted.path, src_dir_fd=descriptors, follow_symlinks=True)
        finally:
            os.close(descriptors)
    except FileExistsError:
        os.close(fd)
        raise
    except PermissionError as error:
        os.close(fd)
        raise wanted.refuse(
            UntrustedSegment,
            f"no right to give the file to group {wanted.gid} ({error.strerror})",
            "a creator that is root or a member of that group",
            "create the store as root, or name a group that this process is in",
        ) from None
    except OSError as error:
        os.close(fd)
        raise not_opened(wanted, error) from None
    return fd


def not_opened(wanted: Wanted, error: OSError) -> SegmentError:
    """What to raise for a file that the system didn't open."""
    if error.errno == errno.ELOOP:
        return wanted.refuse(
            UntrustedSegment, "a symbolic link", "a regular file", "remove the link, or give the path it leads to"
        )
    if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
        return wanted.refuse(ForeignSegment, "a directory or a device", "a regular file", "choose another path")
    if error.errno == errno.ENOENT:
        return wanted.refuse(
            SegmentError, "no such directory", "a directory to create the segment in", "create the directory"
        )
    if error.errno == errno.EROFS:
        return wanted.refuse(
            SegmentError,
            "a file system that is mounted for reading only",
            "one that can be written",
            "mount it for writing too, or give path= on another one",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            status = os.lstat(wanted.path)
        except OSError:
            return wanted.refuse(
                SegmentError,
                f"no right to make a file there ({error.strerror})",
                f"a directory that uid {os.geteuid()} may write",
                "give path= in such a directory, or give this user the right to write this one",
            )
        return wanted.refuse(
            UntrustedSegment,
            f"a file of uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}",
            f"one that uid {os.geteuid()} may read and write",
            "share a store between users with Store(..., mode=0o660, group=...) in every process; a segment that was "
            "made otherwise keeps its mode and group until it is removed (Store.unlink)"
            + _where_names_are_safe(wanted),
        )
    if error.errno == errno.EOPNOTSUPP:
        return wanted.refuse(
            SegmentError,
            "a file system without unnamed files (O_TMPFILE)",
            "tmpfs, ext4, XFS, btrfs or the like",
            "choose a path on such a one; in a container, on a volume",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
        return wanted.refuse(SegmentSpaceError, error.strerror or "", "room for one more file", "free some")
    return wanted.refuse(SegmentError, f"a file that can't be opened ({error.strerror})", "a segment", "choose another")


def _check_directory(wanted: Wanted, is_own: bool) -> None:
    """That nobody else can make files there, if it is to be one's own; and that a file of the group was made by a
    member of it, or by root.

    That is so but in a directory that gives its group to every file, whoever makes it: by the setgid bit, or by how its
    file system is mounted. There, all who may make files must be trusted.
    """
    directory = os.path.dirname(wanted.path)
    try:
        status = os.stat(directory)
    except OSError as error:
        raise not_opened(wanted, error) from None
    group_is_trusted = bool(wanted.mode & 0o020) and status.st_gid == wanted.gid
    is_open = status.st_mode & 0o002 or status.st_uid not in (os.geteuid(), 0)
    described = f"a directory of uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
    if is_own and (is_open or (status.st_mode & 0o020 and not group_is_trusted)):
        raise wanted.refuse(
            UntrustedSegment,
            f"{described}, in which others may make files",
            f"one that only uid {os.geteuid()} may write" + (f", or group {wanted.gid}" if wanted.mode & 0o020 else ""),
            "give directory= one of this user's own, such as that of systemd's RuntimeDirectory=",
        )
    has_bit = bool(status.st_mode & stat.S_ISGID)
    if is_open and group_is_trusted and (has_bit or _is_mounted_with_grpid(status.st_dev)):
        giver = "the setgid bit" if has_bit else "the mount option grpid"
        raise wanted.refuse(
            UntrustedSegment,
            f"{described}, that gives its group to the files of users that aren't in it",
            f"one without {giver}, or of uid {os.geteuid()} or root and not writable by others",
            (f"chmod g-s {directory}" if has_bit else "mount it without grpid") + ", or chmod o-w and chown it to root",
        )


def _is_mounted_with_grpid(device: int) -> bool:
    """Whether every directory of a file system gives its group to all files, as one with the setgid bit does."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, _, where, *_, options = line.split()
            if where == number and "grpid" in options.split(","):
                return True
    return False


def _where_names_are_safe(wanted: Wanted) -> str:
    """The rest of a remedy, where another user may have taken a store's name."""
    with contextlib.suppress(OSError):
        if os.stat(os.path.dirname(wanted.path)).st_mode & 0o002:
            return (
                f"; any user may take a name in {os.path.dirname(wanted.path)}: give directory= one that only this "
                f"user may write (systemd: RuntimeDirectory=)"
            )
    return ""


def _check_trust(wanted: Wanted, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise wanted.refuse(ForeignSegment, "no regular file", "a regular file", "choose another path")
    mode = stat.S_IMODE(status.st_mode)
    group_is_trusted = bool(wanted.mode & 0o020) and status.st_gid == wanted.gid
    if mode & 0o002 or (mode & 0o020 and not group_is_trusted):
        raise wanted.refuse(
            UntrustedSegment,
            f"a file that others may write (mode {mode:04o}, gid {status.st_gid})",
            f"write permission for uid {os.geteuid()} only"
            + (f", or for group {wanted.gid}" if wanted.mode & 0o020 else ""),
            "remove the file if you don't know it; to share a store with a group, give mode=0o660 and group=..."
            + _where_names_are_safe(wanted),
        )
    if status.st_uid not in (os.geteuid(), 0) and not group_is_trusted:
        raise wanted.refuse(
            UntrustedSegment,
            f"a file of uid {status.st_uid}",
            f"one of uid {os.geteuid()} or of root",
            "remove the file if you don't know it; to share a store with a group, give mode=0o660 and group=..."
            + _where_names_are_safe(wanted),
        )


def _is_current(wanted: Wanted, fd: int) -> bool:
    """Whether the path still leads to this file: it may have been unlinked while we waited for the lock."""
    return is_at(wanted.path, os.fstat(fd))


def is_at(path: str, status: os.stat_result) -> bool:
    """Whether the path leads to the file of that status."""
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _usable_header(wanted: Wanted, fd: int) -> Header | None:
    """The header, if nothing has to be done or said before the segment is used."""
    with contextlib.suppress(SegmentError):
        header = _read_header(wanted, fd)
        return None if _is_of_another_boot(wanted, header) else header
    return None


def _read_header(wanted: Wanted, fd: int) -> Header:
    raw = os.pread(fd, layout.HEADER.size, 0)
    check_identity(wanted, raw)
    header = check_consistency(wanted, raw, os.fstat(fd).st_size)
    if header.name_hash != wanted.name_hash:
        raise wanted.refuse(
            UntrustedSegment,
            "the segment of another store: it was made under another file name",
            f"one that was made as {os.path.basename(wanted.path)!r}",
            "if the file was linked here, remove this name; if it was renamed, give it back its own",
        )
    if not _is_of_another_boot(wanted, header):
        _check_age(wanted, header)
    return header


def _is_of_another_boot(wanted: Wanted, header: Header) -> bool:
    return header.clock_kind == layout.CLOCK_MONOTONIC and header.boot_id != wanted.boot_id


def _make_usable(wanted: Wanted, fd: int, place: int) -> bool:
    """Create the segment if it has never been ready, or give it this boot's clock. False if the file is of no use.

    Or say why it can't be used.
    """
    if not ofd_locks.lock_within(fd, 0, layout.HEADER.size, LOCK_TIMEOUT):
        raise _busy(wanted)
    try:
        if not _is_current(wanted, fd):
            return False
        raw = os.pread(fd, layout.HEADER.size, 0)
        if raw:
            check_identity(wanted, raw)
        if not raw or is_unfinished(raw):
            # Its creator is gone, or it would hold the lock.
            _create(wanted, fd)
            if attachments.use_removed(fd, place):
                warnings.warn(removed(wanted.path), SegmentRemovedWarning, stacklevel=5)
            return True
        header = _read_header(wanted, fd)
        if not _is_of_another_boot(wanted, header):
            return True  # by another process, while this one waited for the lock
        if not attachments.exclude(fd):
            raise wanted.refuse(
                ClockMismatch,
                f"a segment of boot {uuid.UUID(bytes=header.boot_id)}, which some process has attached or locked",
                f"one of this boot, {uuid.UUID(bytes=wanted.boot_id)}",
                "system containers have boot ids of their own: give those that share a store one "
                f"({host_clock.BOOT_ID}), or each a store; `fuser` tells who has the file open",
            )
        return _rebase(wanted, fd, header)
    finally:
        ofd_locks.unlock(fd, 0, 0)


def is_unfinished(raw: bytes) -> bool:
    """Whether a header is what a creator leaves that was killed, or is at it."""
    return bool(SEAL.unpack_from(raw, layout.HEADER_CHECKSUM) == (0, layout.STATE_CREATING))


def _create(wanted: Wanted, fd: int) -> Header:
    """Make a segment in a file that has never been ready. It may have grown already, and it is never made smaller:
    should somebody be attached after all, because of damage, that would kill them."""
    size = os.fstat(fd).st_size
    header = Header.new(wanted, at_least=size)
    try:
        free_space.refuse_what_does_not_fit(fd, wanted.file_path, header.segment_size - _bytes_taken(fd))
        # One small write, then the rest: whatever a killed creator leaves is empty or says that it isn't ready.
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
            if _is_current(wanted, fd):
                os.unlink(wanted.path)
        if not free_space.is_shortage(error):
            raise
        found, remedy = free_space.shortage(
            error, fd, wanted.file_path, header.segment_size, taken=_bytes_taken(fd), or_else="ask for fewer keys"
        )
        expected = f"{header.segment_size} bytes for {wanted.keys} keys"
        raise wanted.refuse(SegmentSpaceError, found, expected, remedy) from None
    os.pwrite(fd, header.pack(layout.STATE_READY)[layout.HEADER_CHECKSUM :], layout.HEADER_CHECKSUM)
    return header


def _bytes_taken(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def check_identity(wanted: Wanted, raw: bytes) -> None:
    """That a header is one, and of our layout."""
    magic = layout.MAGIC.to_bytes(8, "little")
    if raw[:8] != magic:
        raise wanted.refuse(
            ForeignSegment,
            f"a file that begins with {raw[:8]!r}",
            f"the mark of a forebay segment, {magic!r}",
            "choose another name or path; the file was left as it is",
        )
    if len(raw) < layout.HEADER_MANUAL_NS:
        if len(raw) == layout.HEADER_STATE + 4:
            return  # Its creator died right after its first write.
        raise wanted.refuse(
            TruncatedSegment, f"{len(raw)} bytes", f"a header of {layout.HEADER.size} bytes", _START_AGAIN
        )
    version = int.from_bytes(raw[layout.HEADER_LAYOUT_VERSION : layout.HEADER_LAYOUT_VERSION + 4], "little")
    if version != layout.LAYOUT_VERSION:
        raise wanted.refuse(
            SegmentVersionMismatch,
            f"layout version {version}",
            f"layout version {layout.LAYOUT_VERSION}",
            "use one version of forebay in all processes, or give this one a store of another name",
        )


_START_AGAIN: Final = "stop its users and call Store.unlink to start with an empty one"


def check_consistency(wanted: Wanted, raw: bytes, size: int) -> Header:
    """A header that is ready, as of a file of that size."""
    if len(raw) < layout.HEADER.size:
        raise wanted.refuse(
            TruncatedSegment, f"{len(raw)} bytes", f"a header of {layout.HEADER.size} bytes", _START_AGAIN
        )
    checksum, state = SEAL.unpack_from(raw, layout.HEADER_CHECKSUM)
    computed = zlib.crc32(raw[: layout.HEADER_CHECKSUM])
    if checksum != computed:
        raise wanted.refuse(
            DamagedSegment, f"a header with checksum {checksum:#010x}", f"checksum {computed:#010x}", _START_AGAIN
        )
    if state != layout.STATE_READY:
        raise wanted.refuse(
            DamagedSegment, f"a header in state {state}", f"state {layout.STATE_READY} (ready)", _START_AGAIN
        )
    header = Header.unpack(raw)
    if size < header.segment_size:  # it may be larger: extents lie behind the table
        raise wanted.refuse(TruncatedSegment, f"{size} bytes", f"{header.segment_size} bytes", _START_AGAIN)
    whole = layout.TABLE_OFFSET + header.group_count * layout.GROUP_BYTES
    if header.group_count < layout.MIN_GROUPS or whole != header.segment_size or header.clock_kind not in CLOCK_NAMES:
        raise wanted.refuse(
            DamagedSegment,
            f"{header.group_count} groups and clock {header.clock_kind} in {header.segment_size} bytes",
            "numbers that fit each other",
            _START_AGAIN,
        )
    if header.clock_kind != wanted.clock_kind:
        raise wanted.refuse(
            ClockMismatch,
            f"a segment with a {CLOCK_NAMES[header.clock_kind]} clock",
            f"one with a {CLOCK_NAMES[wanted.clock_kind]} clock",
            "give the same clock= in all processes, or use another name",
        )
    return header


def _check_age(wanted: Wanted, header: Header) -> None:
    """A segment of this boot is no older than the boot; if it seems so, its time would let everybody in.

    That is another clock than the one it was made by: that of a host restored from a snapshot, or of another boot that
    was given the same id.
    """
    age_ns = (host_clock.monotonic_ns(wanted.offset_ns) - header.epoch_ns) % 2**64
    if header.clock_kind == layout.CLOCK_MONOTONIC and age_ns >= MAX_AGE_NS:
        raise wanted.refuse(
            ClockMismatch,
            f"a segment that was made {(2**64 - age_ns) / 1e9:.0f} s after now by this host's clock",
            "one that was made before now",
            _START_AGAIN,
        )


def _rebase(wanted: Wanted, fd: int, header: Header) -> bool:
    """After a reboot: let the segment's time go on by the wall clock, as nobody was attached meanwhile. False if it is
    of no use, and removed.

    If the wall clock says that this is before the segment was made, or 73 years later, nothing is known about the
    states' age: keeping them could lock keys out for as long as the machine was up, so the segment starts empty.
    """
    elapsed_ns = time.time_ns() - header.wall_epoch_ns
    if not 0 <= elapsed_ns < MAX_AGE_NS:
        warnings.warn(
            f"{wanted.path} was made {elapsed_ns // 10**9} s ago by the wall clock, which can't be, and starts empty",
            RuntimeWarning,
            stacklevel=6,
        )
        with contextlib.suppress(FileNotFoundError):
            os.unlink(wanted.path)
        return False
    epoch_ns = (host_clock.monotonic_ns(wanted.offset_ns) - elapsed_ns) % 2**64
    rebased = replace(header, epoch_ns=epoch_ns, boot_id=wanted.boot_id)
    os.pwrite(fd, rebased.pack(layout.STATE_READY), 0)
    return True
