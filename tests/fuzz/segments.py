"""Small segments for fuzzing: the same bytes every time, so that an input means the same in every run."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from forebay import Store
from forebay.clock import MAX_NS, ManualClock
from forebay.segment import layout
from forebay.segment.sizes import BYTES_PER_KEY

Choice = TypeVar("Choice")

HASH_KEY: Final = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
START_S: Final = 10**6
WORD: Final = struct.Struct("<Q")
MOST_KEYS_IN_A_PROBE_SET: Final = layout.GROUPS_PER_KEY * layout.GROUP_BYTES // layout.CELL.size
KIND_MASK: Final = 2**layout.KIND_BITS - 1


class Input:
    """Reads numbers and choices from a fuzzer's bytes; zeros after their end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken.ljust(size, b"\0")

    def number(self, below: int) -> int:
        """Read as few bytes as possible, so that a small change of the input is a small change of the run."""
        return int.from_bytes(self.take(-(-(below - 1).bit_length() // 8)), "little") % below

    def choice(self, choices: Sequence[Choice]) -> Choice:
        return choices[self.number(len(choices))]


class SegmentBytes:
    """The bytes of a segment's file, to be damaged."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.bytes = mmap.mmap(file.fileno(), self.size)
        self.extents = [
            (offset, min(offset + size, self.size), keys)
            for identity, offset, size, keys, *_ in layout.EXTENT_ENTRY.iter_unpack(
                self.bytes[layout.EXTENTS_OFFSET : layout.COUNTERS_OFFSET]
            )
            if identity
        ]
        self.table_end = self.word(layout.HEADER_SEGMENT_SIZE)

    def close(self) -> None:
        self.bytes.close()

    def word(self, offset: int) -> int:
        return int.from_bytes(self.bytes[offset : offset + 8], "little")

    def read(self, offset: int, size: int) -> bytes:
        return self.bytes[offset : offset + size]

    def write(self, offset: int, data: bytes) -> None:
        """As much of it as there is room for."""
        end = min(offset + len(data), self.size)
        if offset < end:
            self.bytes[offset:end] = data[: end - offset]

    def write_word(self, offset: int, word: int) -> None:
        self.write(offset, WORD.pack(word % 2**64))

    def live_cells(self) -> list[int]:
        """Offsets of the cells that hold anything, of the table and then of each extent's."""
        cells = []
        for start, end in [(layout.TABLE_OFFSET, self.table_end), *self.cell_spans()]:
            tags = memoryview(self.bytes[start:end]).cast("Q")[::2].tolist()
            cells += [
                start + number * layout.CELL.size
                for number, tag in enumerate(tags)
                if tag not in (0, layout.KIND_BLOCKED)
            ]
        return cells

    def cell_spans(self) -> list[tuple[int, int]]:
        """Where the cells of each extent are."""
        return [(offset, min(offset + _table_bytes(keys), end)) for offset, end, keys in self.extents]

    def words_of(self, cell: int) -> list[tuple[int, int]]:
        """Offset and size of a cell's words, if it has any."""
        for (start, end), (words, words_end) in zip(self.cell_spans(), self.word_spans(), strict=True):
            if start <= cell < end:
                keys = next(keys for offset, _, keys in self.extents if offset == start)
                cells = keys if keys <= MOST_KEYS_IN_A_PROBE_SET else (end - start) // layout.CELL.size
                size = (words_end - words) // cells
                return [(words + (cell - start) // layout.CELL.size * size, size)]
        return []

    @property
    def now_ns(self) -> int:
        """The time of a manual clock."""
        return self.word(layout.HEADER_MANUAL_NS)

    def advance(self, by_ns: int) -> None:
        self.write_word(layout.HEADER_MANUAL_NS, min(self.now_ns + by_ns, MAX_NS))

    def word_spans(self) -> list[tuple[int, int]]:
        """Where the words of each extent are."""
        return [(min(offset + _table_bytes(keys), end), end) for offset, end, keys in self.extents]


def _table_bytes(keys: int) -> int:
    """As forebay.segment.extents has it."""
    if keys <= MOST_KEYS_IN_A_PROBE_SET:
        return -(-keys * layout.CELL.size // layout.GROUP_BYTES) * layout.GROUP_BYTES
    return -(-keys * BYTES_PER_KEY // layout.GROUP_BYTES) * layout.GROUP_BYTES


class Scratch:
    """A directory in memory for segments, removed at the end."""

    def __init__(self) -> None:
        directory = os.environ.get("FOREBAY_FUZZ_DIRECTORY", "/dev/shm")
        self.directory = tempfile.mkdtemp(prefix="forebay-fuzz-", dir=directory)
        self._images: dict[object, bytes] = {}

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, name: str) -> str:
        """In a directory of its own, as a segment can't be used under another file name than its own."""
        os.makedirs(f"{self.directory}/{name}", exist_ok=True)
        return f"{self.directory}/{name}/segment"

    def image(self, which: object, use: Callable[[Store], None], clock: Any) -> bytes:
        """The bytes of a fresh segment after `use`."""
        if which not in self._images:
            path = self.path("image")
            Store("fuzz", keys=1, path=path, clock=clock).close()
            with open(path, "r+b") as file:
                header = bytearray(file.read(layout.HEADER.size))
                struct.pack_into("<2Q", header, layout.HEADER_HASH_KEY, *HASH_KEY)
                WORD.pack_into(header, layout.HEADER_WALL_EPOCH_NS, 10**18)
                file.seek(0)
                file.write(sealed(header))
            with Store("fuzz", keys=1, path=path, clock=clock) as store:
                use(store)
            with open(path, "rb") as file:
                self._images[which] = file.read()
            os.unlink(path)
        return self._images[which]

    @contextlib.contextmanager
    def segment(self, name: str, image: bytes) -> Iterator[str]:
        """The path of a file with these bytes, that has never been another's."""
        path = self.path(name)
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(image)
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def sealed(header: bytearray) -> bytearray:
    """With a checksum that is right."""
    struct.pack_into("<I", header, layout.HEADER_CHECKSUM, zlib.crc32(bytes(header[: layout.HEADER_CHECKSUM])))
    return header


def manual_clock() -> ManualClock:
    return ManualClock(START_S)
