"""The segment that a process requires: its path, size, clock and trusted users."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Final

from forebay.errors import SegmentError
from forebay.segment import host_clock

__all__ = ["PRIVATE", "START_AGAIN", "SegmentSpec"]

PRIVATE: Final = "private store"  # instead of a path
START_AGAIN: Final = "stop its users and call Store.unlink to start with an empty one"


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """The options of a store, and the clock of the process that makes it."""

    path: str
    keys: int
    clock_kind: int
    mode: int
    """The mode of a new file. With group write permission, files of members of `gid` are trusted, too."""
    gid: int
    boot_id: bytes
    offset_ns: int
    """How far this process's clock is ahead of the host's: see ``host_clock``."""

    @classmethod
    def for_this_process(cls, path: str, *, keys: int, clock_kind: int, mode: int, gid: int) -> SegmentSpec:
        return cls(path, keys, clock_kind, mode, gid, host_clock.read_boot_id(), host_clock.read_offset_ns())

    @property
    def name_hash(self) -> int:
        """A hash of the file's name without its directory: containers may mount the directory elsewhere."""
        name = os.fsencode(os.path.basename(self.path))
        return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")

    @property
    def file_path(self) -> str | None:
        return None if self.path == PRIVATE else self.path

    @property
    def trusts_group(self) -> bool:
        return bool(self.mode & 0o020)

    def refuse(self, kind: type[SegmentError], found: str, expected: str, remedy: str) -> SegmentError:
        return kind(self.path, found, expected, remedy)
