"""A comparison as JSON."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass
from typing import Any, Final

from forebay.rate import NS
from forebay.tuning.comparison import Comparison, Result
from forebay.tuning.readers import Reading

__all__ = ["Source", "document", "time_text"]

VERSION: Final = 1


@dataclass(frozen=True)
class Source:
    """Where the requests come from."""

    name: str
    reading: Reading | None
    """None for generated traffic."""
    reordered: int
    late: int


def document(source: Source, comparison: Comparison) -> dict[str, Any]:
    """The comparison as values of JSON. It is the same for the same requests, except for ``decision_ns``.

    Durations are in nanoseconds and shares from 0 to 1. A member may be added; the version changes if one changes.
    """
    reading = source.reading
    return {
        "version": VERSION,
        "source": {
            "name": source.name,
            "format": reading.format if reading else None,
            "lines": reading.lines if reading else None,
            "unreadable": reading.unreadable.count if reading else 0,
            "unreadable_examples": [
                {"line": line, "why": why} for line, why in (reading.unreadable.examples if reading else ())
            ],
            "warning": reading.warning if reading else None,
            "reordered": source.reordered,
            "late": source.late,
            "requests": comparison.requests,
            "users": comparison.users,
            "first": time_text(comparison.first_ns),
            "last": time_text(comparison.last_ns),
        },
        "candidates": [_candidate(result, comparison) for result in comparison.results],
        "left_out": [{"candidate": str(one.candidate), "reason": one.reason} for one in comparison.left_out],
        "suggestions": [
            {
                "deny_at_most": one.deny_at_most,
                "limit": one.rate.limit,
                "period_ns": one.rate.period_ns,
                "users_hit": one.users_hit,
            }
            for one in comparison.suggestions
        ],
        "demand": [
            {
                "period_ns": demand.period_ns,
                "points": [{"limit": limit, "users_above": users} for limit, users in demand.points],
            }
            for demand in comparison.demands
        ],
        "timeline": {
            "first": time_text(comparison.first_ns),
            "bin_ns": comparison.bin_ns,
            "requests": comparison.requests_by_bin,
        },
    }


def _candidate(result: Result, comparison: Comparison) -> dict[str, Any]:
    figures = asdict(result)
    del figures["candidate"]
    figures["most_denied"] = [{"key": key, "denied": denied} for key, denied in result.most_denied]
    return {
        "algorithm": result.candidate.algorithm,
        "limit": result.candidate.rate.limit,
        "period_ns": result.candidate.rate.period_ns,
        "burst": result.candidate.burst,
        "denied_share": result.denied / comparison.requests,
        "users_hit_share": result.users_hit / comparison.users,
        "differing_share": result.differing / comparison.requests,
        **figures,
    }


def time_text(time_ns: int) -> str:
    """A time in UTC, to the millisecond."""
    time = dt.datetime.fromtimestamp(time_ns // NS, dt.UTC).replace(microsecond=time_ns % NS // 1_000_000 * 1000)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
