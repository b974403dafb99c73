"""Whether everything holds in a segment that must: ``verify``, which changes nothing and disturbs nobody.

The file is mapped for reading only. Workers may be deciding meanwhile, so what looks wrong is looked at again, and told
only if it stays so: no worker is half-way for that long, and what a killed one has left half-done is sound.

``mapped_segment`` opens the file, ``lists`` looks at the header, the limiters and the counters, ``extent_list`` at
where the extents lie and what they are for, ``cells`` at all cells and words; ``problems`` says in words what that
finds.
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

__all__ = ["Finding", "Part", "Report", "verify"]


def verify(name_or_path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> Report:
    """Check a whole segment: a store's name, or a path, which is one that has a slash or is a ``Path``.

    Reads, and never writes, creates or locks; a segment may be in use meanwhile. `progress` is told now and then how
    many bytes have been looked at, and of how many. Raises the kinds of ``SegmentError`` that attaching raises for a
    file that can't be read as a segment; damage behind a readable header is in the report.
    """
    with MappedSegment(name_or_path) as segment:
        findings = Findings()
        findings.lasting(lambda: header_findings(segment))
        findings.lasting(lambda: limiter_findings(segment))
        findings.lasting(lambda: list(counter_findings(segment)))
        extents = Extents(segment)
        findings.lasting(extents.look)
        checks = CellChecks(segment, findings, progress or (lambda done, total: None), extents.sound)
        parts = checks.parts()
        return Report(
            path=segment.path,
            bytes=len(segment.memory),
            keys=segment.header.advertised_keys,
            clock=CLOCK_NAMES[segment.header.clock_kind],
            limiters=limiter_labels(segment),
            parts=parts,
            findings=findings.all(),
        )
