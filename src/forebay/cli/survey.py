"""The stores of a host as an operator sees them: read from their files, without attaching."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.errors import SegmentError, SegmentMissing
from forebay.segment import layout
from forebay.segment.counts import COUNTERS_BYTES, limiter_stats
from forebay.segment.file_users import FileUsers
from forebay.segment.header import CLOCK_NAMES
from forebay.segment.removal import is_of_rules
from forebay.stats import LimiterStats
from forebay.store_options import DIRECTORY, checked_path, default_path
from forebay.verification.cells import CellChecks
from forebay.verification.extent_list import Extents, KnownExtent
from forebay.verification.findings import Findings
from forebay.verification.lists import limiters_in_place
from forebay.verification.mapped_segment import MappedSegment
from forebay.verification.report import Part

__all__ = ["PREFIX", "Counts", "Memory", "Seen", "count", "directories", "files_in", "look_at", "path_of_store"]

PREFIX: Final = "forebay-"


def path_of_store(name: str, directory: str | None = None) -> str:
    """The path of a store that is named by its name or, with a slash in it, by its path. Raises ``ValueError``."""
    if "/" not in name:
        return default_path(name, directory)
    if directory is not None:
        raise ValueError(f"{name!r} is the whole path of a file: give it or --directory, not both")
    return checked_path(name, "NAME", "file")


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
        directory, file = os.path.split(self.path)
        name = file.removeprefix(PREFIX)
        return name if directory == os.path.normpath(DIRECTORY) and name != file else self.path

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
                keys=segment.header.advertised_keys,
                live_keys=_live_keys(segment),
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
class Memory:
    """The extent of a limiter with memory of its own."""

    limiter: str
    algorithm: str
    keys: int
    live_keys: int
    held: int
    """Permits of a ``Concurrency`` whose leases have not ended."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of a store's limiters, as in ``Store.stats``, and their extents."""

    limiters: dict[str, LimiterStats]
    memories: tuple[Memory, ...]


def count(path: str) -> Counts:
    """Read the counts of a segment. Raises ``SegmentError``."""
    with MappedSegment(path) as segment:
        # The counts first: a limiter has its name before it counts.
        counters = segment.memory[layout.COUNTERS_OFFSET : layout.COUNTERS_OFFSET + COUNTERS_BYTES]
        limiters = {
            number: (limiter.name.decode(errors="replace"), limiter.algorithm_name)
            for number, limiter in limiters_in_place(segment).items()
        }
        extents, parts = _parts(segment)
        memories = tuple(
            Memory(part.name, part.algorithm, extent.entry.keys, part.live_keys, part.held, extent.entry.size)
            for extent, part in zip(extents, parts[1:], strict=True)
        )
        return Counts(limiter_stats(counters, limiters), memories)


def _parts(segment: MappedSegment) -> tuple[list[KnownExtent], tuple[Part, ...]]:
    """The extents that can be read, and the cells of the table and of each of them."""
    findings, extents = Findings(), Extents(segment)
    findings.lasting(extents.look)
    return extents.sound, CellChecks(segment, findings, lambda done, total: None, extents.sound).parts()


def _live_keys(segment: MappedSegment) -> int:
    """The live keys of the table."""
    return CellChecks(segment, Findings(), lambda done, total: None, []).parts()[0].live_keys
