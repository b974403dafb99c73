"""Which processes use which segments, as the kernel shows it in ``/proc``.

Attachment locks count the attached processes of all containers, without their pids. The mappings in
``/proc/PID/maps`` have the pids, of the processes that this one sees and may look at. They also show segments that
were removed, those without a name, and those of processes that closed their files.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from forebay.segment.attachment_locks import attached_ids
from forebay.segment.kernel_files import read_kernel_file

__all__ = ["ANONYMOUS", "FileUsers", "MappedFile", "file_users"]

PROC: Final = Path("/proc")
ANONYMOUS: Final = "/memfd:forebay (deleted)"
"""The path of segments without a name."""


class MappedFile(NamedTuple):
    """A file that a process has mapped to share it. The device is that of a ``stat``."""

    device: int
    inode: int
    path: str
    """As the process sees it, ending with " (deleted)" if it was removed; a memfd has no other path."""


@dataclass(frozen=True, slots=True)
class FileUsers:
    """The use of all shared files of this host, segments among them."""

    mapped_by: dict[MappedFile, list[int]] = field(default_factory=dict)
    """The pids of the processes that map each file."""
    hidden: int = 0
    """The number of processes whose mappings this user may not see."""

    def pids_of(self, status: os.stat_result) -> list[int]:
        """The pids of the processes that map the file of that status."""
        wanted = (status.st_dev, status.st_ino)
        return sorted({pid for file, pids in self.mapped_by.items() if file[:2] == wanted for pid in pids})

    def number_of(self, status: os.stat_result) -> int:
        """How many processes use the file of that status, as far as it is known.

        An attachment lock stands for a store that a process has open, or for one that it shares with forked children.
        """
        return max(len(self.pids_of(status)), len(attached_ids(status)))


def file_users() -> FileUsers:
    """Look at all processes. About 0.1 ms each."""
    found: dict[MappedFile, list[int]] = defaultdict(list)
    hidden = 0
    for entry in os.listdir(PROC):
        if entry.isdecimal():
            try:
                maps = read_kernel_file(PROC / entry / "maps")
            except PermissionError:
                hidden += 1
                continue
            except OSError:  # it has ended
                continue
            for file in dict.fromkeys(_shared_files(maps)):
                found[file].append(int(entry))
    return FileUsers(dict(found), hidden)


def _shared_files(maps: bytes) -> list[MappedFile]:
    files = []
    for line in maps.splitlines():
        _, permissions, _, device, inode, *rest = line.split(maxsplit=5)
        if permissions.endswith(b"s") and rest:
            major, minor = (int(part, 16) for part in device.split(b":"))
            files.append(MappedFile(os.makedev(major, minor), int(inode), os.fsdecode(rest[0])))
    return files
