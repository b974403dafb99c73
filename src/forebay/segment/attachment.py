"""One process's attachment to a segment: the open file, its locks, and the mapped memory."""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import Protocol

from forebay.errors import (
    ClockMismatch,
    DamagedSegment,
    InvalidLimiter,
    SegmentBusy,
    SegmentError,
    SegmentSpaceError,
    StoreClosed,
    TooManyLimiters,
)
from forebay.segment import attachment_locks, host_clock, layout, ofd_locks
from forebay.segment.file import SegmentFile
from forebay.segment.limiter_list import ALGORITHM_NAMES, LIST_BYTES, encode_limiter_name, listed_limiters
from forebay.segment.removal import NameWatch, is_at, unlink
from forebay.segment.spec import START_AGAIN

__all__ = ["Attachment", "MappedExtent", "MappedSegment"]


class MappedExtent(Protocol):
    """The mapped memory of an extent."""

    def block_cells(self, used_cells: int) -> None: ...
    @property
    def used_cells(self) -> int: ...
    def word(self, number: int) -> int: ...
    def replace_word(self, number: int, seen: int, value: int) -> bool: ...


class MappedSegment(Protocol):
    """The mapped memory of a segment."""

    @property
    def size(self) -> int: ...
    def mark_closed(self) -> None: ...
    def know_file(self, path: bytes, device: int, inode: int) -> None: ...
    def read(self, offset: int, size: int) -> bytes: ...
    def limiter_number(self, name: bytes, algorithm: int, *, add: bool = True) -> int: ...
    def take_counter_line(self, number: int, limiter: int) -> bool: ...
    def identity_of(self, text: bytes) -> int: ...
    def extent_entry(self, identity: int) -> bytes | None: ...
    def publish_extent(self, number: int, entry: bytes) -> None: ...
    def extents_maker(self) -> int: ...
    def replace_extents_maker(self, seen: int, maker: int) -> bool: ...
    def map_extent(
        self, fd: int, *, offset: int, keys: int, group_count: int, used_cells: int, word_count: int
    ) -> MappedExtent: ...


class Attachment:
    """A process's hold on a segment, from attaching until it is closed.

    *Threads*: safe. *Fork*: the child opens the file for itself, and takes locks of its own, when it first needs
    them; until then it shares its parent's.
    """

    def __init__(
        self,
        label: str,
        path: str | None,
        file: SegmentFile,
        map_segment: Callable[[int], MappedSegment],
        forks: Callable[[], int],
        next_generation: Callable[[], None],
    ) -> None:
        """`label` names the segment in errors. `forks` counts the forks between the import and this process.
        `next_generation` makes all limiters of this process look for their counter lines again.
        """
        self.label = label
        self.path = path
        self.closed = False
        self._forks = forks
        self._next_generation = next_generation
        self._made_file = file.is_new
        self._may_grow = file.may_grow
        self.is_writable = file.is_writable
        """Whether this process may write to the segment. If not, it may look at states, and has no counter line."""
        self._status = os.fstat(file.fd)
        # By number of forks: the file as this process opened it, with its locks; and whose the counter lines are that
        # it has locked, each a limiter's number and a holder.
        self._files = {forks(): file.fd}
        self._lines: dict[int, dict[int, tuple[int, int]]] = {}
        self._locks: dict[int, threading.RLock] = {}
        self._holds = 0
        follows_host = file.header.clock_kind == layout.CLOCK_MONOTONIC
        self._time_namespace = host_clock.time_namespace() if follows_host else None
        self._clock_checked_at = forks()
        self.id = file.attachment_id
        """The id of the newest file: see ``attachment_locks``."""
        self.allows_other_clock = False
        """Whether a fork may bring a process that uses the segment into another time namespace."""
        self.name_watch = NameWatch(path, self._status)
        if not ofd_locks.succeeds_in_time(lambda: attachment_locks.prevent_resize(file.fd)):
            self.close()
            raise SegmentBusy(
                label,
                f"a resize that has been under way for {ofd_locks.TIMEOUT_S:.0f} s",
                "one that ends",
                "wait for it, or kill a `forebay resize` that was stopped",
            )
        try:
            with attachment_locks.opened_to_map(file.fd) as opened:
                self.segment = map_segment(opened)
            if path is not None:
                self.segment.know_file(os.fsencode(path), self._status.st_dev, self._status.st_ino)
        except OSError as error:
            self.close()
            raise SegmentSpaceError(
                label,
                f"no room in this process's address space ({os.strerror(error.errno or 0)})",
                f"room to map {file.header.segment_size} bytes",
                "raise the process's limits (ulimit -v) or ask for fewer keys",
            ) from None

    def close(self) -> bool:
        """Close the file, which drops all locks. False if it was closed already. The mapping stays until garbage.

        While there is a hold, the file stays open.
        """
        with self.lock():
            if self.closed:
                return False
            self.closed = True
            self.name_watch.stop()
            # Before the locks are dropped: no thread may count in a line that another process has taken.
            self._next_generation()
            if self._holds == 0:
                self._close_files()
            return True

    def hold(self) -> None:
        """Keep the file open until ``release``, also after ``close``.

        For threads that decide without the GIL: they may count in a line for some time after the close, so this process
        must keep its lock on the line.
        """
        with self.lock():
            self.check_open()
            self.check_writable()
            self._holds += 1

    def release(self) -> None:
        """End a hold."""
        with self.lock():
            self._holds -= 1
            if self.closed and self._holds == 0:
                self._close_files()

    def _close_files(self) -> None:
        for fd in self._open_files():
            os.close(fd)
        self._files.clear()

    def is_in_place(self) -> bool:
        """Whether the segment's path still leads to its file. False for a segment without a name."""
        return self.path is not None and is_at(self.path, self._status)

    def remove_if_new(self) -> bool:
        """Unlink the file if this process made it and no other process is attached. Close the attachment after this.

        Returns whether it was unlinked.
        """
        with self.lock():
            fd = self.own_file()
            if self.path is None or fd is None or not self._made_file or not self.is_in_place():
                return False
            # Turns this process's shared lock into an exclusive one, so none attaches before the file has no name.
            if attachment_locks.exclude_all(fd):
                with contextlib.suppress(OSError, SegmentError):
                    unlink(self.path)
                    return True
            return False

    def lock(self) -> threading.RLock:
        """The lock for work with the file; no decision takes it.

        Each process has its own, because a fork may happen while another thread holds it.
        """
        return self._locks.setdefault(self._forks(), threading.RLock())

    def check_open(self) -> None:
        if self.closed:
            raise StoreClosed(f"the store {self.label} was closed")

    def check_writable(self) -> None:
        """Raise if this process may only read the segment."""
        if not self.is_writable:
            raise SegmentError(
                self.label,
                f"a file that uid {os.geteuid()} may only read",
                "one that it may write, to decide or to change a key's state",
                "run as the file's owner or as root; statistics and peek need no more",
            )

    def refuse_growth(self, what: str) -> None:
        """Raise if this process adds nothing to the segment, which has no such thing."""
        if not self._may_grow:
            known = ", ".join(f"{kind} {name!r}" for name, kind in self.limiters().values())
            raise InvalidLimiter(
                f"the store {self.label} has {what}, and Store.attach adds none: it has {known or 'no limiter'}; give "
                "the name and the parameters that the store's processes give"
            )

    @property
    def is_inherited(self) -> bool:
        """Whether an ancestor of this process attached, before a fork, and this process has not opened the file."""
        return min(self._files) != self._forks()

    # The file

    def own_file(self) -> int | None:
        """The segment's file as this process opened it. None if the program closed it, or a child may not open it."""
        inherited = self._open_files()
        if not inherited:
            return None
        fork = self._forks()
        if fork in self._files:
            return self._files[fork]
        try:
            opened = os.open(f"/proc/self/fd/{inherited[-1]}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Most often a worker that gave up root: its mapping and its limits work, and its counters are shared.
            return None
        # Before the parent's file is closed, so that the segment is attached all the time and none can exclude it.
        attachment_id = attachment_locks.attach(opened, attachment_locks.place_of_id(self.id))
        assert attachment_id is not None
        self.id = attachment_id
        attachment_locks.prevent_resize(opened)
        self._files = {fork: opened}
        for fd in inherited:
            os.close(fd)
        return opened

    def _open_files(self) -> list[int]:
        """The segment's descriptors that are still open. A program that becomes a daemon closes all, and its next
        files get the same numbers."""
        found = []
        for fd in self._files.values():
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), self._status):
                    found.append(fd)
        return found

    def file_size(self) -> int:
        opened = self._open_files()
        return (os.fstat(opened[0]) if opened else self._status).st_size

    def read_file(self, offset: int, size: int) -> bytes:
        """Bytes of the file, also behind the segment. Needs only that the file is open, in this process or before a
        fork: raises ``SegmentError`` if the program has closed it.
        """
        opened = self._open_files()
        if not opened:
            raise SegmentError(
                self.label,
                "a process that has closed the segment's file",
                "one that has it open",
                "look from outside, by the forebay command",
            )
        return os.pread(opened[0], size, offset)

    def bytes_taken(self) -> int:
        """The bytes that the file takes of its file system. 0 if the program has closed it."""
        opened = self._open_files()
        return os.fstat(opened[0]).st_blocks * 512 if opened else 0

    # The limiters

    def limiter_number(self, name: str, algorithm: int, *, add: bool = True) -> int:
        """The number of the limiter of that name and algorithm in the segment, which is added if it is new.

        Without `add` nothing is written: for a new limiter, the number that it would get now. Raises
        ``TooManyLimiters``.
        """
        self.check_open()
        encoded = encode_limiter_name(name)
        number = self.segment.limiter_number(encoded, algorithm, add=add and self._may_grow)
        if add and not self._may_grow:
            kind = ALGORITHM_NAMES[algorithm]
            # Another process may have given the number to another limiter meanwhile.
            if self.limiters().get(number) != (encoded.decode(), kind):
                self.refuse_growth(f"no {kind} {name!r}")
        if number < 0:
            raise TooManyLimiters(
                f"the store {self.label} has all its {layout.LIMITER_CAPACITY} limiters, so there is no place for "
                f"{name!r}: tell users apart by keys instead of limiters, or make a second store"
            )
        return number

    def limiters(self) -> dict[int, tuple[str, str]]:
        """The limiters of all processes, by number: a name and an algorithm's name each."""
        limiters = {}
        for number, limiter in listed_limiters(self.segment.read(layout.LIMITERS_OFFSET, LIST_BYTES)):
            try:
                limiters[number] = limiter.name.decode(), limiter.algorithm_name
            except UnicodeDecodeError:
                raise DamagedSegment(
                    self.label, f"{limiter.name!r} as the name of limiter {number}", "UTF-8", START_AGAIN
                ) from None
        return limiters

    # The counters

    def counter_line(self, number: int, holder: int | None = 0) -> tuple[int, bool]:
        """The counter line in which `holder` counts for limiter `number`, and whether others count in it too.

        A holder is a part of this process that counts by loads and stores: one thread, or, as holder 0, all threads
        that hold the GIL. Each holder has a line of its own, until ``release_lines``, and gets the same one again. A
        holder that finds no free line, and None, get the limiter's shared line, in which all count by atomic additions.

        A process owns a line while it holds the file lock on the line's bytes. So the kernel frees a line when its
        owner ends, and the next owner continues its counts: no counts are merged, and no sum ever falls.
        """
        with self.lock():
            self.check_open()
            self.check_writable()
            self._check_clock()
            line = None if holder is None else self._own_line(number, holder)
        return (line, False) if line is not None else (layout.OWNED_COUNTER_LINES + number, True)

    def release_lines(self, holder: int = 0) -> None:
        """Give back the lines of `holder`: other holders and processes may continue their counts.

        The holder counts in them no more. Lines that a parent of this process took stay the parent's.
        """
        with self.lock():
            owners = self._owners()
            lines = [line for line, owner in owners.items() if owner[1] == holder]
            fd = self.own_file() if lines else None
            for line in lines:
                del owners[line]
                if fd is not None:
                    ofd_locks.unlock(fd, *_bytes_of(line))

    def _check_clock(self) -> None:
        """Raise if a fork has brought this process into another time namespace than the one that attached.

        By its clock, every key would be fresh, or denied for as long as the two clocks are apart. With
        `allows_other_clock`, no check is made.
        """
        if self.allows_other_clock or self._forks() == self._clock_checked_at:
            return
        namespace = host_clock.time_namespace()
        if None not in (namespace, self._time_namespace) and namespace != self._time_namespace:
            raise ClockMismatch(
                self.label,
                "a process that a fork brought into another time namespace than the one that made the store",
                "one time namespace for a store and its users",
                "make the store in the process that uses it; a private store can't be shared over time namespaces",
            )
        self._clock_checked_at = self._forks()

    def _owners(self) -> dict[int, tuple[int, int]]:
        """The owner of the counter lines that this process has locked. The file's lock doesn't distinguish them."""
        return self._lines.setdefault(self._forks(), {})

    def _own_line(self, number: int, holder: int) -> int | None:
        """Lock a counter line for a holder of limiter `number`. None if there is none for it."""
        owners, owner = self._owners(), (number, holder)
        fd = self.own_file()
        if fd is None:
            return None
        for line in [line for line in owners if owners[line] == owner]:
            # Once more: the program may have closed all descriptors, and with them the lock.
            if ofd_locks.try_lock(fd, *_bytes_of(line)):
                return line
            del owners[line]
        size = layout.COUNTER_LINE.size
        raw = self.segment.read(layout.COUNTERS_OFFSET, layout.OWNED_COUNTER_LINES * size)
        # The first field of each line, without a step of Python for each: this is part of a limiter's first call.
        limiters = array("I", raw)[layout.COUNTER_LINE_LIMITER // 4 :: size // 4]
        # First the lines that this limiter has used before, then unused ones.
        for wanted in (number + 1, 0):
            for line in _places(limiters, wanted):
                if line not in owners and ofd_locks.try_lock(fd, *_bytes_of(line)):
                    if self.segment.take_counter_line(line, number):
                        owners[line] = owner
                        return line
                    ofd_locks.unlock(fd, *_bytes_of(line))
        return None


def _bytes_of(line: int) -> tuple[int, int]:
    return layout.COUNTERS_OFFSET + line * layout.COUNTER_LINE.size, layout.COUNTER_LINE.size


def _places(numbers: array[int], wanted: int) -> Iterator[int]:
    place = -1
    with contextlib.suppress(ValueError):
        while True:
            place = numbers.index(wanted, place + 1)
            yield place
