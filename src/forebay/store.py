"""Stores hold the state of limiters in shared memory."""

from __future__ import annotations

import grp
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final, Literal, Self, cast

from forebay.clock import ManualClock
from forebay.core.table.segment_view import Extent, Segment
from forebay.core.table.threads import forks, next_generation
from forebay.errors import SegmentError, SegmentMissing, StoreClosed, short_repr
from forebay.names import LimiterNames
from forebay.segment import layout, removal
from forebay.segment.attachment import Attachment
from forebay.segment.counts import COUNTERS_BYTES, limiter_stats
from forebay.segment.file import SegmentFile, create_anonymous, open_existing, open_or_create
from forebay.segment.hot_keys import find_record, keys_in, open_record
from forebay.segment.sizes import ExtentShape
from forebay.segment.table_place import TablePlace
from forebay.stats import HotKey, LimiterStats, StoreStats
from forebay.store_options import DIRECTORY, check_options, checked_mode, default_path, path_of

__all__ = ["DIRECTORY", "HotKey", "LimiterStats", "Store", "StoreStats", "clear", "default_path"]

CLEARED_AT_ONCE: Final = 2**20
LATENCY_BYTES: Final = layout.HEADER_REDIS_LATENCY - layout.HEADER_DECISION_LATENCY


class Store:
    """Shared memory that holds the state of any number of limiters for all processes of the host.

    ``Store("shop", keys=1_000_000)`` creates ``/dev/shm/forebay-shop`` or attaches to it. `keys` is how many keys can
    be live at once; a key is live while its state differs from a fresh key's. The segment takes 21 bytes per key and
    100 KiB, allocated at once. An existing segment keeps its size; a different `keys` warns.

    `on_full` decides for a new key when there is no free cell near its place. With up to `keys` live keys that happens
    in fewer than one insertion of 10,000. ``"evict"`` forgets the neighbour that has used least of its limit, and of
    several the one that expires first; ``"deny"`` denies the request and ``"allow"`` allows it. Left out, it is
    ``"deny"`` for limits that one request uses up, whose keys are all at their limit, and ``"evict"`` for the others.
    These limits are ``MinInterval``, limits of one permit and ``TokenBucket(initial=1)``. Each such decision is
    counted. Each process has its own `on_full`.

    With ``"evict"``, a flood of keys that come once never resets a key at its limit. To reset one, a flood must use
    about as much of each of its keys: some hundred permits per cell for a limit of 100. Cheaper is only a flood against
    a limit that one request uses up, against a ``TokenBucket`` with a low ``initial``, against a ``SlidingWindow``
    whose key has not come in this window yet, and between limiters of one store that forget at different times. If
    clients can make up keys, use ``"deny"``, a separate store, or a second limit by something that they can't make up.
    docs/operations/capacity.md has the figures.

    `clock` is ``"monotonic"``, the host's clock; a ``forebay.testing.ManualClock``; or ``"time"``, Python's
    ``time.time``, so that libraries that freeze or move it move the limits, too. With ``"time"``, each decision reads
    ``time.time`` first, and the limits' time never goes back. It is for tests: it is slower, and follows every step of
    the wall clock.

    `mode` and `group` set which users share the store: by default only the user that created it, and root. With
    ``mode=0o660, group="www-data"`` in every process, all members of the group share it.

    `directory` holds the file of that name, instead of ``/dev/shm``. It is refused if other users may make files in it.
    Use ``/run/shop`` of systemd's ``RuntimeDirectory=shop``, or ``$XDG_RUNTIME_DIR``. In ``/dev/shm`` any user may take
    a name first, and so prevent a store. `path` is the file itself, for example on a disk, where limits survive a
    reboot. All processes must use the same path.

    With `hot_keys`, this process notes which keys it denies and which it allows most, in a record of about so many keys
    of each kind, from 4 to 65,536: see ``hot_keys``. The record is shared by all processes of the store, and each has
    its own `hot_keys`; it takes about 70 bytes per key. It has hashes of keys, and no key. Without, the record costs a
    decision nothing.

    Raises ``SegmentError`` (see ``forebay.errors`` for its kinds) and ``ValueError``.

    *Threads*: safe. *Processes*: each makes its own ``Store`` of the same name. *Fork*: a store made before a fork
    works in parent and child. As a context manager, it closes itself.
    """

    name: str
    """The name that it was made with; ``"private"`` for ``Store.private``."""
    path: str | None
    """The segment's file; None for ``Store.private``."""
    made_for_keys: int
    """Live keys that the segment was made for, before any resize."""
    on_full: str | None
    manual_clock: ManualClock | None
    attachment: Attachment
    segment: Segment
    names: LimiterNames

    def __init__(
        self,
        name: str,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] | None = None,
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
        mode: int = 0o600,
        group: str | int | None = None,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        hot_keys: int | None = None,
    ) -> None:
        check_options(keys, on_full, clock, hot_keys)
        target = path_of(name, path, directory)
        file = open_or_create(
            target,
            keys=keys,
            clock_kind=_clock_kind(clock),
            mode=checked_mode(mode, group),
            gid=_gid(group),
            own_directory=directory is not None,
        )
        attach(self, name, target, file, on_full, clock, hot_keys)

    @classmethod
    def private(
        cls,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] | None = None,
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
        hot_keys: int | None = None,
    ) -> Self:
        """A store without a name, shared by this process and the children that it forks; it ends with the last one."""
        check_options(keys, on_full, clock, hot_keys)
        store = cls.__new__(cls)
        file = create_anonymous(keys=keys, clock_kind=_clock_kind(clock))
        attach(store, "private", None, file, on_full, clock, hot_keys)
        return store

    @classmethod
    def attach(
        cls,
        name: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Attach to the segment of that name, in that directory, or at that path, to look at it and to change states.

        For operators, beside the processes that use the store. Makes nothing: no file, no limiter, no memory of a
        limiter. Changes no owner and no mode, and waits for no other process. The store has the segment's size and
        clock. Its limiters are those that the segment has already: make them with the same names and parameters, then
        ``peek`` and ``reset`` keys as everywhere.

        Root may attach to the store of any user, so nothing keeps that user from changing it: to enforce limits, use
        ``Store(...)``. A user that may only read the file gets ``stats``, ``hot_keys``, and ``peek`` of limiters
        without memory of their own; everything else raises ``SegmentError``.

        Raises ``SegmentMissing`` if there is no such file, ``SegmentBusy`` if it is being created, ``ClockMismatch`` if
        it is of an earlier boot and no process has used it since, and other kinds of ``SegmentError``. A limiter that
        the segment doesn't have raises ``InvalidLimiter``. Threads, processes, fork: as every store. O(1).
        """
        if (name is None) == (path is None):
            raise ValueError("Store.attach takes a name or a path")
        target = path_of(name, path, directory)
        store = cls.__new__(cls)
        attach(store, name or os.path.basename(target), target, open_existing(target), None, None)
        return store

    @staticmethod
    def unlink(
        name: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        missing_ok: bool = False,
    ) -> None:
        """Remove the segment of that name, in that directory, or at that path.

        Attached processes keep the removed segment; the next process to attach makes a new one. Raises
        ``SegmentError`` if it can't be removed, or if there is none and `missing_ok` is false, and ``ForeignSegment``
        if the file isn't a segment.
        """
        if (name is None) == (path is None):
            raise ValueError("Store.unlink takes a name or a path")
        target = path_of(name, path, directory)
        try:
            removal.unlink(target)
        except FileNotFoundError:
            if not missing_ok:
                remedy = "check the name, or give missing_ok=True if there may be none"
                raise SegmentMissing(target, "no such file", "a segment to remove", remedy) from None

    @property
    def keys(self) -> int:
        """The live keys that the store is made for. A resize changes it, for all processes."""
        return self.segment.moved_keys() or self.made_for_keys

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.attachment.closed

    def close(self) -> None:
        """Detach from the segment. Its limiters raise ``StoreClosed`` from now on; the segment itself stays."""
        if not hasattr(self, "attachment") or self.closed:
            return
        self.attachment.segment.mark_closed()
        if self.attachment.close() and self.manual_clock is not None:
            self.manual_clock.detach(self.segment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # then the modules that closing needs may be gone, and the kernel closes
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"keys={self.keys}, on_full={self.on_full!r}"
        return f"<Store {self.path or self.name} {state}>"

    def __reduce__(self) -> str:
        raise TypeError(f"{self!r} can't be pickled: attach to it by name in the other process")

    def stats(self) -> StoreStats:
        """Counts of every limiter, summed over all processes, and how full the store is.

        Limiters of one name and algorithm are counted together, whatever their rates. Limiters of one name and several
        algorithms are counted apart: see ``StoreStats.limiters``. A name of more than 48 bytes stands there as its
        beginning and a digest.

        Reads the whole table: some milliseconds per million keys. The counted processes need not take part. Warns once
        with ``SegmentRemovedWarning`` if the segment's file was removed: processes that start make another segment.
        """
        with self.attachment.lock():
            if self.closed:
                raise StoreClosed(f"{self!r} has no statistics any more")
            size_bytes = self.attachment.file_size()
        self.attachment.name_watch.warn_if_removed(stacklevel=2)
        raw = self.segment.read(layout.COUNTERS_OFFSET, COUNTERS_BYTES)
        limiters = limiter_stats(raw, self.attachment.limiters())
        return StoreStats(keys=self.keys, live_keys=self.segment.count_live(), bytes=size_bytes, limiters=limiters)

    def hot_keys(self) -> list[HotKey]:
        """The keys that were denied most of late, and those that were allowed most, over all processes that note them.

        A process notes the keys of its decisions if its store was made with `hot_keys`. The most denied keys come
        first. The record is bounded: of keys that share a line of four slots, those with few requests are left out. A
        count is never more than there were requests, except the estimate of allowed ones.

        Raises ``SegmentError`` if no process has made a record, or if the program has closed all files, and
        ``StoreClosed``. Threads, processes, fork: safe. Needs no right to write. O(number of slots).
        """
        if self.closed:
            raise StoreClosed(f"{self!r} has no hot keys any more")
        record = find_record(self.attachment)
        if record is None:
            raise SegmentError(
                self.attachment.label,
                "no record of hot keys",
                "one that a process notes keys in",
                "make the store in the processes that decide with hot_keys, as in Store(..., hot_keys=64)",
            )
        with self.attachment.lock():
            return keys_in(record, self.attachment.read_file, self.attachment.limiters(), self.segment.now_ns())

    def now_ns(self) -> int:
        """The segment's time in nanoseconds, for waiters."""
        if self.closed:
            raise StoreClosed(f"{self!r} has no time any more")
        return self.segment.now_ns()


def attach(
    store: Store,
    name: str,
    path: str | None,
    file: SegmentFile,
    on_full: str | None,
    clock: Literal["monotonic", "time"] | ManualClock | None,
    hot_keys: int | None = None,
) -> None:
    """Map the segment of `file`, and set all attributes of a new store. With `clock` None the segment's stays."""

    def map_segment(fd: int) -> Segment:
        return Segment(
            fd,
            size=file.header.segment_size,
            group_count=file.header.group_count,
            epoch_ns=file.epoch_ns,
            wall_epoch_ns=file.header.wall_epoch_ns,
            clock_kind=file.header.clock_kind,
            hash_key=file.header.hash_key,
            on_full=on_full,
            is_writable=file.is_writable,
        )

    store.name = name
    store.path = path
    store.made_for_keys = file.header.advertised_keys
    store.on_full = on_full
    store.manual_clock = clock if isinstance(clock, ManualClock) else None
    store.names = LimiterNames()
    store.attachment = Attachment(path or name, path, file, map_segment, forks, next_generation)
    store.segment = cast(Segment, store.attachment.segment)
    if store.manual_clock is not None:
        store.manual_clock.attach(store.segment)
    if hot_keys is not None:
        try:
            store.segment.note_hot_keys(cast(Extent, open_record(store.attachment, hot_keys)))
        except BaseException:
            store.close()
            raise


def clear(store: Store) -> None:
    """Forget all keys and counts of a store, for ``forebay.testing.reset_store``."""
    attachment = store.attachment
    with attachment.lock():
        attachment.check_writable()
        fd = None if store.closed else attachment.own_file()
        if fd is None:
            raise StoreClosed(f"{store!r} can't be reset by this process")
        for number in range(layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY):
            line = layout.COUNTERS_OFFSET + number * layout.COUNTER_LINE.size
            _clear(fd, line + layout.COUNTER_LINE_ALLOWED, line + layout.COUNTER_LINE.size)
        made_groups = (store.segment.size - layout.TABLE_OFFSET) // layout.GROUP_BYTES
        place = TablePlace.read(store.segment.moved_table(), store.keys, group_count=made_groups, keys=store.keys)
        _clear(fd, place.offset, place.offset + place.bytes)
        raw = store.segment.read(layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY * layout.EXTENT_ENTRY.size)
        for identity, offset, size, keys, *_ in layout.EXTENT_ENTRY.iter_unpack(raw):
            if identity:
                shape = ExtentShape(keys, 0)
                # The cells behind the usable ones stay blocked.
                _clear(fd, offset, offset + shape.used_cells * layout.CELL.size)
                _clear(fd, offset + shape.group_count * layout.GROUP_BYTES, offset + size)
        _clear(fd, layout.HEADER_DECISION_LATENCY, layout.HEADER_REDIS_LATENCY + LATENCY_BYTES)
        if store.segment.follows_python:
            _clear(fd, layout.HEADER_MANUAL_NS, layout.HEADER_MANUAL_NS + 8)


def _clear(fd: int, start: int, end: int) -> None:
    for position in range(start, end, CLEARED_AT_ONCE):
        os.pwrite(fd, bytes(min(CLEARED_AT_ONCE, end - position)), position)


def _clock_kind(clock: object) -> int:
    if isinstance(clock, ManualClock):
        return layout.CLOCK_MANUAL
    return layout.CLOCK_PYTHON if clock == "time" else layout.CLOCK_MONOTONIC


def _gid(group: str | int | None) -> int:
    if group is None:
        return os.getegid()
    if isinstance(group, int):
        if isinstance(group, bool) or not 0 <= group < 2**32 - 1:
            raise ValueError(f"group is a group's name or number, not {short_repr(group)}")
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"there is no group {group!r} on this host") from None
