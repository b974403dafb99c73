"""Opening a segment's file, or making an empty one."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Final

from forebay.errors import ForeignSegment, SegmentError, SegmentSpaceError, UntrustedSegment
from forebay.segment.spec import SegmentSpec
from forebay.segment.trust import check_file, private_directory_hint

__all__ = ["name_file", "open_or_make_empty", "open_unnamed", "opening_error"]

OPEN_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def open_or_make_empty(spec: SegmentSpec) -> tuple[int, bool]:
    """Open the file at the path without following links, or make an empty one. Returns whether it is new, too."""
    while True:
        try:
            return os.open(spec.path, OPEN_FLAGS), False
        except FileNotFoundError:
            pass
        except OSError as error:
            raise opening_error(spec, error) from None
        with contextlib.suppress(FileExistsError):
            return _make_empty(spec), True


def _make_empty(spec: SegmentSpec) -> int:
    """Make an empty file at the path. It has its group and mode from the moment it appears.

    The file is made without a name and then linked, so a creator that is killed earlier leaves nothing. In particular
    it leaves no file that other members of the group can't open. Raises FileExistsError if another process was first,
    and ``UntrustedSegment`` if others could write the file.
    """
    fd = open_unnamed(spec)
    try:
        name_file(fd, spec.path)
    except FileExistsError:
        os.close(fd)
        raise
    except OSError as error:
        os.close(fd)
        raise opening_error(spec, error) from None
    return fd


def name_file(fd: int, path: str) -> None:
    """Give an unnamed file a name. Raises FileExistsError if there is a file of that name."""
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.link(str(fd), path, src_dir_fd=descriptors, follow_symlinks=True)
    finally:
        os.close(descriptors)


def open_unnamed(spec: SegmentSpec) -> int:
    """Make an empty file without a name in the directory of the path, with the group and the mode of the spec."""
    try:
        fd = os.open(os.path.dirname(spec.path), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise opening_error(spec, error) from None
    try:
        if os.fstat(fd).st_gid != spec.gid and spec.mode & 0o070:
            os.fchown(fd, -1, spec.gid)
        os.fchmod(fd, spec.mode)
        check_file(spec, fd)  # a default ACL of the directory may let others write it
    except SegmentError:
        os.close(fd)
        raise
    except PermissionError as error:
        os.close(fd)
        raise spec.refuse(
            UntrustedSegment,
            f"no right to give the file to group {spec.gid} ({error.strerror})",
            "a creator that is root or a member of that group",
            "create the store as root, or name a group that this process is in",
        ) from None
    except OSError as error:
        os.close(fd)
        raise opening_error(spec, error) from None
    return fd


def opening_error(spec: SegmentSpec, error: OSError) -> SegmentError:
    """The exception for a file that the system refused to open or to make."""
    if error.errno == errno.ELOOP:
        return spec.refuse(
            UntrustedSegment, "a symbolic link", "a regular file", "remove the link, or give the path it leads to"
        )
    if error.errno in (errno.EISDIR, errno.ENXIO, errno.ENODEV):
        return spec.refuse(ForeignSegment, "a directory or a device", "a regular file", "choose another path")
    if error.errno == errno.ENOENT:
        return spec.refuse(
            SegmentError, "no such directory", "a directory to create the segment in", "create the directory"
        )
    if error.errno == errno.EROFS:
        return spec.refuse(
            SegmentError,
            "a file system that is mounted read-only",
            "one that can be written",
            "mount it read-write, or give path= on another one",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        try:
            status = os.lstat(spec.path)
        except OSError:
            return spec.refuse(
                SegmentError,
                f"no right to make a file there ({error.strerror})",
                f"a directory that uid {os.geteuid()} may write",
                "give path= in such a directory, or give this user the right to write this one",
            )
        return spec.refuse(
            UntrustedSegment,
            f"a file of uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}",
            f"one that uid {os.geteuid()} may open",
            "share a store between users with Store(..., mode=0o660, group=...) in every process; a segment that was "
            "made otherwise keeps its mode and group until it is removed (Store.unlink)" + private_directory_hint(spec),
        )
    if error.errno == errno.EOPNOTSUPP:
        return spec.refuse(
            SegmentError,
            "a file system without unnamed files (O_TMPFILE)",
            "tmpfs, ext4, XFS, btrfs or the like",
            "choose a path on such a file system; in a container, on a volume",
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE):
        return spec.refuse(SegmentSpaceError, error.strerror or "", "space for one more file", "free some")
    return spec.refuse(SegmentError, f"a file that can't be opened ({error.strerror})", "a segment", "choose another")
