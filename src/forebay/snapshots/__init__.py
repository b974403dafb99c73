"""Snapshots of stores: keys that outlive a reboot, and stores of another size.

``snapshot`` copies a live store into a file, ``restore`` makes a store of that file, and ``resize`` makes a store for
another number of keys. `copying` reads a segment while processes use it, `document` has the file, `making` makes a
segment of a copy, and `moving` resizes a store in use. docs/operations/snapshots.md says what is carried over, and
what is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from forebay.errors import ForeignSegment, SegmentBusy, SegmentError, SegmentMissing, short_repr
from forebay.segment import attachment_locks, layout, ofd_locks, trust
from forebay.segment.header import MAGIC, is_foreign
from forebay.segment.limiter_list import ALGORITHM_NAMES
from forebay.segment.opening import opening_error
from forebay.segment.reading import open_to_write, spec_to_look
from forebay.segment.removal import is_at
from forebay.segment.spec import SegmentSpec
from forebay.snapshots import document
from forebay.snapshots.copying import Copy
from forebay.snapshots.document import COUNTERS, SnapshotFile
from forebay.snapshots.making import NewSegment, too_small
from forebay.snapshots.moving import move_table
from forebay.store_options import MAX_KEYS
from forebay.verification.lists import limiters_in_place
from forebay.verification.mapped_segment import MappedSegment, path_of

__all__ = ["Summary", "resize", "restore", "snapshot"]

NOT_CARRIED: Final = frozenset(
    (
        layout.ALGORITHM_CONCURRENCY,
        layout.ALGORITHM_SHEDDER,
        layout.ALGORITHM_SYNCED_FIXED_WINDOW,
        layout.ALGORITHM_SYNCED_SLIDING_WINDOW,
        layout.ALGORITHM_SYNCED_TOKEN_BUCKET,
    )
)
"""The algorithms of limiters of which only the name is carried over."""

Progress: TypeAlias = Callable[[str], Callable[[int, int], None]]
"""Begins a part of the work, which it gets in words. Returns what gets the work done and its total now and then."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a snapshot has, or what was made of it."""

    path: str
    """The store's file."""
    keys: int
    """Live keys that the store is made for."""
    carried_keys: int
    """Live keys that were carried over, of the table and of limiters with memory of their own."""
    bytes: int
    """The size of the file that was made: of the snapshot, or of the store."""
    limiters: int
    started_anew: tuple[str, ...]
    """Limiters of which only the name is carried over, as ``"downloads (Concurrency)"``."""


def snapshot(
    name_or_path: str | os.PathLike[str], file: str | os.PathLike[str], *, progress: Progress | None = None
) -> Summary:
    """Copy a store, given its name or a path, into a file. The store may be in use: nothing is locked or delayed.

    Each key's state is one of a moment between the begin and the end of the call. The file replaces an older snapshot
    at its path once it is whole. Only its owner may read it, as it has the store's secret hash key.

    Raises the kinds of ``SegmentError`` that attaching raises, ``ForeignSegment`` if the file is there and no snapshot,
    ``SegmentBusy`` if another process is writing it, and ``OSError``. Threads, processes: safe. O(size of the store).
    """
    begin = progress or _no_progress
    with MappedSegment(name_or_path) as segment:
        copy = Copy(segment, begin("copying"))
        # One whose owner was denied access meanwhile is restored for its owner.
        head = dataclasses.replace(copy.head, mode=copy.head.mode | 0o600)
        # A restored store counts anew: a counter that falls to another number than 0 seems to have counted all of it.
        frames = (frame for frame in copy.frames() if frame[0] != COUNTERS)
        size = document.write(os.fspath(file), head, frames)
        return _summary(segment, copy.keys, size)


def restore(
    file: str | os.PathLike[str],
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    keys: int | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Make a store of a snapshot: before the processes start that use it, at its former path or another one.

    The store's time goes on by what has passed since the snapshot: after a reboot by the wall clock. So states expire
    when they would have. With `keys` the store gets another size. With `replace` it takes the place of a store that no
    process has attached. The store is checked before it gets its name; whatever is wrong, nothing is made.

    Raises ``SegmentError`` if there is a store of that name, or the snapshot isn't this user's or root's;
    ``SegmentBusy`` if a process has the store attached that is to be replaced; ``DamagedSegment``, ``ForeignSegment``,
    ``TruncatedSegment`` or ``SegmentVersionMismatch`` for another file than a whole snapshot; ``ClockMismatch`` if the
    snapshot is of the future by the clock; ``SegmentSpaceError`` if `keys` is too small for the live keys, or there is
    no space; and ``OSError``. Threads, processes: safe. O(keys).
    """
    with SnapshotFile(os.fspath(file)) as source:
        path = path_of(source.head.path if name_or_path is None else name_or_path)
        begin = progress or _no_progress
        wanted = source.head.keys if keys is None else _checked(keys)
        with contextlib.ExitStack() as stack:
            old = None
            if replace:
                with contextlib.suppress(SegmentMissing):
                    old = stack.enter_context(_unattached(path))
            if old is None and os.path.lexists(path):
                raise _exists(path)
            new = stack.enter_context(NewSegment(source.path, source.head, path, wanted))
            new.fill(source.frames(begin("restoring")))
            new.verify(begin("verifying"))
            if old is not None:
                new.replace(old)
            else:
                try:
                    new.link()
                except FileExistsError:
                    raise _exists(path) from None
            return new.look(lambda made: _summary(made, new.keys, made.status.st_size))


def resize(name_or_path: str | os.PathLike[str], keys: int, *, progress: Progress | None = None) -> Summary:
    """Make a store for another number of keys, with all live keys of the store of that name.

    If no process has it attached, another file takes its place. One that starts meanwhile waits for up to 30 s, and
    then uses the new one. If processes have it attached, its file gets another table, which they use from their next
    decisions on. A decision about a key that isn't in its usual place waits meanwhile, about half a second per million
    keys. The bytes of the former table stay in the file, until a resize without users.

    If it fails, or the process is killed, the store is as before.

    Raises ``SegmentBusy`` if another resize is under way, or a process without the GIL has it attached;
    ``SegmentSpaceError`` if `keys` is too small for the live keys, or there is no space; the kinds of ``SegmentError``
    that attaching raises; and ``OSError``. Threads, processes: safe. O(size of the store).
    """
    path = path_of(name_or_path)
    begin = progress or _no_progress
    wanted = _checked(keys)
    try:
        with _unattached(path) as fd, MappedSegment(path, fd=fd) as segment:
            copy = Copy(segment, begin("copying"))
            with NewSegment(path, copy.head, path, wanted) as new:
                new.fill(copy.frames())
                new.verify(begin("verifying"))
                new.replace(fd)
                return new.look(lambda made: _summary(made, new.keys, made.status.st_size))
    except _InUse:
        pass
    carried, without_room = move_table(path, wanted)
    if without_room:
        raise too_small(path, carried, without_room, wanted)
    with MappedSegment(path) as segment:
        return dataclasses.replace(_summary(segment, carried, segment.status.st_size), started_anew=())


class _InUse(SegmentBusy):
    """Processes have a segment attached that must have none."""


def _no_progress(what: str) -> Callable[[int, int], None]:
    return lambda done, total: None


def _checked(keys: int) -> int:
    if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
        raise ValueError(f"keys is a whole number from 1 to 2**36, not {short_repr(keys)}")
    return keys


def _exists(path: str) -> SegmentError:
    return SegmentError(
        path,
        "a file that is there already",
        "none, as a restored store takes no other one's place",
        "keep it; or remove it (forebay rm), or replace it (--replace), if its state is older than the snapshot",
    )


@contextlib.contextmanager
def _unattached(path: str) -> Iterator[int]:
    """The file of the segment at the path, open, while no process has it attached and none can attach."""
    while True:
        spec = spec_to_look(path)
        fd, is_writable = open_to_write(spec)
        try:
            if _excludes_others(spec, fd, is_writable):
                yield fd
                return
        finally:
            # A close alone would leave the lock with a child that another thread forked meanwhile.
            with contextlib.suppress(OSError):
                ofd_locks.unlock(fd, 0, 0)
            os.close(fd)


def _excludes_others(spec: SegmentSpec, fd: int, is_writable: bool) -> bool:
    """Lock the file so that no process can attach it. Whether the path still leads to it."""
    try:
        if not is_writable:
            raise SegmentError(
                spec.path, f"a file that uid {os.geteuid()} may only read", "one that it may write", "run as its owner"
            )
        trust.check_file(trust.trusting_its_users(spec, fd), fd, of_any_owner=os.geteuid() == 0)
        if is_foreign(begin := os.pread(fd, len(MAGIC), 0)):
            raise ForeignSegment(
                spec.path,
                f"a file that begins with {begin!r}",
                f"a forebay segment, which begins with {MAGIC!r}",
                "check the name or path: the file is unchanged",
            )
        if not attachment_locks.exclude_all(fd):
            users = len(attachment_locks.attached_ids(os.fstat(fd)))
            raise _InUse(
                spec.path,
                f"a store that {users} {'process has' if users == 1 else 'processes have'} attached"
                if users
                else "a store that processes have attached, or that another resize or restore replaces",
                "one that no process uses",
                "stop them first: `forebay stat` counts them and `forebay doctor` lists them",
            )
        return is_at(spec.path, os.fstat(fd))
    except OSError as error:
        raise opening_error(spec, error) from None


def _summary(segment: MappedSegment, carried_keys: int, size: int) -> Summary:
    limiters = limiters_in_place(segment).values()
    return Summary(
        path=segment.path,
        keys=segment.table.keys,
        carried_keys=carried_keys,
        bytes=size,
        limiters=len(limiters),
        started_anew=tuple(
            f"{limiter.name.decode(errors='replace')} ({ALGORITHM_NAMES[limiter.algorithm]})"
            for limiter in limiters
            if limiter.algorithm in NOT_CARRIED
        ),
    )
