"""``verify`` checks every invariant of a segment's bytes. It changes nothing and delays no process.

The file is mapped read-only. Workers may make decisions meanwhile, so a problem counts only if repeated checks find it
each time: no worker is inside a change for that long, and a change that a killed worker left unfinished is sound.

``mapped_segment`` opens the file. ``lists`` checks the header, the limiters and the counters, ``extent_list`` the
extents' places and purposes, and ``cells`` all cells and their words. ``problems`` describes what ``cells`` finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from forebay.segment.header import CLOCK_NAMES
from forebay.verification.cells import CellChecks
from forebay.verification.extent_list import Extents
from forebay.verification.findings import Finding, Findings
from forebay.verification.lists import counter_findings, header_findings, limiter_findings, limiter_labels
from forebay.verification.mapped_segment import MappedSegment
from forebay.verification.report import Part, Report

__all__ = ["Finding", "Part", "Report", "check", "verify"]


def verify(name_or_path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check a whole segment, given a store's name or a path: a ``Path``, or text with a slash.

    Only reads: it never writes, creates or locks. The segment may be in use meanwhile. `progress` is called now and
    then with the number of bytes checked and their total. Raises the kinds of ``SegmentError`` that attaching raises
    if the file can't be read as a segment. Damage behind a readable header is in the report.
    """
    with MappedSegment(name_or_path) as segment:
        return check(segment, progress or (lambda done, total: None))


def check(segment: MappedSegment, progress: Callable[[int, int], None]) -> Report:
    """``verify`` of a segment that is mapped already."""
    findings = Findings()
    findings.lasting(lambda: header_findings(segment))
    findings.lasting(lambda: limiter_findings(segment))
    findings.lasting(lambda: list(counter_findings(segment)))
    extents = Extents(segment)
    findings.lasting(extents.look_around)
    checks = CellChecks(segment, findings, progress, extents.sound)
    parts = checks.parts()
    return Report(
        path=segment.path,
        bytes=len(segment.memory),
        keys=segment.table.keys,
        clock=CLOCK_NAMES[segment.header.clock_kind],
        limiters=limiter_labels(segment),
        parts=parts,
        findings=findings.all(),
    )
