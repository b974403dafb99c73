"""The result of ``verify``."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.verification.findings import Finding

__all__ = ["Part", "Report"]


@dataclass(frozen=True, slots=True)
class Part:
    """The table, or the extent of a limiter."""

    name: str
    algorithm: str
    """The algorithm of an extent's limiter; "" for the table, or if the extent's entry is damaged."""
    cells: dict[str, int]
    """Numbers of cells by content: empty, claims, times, counts, blocked, unknown."""
    live_keys: int
    held: int
    """Permits of a ``Concurrency`` whose leases have not ended."""


@dataclass(frozen=True, slots=True)
class Report:
    """The findings and counts of one segment."""

    path: str
    bytes: int
    keys: int
    clock: str
    limiters: tuple[str, ...]
    """As in ``StoreStats.limiters``."""
    parts: tuple[Part, ...]
    """The table, then the extents."""
    findings: tuple[Finding, ...]

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
        return tuple(finding for finding in self.findings if finding.severity == "damage")

    @property
    def sound(self) -> bool:
        return not self.damage
