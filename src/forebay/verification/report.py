"""The result of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.verification.findings import Finding

__all__ = ["Part", "Report"]


@dataclass(frozen=True, slots=True)
class Part:
    """The table, or the extent of a limiter."""

    name: str
    """The limiter's name, or ``"table"``."""
    algorithm: str
    """The algorithm of an extent's limiter; "" for the table, or if the extent's entry is damaged."""
    cells: dict[str, int]
    """Numbers of cells by content: empty, claims, times, counts, blocked, unknown."""
    live_keys: int
    """Keys whose state matters now."""
    held: int
    """Permits of a ``Concurrency`` whose leases have not ended."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings and counts of one segment."""

    path: str
    """The segment's file."""
    bytes: int
    """The file's size."""
    keys: int
    """Live keys that the segment was made for."""
    clock: str
    """The kind of its clock: ``"monotonic"``, ``"manual"`` or ``"Python (time.time)"``."""
    limiters: tuple[str, ...]
    """As in ``StoreStats.limiters``."""
    parts: tuple[Part, ...]
    """The table, then the extents."""
    findings: tuple[Finding, ...]
    """All deviations: damage and notes."""

    @property
    def cells(self) -> dict[str, int]:
        """Numbers of the table's cells by content."""
        return self.parts[0].cells

    @property
    def live_keys(self) -> int:
        """Keys of the table whose state matters now."""
        return self.parts[0].live_keys

    @property
    def damage(self) -> tuple[Finding, ...]:
        """The findings that are damage."""
        return tuple(finding for finding in self.findings if finding.severity == "damage")

    @property
    def sound(self) -> bool:
        """Whether no finding is damage."""
        return not self.damage
