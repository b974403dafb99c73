"""Stores: where limiters keep their state."""

from __future__ import annotations

import atexit
import contextlib
import grp
import os
import re
import sys
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import TracebackType
from typing import Any, Final, Literal, Self

from forebay.clock import ManualClock
from forebay.core.table.segment_view import Segment, forks, next_generation
from forebay.errors import (
    DamagedSegment,
    InvalidLimiter,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSpaceError,
    StoreClosed,
    TooManyLimiters,
    shown,
)
from forebay.segment import attachments, layout, ofd_locks
from forebay.segment.file import SegmentFile, create_anonymous, is_at, open_or_create, removed
from forebay.segment.limiter_list import LIST_BYTES, labels_of, listed_limiters

__all__ = ["LimiterStats", "Store", "StoreStats", "default_path"]

DIRECTORY: Final = "/dev/shm/"
MAX_KEYS: Final = 2**36
NAME_DIGEST_BYTES: Final = 8
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LimiterStats:
    """Counts of one limiter since its segment was made, over all processes, living and gone."""

    allowed: int = 0
    denied: int = 0
    inserted: int = 0
    """Keys put into the table."""
    evicted: int = 0
    """Live keys that made room for another: make the store larger if this grows."""
    full: int = 0
    """Decisions that found no room for their key and were made by ``on_full``."""
    cas_retries: int = 0
    """Races lost to another process and run again."""
    algorithm: str = field(default="", kw_only=True)
    """The limiter's class, such as ``"TokenBucket"`` or ``"leased TokenBucket"``; empty in a sum over several."""

    def __add__(self, other: LimiterStats) -> LimiterStats:
        counts = (getattr(self, name) + getattr(other, name) for name in _COUNTS)
        return LimiterStats(*counts, algorithm=self.algorithm if self.algorithm == other.algorithm else "")


_COUNTS: Final = ("allowed", "denied", "inserted", "evicted", "full", "cas_retries")


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What ``Store.stats()`` found."""

    keys: int
    """Live keys that the segment was made for."""
    live_keys: int
    """Keys whose state matters now; a limiter forgets a key by itself when its state is that of a fresh one."""
    bytes: int
    """The size of the segment's file, all of it taken: as ``ls`` tells it, with the memory of single limiters."""
    limiters: dict[str, LimiterStats] = field(default_factory=dict)
    """By name. Where limiters of several algorithms share a name, each has ``name (algorithm)`` instead, such as
    ``"api (TokenBucket)"``, and none has the bare name."""

    @property
    def total(self) -> LimiterStats:
        """The sum over all limiters."""
        return sum(self.limiters.values(), LimiterStats())


class Store:
    """Shared memory that holds the state of any number of limiters for all processes of the host.

    ``Store("shop", keys=1_000_000)`` creates ``/dev/shm/forebay-shop`` or attaches to it. `keys` is how many keys can
    be live at once (a key is live while its state differs from a fresh key's); it takes 21 bytes per key and 100 KiB,
    all of it at once. The size of a segment that exists is kept; asking for another one warns.

    `on_full` says what happens to a new key when there is no room near its place, which up to `keys` live keys is
    rarer than one insertion in 10,000: ``"evict"`` forgets the neighbour that expires first, ``"deny"`` denies the
    request and ``"allow"`` allows it. Each is counted. It is each process's own choice, not the segment's.

    With ``"evict"``, a flood of keys that come once never resets a key that is at its limit where states tell how
    much was used: ``TokenBucket``, ``LeakyBucket``, and within a window ``FixedWindow`` by the clock and
    ``SlidingWindow`` (limits below 4 in windows and intervals excepted). With the others, and between limiters of
    one store that forget at different times, about one such key for each cell does. Where anybody can make up keys,
    use ``"deny"``, a store of its own, or a second limit by something that can't be made up; docs/operations.md has
    the figures.

    `clock` is ``"monotonic"``, the host's; a ``forebay.testing.ManualClock``; or ``"time"``: what Python's
    ``time.time`` says, so that libraries that freeze or move it move the limits too. It is asked before every
    decision, and never goes back; for tests, as it is slower and follows every step of the wall clock.

    `mode` and `group` say who may share the store: by default only the user that created it, or root. With
    ``mode=0o660, group="www-data"`` in every process, all members of the group.

    `directory` is where the file of that name is, instead of ``/dev/shm``: a directory in which nobody else may make
    files, or it is refused, such as ``/run/shop`` of systemd's ``RuntimeDirectory=shop``, or ``$XDG_RUNTIME_DIR``. In
    ``/dev/shm`` any user may take a name first, and so keep a store from being made. `path` names the file itself, for
    example on a disk, where limits survive a reboot. All processes must give the same.

    Raises ``SegmentError`` (see ``forebay.errors`` for its kinds) and ``ValueError``.

    *Threads*: safe. *Processes*: each makes its own ``Store`` of the same name. *Fork*: a store made before a fork
    works in both. Usable as a context manager, which closes it.
    """

    def __init__(
        self,
        name: str,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] = "evict",
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
        mode: int = 0o600,
        group: str | int | None = None,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_options(keys, on_full, clock)
        target = _path_of(name, path, directory)
        file = open_or_create(
            target,
            keys=keys,
            clock_kind=_clock_kind(clock),
            mode=_checked_mode(mode, group),
            gid=_gid(group),
            own_directory=directory is not None,
        )
        self._attach(name, target, file, on_full, clock)

    @classmethod
    def private(
        cls,
        *,
        keys: int,
        on_full: Literal["evict", "deny", "allow"] = "evict",
        clock: Literal["monotonic", "time"] | ManualClock = "monotonic",
    ) -> Self:
        """A store without a name, shared by this process and the children that it forks; gone with the last of them."""
        _check_options(keys, on_full, clock)
        store = cls.__new__(cls)
        store._attach("private", None, create_anonymous(keys=keys, clock_kind=_clock_kind(clock)), on_full, clock)
        return store

    @staticmethod
    def unlink(
        name: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        missing_ok: bool = False,
    ) -> None:
        """Remove the segment of that name, in that directory, or path. Who is attached keeps it; the next one makes a
        new one.

        Raises ``SegmentError`` if there is none and that is not `missing_ok`, or if it can't be removed.
        """
        if (name is None) == (path is None):
            raise ValueError("Store.unlink takes a name or a path")
        target = _path_of(name, path, directory)
        try:
            os.unlink(target)
            _unlinked.add(target)
        except FileNotFoundError:
            if not missing_ok:
                remedy = "check the name, or say missing_ok=True where there may be none"
                raise SegmentError(target, "no such file", "a segment to remove", remedy) from None
        except OSError as error:
            remedy = "remove it as its owner or as root; if it is a directory, or mounted, it is no segment"
            expected = f"a file that uid {os.geteuid()} may remove"
            raise SegmentError(target, f"one that can't be removed ({error.strerror})", expected, remedy) from None

    def _attach(
        self,
        name: str,
        path: str | None,
        file: SegmentFile,
        on_full: str,
        clock: Literal["monotonic", "time"] | ManualClock,
    ) -> None:
        self.name = name
        self.path = path
        self.keys = file.header.advertised_keys
        self.on_full = on_full
        self._status = os.fstat(file.fd)
        self.closed = False
        self._is_removed = False
        # By number of forks: the file as this process opened it, which carries its locks, and the counter lines locked.
        # Its mark is that of the newest.
        self._files = {forks(): file.fd}
        self._mark = file.mark
        self._lines: dict[tuple[int, int], int] = {}
        self._locks: dict[int, threading.RLock] = {}
        self.manual_clock: ManualClock | None = None
        try:
            with attachments.opened_to_map(file.fd) as opened:
                self._segment = Segment(
                    opened,
                    size=file.header.segment_size,
                    group_count=file.header.group_count,
                    epoch_ns=file.epoch_ns,
                    wall_epoch_ns=file.header.wall_epoch_ns,
                    clock_kind=file.header.clock_kind,
                    hash_key=file.header.hash_key,
                    on_full=on_full,
                )
        except OSError as error:
            self.close()
            raise SegmentSpaceError(
                path or name,
                f"no room in this process's address space ({os.strerror(error.errno or 0)})",
                f"room to map {file.header.segment_size} bytes",
                "raise the process's limits (ulimit -v) or ask for fewer keys",
            ) from None
        if isinstance(clock, ManualClock):
            self.manual_clock = clock
            clock.attach(self._segment)
        _open_stores.add(self)

    def close(self) -> None:
        """Let go of the segment. Its limiters raise ``StoreClosed`` from now on; the segment itself stays."""
        if getattr(self, "closed", True):
            return
        with self._lock():
            if not self.closed:
                self.closed = True
                for fd in self._open_files():
                    os.close(fd)
                self._files.clear()
        if self.manual_clock is not None:
            self.manual_clock.detach(self._segment)
        next_generation()

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

        Reads the whole table: some milliseconds per million keys. Needs no help from the processes counted. Warns once
        with ``SegmentRemovedWarning`` if the segment's file was removed: processes that start make another one.
        """
        with self._lock():
            if self.closed:
                raise StoreClosed(f"{self!r} has no statistics any more")
            size_bytes = self._look_at_name(stacklevel=3)
        by_number: dict[int, LimiterStats] = {}
        size = layout.COUNTER_LINE.size
        raw = self._segment.read(layout.COUNTERS_OFFSET, (layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY) * size)
        for line, values in enumerate(layout.COUNTER_LINE.iter_unpack(raw)):
            limiter, _, _, *counts = values
            number = limiter - 1 if line < layout.OWNED_COUNTER_LINES else line - layout.OWNED_COUNTER_LINES
            by_number[number] = by_number.get(number, LimiterStats()) + LimiterStats(*counts)
        listed = self._limiters()
        labels = labels_of(listed.values())
        limiters: dict[str, LimiterStats] = {}
        for number, limiter in listed.items():
            counted = replace(by_number[number], algorithm=limiter[1])
            label = labels[limiter]
            # Only in a damaged list does a limiter stand twice.
            limiters[label] = limiters[label] + counted if label in limiters else counted
        return StoreStats(keys=self.keys, live_keys=self._segment.count_live(), bytes=size_bytes, limiters=limiters)

    def _look_at_name(self, stacklevel: int) -> int:
        """The size of the segment's file. Warns once if the file is no longer where others look for it."""
        opened = self._open_files()
        status = os.fstat(opened[0]) if opened else self._status
        if self.path is not None and not self._is_removed:
            # Where even the directory is gone, as after ``private_stores``, nobody makes another one.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                os.stat(os.path.dirname(self.path))
                self._is_removed = not is_at(self.path, status)
                if self._is_removed:
                    warnings.warn(removed(self.path), SegmentRemovedWarning, stacklevel=stacklevel)
        return status.st_size

    def now_ns(self) -> int:
        """For waiters: the segment's time."""
        if self.closed:
            raise StoreClosed(f"{self!r} has no time any more")
        return self._segment.now_ns()

    def _limiters(self) -> dict[int, tuple[str, str]]:
        """The limiters of all processes, by number: a name and an algorithm's name each."""
        limiters = {}
        for number, limiter in listed_limiters(self._segment.read(layout.LIMITERS_OFFSET, LIST_BYTES)):
            try:
                limiters[number] = limiter.name.decode(), limiter.algorithm_name
            except UnicodeDecodeError:
                raise DamagedSegment(
                    self.path or self.name,
                    f"{limiter.name!r} as the name of limiter {number}",
                    "UTF-8",
                    "stop its users and call Store.unlink to start with an empty one",
                ) from None
        return limiters

    def _limiter_name(self, name: str) -> bytes:
        """For limiters: `name` as the segment holds it. One that is too long, by its beginning and a digest."""
        try:
            encoded = name.encode() if isinstance(name, str) else b""
        except UnicodeEncodeError:
            encoded = b""
        if not encoded or b"\0" in encoded:
            raise InvalidLimiter(f"a limiter's name is text, and not empty; not {shown(name)}")
        if len(encoded) > layout.LIMITER_NAME_BYTES:
            ending = b"~" + blake2b(encoded, digest_size=NAME_DIGEST_BYTES).hexdigest().encode()
            beginning = encoded[: layout.LIMITER_NAME_BYTES - len(ending)].decode(errors="ignore")
            encoded = beginning.encode() + ending
        return encoded

    def _limiter_number(self, name: str, algorithm: int, *, add: bool = True) -> int:
        """For limiters: the number of `name` and `algorithm` in the segment; without `add`, a new one's next number."""
        if self.closed:
            raise StoreClosed(f"{self!r} takes no limiters any more")
        number = self._segment.limiter_number(self._limiter_name(name), algorithm, add=add)
        if number < 0:
            raise TooManyLimiters(
                f"{self!r} has its {layout.LIMITER_CAPACITY} limiters, so {name!r} has no room: use keys instead of "
                f"limiters to tell users apart, or a second store"
            )
        return number

    def _counter_line(self, number: int) -> tuple[int, bool]:
        """For limiters: the counter line that this process uses for limiter `number`, and whether it is shared.

        A line is owned by whoever holds the file lock on its bytes, so the kernel frees it when its owner ends, and
        the next owner goes on counting where the last one stopped: nothing is folded, and no sum ever falls.
        """
        with self._lock():
            if self.closed:  # by another thread, meanwhile
                raise StoreClosed(f"{self!r} was closed")
            line = self._own_line(number)
        return (line, False) if line is not None else (layout.OWNED_COUNTER_LINES + number, True)

    def _own_line(self, number: int) -> int | None:
        """A counter line that this process has locked for limiter `number`; None if it can't have one."""
        fork = forks()
        fd = self._own_file(fork)
        if fd is None:
            return None
        size = layout.COUNTER_LINE.size
        raw = self._segment.read(layout.COUNTERS_OFFSET, layout.OWNED_COUNTER_LINES * size)
        # The first field of each, without a step of Python for each: this is part of a limiter's first call.
        limiters = array("I", raw)[layout.COUNTER_LINE_LIMITER // 4 :: size // 4]
        # First the lines that this limiter has used already, then unused ones.
        for wanted in (number + 1, 0):
            for line in _places(limiters, wanted):
                # The file's lock doesn't tell this process's limiters apart.
                if self._lines.get((fork, line), number) != number:
                    continue
                start = layout.COUNTERS_OFFSET + line * size
                if ofd_locks.try_lock(fd, start, size):
                    if self._segment.take_counter_line(line, number):
                        self._lines[fork, line] = number
                        return line
                    ofd_locks.unlock(fd, start, size)
        return None

    def _open_files(self) -> list[int]:
        """The segment's descriptors, as far as they still are: programs that become daemons close all, and the next
        files that they open get the same numbers."""
        found = []
        for fd in self._files.values():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), self._status):
                    found.append(fd)
        return found

    def _own_file(self, fork: int) -> int | None:
        """The segment's file as opened by this process; None if the program closed it, or a child may not open it."""
        inherited = self._open_files()
        if not inherited:
            return None
        if fork in self._files:
            return self._files[fork]
        try:
            opened = os.open(f"/proc/self/fd/{inherited[-1]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Most often a worker that gave up root: mapping and limits work, only its counters are shared.
            return None
        # Before the parent's is closed, so that the segment is in use all the time, and nobody can exclude this one.
        mark = attachments.join(opened, attachments.place_of_mark(self._mark))
        assert mark is not None
        self._mark = mark
        self._files = {fork: opened}
        for fd in inherited:
            os.close(fd)
        return opened

    def _lock(self) -> threading.RLock:
        """For what is done with the file, never for a decision. Of this process: a fork may happen while it is held."""
        return self._locks.setdefault(forks(), threading.RLock())


def _look_at_names() -> None:
    """Look at the end of a process. A worker that ends is often replaced, and its successor makes a new segment.

    It doesn't wait for a thread that is at the file, and may be waiting for a stopped process.
    """
    for store in list(_open_stores):
        if not store._lock().acquire(blocking=False):
            continue
        try:
            if not store.closed and store.path not in _unlinked:
                store._look_at_name(stacklevel=2)
        finally:
            store._lock().release()


_open_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_unlinked: set[str] = set()
"""What this process has removed itself."""
atexit.register(_look_at_names)


def _places(numbers: array[int], wanted: int) -> Iterator[int]:
    place = -1
    with contextlib.suppress(ValueError):
        while True:
            place = numbers.index(wanted, place + 1)
            yield place


def _path_of(name: str | None, path: str | os.PathLike[str] | None, directory: str | os.PathLike[str] | None) -> str:
    if path is None:
        return default_path(name, directory)
    if directory is not None:
        raise ValueError(f"path={shown(path)} says where the file is: give it or a directory, not both")
    return _checked_path(path, "path", "file")


def default_path(name: str | None, directory: str | os.PathLike[str] | None = None) -> str:
    """The path of the store of that name."""
    if isinstance(name, str) and "://" in name:
        # Not the URL: it may have a password in it.
        raise ValueError("a store's name is no URL: for limits over Redis say RedisStore(url), of forebay.redis")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"a store's name is 1 to 100 letters, digits, '_', '.' and '-', and does not begin with '.' or '-'; "
            f"not {shown(name)}"
        )
    where = DIRECTORY if directory is None else _checked_path(directory, "directory", "directory")
    return os.path.join(where, f"forebay-{name}")


def _checked_path(path: Any, option: str, kind: str) -> str:
    try:
        target = os.path.abspath(os.fsdecode(path))
    except TypeError:
        raise ValueError(f"{option} is the path of a {kind}, as text or a Path, not {shown(path)}") from None
    if "\0" in target:
        raise ValueError(f"{option} is the path of a {kind}, which has no zero byte in it, not {shown(path)}")
    return target


def _check_options(keys: int, on_full: str, clock: object) -> None:
    if isinstance(keys, bool) or not isinstance(keys, int) or not 1 <= keys <= MAX_KEYS:
        raise ValueError(f"keys is a whole number from 1 to 2**36, not {shown(keys)}")
    if on_full not in ("evict", "deny", "allow"):
        raise ValueError(f"on_full is 'evict', 'deny' or 'allow', not {shown(on_full)}")
    if not isinstance(clock, ManualClock) and clock not in ("monotonic", "time"):
        raise ValueError(f"clock is 'monotonic', 'time' or a forebay.testing.ManualClock, not {shown(clock)}")


def _clock_kind(clock: object) -> int:
    if isinstance(clock, ManualClock):
        return layout.CLOCK_MANUAL
    return layout.CLOCK_PYTHON if clock == "time" else layout.CLOCK_MONOTONIC


def _checked_mode(mode: int, group: str | int | None) -> int:
    if not isinstance(mode, int) or mode not in (0o600, 0o660):
        given = f"{mode:#o}" if isinstance(mode, int) else shown(mode)
        raise ValueError(f"mode is 0o600 (this user) or 0o660 (with a group), not {given}")
    if group is not None and mode != 0o660:
        raise ValueError(f"group={group!r} needs mode=0o660: members of a group share a store by writing to it")
    return mode


def _gid(group: str | int | None) -> int:
    if group is None:
        return os.getegid()
    if isinstance(group, int):
        if isinstance(group, bool) or not 0 <= group < 2**32 - 1:
            raise ValueError(f"group is a group's name or number, not {shown(group)}")
        return group
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"there is no group {group!r} on this host") from None
