"""The stores of a host as an operator sees them: read from their files, without attaching."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay.errors import SegmentError, SegmentMissing
from forebay.metrics.readings import Memory
from forebay.metrics.segments import limiters_of, live_keys_of, occupancy_of
from forebay.metrics.sources import PREFIX, label_of, path_of_store
from forebay.segment import layout
from forebay.segment.file_users import FileUsers
from forebay.segment.header import CLOCK_NAMES
from forebay.segment.limiter_list import labels_of
from forebay.segment.names import is_of_rules
from forebay.stats import LimiterStats
from forebay.store_options import DIRECTORY
from forebay.verification.lists import limiters_in_place
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["PREFIX", "Counts", "Memory", "Seen", "count", "directories", "files_in", "look_at", "path_of_store"]


def directories(more: Iterable[str]) -> list[str]:
    """The directories in which stores usually are, and `more`. Raises ``OSError`` for one of `more` that is none."""
    usual = [DIRECTORY, os.environ.get("XDG_RUNTIME_DIR", "")]
    for one in more:
        os.listdir(one)
    return list(dict.fromkeys(os.path.abspath(one) for one in (*usual, *more) if one and os.path.isdir(one)))


def files_in(directory: str) -> list[str]:
    """The paths of the files in a directory that have a store's name, sorted. Empty if it can't be read.

    Those of live rules are left out.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    stores = [name for name in sorted(names) if name.startswith(PREFIX) and not is_of_rules(name)]
    return [os.path.join(directory, name) for name in stores]


@dataclass(frozen=True, slots=True)
class Seen:
    """A store's file."""

    path: str
    bytes: int
    """The file's size."""
    mode: int
    uid: int
    gid: int
    attached: int
    """Processes that use it, as far as it is known."""
    pids: tuple[int, ...]
    """Those that this user may see."""
    keys: int = 0
    """Live keys that it was made for."""
    live_keys: int = 0
    limiters: int = 0
    clock: str = ""
    of_this_boot: bool = True
    layout_version: int = 0
    problem: str = ""
    """The reason why it can't be read; then the fields from `keys` on are unknown."""

    @property
    def name(self) -> str:
        """The name by which commands find it: in the usual directory without the directory."""
        return label_of(self.path)

    @property
    def owner(self) -> str:
        return f"{_name(pwd.getpwuid, self.uid)}:{_name(grp.getgrgid, self.gid)}"

    @property
    def is_stale(self) -> bool:
        """Whether no process of this boot has used it."""
        return not self.problem and not self.of_this_boot and not self.attached


def _name(find: Callable[[int], Sequence[Any]], number: int) -> str:
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)


def look_at(path: str, users: FileUsers) -> Seen:
    """Look at a store's file. Raises ``SegmentMissing`` if there is none."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        raise SegmentMissing(path, "no such file", "a segment", "check the name; see `forebay ls`") from None
    pids = tuple(users.pids_of(status))
    attached = users.number_of(status)
    seen = (path, status.st_size, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
    try:
        with MappedSegment(path) as segment:
            if not attached:
                attached = int(segment.is_any_attached())
            return Seen(
                *seen,
                attached,
                pids,
                keys=segment.table.keys,
                live_keys=live_keys_of(segment),
                limiters=len(limiters_in_place(segment)),
                clock=CLOCK_NAMES[segment.header.clock_kind],
                of_this_boot=segment.is_of_this_boot,
                layout_version=layout.LAYOUT_VERSION,
            )
    except SegmentMissing:
        raise
    except SegmentError as error:
        return Seen(*seen, attached, pids, problem=f"found {error.found}, expected {error.expected}; {error.remedy}")


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a store's limiters, as in ``Store.stats``, and their extents."""

    limiters: dict[str, LimiterStats]
    memories: tuple[Memory, ...]


def count(path: str) -> Counts:
    """Read the counts of a segment. Raises ``SegmentError``."""
    with MappedSegment(path) as segment:
        limiters = limiters_of(segment)
        labels = labels_of(limiters)
        return Counts({labels[limiter]: one for limiter, one in limiters.items()}, occupancy_of(segment)[1])
