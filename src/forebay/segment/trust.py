"""Whether a process may trust a segment's file: by its type, owner, group, mode, ACL and directory."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from dataclasses import replace
from typing import Final

from forebay.errors import ForeignSegment, UntrustedSegment
from forebay.segment.spec import SegmentSpec

__all__ = ["check_directory", "check_file", "private_directory_hint", "trusting_its_users"]

MOUNTS: Final = "/proc/self/mountinfo"
ACL: Final = "system.posix_acl_access"
DEFAULT_ACL: Final = "system.posix_acl_default"
# As the kernel gives an ACL out: a version, and for each entry a tag, its permissions and an id.
ACL_VERSION: Final = struct.Struct("<I")
ACL_ENTRY: Final = struct.Struct("<HHI")
ACL_USER, ACL_GROUP, ACL_MASK = 0x02, 0x08, 0x10


def check_directory(spec: SegmentSpec, status: os.stat_result, *, is_own: bool) -> None:
    """Raise if others may make files in the directory of that status, which the spec trusts.

    With `is_own`, no other user may. With a trusted group, a file of that group must come from a member or from root.
    That holds except where a directory gives its group to every new file: by the setgid bit, or by a mount option.
    In such a directory, all users who may make files must be trusted.
    """
    directory = os.path.dirname(spec.path)
    group_is_trusted = spec.trusts_group and status.st_gid == spec.gid
    has_acl = _acl_lets_others_write(spec, directory)
    is_open = has_acl or status.st_mode & 0o002 or status.st_uid not in (os.geteuid(), 0)
    described = f"a directory of uid {status.st_uid}, gid {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"
    described += ", with an ACL for others" if has_acl else ""
    if is_own and (is_open or (status.st_mode & 0o020 and not group_is_trusted)):
        raise spec.refuse(
            UntrustedSegment,
            f"{described}, in which others may make files",
            f"one that only uid {os.geteuid()} may write" + (f", or group {spec.gid}" if spec.trusts_group else ""),
            "give directory= one of this user's own, such as that of systemd's RuntimeDirectory=",
        )
    has_bit = bool(status.st_mode & stat.S_ISGID)
    if is_open and group_is_trusted and (has_bit or _is_mounted_with_grpid(status.st_dev)):
        giver = "the setgid bit" if has_bit else "the mount option grpid"
        raise spec.refuse(
            UntrustedSegment,
            f"{described}, that gives its group to the files of users that aren't in it",
            f"one without {giver}, or of uid {os.geteuid()} or root and not writable by others",
            (f"chmod g-s {directory}" if has_bit else "mount it without grpid")
            + ", or chmod o-w and chown it to root"
            + (f", and setfacl -b {directory}" if has_acl else ""),
        )


def _is_mounted_with_grpid(device: int) -> bool:
    """Whether a mount option makes every directory give its group to new files, as the setgid bit does."""
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open(MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, _, where, *_, options = line.split()
            if where == number and "grpid" in options.split(","):
                return True
    return False


def _acl_lets_others_write(spec: SegmentSpec, file: int | str) -> bool:
    """Whether an ACL lets other users write than this one and root, or other groups than a trusted one.

    The mode doesn't show that: its bits of the group are the ACL's mask.
    """
    try:
        raw = os.getxattr(file, ACL)
    except OSError:
        return False  # it has none, or its file system knows none
    entries = list(ACL_ENTRY.iter_unpack(raw[ACL_VERSION.size :]))
    mask = next((permissions for tag, permissions, _ in entries if tag == ACL_MASK), 0o7)
    trusted = {ACL_USER: {os.geteuid(), 0}, ACL_GROUP: {spec.gid} if spec.trusts_group else set()}
    return any(
        permissions & mask & 0o2 and number not in trusted.get(tag, {number}) for tag, permissions, number in entries
    )


def trusting_its_users(spec: SegmentSpec, fd: int) -> SegmentSpec:
    """The spec of an operator, who trusts the group that shares the file if this user is in it. Root trusts any."""
    status = os.fstat(fd)
    is_trusted = os.geteuid() == 0 or status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_mode & 0o020 and is_trusted:
        return replace(spec, mode=0o660, gid=status.st_gid)
    return spec


def check_file(spec: SegmentSpec, fd: int, *, of_any_owner: bool = False) -> None:
    """Raise for a file that isn't regular, that others may write, or that another user owns."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise spec.refuse(ForeignSegment, "no regular file", "a regular file", "choose another path")
    mode = stat.S_IMODE(status.st_mode)
    group_is_trusted = spec.trusts_group and status.st_gid == spec.gid
    remedy = "remove the file if you don't know it; to share a store with a group, give mode=0o660 and group=..."
    has_acl = _acl_lets_others_write(spec, fd)
    if has_acl or mode & 0o002 or (mode & 0o020 and not group_is_trusted):
        raise spec.refuse(
            UntrustedSegment,
            f"a file that others may write (mode {mode:04o}, gid {status.st_gid}{', by its ACL' if has_acl else ''})",
            f"write permission for uid {os.geteuid()} only"
            + (f", or for group {spec.gid}" if spec.trusts_group else ""),
            (_acl_remedy(spec) if has_acl else remedy) + private_directory_hint(spec),
        )
    if status.st_uid not in (os.geteuid(), 0) and not group_is_trusted and not of_any_owner:
        raise spec.refuse(
            UntrustedSegment,
            f"a file of uid {status.st_uid}",
            f"one of uid {os.geteuid()} or of root",
            remedy + private_directory_hint(spec),
        )


def _acl_remedy(spec: SegmentSpec) -> str:
    """The remedy for a file whose ACL lets others write."""
    directory = os.path.dirname(spec.path)
    with contextlib.suppress(OSError):
        os.getxattr(directory, DEFAULT_ACL)
        return (
            f"remove the directory's default ACL, which new files get (setfacl -b {directory}), and the file if it "
            f"is there"
        )
    return f"remove the file if you don't know it, else its ACL (setfacl -b {spec.path})"


def private_directory_hint(spec: SegmentSpec) -> str:
    """The rest of a remedy, if any user may take a name in the directory; else empty."""
    directory = os.path.dirname(spec.path)
    with contextlib.suppress(OSError):
        if os.stat(directory).st_mode & 0o002:
            return (
                f"; any user may take a name in {directory}: give directory= one that only this user may write "
                f"(systemd: RuntimeDirectory=)"
            )
    return ""
