"""How much space there is for a segment, and the error text when there is too little.

Space is checked before any is taken. A file system that is filled to its last byte harms other programs before it
refuses. The kernel promises more memory than there is, and ends processes when they use it.
"""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import Final

from forebay.segment.kernel_files import read_kernel_file
from forebay.segment.mapping import is_in_memory

__all__ = ["first_numbers", "is_shortage", "memory_limits", "refuse_what_does_not_fit", "shortage"]

SHARED_MEMORY: Final = "/dev/shm/"
PROC: Final = Path("/proc")
CONTROL_GROUPS: Final = Path("/sys/fs/cgroup")


def refuse_what_does_not_fit(fd: int, path: str | None, needed: int) -> None:
    """Raise OSError if `needed` more bytes for the file `fd` don't fit. It is at `path`; None if it has no name."""
    free = _bytes_free(fd, path)
    if free is not None and needed > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    available = _bytes_available(fd)
    if available is not None and needed > available:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def is_shortage(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


def shortage(
    error: OSError, fd: int, path: str | None, needed: int, *, taken: int = 0, or_else: str
) -> tuple[str, str]:
    """Describe the space found instead of `needed` bytes, of which the file has `taken` already; and the remedy."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if error.errno == errno.EFBIG and limit != resource.RLIM_INFINITY:
        return f"a limit of {limit} bytes to a file's size (ulimit -f)", f"raise it, or {or_else}"
    free, available = _bytes_free(fd, path), _bytes_available(fd)
    if available is not None and (free is None or error.errno == errno.ENOMEM):
        found = f"{available + taken} bytes of memory available"
        return found, f"free some, give a container more of it, or {or_else}"
    found = error.strerror or "" if free is None else f"{free + taken} bytes free on its file system"
    remedy = f"free space there, give path= on a larger file system, or {or_else}"
    if path is not None and path.startswith(SHARED_MEMORY):
        used, more = _mib_up(_bytes_used(fd) - taken), _mib_up(needed)
        remedy += (
            f"; in a container, enlarge /dev/shm to {used + more} MiB ({used} MiB in use and {more} MiB needed): "
            f"docker run --shm-size={used + more}m, shm_size in Compose, an emptyDir volume with medium: Memory in "
            f"Kubernetes"
        )
    return found, remedy


def _mib_up(size: int) -> int:
    return -(-size // 2**20)


def _bytes_used(fd: int) -> int:
    """The bytes that all files of its file system take."""
    system = os.fstatvfs(fd)
    return (system.f_blocks - system.f_bfree) * system.f_frsize


def _bytes_free(fd: int, path: str | None) -> int | None:
    """The free bytes of the file system. None if it has no limit of its own."""
    system = os.fstatvfs(fd)
    return None if path is None or system.f_blocks == 0 else system.f_bavail * system.f_frsize


def _bytes_available(fd: int) -> int | None:
    """The available memory of the host, or less if a control group (version 2) of this process is near its limit.

    None if the file isn't in memory, or if neither can be read.
    """
    if not is_in_memory(fd):
        return None
    sizes = []
    with suppress(OSError, ValueError, KeyError):
        sizes.append(first_numbers(PROC / "meminfo")["MemAvailable:"] * 1024)
    sizes += [max(most - used, 0) for _, most, used in memory_limits()]
    return min(sizes, default=None)


def memory_limits() -> list[tuple[Path, int, int]]:
    """The control groups (version 2) of this process that have a memory limit: each with the limit, and the bytes in
    use that the kernel can't drop."""
    limits = []
    for group in _control_groups():
        with suppress(OSError, ValueError, KeyError):
            most = int(read_kernel_file(group / "memory.max"))  # "max", if there is no limit, is a ValueError
            numbers = first_numbers(group / "memory.stat")
            # The kernel drops cached files before it ends a process.
            used = int(read_kernel_file(group / "memory.current")) - numbers["active_file"] - numbers["inactive_file"]
            limits.append((group, most, used))
    return limits


def _control_groups() -> list[Path]:
    """This process's control group and the groups that contain it."""
    with suppress(OSError):
        for line in os.fsdecode(read_kernel_file(PROC / "self/cgroup")).splitlines():
            if line.startswith("0::/"):
                group = CONTROL_GROUPS / line.removeprefix("0::/")
                return [group, *group.parents]
    return []


def first_numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by the line's first word."""
    return {words[0]: int(words[1]) for words in map(str.split, read_kernel_file(file).decode().splitlines())}
