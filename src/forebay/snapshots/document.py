"""The file of a snapshot: its frames, how it is written whole, and how a damaged one is refused.

A file is `MAGIC`, then frames, then a BLAKE2b digest of all bytes before it. A frame is its kind, the length of its
content, and its content. The first frame is the head. The frames of keys before any extent are of the table, those
behind an extent are that extent's. The file has the segment's hash key, so only its owner may read it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Any, Final, Self

from forebay.errors import (
    DamagedSegment,
    ForeignSegment,
    SegmentBusy,
    SegmentError,
    SegmentVersionMismatch,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.segment import layout, ofd_locks
from forebay.segment.header import CLOCK_NAMES
from forebay.segment.removal import is_at
from forebay.segment.sizes import CELLS_PER_GROUP
from forebay.store_options import MAX_KEYS

__all__ = ["COUNTERS", "EXTENT", "KEYS", "LIMITERS", "RULES", "Frame", "Head", "SnapshotFile", "write"]

MAGIC: Final = b"FOREBAY SNAPSHOT"
VERSION: Final = 1
LAYOUTS: Final = frozenset({1})
"""The layouts of the segments whose snapshots are restored, in a segment of this version's layout. What a snapshot has
of one means the same in the other, or ``making`` converts it. A release with another layout adds its number.
"""
DIGEST_BYTES: Final = 32
READ_AT_ONCE: Final = 2**20
FRAME: Final = struct.Struct("<IQ")
VERSIONS: Final = struct.Struct("<II")
HEAD: Final = struct.Struct("<IIIIQQQQQQQQ16s")
MOST_GROUPS: Final = 2**40
NO_ID: Final = 2**32 - 1
"""The id of no user and no group: to the system it says that a file is to keep its own."""
ANOTHER: Final = "take another snapshot, or restore an older one; nothing was made"

# The kinds of frames.
HEAD_KIND: Final = 1
KEYS: Final = 2
EXTENT: Final = 3
COUNTERS: Final = 4
LIMITERS: Final = 5
RULES: Final = 6

Frame = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Head:
    """What a segment is, and when the snapshot was taken."""

    clock_kind: int
    mode: int
    uid: int
    gid: int
    keys: int
    group_count: int
    wall_epoch_ns: int
    key0: int
    key1: int
    """The hash key."""
    segment_ns: int
    """The segment's time when the snapshot was begun."""
    host_ns: int
    """``CLOCK_MONOTONIC`` at that time."""
    wall_ns: int
    """The wall clock at that time."""
    boot_id: bytes
    path: str
    """The segment's file."""

    def pack(self) -> bytes:
        *numbers, path = astuple(self)
        return VERSIONS.pack(VERSION, layout.LAYOUT_VERSION) + HEAD.pack(*numbers) + os.fsencode(path)

    @classmethod
    def unpack(cls, file: str, raw: bytes) -> Head:
        """Raises ``SegmentVersionMismatch`` and ``DamagedSegment``."""
        if len(raw) >= VERSIONS.size:
            version, layout_version = VERSIONS.unpack_from(raw)
            if version != VERSION or layout_version not in LAYOUTS:
                raise SegmentVersionMismatch(
                    file,
                    f"a snapshot of version {version}, of layout version {layout_version}",
                    f"version {VERSION} and layout version {' or '.join(map(str, sorted(LAYOUTS)))}",
                    "restore it with the version of forebay that took it",
                )
        if len(raw) < VERSIONS.size + HEAD.size:
            raise damaged(file, f"a head of {len(raw)} bytes", "a whole one")
        path = os.fsdecode(raw[VERSIONS.size + HEAD.size :])
        fields: list[Any] = [*HEAD.unpack_from(raw, VERSIONS.size), path]
        head = cls(*fields)
        if (
            head.clock_kind not in CLOCK_NAMES
            or not 1 <= head.keys <= MAX_KEYS
            or not layout.MIN_GROUPS <= head.group_count <= MOST_GROUPS
            or head.keys > head.group_count * CELLS_PER_GROUP
            or max(head.wall_epoch_ns, head.segment_ns, head.host_ns, head.wall_ns) >= 2**63
            or not path.startswith("/")
            or "\0" in path
        ):
            raise damaged(file, f"a head of {head.keys} keys in {head.group_count} groups, of {path!r}", "a valid one")
        if NO_ID in (head.uid, head.gid) or head.mode & ~0o064 != 0o600:
            raise damaged(
                file,
                f"a store of uid {head.uid}, gid {head.gid}, mode {head.mode:04o}",
                f"ids below {NO_ID}, and a mode from 0600 to 0664 by which its owner may use it",
            )
        return head


def damaged(file: str, found: str, expected: str) -> SegmentError:
    return DamagedSegment(file, found, expected, ANOTHER)


def write(path: str, head: Head, frames: Iterable[Frame]) -> int:
    """Replace the file at the path by a snapshot, once that is whole on the disk. Returns its bytes.

    A process that is killed meanwhile leaves the file as it was, and beside it one with the ending ``.partial``, over
    which the next snapshot is written. Raises ``ForeignSegment`` if the file isn't a snapshot, ``SegmentBusy`` if
    another process is writing it, and ``OSError``.
    """
    path = os.path.realpath(path)
    _refuse_others(path)
    partial = f"{path}.partial"
    with open(_open_partial(partial), "wb") as file:
        try:
            digest = blake2b(digest_size=DIGEST_BYTES)
            for data in _pieces(head, frames):
                digest.update(data)
                file.write(data)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
            os.replace(partial, path)
            ofd_locks.unlock(file.fileno(), 0, 0)
        except BaseException as error:
            if isinstance(error, OSError) and error.filename is None:
                error.filename = path  # a write names no file
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return size


def _pieces(head: Head, frames: Iterable[Frame]) -> Iterator[bytes]:
    yield MAGIC
    for kind, content in itertools.chain([(HEAD_KIND, head.pack())], frames):
        yield FRAME.pack(kind, len(content))
        yield content


def _refuse_others(path: str) -> None:
    """Refuse to replace the file of another program."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        begin = os.read(fd, len(MAGIC)) if stat.S_ISREG(os.fstat(fd).st_mode) else b"?"
    finally:
        os.close(fd)
    if begin not in (b"", MAGIC):
        found = f"a file that begins with {begin!r}" if begin != b"?" else "no regular file"
        raise ForeignSegment(path, found, "a snapshot, or no file", "choose another path; the file is unchanged")


def _open_partial(path: str) -> int:
    """Open the file that is written, empty and locked."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_nlink > 1:
                raise UntrustedSegment(
                    path,
                    f"a file of uid {status.st_uid} in the way",
                    "none, or what an earlier snapshot of this user left",
                    "remove it, or write the snapshot into a directory of this user's own",
                )
            if not ofd_locks.try_lock(fd, 0, 0):
                raise SegmentBusy(path, "a snapshot that another process writes", "one at a time", "wait for it")
            if is_at(path, status):
                os.fchmod(fd, 0o600)
                os.ftruncate(fd, 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another process has finished it meanwhile


class SnapshotFile:
    """A snapshot that is to be restored. A context manager that closes it."""

    head: Head

    def __init__(self, path: str) -> None:
        """Raises ``SegmentError`` unless it is a whole snapshot of this user or of root, and ``OSError``."""
        self.path: Final = path
        self._file: Final = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
        try:
            self._check_owner()
            self._end = self._check_bytes()
            kind, content = next(self._frames(), (0, b""))
            if kind != HEAD_KIND:
                raise damaged(path, f"a frame of kind {kind} at its beginning", "its head")
            self.head = Head.unpack(path, content)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def frames(self, progress: Callable[[int, int], None]) -> Iterator[Frame]:
        """The frames behind the head. `progress` gets the bytes read and their total."""
        frames = self._frames()
        next(frames)
        for frame in frames:
            yield frame
            progress(self._file.tell(), self._end)

    def _check_owner(self) -> None:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ForeignSegment(self.path, "no regular file", "a snapshot", "choose another path")
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise UntrustedSegment(
                self.path,
                f"a file of uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}",
                f"one of uid {os.geteuid()} or root that no other user may write",
                "restore it as its owner; if you trust its content, chown it and chmod it to 0600",
            )

    def _check_bytes(self) -> int:
        """Where the frames end. Raises if the file isn't whole."""
        file = self._file
        size = os.fstat(file.fileno()).st_size
        begin = file.read(len(MAGIC))
        if begin != MAGIC[: len(begin)] or not begin:
            raise ForeignSegment(self.path, f"a file that begins with {begin!r}", "a snapshot", "choose another file")
        end = size - DIGEST_BYTES
        if end < len(MAGIC):
            raise TruncatedSegment(self.path, f"{size} bytes", "a whole snapshot", ANOTHER)
        digest = blake2b(begin, digest_size=DIGEST_BYTES)
        while file.tell() < end:
            data = file.read(min(READ_AT_ONCE, end - file.tell()))
            if not data:
                break
            digest.update(data)
        if file.read(DIGEST_BYTES) != digest.digest():
            raise damaged(self.path, "a checksum that its bytes don't have", "a whole, unchanged snapshot")
        return end

    def _frames(self) -> Iterator[Frame]:
        place = len(MAGIC)
        while place < self._end:
            self._file.seek(place)
            kind, size = FRAME.unpack(self._file.read(FRAME.size).ljust(FRAME.size, b"\0"))
            place += FRAME.size + size
            if place > self._end:
                raise damaged(self.path, f"a frame of {size} bytes", "one that ends within the file")
            content = self._file.read(size)
            if len(content) < size:
                raise damaged(self.path, f"{len(content)} bytes", f"a frame of {size} bytes")
            yield kind, content
