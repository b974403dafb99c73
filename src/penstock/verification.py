"""Whether everything holds in a segment that must: ``verify``, which changes nothing and disturbs nobody.

The file is mapped for reading only. Workers may be deciding meanwhile, so what looks wrong is looked at again, and told
only if it stays so: no worker is half-way for that long, and what a killed one has left half-done is sound.
"""

from __future__ import annotations

import itertools
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from penstock import layout
from penstock.core.audit import (
    LATEST_NS,
    Counts,
    find_identity,
    hash_of_name,
    look_at_cells,
    look_at_words,
)
from penstock.core.concurrency import words_for
from penstock.errors import ForeignSegment, SegmentBusy, SegmentError
from penstock.extents import CELLS_PER_GROUP, MAX_KEYS, ExtentShape
from penstock.rate import MAX_PERIOD_NS
from penstock.segment_file import (
    _SEAL,
    BYTES_PER_KEY,
    CLOCK_NAMES,
    Header,
    _boot_id,
    _check_consistency,
    _check_identity,
    _monotonic_ns,
    _not_opened,
    _Wanted,
)
from penstock.store import _default_path

__all__ = ["Finding", "Part", "Report", "verify"]

LOOKS: Final = 3  # after the first one
PAUSE_S: Final = 0.002
MOST_FINDINGS: Final = 1000
MAX_KEPT_BITS: Final = 32  # as in bucketed_window.pyx
MEANWHILE_NS: Final = 1_000_000_000  # for which a look takes its reading of the clock to be the present
WORDS_AT_ONCE: Final = 2**19  # between two reports of progress
KIND_NAMES: Final = {
    layout.KIND_EMPTY: "empty",
    layout.KIND_CLAIM: "claims",
    layout.KIND_TAT: "times",
    layout.KIND_COUNT: "counts",
    layout.KIND_BLOCKED: "blocked",
}
NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; or, as a note, that is sound and worth knowing."""

    severity: Literal["damage", "note"]
    where: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: found {self.found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class Part:
    """The table, or the extent of a limiter."""

    name: str
    algorithm: str
    """Of an extent's limiter; "" for the table, or if it isn't known."""
    cells: dict[str, int]
    """By what is in them: empty, claims, times, counts, blocked, unknown."""
    live_keys: int
    held: int
    """Permits of a ``Concurrency`` whose leases have not ended."""


@dataclass(frozen=True, slots=True)
class Report:
    """What ``verify`` found."""

    path: str
    bytes: int
    keys: int
    clock: str
    limiters: tuple[str, ...]
    parts: tuple[Part, ...]
    """The table, then the extents."""
    findings: tuple[Finding, ...]

    @property
    def cells(self) -> dict[str, int]:
        """The table's cells, by what is in them."""
        return self.parts[0].cells

    @property
    def live_keys(self) -> int:
        """Keys of the table whose state matters now."""
        return self.parts[0].live_keys

    @property
    def damage(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "damage")

    @property
    def sound(self) -> bool:
        return not self.damage


Progress = Callable[[int, int], None]


def verify(name_or_path: str | os.PathLike[str], *, progress: Progress | None = None) -> Report:
    """Check a whole segment: a store's name, or a path, which is one that has a slash or is a ``Path``.

    Reads, and never writes, creates or locks; a segment may be in use meanwhile. `progress` is told now and then how
    many bytes have been looked at, and of how many. Raises the kinds of ``SegmentError`` that attaching raises for a
    file that can't be read as a segment; damage behind a readable header is in the report.
    """
    path = os.fspath(name_or_path)
    if isinstance(name_or_path, str) and "/" not in path:
        path = _default_path(path)
    path = os.path.abspath(path)
    wanted = _Wanted(path, 0, layout.CLOCK_MONOTONIC, 0o600, os.getegid(), _boot_id())
    fd = _open(wanted)
    try:
        header = _read_header(wanted, fd)
        with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
            return _Verification(wanted, memory, header, progress or (lambda done, total: None)).report()
    finally:
        os.close(fd)


def _open(wanted: _Wanted) -> int:
    try:
        fd = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise wanted.refuse(SegmentError, "no such file", "a segment", "check the name; `ls /dev/shm`") from None
    except OSError as error:
        raise _not_opened(wanted, error) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise wanted.refuse(ForeignSegment, "no regular file", "a regular file", "choose another path")
    return fd


def _read_header(wanted: _Wanted, fd: int) -> Header:
    for look in range(LOOKS + 1):
        raw = os.pread(fd, layout.HEADER.size, 0)
        try:
            _check_identity(wanted, raw)
            checksum, state = _SEAL.unpack_from(raw, layout.HEADER_CHECKSUM)
            if state == layout.STATE_CREATING and checksum == 0:
                raise wanted.refuse(
                    SegmentBusy,
                    "a segment that is being created, or whose creator was killed",
                    "one that is ready",
                    "try again; if it stays so, the next Store of that name makes it anew",
                )
            # Whatever its clock is: no limiter is going to use it.
            kind = int.from_bytes(raw[layout.HEADER_CLOCK_KIND : layout.HEADER_CLOCK_KIND + 4], "little")
            of_its_clock = _Wanted(wanted.path, 0, kind, wanted.mode, wanted.gid, wanted.boot_id)
            return _check_consistency(of_its_clock, raw, checksum, state, os.fstat(fd).st_size)
        except SegmentError:
            # It may be in the making, or be changed for this boot.
            if look == LOOKS:
                raise
            time.sleep(PAUSE_S)
    raise AssertionError


@dataclass(frozen=True, slots=True)
class _Making:
    """What an extent may have been made for."""

    algorithm: str
    encoding: bytes
    """As its identity says it."""
    limit: int
    period_ns: int
    """The window, or the length of a bucket."""
    low_bits: int
    """Of a state; those of a log or a window stay with the cell."""


@dataclass(frozen=True, slots=True)
class _Extent:
    """An extent whose entry is sound."""

    number: int
    offset: int
    shape: ExtentShape
    limiter: str = ""
    making: _Making | None = None

    @property
    def where(self) -> str:
        return f"extent {self.number}" + (f", limiter {self.limiter!r}" if self.making else "")


class _Verification:
    def __init__(self, wanted: _Wanted, memory: mmap.mmap, header: Header, progress: Progress) -> None:
        self.wanted, self.memory, self.header, self.progress = wanted, memory, header, progress
        self.findings: list[Finding] = []
        self.unshown = self.done = self.total = 0
        self.of_this_boot = header.clock_kind != layout.CLOCK_MONOTONIC or header.boot_id == wanted.boot_id

    def report(self) -> Report:
        self._lasting(self._header)
        names = self._names()
        self._lasting(self._limiters)
        self._lasting(lambda: list(self._counters(names)))
        extents, wrong = self._extents(tuple(names.values()))
        self._lasting(lambda: self._extents(tuple(names.values()))[1] if wrong else [])
        self.total = self.header.segment_size + sum(extent.shape.bytes for extent in extents)
        parts = [self._table(), *map(self._extent, extents)]
        if self.unshown:
            self.findings.append(Finding("damage", "the rest", f"{self.unshown} more that look like damage", "none"))
        return Report(
            path=self.wanted.path,
            bytes=len(self.memory),
            keys=self.header.advertised_keys,
            clock=CLOCK_NAMES[self.header.clock_kind],
            limiters=tuple(name.decode(errors="replace") for name in names.values()),
            parts=tuple(parts),
            findings=tuple(self.findings),
        )

    # What is found once may be on its way; what lasts is told.

    def _lasting(self, look: Callable[[], list[Finding]]) -> None:
        found = look()
        for _ in range(LOOKS):
            if not found:
                return
            time.sleep(PAUSE_S)
            again = look()
            found = [finding for finding in found if finding in again]
        self._add(found)

    def _add(self, findings: list[Finding]) -> None:
        room = MOST_FINDINGS - len(self.findings)
        self.findings += findings[:room]
        self.unshown += len(findings[room:])

    def _note(self, where: str, found: str, expected: str) -> None:
        self.findings.append(Finding("note", where, found, expected))

    # Times.

    def _now_ns(self) -> int:
        header = self.header
        if header.clock_kind != layout.CLOCK_MONOTONIC:
            return self._u64(layout.HEADER_MANUAL_NS)
        if self.of_this_boot:
            return (_monotonic_ns() - header.epoch_ns) % 2**64
        return max(0, time.time_ns() - header.wall_epoch_ns)

    def _latest_ns(self, ahead_ns: int = 0) -> int:
        """Later than any time that is no further ahead of now than that; a clock that tests move may have been set
        back."""
        if self.header.clock_kind != layout.CLOCK_MONOTONIC:
            return LATEST_NS
        return min(LATEST_NS, self._now_ns() + ahead_ns + MEANWHILE_NS)

    def _u64(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 8], "little")

    # The header and the lists.

    def _header(self) -> list[Finding]:
        fields = dict(zip(layout.HEADER_FIELDS, layout.HEADER.unpack_from(self.memory), strict=False))
        pads = self.memory[layout.HEADER_STATE + 4 : layout.HEADER_MANUAL_NS]
        rest = self.memory[layout.HEADER_MANUAL_NS + 8 : layout.HEADER.size]
        found = []
        if any(pads) or any(rest):
            found.append(_damage("header", "bytes behind the fields that are not zero", "zeros"))
        manual_ns = self._u64(layout.HEADER_MANUAL_NS)
        if fields["clock_kind"] == layout.CLOCK_MONOTONIC and manual_ns:
            found.append(_damage("header", f"a manual time, {manual_ns} ns", "0, as its clock is the host's"))
        if manual_ns > LATEST_NS:
            found.append(_damage("header", f"a time of {manual_ns} ns", f"one up to {LATEST_NS}"))
        header = self.header
        if not 1 <= header.advertised_keys * BYTES_PER_KEY <= header.group_count * layout.GROUP_BYTES:
            found.append(
                _damage("header", f"{header.advertised_keys} keys in {header.group_count} groups", "room for them")
            )
        if header.clock_kind == layout.CLOCK_MONOTONIC:
            now_ns = self._now_ns()
            if now_ns > LATEST_NS // 2:
                found.append(_damage("header", f"an epoch {now_ns} ns ago", f"at most {LATEST_NS // 2} ns"))
            if not self.of_this_boot:
                found.append(
                    Finding("note", "header", "times of an earlier boot", "to be moved on by the next who attaches")
                )
        return found

    def _names(self) -> dict[int, bytes]:
        """By number, the limiters whose names are in place."""
        entries = self._records(layout.LIMITER_ENTRY.size, layout.LIMITERS_OFFSET, layout.LIMITER_CAPACITY)
        names = {}
        for number, raw in entries:
            name_hash, length, name = layout.LIMITER_ENTRY.unpack(raw)
            if name_hash and 1 <= length <= layout.LIMITER_NAME_BYTES:
                names[number] = name[:length]
        return names

    def _records(self, size: int, offset: int, count: int) -> Iterator[tuple[int, bytes]]:
        """Those that are not all zero."""
        raw = self.memory[offset : offset + count * size]
        zero = bytes(size)
        for number in range(count):
            record = raw[number * size : (number + 1) * size]
            if record != zero:
                yield number, record

    def _limiters(self) -> list[Finding]:
        found = []
        entries = dict(self._records(layout.LIMITER_ENTRY.size, layout.LIMITERS_OFFSET, layout.LIMITER_CAPACITY))
        for number, raw in entries.items():
            where = f"limiter {number}"
            name_hash, length, padded = layout.LIMITER_ENTRY.unpack(raw)
            name = padded[:length]
            if not name_hash:
                found.append(_damage(where, "a name in a free entry", "zeros"))
            elif number and number - 1 not in entries:
                found.append(_damage(where, "a free entry before it", "none: entries are taken in order"))
            elif not length:
                found.append(
                    Finding("note", where, "a name that is not in place", "the next who makes it to finish it")
                )
            elif length > layout.LIMITER_NAME_BYTES or any(padded[length:]) or b"\0" in name or not _is_utf8(name):
                found.append(
                    _damage(where, f"{length} bytes of {padded!r}", f"up to {layout.LIMITER_NAME_BYTES} of UTF-8")
                )
            elif hash_of_name(self.header.hash_key, name) != name_hash:
                found.append(_damage(where, f"a hash that is not that of its name {name!r}", "that"))
        return found

    def _counters(self, names: dict[int, bytes]) -> Iterator[Finding]:
        count = layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY
        for line, raw in self._records(layout.COUNTER_LINE.size, layout.COUNTERS_OFFSET, count):
            where = f"counter line {line}"
            limiter, pad, *counts = layout.COUNTER_LINE.unpack(raw)
            # The shared ones are their limiters' by their place.
            number = limiter - 1 if line < layout.OWNED_COUNTER_LINES else line - layout.OWNED_COUNTER_LINES
            if number < 0:
                yield _damage(where, "counts in a line that was never used", "zeros")
            elif number not in names or (limiter and line >= layout.OWNED_COUNTER_LINES):
                yield _damage(where, f"counts of limiter {max(number, limiter - 1)}", f"one of the {len(names)}")
            elif pad:
                yield _damage(where, f"{pad:#x} in its padding", "0")
            elif max(counts) >= 2**63:
                yield _damage(where, "a count of 2**63 or more", "one that can have been reached")

    def _extents(self, names: tuple[bytes, ...]) -> tuple[list[_Extent], list[Finding]]:
        """Those that can be looked into, and what is wrong with the list."""
        extents: list[_Extent] = []
        found: list[Finding] = []
        entries = list(self._records(layout.EXTENT_ENTRY.size, layout.EXTENTS_OFFSET, layout.EXTENT_CAPACITY))
        identities = set()
        used = 0
        for number, raw in entries:
            where = f"extent {number}"
            identity, offset, size, keys = layout.EXTENT_ENTRY.unpack(raw)
            if not identity:
                # Its maker was killed before the last step, or is about to take it.
                continue
            used += 1
            if used != number + 1:
                found.append(_damage(where, "a free entry before it", "none: entries are taken in order"))
            if identity in identities:
                found.append(_damage(where, f"identity {identity:#x} for the second time", "one of its own"))
            identities.add(identity)
            shape = _shape_of(size, keys)
            if shape is None:
                found.append(_damage(where, f"{size} bytes for {keys} keys", "cells and whole words for each of them"))
            elif (
                offset < self.header.segment_size
                or offset % layout.EXTENT_ALIGNMENT
                or offset + size > len(self.memory)
            ):
                found.append(
                    _damage(
                        where,
                        f"{size} bytes at {offset}",
                        f"a multiple of {layout.EXTENT_ALIGNMENT} behind the table and within the file's "
                        f"{len(self.memory)} bytes",
                    )
                )
            else:
                limiter, making = _identified(self.header.hash_key, identity, shape.words_per_key, names)
                extents.append(_Extent(number, offset, shape, limiter, making))
        extents.sort(key=lambda extent: extent.offset)
        for before, after in itertools.pairwise(extents):
            if before.offset + before.shape.bytes > after.offset:
                found.append(_damage(after.where, f"that it begins within {before.where}", "bytes of its own"))
        return extents, found

    # Cells and words.

    def _table(self) -> Part:
        cells = self.header.group_count * CELLS_PER_GROUP
        table = _Cells("the table", layout.TABLE_OFFSET, self.header.group_count, cells, _MEMBERS, 0)
        return self._part("table", table, None, 0)

    def _extent(self, extent: _Extent) -> Part:
        shape, making = extent.shape, extent.making
        kinds: tuple[int, ...] = _MEMBERS
        kept_bits = -1
        if making is None:
            self._note(
                extent.where,
                f"{shape.words_per_key} words for each of {shape.keys} keys, for an unusual period or no limiter's",
                "one that can be told: its words were not checked, its cells were",
            )
        elif making.algorithm == "Concurrency":
            kinds, kept_bits = (layout.KIND_TAT,), 0
        else:
            kinds, kept_bits = (layout.KIND_COUNT,), making.low_bits
        cells = _Cells(extent.where, extent.offset, shape.group_count, shape.used_cells, kinds, kept_bits)
        return self._part(extent.limiter or f"extent {extent.number}", cells, making, shape.words_per_key)

    def _look(self, counts: Counts, cells: _Cells, making: _Making | None, words: int, first: int, last: int) -> None:
        at = (self.memory, cells.offset, cells.group_count, first, last)
        look_at_cells(
            counts,
            *at,
            used=cells.used,
            kinds=cells.kinds,
            kept_bits=cells.kept_bits,
            now_ns=self._now_ns(),
            latest_ns=self._latest_ns(LATEST_NS // 2 + 2 * MAX_PERIOD_NS),
        )
        if making is None:
            return
        leases = making.algorithm == "Concurrency"
        monotonic = self.header.clock_kind == layout.CLOCK_MONOTONIC
        longest_lease_ns = MAX_PERIOD_NS + MEANWHILE_NS if monotonic else LATEST_NS
        phase_ns = 0
        if making.algorithm == "BucketedWindow" and monotonic:
            phase_ns = self.header.wall_epoch_ns % making.period_ns
        look_at_words(
            counts,
            *at,
            used=cells.used,
            algorithm=making.algorithm,
            word_count=words,
            limit=making.limit,
            period_ns=longest_lease_ns if leases else making.period_ns,
            phase_ns=phase_ns,
            low_bits=making.low_bits,
            # How many leases are held now is told; they may end later than any clock has been.
            now_ns=min(self._now_ns(), LATEST_NS) if leases else self._latest_ns(),
        )

    def _part(self, name: str, cells: _Cells, making: _Making | None, words: int) -> Part:
        counts = Counts()
        last = cells.group_count * CELLS_PER_GROUP
        at_once = max(1, WORDS_AT_ONCE // (2 + words) // CELLS_PER_GROUP) * CELLS_PER_GROUP
        for first in range(0, last, at_once):
            self._look(counts, cells, making, words, first, first + at_once)
            self._settle(counts, cells, lambda again, cell: self._look(again, cells, making, words, cell, cell + 1))
            self.done += (min(last, first + at_once) - first) * layout.CELL.size
            self.done += max(0, min(cells.used, first + at_once) - first) * words * 8
            self.progress(min(self.done, self.total), self.total)
        if counts.stale_claims:
            self._note(cells.where, f"{counts.stale_claims} claims of killed processes", "their cells to be used again")
        if counts.unfinished:
            self._note(cells.where, f"{counts.unfinished} rings not written to the end", "the next request to do it")
        if counts.busy:
            self._note(cells.where, f"{counts.busy} cells that changed all the while", "use; they were left out")
        by_name = {name: counts.kinds[kind] for kind, name in KIND_NAMES.items()}
        by_name["unknown"] = sum(counts.kinds) - sum(by_name.values())
        return Part(name, making.algorithm if making else "", by_name, counts.live, counts.held)

    def _settle(self, counts: Counts, cells: _Cells, look: Callable[[Counts, int], None]) -> None:
        """Look again at the cells in which there was a problem."""
        problems = {(problem[0], problem[1]): problem for problem in counts.problems}
        more = counts.problem_count - len(counts.problems)
        counts.problems, counts.problem_count = [], 0
        for _ in range(LOOKS if problems else 0):
            time.sleep(PAUSE_S)
            again = Counts()
            for cell in sorted({cell for _, cell in problems}):
                look(again, cell)
            latest = {(problem[0], problem[1]): problem for problem in again.problems}
            problems = {key: latest[key] for key in problems if key in latest}
        self._add([_told(problem, cells) for problem in problems.values()])
        self.unshown += more if problems else 0


_MEMBERS: Final = (layout.KIND_TAT, layout.KIND_COUNT)


@dataclass(frozen=True, slots=True)
class _Cells:
    """A table: the segment's, or an extent's."""

    where: str
    offset: int
    group_count: int
    used: int
    kinds: tuple[int, ...]
    """Of its members."""
    kept_bits: int
    """Of a state, that stay with the cell; -1: not known."""


def _damage(where: str, found: str, expected: str) -> Finding:
    return Finding("damage", where, found, expected)


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shape_of(size: int, keys: int) -> ExtentShape | None:
    """The shape of an extent of so many bytes, if there is one."""
    if not 1 <= keys <= MAX_KEYS:
        return None
    bare = ExtentShape(keys, 0)
    words = (size - bare.bytes) // (8 * bare.used_cells)
    shape = ExtentShape(keys, words)
    return shape if words >= 1 and shape.bytes == size else None


# A segment doesn't say what an extent was made for, it has a hash of that. So all that is likely is tried.

_UNITS_NS: Final = (1000, 10**6, NS, 60 * NS, 3600 * NS, 86_400 * NS, 604_800 * NS, 31_536_000 * NS)
_PERIODS_NS: Final = sorted(
    {
        count * unit_ns
        for unit_ns in _UNITS_NS
        for count in (*range(1, 101), *range(100, 1001, 25))
        if count * unit_ns <= MAX_PERIOD_NS
    }
)


def _makings(words: int) -> Iterator[_Making]:
    """What an extent of so many words for each cell may be for."""
    for limit in range(max(1, (words - 10) * 64 // 130 - 1), words * 64 // 130 + 2):
        if words_for(limit) == words:
            yield _Making("Concurrency", b"concurrency %d" % limit, limit, 0, 0)
    for period_ns in _PERIODS_NS:
        yield _Making("SlidingLog", b"log %d %d" % (words, period_ns), words, period_ns, 1 + (words - 1).bit_length())
    for length_ns in sorted({-(-period_ns // words) for period_ns in _PERIODS_NS}):
        low_bits = min(length_ns.bit_length(), MAX_KEPT_BITS)
        encoding = b"bucketed %d %d %d" % (length_ns, words, low_bits)
        yield _Making("BucketedWindow", encoding, 0, length_ns, low_bits)


# What was found out, by the arguments below: a segment is verified again and again by those who watch it.
_identities: dict[tuple[object, ...], tuple[str, _Making | None]] = {}


def _identified(
    hash_key: tuple[int, int], identity: int, words: int, names: tuple[bytes, ...]
) -> tuple[str, _Making | None]:
    """Whose extent it is, and what it was made for."""
    known = (hash_key, identity, words, names)
    if known not in _identities:
        if len(_identities) > layout.EXTENT_CAPACITY:
            _identities.clear()
        makings = list(_makings(words))
        found = find_identity(hash_key, identity, list(names), [making.encoding for making in makings])
        _identities[known] = ("", None)
        if found is not None:
            _identities[known] = (names[found[0]].decode(errors="replace"), makings[found[1]])
    return _identities[known]


def _told(problem: tuple[str, int, int, int, int, int], cells: _Cells) -> Finding:
    what, cell, tag, state, other, there = problem
    where = f"cell {cell} of {cells.where}"
    found, expected = {
        "kind": (
            f"kind {tag % 2**layout.KIND_BITS} (tag {tag:#x})",
            "one of " + ", ".join(map(str, (layout.KIND_EMPTY, layout.KIND_CLAIM, *cells.kinds))),
        ),
        "empty": (f"tag {tag:#x} and state {state:#x} in an empty cell", "zeros, but for what stays with the cell"),
        "state": (f"state {state:#x}", "a time that a limiter can have written"),
        "claim": (f"a claim of a counter line that there isn't ({state:#x})", "one of those"),
        "blocked": (f"tag {tag:#x} and state {state:#x}", f"kind {layout.KIND_BLOCKED}, as it is no key's place"),
        "place": (f"a key (tag {tag:#x}) that is never looked for there", "one of this cell's keys"),
        "twice": (f"a key (tag {tag:#x}) that is in cell {other} too", "one cell for each key"),
        "position": (f"position {other} in its ring", "one within the limit"),
        "lap": (f"entry {other} of another lap ({there:#x})", "the lap of those around it"),
        "order": (f"entry {other} ({there:#x}), later than a newer one", "times that don't fall along the ring"),
        "time": (f"entry {other} ({there:#x}), later than the key's last request", "a time that has been"),
        "bucket": (f"state {state:#x}, that of bucket {other}", "the time at which a bucket leaves the window"),
        "mark place": (f"mark {there:#x} in place {other}", "a mark of a bucket that belongs there"),
        "total": (f"mark {there:#x} in place {other}, beyond the state's total", "totals that grow"),
        "hint": (f"hint {other} ({there:#x}) of slots that there aren't", "0"),
        "slot": (f"{there:#x} in slot {other}", "an owner and the end of its lease, or zeros"),
        "lease": (f"a lease until {there} ns in slot {other}", "one that a limiter can have given"),
        "rest": (f"{there:#x} behind the slots", "0"),
    }[what]
    return Finding("damage", where, found, expected)
