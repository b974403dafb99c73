"""Making a segment from a snapshot's frames, without a name until it is whole and was verified.

**Transitions.** The file is made without a name, filled, and checked by ``forebay.verification``. Then it gets its
name: by a link, which fails if there is a file, or by a rename over the segment that it replaces.

**Live rules.** Their file is written without a name, too, and gets one just before the segment does. It never replaces
a file: the segment of before, or another one of the same snapshot, may have other live rules of that number. Then these
rules get the next number that is free, and the segment's header has it. They never get the number that is in force in
the segment of before, even if its file is lost: that segment would have their rules. A file of the same rules serves
both segments, so a process that fails removes none. One that has named its segment removes all other files of rules at
that path. From before the name until then it excludes attachments of the new segment, and so another replacement, which
could take one of the names that are to be removed.

**Crash.** A process that is killed before the segment has its name leaves at most a file of live rules that no segment
names. The next restore to that path uses it or removes it, and the removal of the segment removes it. For the rename
the segment has another name first, ``.<file>.new``; a process that is killed between the two leaves it. The next one
removes it, as does the removal of the segment, and ``forebay doctor`` names it. A process that is killed after the
rename leaves files of former rules, which are removed in the same ways.

**Replacing.** The caller excludes all attachments of the old segment until the new one has its name. A process that
wants to attach meanwhile waits, and then finds that the path leads elsewhere: see ``forebay.segment.file``.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Self, TypeVar

from forebay.core.table.segment_view import Extent, Segment
from forebay.errors import ClockMismatch, DamagedSegment, SegmentError, SegmentSpaceError, UntrustedSegment
from forebay.segment import attachment_locks, free_space, host_clock, layout, ofd_locks
from forebay.segment.counts import COUNTERS_BYTES
from forebay.segment.creation import MAX_AGE_NS, create
from forebay.segment.extents import ExtentEntry
from forebay.segment.header import Header, segment_bytes
from forebay.segment.limiter_list import LIST_BYTES
from forebay.segment.names import RULES_SECRET, check_name, rules_files, rules_prefix, successor_of
from forebay.segment.opening import name_file, open_unnamed, opening_error
from forebay.segment.removal import expect_removal
from forebay.segment.spec import SegmentSpec
from forebay.snapshots.document import COUNTERS, EXTENT, KEYS, LIMITERS, RULES, Frame, Head, damaged
from forebay.store_options import MAX_KEYS
from forebay.verification import check
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["NewSegment", "too_small"]

RECORD_WORDS: Final = 3

Seen = TypeVar("Seen")


def too_small(source: str, live_keys: int, without_room: int, keys: int) -> SegmentError:
    """The exception for live keys that a table for so many `keys` doesn't hold."""
    enough = min(MAX_KEYS, max(keys, live_keys) * 5 // 4 + 1)
    return SegmentSpaceError(
        source,
        f"{live_keys} live keys, of which {without_room} have no room in a table for {keys}",
        "a table with room for all of them",
        f"ask for {enough} keys (--keys {enough})",
    )


class NewSegment:
    """A segment that is being made. A context manager: without ``link`` or ``replace`` it leaves nothing."""

    def __init__(self, source: str, head: Head, path: str, keys: int) -> None:
        """`source` names the snapshot in errors. Raises the kinds of ``SegmentError`` that creating a store raises."""
        check_name(path)
        mode, is_shared = head.mode, bool(head.mode & 0o060)
        self.spec = SegmentSpec.for_this_process(
            path, keys=keys, clock_kind=head.clock_kind, mode=mode, gid=head.gid if is_shared else os.getegid()
        )
        self.keys = 0
        """Keys that were put into it."""
        self._source, self._head = source, head
        self._rules: tuple[int, bytes] | None = None
        if os.geteuid() not in (0, head.uid):
            raise UntrustedSegment(
                source,
                f"a snapshot of a store of uid {head.uid}",
                f"one of uid {os.geteuid()}",
                f"restore it as root or as uid {head.uid}, whose processes use the store",
            )
        size = layout.TABLE_OFFSET + head.group_count * layout.GROUP_BYTES
        self._in_place = keys == head.keys
        if not self._in_place:
            size = segment_bytes(keys)
        self.header = Header(
            segment_size=size,
            advertised_keys=keys,
            group_count=(size - layout.TABLE_OFFSET) // layout.GROUP_BYTES,
            clock_kind=head.clock_kind,
            epoch_ns=self._epoch_ns(),
            wall_epoch_ns=head.wall_epoch_ns,
            hash_key=(head.key0, head.key1),
            boot_id=self.spec.boot_id,
            name_hash=self.spec.name_hash,
        )
        self._fd = open_unnamed(self.spec)
        try:
            if os.geteuid() != head.uid:
                os.fchown(self._fd, head.uid, head.gid)
            create(self.spec, self._fd, self.header)
            if head.clock_kind != layout.CLOCK_MONOTONIC:
                os.pwrite(self._fd, head.segment_ns.to_bytes(8, "little"), layout.HEADER_MANUAL_NS)
            self._segment = self._mapped()
        except OSError as error:
            os.close(self._fd)
            raise opening_error(self.spec, error) from None
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _epoch_ns(self) -> int:
        """The host's clock at segment time 0, so that the time goes on by what has passed since the snapshot.

        In the same boot the host's clock tells that. In another one only the wall clock does, and it must not say that
        the snapshot is yet to come.
        """
        head, spec = self._head, self.spec
        if head.clock_kind != layout.CLOCK_MONOTONIC:
            return host_clock.monotonic_ns(spec.offset_ns)
        wall_ns, host_ns = time.time_ns(), host_clock.monotonic_ns(spec.offset_ns)
        is_same_boot = head.boot_id == spec.boot_id
        elapsed_ns = host_ns - head.host_ns if is_same_boot else wall_ns - head.wall_ns
        now_ns = head.segment_ns + elapsed_ns
        if not (0 <= elapsed_ns < MAX_AGE_NS and now_ns < MAX_AGE_NS):
            when = f"{-elapsed_ns / 1e9:,.0f} s after now" if elapsed_ns < 0 else f"{elapsed_ns / 1e9:,.0f} s ago"
            raise ClockMismatch(
                self._source,
                f"a snapshot taken {when}, by {'the clock' if is_same_boot else 'the wall clock'} of this host",
                "one taken before now, and in the last 73 years",
                "set the host's clock right, and restore it then; or start with an empty store",
            )
        return (host_ns - now_ns) % 2**64

    def _mapped(self) -> Segment:
        header = self.header
        return Segment(
            self._fd,
            size=header.segment_size,
            group_count=header.group_count,
            epoch_ns=(header.epoch_ns + self.spec.offset_ns) % 2**64,
            wall_epoch_ns=header.wall_epoch_ns,
            clock_kind=header.clock_kind,
            hash_key=header.hash_key,
            on_full="deny",
            is_writable=True,
        )

    def fill(self, frames: Iterable[Frame]) -> None:
        """Put everything in. Raises ``DamagedSegment``, ``SegmentSpaceError``."""
        extent: Extent | None = None
        words = number = without_room = 0
        for kind, content in frames:
            try:
                if kind == KEYS:
                    put = extent.put_copies(content) if extent else self._put(content)
                    without_room += 0 if extent else put
                    self.keys += len(content) // ((RECORD_WORDS + words) * 8)
                    if put and (extent or self._in_place):
                        raise damaged(self._source, f"{put} keys for cells that don't take them", "one for each cell")
                elif kind == EXTENT:
                    if number == layout.EXTENT_CAPACITY:
                        raise damaged(self._source, f"more than {number} extents", "at most as many")
                    extent, words = self._extent(number, ExtentEntry.unpack(content))
                    number += 1
                elif kind == COUNTERS and len(content) == COUNTERS_BYTES:
                    os.pwrite(self._fd, content, layout.COUNTERS_OFFSET)
                elif kind == LIMITERS and len(content) == LIST_BYTES:
                    os.pwrite(self._fd, content, layout.LIMITERS_OFFSET)
                elif kind == RULES and len(content) > 8:
                    self._take_rules(content)
                else:
                    raise damaged(self._source, f"a frame of kind {kind} and {len(content)} bytes", "a known one")
            except (ValueError, OverflowError, struct.error) as error:
                raise damaged(self._source, str(error), "a snapshot of a sound segment") from None
        if without_room:
            raise too_small(self._source, self.keys, without_room, self.spec.keys)

    def _put(self, content: bytes) -> int:
        return self._segment.put_copies(content, in_place=self._in_place)

    def _extent(self, number: int, entry: ExtentEntry) -> tuple[Extent, int]:
        shape = entry.shape
        if not entry.is_whole:
            raise damaged(self._source, f"an extent of {entry.size} bytes for {entry.keys} keys", "a whole one")
        offset = -(-os.fstat(self._fd).st_size // layout.EXTENT_ALIGNMENT) * layout.EXTENT_ALIGNMENT
        try:
            free_space.refuse_what_does_not_fit(self._fd, self.spec.path, shape.bytes)
            os.posix_fallocate(self._fd, offset, shape.bytes)
        except OSError as error:
            if not free_space.is_shortage(error):
                raise
            or_else = "start with an empty store"
            found, remedy = free_space.shortage(error, self._fd, self.spec.path, shape.bytes, or_else=or_else)
            expected = f"{shape.bytes} bytes for the {shape.keys} keys of a limiter"
            raise self.spec.refuse(SegmentSpaceError, found, expected, remedy) from None
        words = entry.purpose.words_per_cell
        extent = self._segment.map_extent(
            self._fd,
            offset=offset,
            keys=entry.keys,
            group_count=shape.group_count,
            used_cells=shape.used_cells,
            word_count=shape.used_cells * words,
        )
        extent.block_cells(shape.used_cells)
        moved = ExtentEntry(entry.identity, offset, entry.size, entry.keys, entry.limiter, entry.purpose)
        os.pwrite(self._fd, moved.pack(), layout.EXTENTS_OFFSET + number * layout.EXTENT_ENTRY.size)
        return extent, words

    def _take_rules(self, content: bytes) -> None:
        version = int.from_bytes(content[:8], "little")
        if not 0 < version < 2**63:
            raise damaged(self._source, f"version {version} of live rules", "a version")
        self._rules = version, content[8:]

    def verify(self, progress: Callable[[int, int], None]) -> None:
        """Check all that was made. Raises ``DamagedSegment`` if it isn't sound, as the snapshot wasn't."""
        report = self.look(lambda segment: check(segment, progress))
        if not report.sound:
            finding = report.damage[0]
            raise DamagedSegment(
                self._source,
                f"{finding.found} in {finding.where}",
                finding.expected,
                "take another snapshot, or start with an empty store; nothing was made",
            )

    def look(self, at: Callable[[MappedSegment], Seen]) -> Seen:
        """What a function sees in the segment."""
        with MappedSegment(self.spec.path, fd=self._fd) as segment:
            return at(segment)

    def link(self) -> None:
        """Give the segment its name. Raises FileExistsError if there is a file of that name."""
        with self._unattached():
            former = rules_files(self.spec.path)
            own = self._name_rules()
            name_file(self._fd, self.spec.path)
            self._clean(former, own)

    def replace(self, old: int) -> None:
        """Give the segment the name of the one open as `old`, which no process has attached or can attach."""
        raw = os.pread(old, 8, layout.HEADER_RULES_VERSION)
        new = successor_of(self.spec.path)
        with self._unattached():
            former = rules_files(self.spec.path)
            own = self._name_rules(not_new=int.from_bytes(raw, "little"))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            name_file(self._fd, new)
            try:
                os.rename(new, self.spec.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(new)
                raise
            self._clean(former, own)
        expect_removal(os.fstat(old))

    @contextlib.contextmanager
    def _unattached(self) -> Iterator[None]:
        attachment_locks.exclude_all(self._fd)
        try:
            yield
        finally:
            # A mapping would keep it.
            ofd_locks.unlock(self._fd, 0, 0)

    def _name_rules(self, not_new: int = 0) -> str | None:
        """Make the file of the live rules, for all who may use the segment, and put its number into the header.

        `not_new`: a number that the file may have only if there is one of the same rules: the version of a segment that
        stays if this process is killed, and that may have lost its file.
        """
        if self._rules is None:
            return None
        version, document = self._rules
        with open(open_unnamed(self.spec), "wb") as file:
            status = os.fstat(self._fd)
            os.fchown(file.fileno(), status.st_uid, status.st_gid)
            os.fchmod(file.fileno(), status.st_mode & 0o660)
            file.write(document)
            file.flush()
            fd = file.fileno()
            while not (
                _is_like(fd, path := f"{self._rules_prefix()}{version}", document)
                or (version != not_new and _is_named(fd, path))
            ):
                version += 1
        os.pwrite(self._fd, version.to_bytes(8, "little"), layout.HEADER_RULES_VERSION)
        return path

    def _rules_prefix(self) -> str:
        return rules_prefix(self.spec.path, self._segment.secret(RULES_SECRET))

    def _clean(self, former: list[str], own: str | None) -> None:
        """Remove the files of rules that were there before the segment had its name, except its own."""
        for file in former:
            if file != own:
                with contextlib.suppress(OSError):
                    os.unlink(file)


def _is_named(fd: int, path: str) -> bool:
    """Whether the file has got that name."""
    try:
        name_file(fd, path)
    except FileExistsError:
        return False
    return True


def _is_like(fd: int, path: str, document: bytes) -> bool:
    """Whether there is a file of the same owner, group, mode and content."""
    try:
        there = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        other, status = os.fstat(there), os.fstat(fd)
        is_like_it = (other.st_uid, other.st_gid, other.st_mode) == (status.st_uid, status.st_gid, status.st_mode)
        return is_like_it and os.pread(there, len(document) + 1, 0) == document
    finally:
        os.close(there)
