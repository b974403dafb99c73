"""A segment's header: packing it, reading it, and refusing one that is foreign or damaged."""

from __future__ import annotations

import secrets
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Final

from forebay.errors import (
    ClockMismatch,
    DamagedSegment,
    ForeignSegment,
    SegmentVersionMismatch,
    TruncatedSegment,
)
from forebay.segment import host_clock, layout
from forebay.segment.sizes import BYTES_PER_KEY
from forebay.segment.spec import START_AGAIN, SegmentSpec

__all__ = [
    "CLOCK_NAMES",
    "Header",
    "check_consistency",
    "check_identity",
    "is_foreign",
    "is_unfinished",
    "segment_bytes",
]

CLOCK_NAMES: Final = {
    layout.CLOCK_MONOTONIC: "monotonic",
    layout.CLOCK_MANUAL: "manual",
    layout.CLOCK_PYTHON: "Python (time.time)",
}
MAGIC: Final = layout.MAGIC.to_bytes(8, "little")
CHECKSUM_AND_STATE: Final = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a segment's header that an attached process uses."""

    segment_size: int
    advertised_keys: int
    group_count: int
    clock_kind: int
    epoch_ns: int
    wall_epoch_ns: int
    hash_key: tuple[int, int]
    boot_id: bytes
    name_hash: int

    @classmethod
    def new(cls, spec: SegmentSpec, at_least: int) -> Header:
        """For a segment of `at_least` bytes."""
        size = segment_bytes(spec.keys, at_least)
        return cls(
            segment_size=size,
            advertised_keys=spec.keys,
            group_count=(size - layout.TABLE_OFFSET) // layout.GROUP_BYTES,
            clock_kind=spec.clock_kind,
            epoch_ns=host_clock.monotonic_ns(spec.offset_ns),
            wall_epoch_ns=time.time_ns(),
            hash_key=(secrets.randbits(64), secrets.randbits(64)),
            boot_id=spec.boot_id,
            name_hash=spec.name_hash,
        )

    def pack(self, state: int) -> bytes:
        """All bytes up to and including the state. The checksum is 0 until the state is ready."""
        head = layout.HEADER.pack(
            layout.MAGIC,
            layout.LAYOUT_VERSION,
            self.clock_kind,
            self.segment_size,
            self.advertised_keys,
            self.group_count,
            self.epoch_ns % 2**64,
            self.wall_epoch_ns,
            *self.hash_key,
            self.boot_id,
            self.name_hash,
            *(0, 0, b"", *(0,) * 7, b"", *(0,) * 26, b""),
        )[: layout.HEADER_CHECKSUM]
        return head + CHECKSUM_AND_STATE.pack(zlib.crc32(head) if state == layout.STATE_READY else 0, state)

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        _, _, clock_kind, segment_size, keys, group_count, epoch_ns, wall_epoch_ns, *rest = layout.HEADER.unpack(raw)
        key0, key1, boot_id, name_hash, *_ = rest
        hash_key = (key0, key1)
        return cls(segment_size, keys, group_count, clock_kind, epoch_ns, wall_epoch_ns, hash_key, boot_id, name_hash)

    def is_of_another_boot(self, spec: SegmentSpec) -> bool:
        return self.clock_kind == layout.CLOCK_MONOTONIC and self.boot_id != spec.boot_id


def segment_bytes(keys: int, at_least: int = 0) -> int:
    """The size of a segment for so many keys, without extents."""
    size = max(keys * BYTES_PER_KEY, at_least - layout.TABLE_OFFSET)
    return layout.TABLE_OFFSET + max(layout.MIN_GROUPS, -(-size // layout.GROUP_BYTES)) * layout.GROUP_BYTES


def is_unfinished(raw: bytes) -> bool:
    """Whether the creator of this header was killed before it finished, or is still at work."""
    return bool(CHECKSUM_AND_STATE.unpack_from(raw, layout.HEADER_CHECKSUM) == (0, layout.STATE_CREATING))


def is_foreign(raw: bytes) -> bool:
    """Whether a file that begins with `raw` belongs to another program. An empty file is a segment not yet created."""
    return bool(raw) and raw[: len(MAGIC)] != MAGIC


def check_identity(spec: SegmentSpec, raw: bytes) -> None:
    """Raise if `raw` is not a header, or is one of another layout."""
    if raw[: len(MAGIC)] != MAGIC:
        raise spec.refuse(
            ForeignSegment,
            f"a file that begins with {raw[:8]!r}",
            f"the magic number of a forebay segment, {MAGIC!r}",
            "choose another name or path; the file is unchanged",
        )
    if len(raw) < layout.HEADER_MANUAL_NS:
        if len(raw) == layout.HEADER_STATE + 4:
            return  # Its creator died right after its first write.
        raise spec.refuse(TruncatedSegment, f"{len(raw)} bytes", f"a header of {layout.HEADER.size} bytes", START_AGAIN)
    version = int.from_bytes(raw[layout.HEADER_LAYOUT_VERSION : layout.HEADER_LAYOUT_VERSION + 4], "little")
    if version != layout.LAYOUT_VERSION:
        raise spec.refuse(
            SegmentVersionMismatch,
            f"layout version {version}",
            f"layout version {layout.LAYOUT_VERSION}",
            "use one version of forebay in all processes, or give this store another name",
        )


def check_consistency(spec: SegmentSpec, raw: bytes, size: int) -> Header:
    """Unpack a ready header of a file of `size` bytes. Raises if it is truncated, damaged or of another clock."""
    if len(raw) < layout.HEADER.size:
        raise spec.refuse(TruncatedSegment, f"{len(raw)} bytes", f"a header of {layout.HEADER.size} bytes", START_AGAIN)
    checksum, state = CHECKSUM_AND_STATE.unpack_from(raw, layout.HEADER_CHECKSUM)
    computed = zlib.crc32(raw[: layout.HEADER_CHECKSUM])
    if checksum != computed:
        raise spec.refuse(
            DamagedSegment, f"a header with checksum {checksum:#010x}", f"checksum {computed:#010x}", START_AGAIN
        )
    if state != layout.STATE_READY:
        raise spec.refuse(
            DamagedSegment, f"a header in state {state}", f"state {layout.STATE_READY} (ready)", START_AGAIN
        )
    header = Header.unpack(raw)
    if size < header.segment_size:  # it may be larger: extents lie behind the table
        raise spec.refuse(TruncatedSegment, f"{size} bytes", f"{header.segment_size} bytes", START_AGAIN)
    whole = layout.TABLE_OFFSET + header.group_count * layout.GROUP_BYTES
    if header.group_count < layout.MIN_GROUPS or whole != header.segment_size or header.clock_kind not in CLOCK_NAMES:
        raise spec.refuse(
            DamagedSegment,
            f"{header.group_count} groups and clock {header.clock_kind} in {header.segment_size} bytes",
            "numbers that fit each other",
            START_AGAIN,
        )
    if header.clock_kind != spec.clock_kind:
        raise spec.refuse(
            ClockMismatch,
            f"a segment with a {CLOCK_NAMES[header.clock_kind]} clock",
            f"one with a {CLOCK_NAMES[spec.clock_kind]} clock",
            "give the same clock= in all processes, or use another name",
        )
    return header
