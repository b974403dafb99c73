"""Descriptions of the problems that ``forebay.core.audit`` finds in a cell."""

from __future__ import annotations

from forebay.segment import layout
from forebay.verification.findings import Finding, damage

__all__ = ["described"]


def described(problem: tuple[str, int, int, int, int, int], table: str, kinds: tuple[int, ...]) -> Finding:
    """The finding for a problem in a cell of `table`, whose states are of those kinds."""
    what, cell, tag, state, other, there = problem
    found, expected = {
        "kind": (
            f"kind {tag % 2**layout.KIND_BITS} (tag {tag:#x})",
            "one of " + ", ".join(map(str, (layout.KIND_EMPTY, layout.KIND_CLAIM, *kinds))),
        ),
        "empty": (
            f"tag {tag:#x} and state {state:#x} in an empty cell",
            "zeros, except for bits that stay with it",
        ),
        "state": (f"state {state:#x}", "a time that a limiter can write"),
        "claim": (f"a claim of a counter line that doesn't exist ({state:#x})", "one of those"),
        "blocked": (f"tag {tag:#x} and state {state:#x}", f"kind {layout.KIND_BLOCKED}, as no key may live there"),
        "place": (f"a key (tag {tag:#x}) that no request looks for there", "a key of this cell"),
        "twice": (f"a key (tag {tag:#x}) that is in cell {other} too", "one cell for each key"),
        "position": (f"position {other} in its ring", "one within the limit"),
        "lap": (f"entry {other} of another lap ({there:#x})", "the lap of its neighbours"),
        "order": (f"entry {other} ({there:#x}), later than a newer one", "times that don't fall along the ring"),
        "time": (f"entry {other} ({there:#x}), later than the key's last request", "a time in the past"),
        "bucket": (f"state {state:#x}, that of bucket {other}", "the time at which a bucket leaves the window"),
        "mark place": (f"mark {there:#x} in place {other}", "a mark of a bucket that belongs there"),
        "total": (f"mark {there:#x} in place {other}, beyond the state's total", "totals that grow"),
        "hint": (f"hint {other} ({there:#x}) of slots that don't exist", "0"),
        "slot": (f"{there:#x} in slot {other}", "an owner and the end of its lease, or zeros"),
        "lease": (f"a lease until {there} ns in slot {other}", "one that a limiter can give"),
        "rest": (f"{there:#x} behind the slots", "0"),
        "checksum": (f"checksum {there:#x} of a name", "0 or an odd number"),
        "incarnation": (f"incarnation {there:#x}, by a claim of a counter line that doesn't exist", "one of those"),
        "reported": (f"reported counts {there:#x}", "no more bits than a count of this limiter has"),
        "until": (f"a report to Redis until {there} ns", "a time in the past"),
    }[what]
    return damage(f"cell {cell} of {table}", found, expected)
