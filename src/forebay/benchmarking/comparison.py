"""Two runs side by side, and which differences are beyond their noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forebay.benchmarking.run import Figure, Run

__all__ = ["Change", "Comparison", "compared"]


@dataclass(frozen=True)
class Change:
    """One subject in both runs."""

    before: Figure
    after: Figure

    @property
    def difference_ns(self) -> float:
        """How much slower it became."""
        return self.after.median_ns - self.before.median_ns

    @property
    def noise_ns(self) -> float:
        """The ranges of both runs' passes together."""
        return self.before.range_ns + self.after.range_ns

    @property
    def verdict(self) -> str:
        """``slower``, ``faster``, or empty: the difference may be noise."""
        if abs(self.difference_ns) <= self.noise_ns:
            return ""
        return "slower" if self.difference_ns > 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    only_in_one: list[str]
    """Subjects of one run alone."""
    differences: list[str]
    """Facts of the machines that differ."""

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "slower"]

    @property
    def faster(self) -> list[Change]:
        return [change for change in self.changes if change.verdict == "faster"]


def compared(before: Run, after: Run) -> Comparison:
    """Every subject of both runs."""
    pairs = [(one, after.figure(one.group, one.name)) for one in before.figures]
    alone = [one for one, other in pairs if other is None]
    alone += [one for one in after.figures if before.figure(one.group, one.name) is None]
    return Comparison(
        changes=[Change(one, other) for one, other in pairs if other is not None],
        only_in_one=[f"{one.group}: {one.name}" for one in alone],
        differences=list(_differences(before, after)),
    )


def _differences(before: Run, after: Run) -> Iterator[str]:
    facts = [
        {"forebay": run.forebay, "quick": "yes" if run.is_quick else "no", **run.machine} for run in (before, after)
    ]
    for name in dict.fromkeys([*facts[0], *facts[1]]):
        one, other = (part.get(name, "") for part in facts)
        if one != other:
            yield f"{name}: {one or 'unknown'}, then {other or 'unknown'}"
