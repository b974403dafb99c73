"""Checks of the cells of the table and of the extents, and of the extents' words."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from forebay.core.audit import LATEST_NS, Counts, look_at_cells, look_at_words
from forebay.rate import MAX_PERIOD_NS
from forebay.segment import layout
from forebay.segment.extents import Purpose
from forebay.segment.limiter_list import ALGORITHM_NAMES
from forebay.segment.reading import LOOKS, PAUSE_S
from forebay.segment.sizes import CELLS_PER_GROUP
from forebay.verification.extent_list import KnownExtent
from forebay.verification.findings import Findings
from forebay.verification.mapped_segment import MEANWHILE_NS, MappedSegment
from forebay.verification.problems import described
from forebay.verification.report import Part

__all__ = ["CellChecks"]

WORDS_AT_ONCE: Final = 2**19  # between two reports of progress
KIND_NAMES: Final = {
    layout.KIND_EMPTY: "empty",
    layout.KIND_CLAIM: "claims",
    layout.KIND_TAT: "times",
    layout.KIND_COUNT: "counts",
    layout.KIND_USED: "windows",
    layout.KIND_BLOCKED: "blocked",
}
WITHOUT_KEYS: Final = (layout.ALGORITHM_SHEDDER, layout.ALGORITHM_HOT_KEYS)
"""Extents whose cells hold no keys, and whose words may be any."""
MEMBERS: Final = (layout.KIND_TAT, layout.KIND_COUNT, layout.KIND_USED)


@dataclass(frozen=True, slots=True)
class _Cells:
    """A table: the segment's, or an extent's."""

    name: str
    where: str
    offset: int
    group_count: int
    used: int
    kinds: tuple[int, ...] = MEMBERS
    """The kinds of states in it."""
    kept_bits: int = 0
    """How many low bits of a state stay with the cell; -1 if unknown."""
    purpose: Purpose | None = None
    """The use of its words; None if it has none, or if the use is unknown."""

    @property
    def words_per_cell(self) -> int:
        return self.purpose.words_per_cell if self.purpose else 0

    @property
    def words(self) -> int:
        return self.used * self.words_per_cell


def _cells_of(extent: KnownExtent) -> _Cells:
    purpose, shape = extent.purpose, extent.entry.shape
    name = extent.limiter or f"extent {extent.number}"
    at = (name, extent.where, extent.entry.offset, shape.group_count, shape.used_cells)
    if purpose is None:
        return _Cells(*at, kept_bits=-1)
    if purpose.algorithm in (layout.ALGORITHM_CONCURRENCY, layout.ALGORITHM_SYNCED_TOKEN_BUCKET):
        return _Cells(*at, (layout.KIND_TAT,), 0, purpose)
    if purpose.algorithm in WITHOUT_KEYS:
        return _Cells(*at, (), 0, purpose)
    if purpose.algorithm in (layout.ALGORITHM_SYNCED_FIXED_WINDOW, layout.ALGORITHM_SYNCED_SLIDING_WINDOW):
        return _Cells(*at, (layout.KIND_COUNT,), 0, purpose)
    return _Cells(*at, (layout.KIND_COUNT,), purpose.low_bits, purpose)


class CellChecks:
    """The checks of one segment's cells. Raises ``DamagedSegment`` if they aren't all in memory."""

    def __init__(
        self,
        segment: MappedSegment,
        findings: Findings,
        progress: Callable[[int, int], None],
        extents: list[KnownExtent],
    ) -> None:
        self._segment, self._findings, self._progress = segment, findings, progress
        # Before the place: if that changes meanwhile, all cells there are frozen.
        self._progress_before = segment.u64(layout.HEADER_RESIZE_PROGRESS)
        place = segment.table
        self._table = _Cells("table", "the table", place.offset, place.group_count, place.group_count * CELLS_PER_GROUP)
        self._tables = [self._table, *map(_cells_of, extents)]
        self._done = 0
        self._total = sum(cells.group_count * layout.GROUP_BYTES + cells.words * 8 for cells in self._tables)
        segment.refuse_holes(self._total)

    def parts(self) -> tuple[Part, ...]:
        """Check and count each table. Adds problems to the findings."""
        return tuple(map(self._part, self._tables))

    def _part(self, cells: _Cells) -> Part:
        counts = Counts()
        last, words = cells.group_count * CELLS_PER_GROUP, cells.words_per_cell
        at_once = max(1, WORDS_AT_ONCE // (2 + words) // CELLS_PER_GROUP) * CELLS_PER_GROUP
        for first in range(0, last, at_once):
            self._look(counts, cells, first, first + at_once)
            self._settle(counts, cells)
            self._done += (min(last, first + at_once) - first) * layout.CELL.size
            self._done += max(0, min(cells.used, first + at_once) - first) * words * 8
            self._progress(self._done, self._total)
        note = self._findings.note
        if counts.stale_claims:
            note(cells.where, f"{counts.stale_claims} claims of killed processes", "their cells to be used again")
        if counts.unfinished:
            note(cells.where, f"{counts.unfinished} rings not written to the end", "the next request to complete them")
        if counts.busy:
            note(cells.where, f"{counts.busy} cells that changed during every check", "use; they were skipped")
        by_name = {name: counts.kinds[kind] for kind, name in KIND_NAMES.items()}
        by_name["unknown"] = sum(counts.kinds) - sum(by_name.values())
        algorithm = ALGORITHM_NAMES[cells.purpose.algorithm] if cells.purpose else ""
        return Part(cells.name, algorithm, by_name, counts.live, counts.held)

    def _kinds(self, cells: _Cells) -> tuple[int, ...]:
        """The kinds of states that may be in cells now: a resize freezes those of the table."""
        is_frozen = self._segment.is_resizing or (
            self._segment.u64(layout.HEADER_RESIZE_PROGRESS) != self._progress_before
        )
        if cells is not self._table or not is_frozen:
            return cells.kinds
        return (*cells.kinds, *(kind + layout.KIND_FROZEN for kind in cells.kinds))

    def _look(self, counts: Counts, cells: _Cells, first: int, last: int) -> None:
        segment, purpose = self._segment, cells.purpose
        at = (segment.memory, cells.offset, cells.group_count, first, last)
        look_at_cells(
            counts,
            *at,
            used=cells.used,
            kinds=self._kinds(cells),
            kept_bits=cells.kept_bits,
            now_ns=segment.now_ns(),
            latest_ns=segment.latest_ns(LATEST_NS // 2 + 2 * MAX_PERIOD_NS),
        )
        if purpose is None or purpose.algorithm in WITHOUT_KEYS:
            return
        # A bucket has no window.
        phase_ns, period_ns, now_ns = 0, max(purpose.period_ns, 1), segment.latest_ns()
        if purpose.algorithm == layout.ALGORITHM_CONCURRENCY:
            # The longest lease. The report counts the permits held now; their leases may end later than now.
            period_ns = MAX_PERIOD_NS + MEANWHILE_NS if segment.is_monotonic else LATEST_NS
            now_ns = min(segment.now_ns(), LATEST_NS)
        elif purpose.algorithm == layout.ALGORITHM_BUCKETED_WINDOW and segment.is_monotonic:
            phase_ns = segment.header.wall_epoch_ns % period_ns
        look_at_words(
            counts,
            *at,
            used=cells.used,
            algorithm=purpose.algorithm,
            word_count=purpose.words_per_cell,
            limit=purpose.limit,
            period_ns=period_ns,
            phase_ns=phase_ns,
            low_bits=purpose.low_bits,
            now_ns=now_ns,
        )

    def _settle(self, counts: Counts, cells: _Cells) -> None:
        """Check the cells that had a problem again. Only lasting problems become findings."""
        problems = {(problem[0], problem[1]): problem for problem in counts.problems}
        more = counts.problem_count - len(counts.problems)
        counts.problems, counts.problem_count = [], 0
        for _ in range(LOOKS if problems else 0):
            time.sleep(PAUSE_S)
            again = Counts()
            for cell in sorted({cell for _, cell in problems}):
                self._look(again, cells, cell, cell + 1)
            latest = {(problem[0], problem[1]): problem for problem in again.problems}
            problems = {key: latest[key] for key in problems if key in latest}
        self._findings.add([described(problem, cells.where, cells.kinds) for problem in problems.values()])
        self._findings.unshown += more if problems else 0
