"""Checks of the header, the list of limiters and the counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forebay.core.audit import LATEST_NS, keyed_hash
from forebay.segment import layout
from forebay.segment.limiter_list import ALGORITHM_NAMES, LIST_BYTES, ListedLimiter, labels_of, listed_limiters
from forebay.segment.sizes import BYTES_PER_KEY
from forebay.verification.findings import Finding, damage, note
from forebay.verification.mapped_segment import MappedSegment

__all__ = ["counter_findings", "header_findings", "limiter_findings", "limiter_labels", "limiters_in_place"]

LATENCY_BYTES: Final = layout.HEADER_REDIS_LATENCY - layout.HEADER_DECISION_LATENCY


def header_findings(segment: MappedSegment) -> list[Finding]:
    memory, header = segment.memory, segment.header
    pads = memory[layout.HEADER_STATE + 4 : layout.HEADER_MANUAL_NS]
    pads += memory[layout.HEADER_RESIZE_PROGRESS + 8 : layout.HEADER_DECISION_LATENCY]
    pads += memory[layout.HEADER_REDIS_LATENCY + LATENCY_BYTES : layout.HEADER.size]
    found = []
    if any(pads):
        found.append(damage("header", "bytes behind the fields that are not zero", "zeros"))
    manual_ns = segment.u64(layout.HEADER_MANUAL_NS)
    if segment.is_monotonic and manual_ns:
        found.append(damage("header", f"a manual time, {manual_ns} ns", "0, as its clock is the host's"))
    if manual_ns > LATEST_NS:
        found.append(damage("header", f"a time of {manual_ns} ns", f"one up to {LATEST_NS}"))
    if not 1 <= header.advertised_keys * BYTES_PER_KEY <= header.group_count * layout.GROUP_BYTES:
        found.append(damage("header", f"{header.advertised_keys} keys in {header.group_count} groups", "room for them"))
    found += _moved_findings(segment)
    if segment.is_monotonic:
        now_ns = segment.now_ns()
        if now_ns > LATEST_NS // 2:
            found.append(damage("header", f"an epoch {now_ns} ns ago", f"at most {LATEST_NS // 2} ns"))
        if not segment.is_of_this_boot:
            found.append(note("header", "times of an earlier boot", "the next process that attaches to rebase them"))
    return found


def names_another_table(segment: MappedSegment) -> bool:
    """Whether the words of the header that say where a resize has moved the table don't agree."""
    # The hash of a list's entry, whose lowest bit is set.
    expected = keyed_hash(segment.header.hash_key, _moved_words(segment))
    return bool(segment.u64(layout.HEADER_MOVED_TABLE)) and segment.u64(layout.HEADER_MOVED_CHECK) | 1 != expected


def _moved_words(segment: MappedSegment) -> bytes:
    return segment.memory[layout.HEADER_MOVED_TABLE : layout.HEADER_MOVED_TABLE + 16]


def _moved_findings(segment: MappedSegment) -> Iterator[Finding]:
    # A mover writes them one after the other. If it was killed in between, the end of its resize mends them.
    if names_another_table(segment) and not segment.is_resizing:
        yield damage("header", f"a table at {_moved_words(segment).hex()}", "the place that a resize has given it")
    if segment.is_resizing:
        yield note("header", "a resize under way, or one that was killed", "its end, by the next decision that waits")


def limiters_in_place(segment: MappedSegment) -> dict[int, ListedLimiter]:
    """The limiters whose names are in place, by number."""
    return dict(listed_limiters(segment.memory[layout.LIMITERS_OFFSET : layout.LIMITERS_OFFSET + LIST_BYTES]))


def limiter_labels(segment: MappedSegment) -> tuple[str, ...]:
    """One text for each limiter, as in ``Store.stats()``."""
    limiters = limiters_in_place(segment).values()
    return tuple(
        labels_of((limiter.name.decode(errors="replace"), limiter.algorithm_name) for limiter in limiters).values()
    )


def limiter_findings(segment: MappedSegment) -> list[Finding]:
    found = []
    numbers: dict[int, int] = {}
    entries = dict(segment.records(layout.LIMITER_ENTRY.size, layout.LIMITERS_OFFSET, layout.LIMITER_CAPACITY))
    for number, raw in entries.items():
        where = f"limiter {number}"
        identity, length, algorithm, padded = layout.LIMITER_ENTRY.unpack(raw)
        limiter = ListedLimiter(padded[:length], algorithm)
        name = limiter.name
        if not identity:
            found.append(damage(where, "a name in a free entry", "zeros"))
        elif number and number - 1 not in entries:
            found.append(damage(where, "a free entry before it", "none: entries are taken in order"))
        elif numbers.setdefault(identity, number) != number:
            found.append(damage(where, f"the identity of limiter {numbers[identity]}", "one that no other has"))
        elif not length:
            found.append(note(where, "a name that is not in place", "the next process that makes it to finish it"))
        elif length > layout.LIMITER_NAME_BYTES or any(padded[length:]) or b"\0" in name or not _is_utf8(name):
            found.append(damage(where, f"{length} bytes of {padded!r}", f"up to {layout.LIMITER_NAME_BYTES} of UTF-8"))
        elif algorithm not in ALGORITHM_NAMES:
            found.append(damage(where, f"algorithm {algorithm} of limiter {name!r}", "a known one"))
        elif keyed_hash(segment.header.hash_key, limiter.identity_text) != identity:
            found.append(damage(where, f"an identity that is not that of {limiter.algorithm_name} {name!r}", "that"))
    return found


def _is_utf8(name: bytes) -> bool:
    try:
        name.decode()
    except UnicodeDecodeError:
        return False
    return True


def counter_findings(segment: MappedSegment) -> Iterator[Finding]:
    count = layout.OWNED_COUNTER_LINES + layout.LIMITER_CAPACITY
    lines = list(segment.records(layout.COUNTER_LINE.size, layout.COUNTERS_OFFSET, count))
    names = limiters_in_place(segment)  # after the counts: a limiter has its name before it counts
    for line, raw in lines:
        where = f"counter line {line}"
        limiter, pad, *counts = layout.COUNTER_LINE.unpack(raw)
        # A shared line belongs to the limiter of its position.
        number = limiter - 1 if line < layout.OWNED_COUNTER_LINES else line - layout.OWNED_COUNTER_LINES
        if number < 0:
            yield damage(where, "counts in a line that was never used", "zeros")
        elif number not in names or (limiter and line >= layout.OWNED_COUNTER_LINES):
            yield damage(where, f"counts of limiter {max(number, limiter - 1)}", f"one of the {len(names)}")
        elif pad:
            yield damage(where, f"{pad:#x} in its padding", "0")
        elif max(counts) >= 2**63:
            yield damage(where, "a count of 2**63 or more", "one that can have been reached")
