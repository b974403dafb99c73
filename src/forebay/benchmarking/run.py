"""The result of a run, and its JSON."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.errors import ForebayError

__all__ = ["Figure", "LeftOut", "Run", "UnreadableRun", "read", "written"]

VERSION: Final = 1


class UnreadableRun(ForebayError):
    """A file is not what ``forebay bench --json`` writes."""


@dataclass(frozen=True)
class Figure:
    """One subject's cost, measured in every pass."""

    group: str
    name: str
    passes_ns: list[float]
    """Nanoseconds per decision; of several workers, of all of them together."""
    workers: int = 1

    @property
    def median_ns(self) -> float:
        return statistics.median(self.passes_ns)

    @property
    def range_ns(self) -> float:
        """The run's own noise: the difference between its slowest pass and its fastest."""
        return max(self.passes_ns) - min(self.passes_ns)


@dataclass(frozen=True)
class LeftOut:
    """A subject that was not measured, or wrongly, and why."""

    group: str
    name: str
    reason: str


@dataclass(frozen=True)
class Run:
    date: str
    forebay: str
    """The version."""
    keys: int
    """The number of live keys of *many keys*."""
    is_quick: bool
    machine: dict[str, str]
    crowded_evictions: float
    """Keys evicted per decision, in the store for half as many keys."""
    waited_share: float
    """The share of the workers' time in which something else ran on their cores."""
    figures: list[Figure] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def figure(self, group: str, name: str) -> Figure | None:
        return next((one for one in self.figures if (one.group, one.name) == (group, name)), None)


def written(run: Run, advice: list[str]) -> str:
    """The run as JSON. Costs are in nanoseconds. A member may be added; the version changes if one changes."""
    document = {"version": VERSION, "kind": "forebay bench", **asdict(run), "advice": advice}
    for one in document["figures"]:
        one["median_ns"] = statistics.median(one["passes_ns"])
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Run:
    """A run from its JSON. Raises ``UnreadableRun``, and ``OSError`` if there is no such file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["kind"] != "forebay bench":
            raise ValueError("it has another kind")
        version = document["version"]
        run = _run(document) if version == VERSION else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnreadableRun(f"{path} is not what `forebay bench --json` writes ({reason})") from None
    if run is None:
        raise UnreadableRun(f"{path} is of version {version}, and this forebay reads {VERSION}: measure again with it")
    return run


def _run(document: dict[str, Any]) -> Run:
    return Run(
        date=str(document["date"]),
        forebay=str(document["forebay"]),
        keys=int(document["keys"]),
        is_quick=bool(document["is_quick"]),
        machine={str(name): str(value) for name, value in document["machine"].items()},
        crowded_evictions=float(document["crowded_evictions"]),
        waited_share=float(document["waited_share"]),
        figures=[_figure(one) for one in document["figures"]],
        left_out=[LeftOut(str(one["group"]), str(one["name"]), str(one["reason"])) for one in document["left_out"]],
    )


def _figure(one: dict[str, Any]) -> Figure:
    passes_ns = [float(value) for value in one["passes_ns"]]
    if not passes_ns or not all(0 < value < 1e18 for value in passes_ns):
        raise ValueError(f"the passes of {one['name']} are no costs")
    return Figure(str(one["group"]), str(one["name"]), passes_ns, int(one["workers"]))
