"""In words: what ``forebay.core.audit`` finds wrong with a cell."""

from __future__ import annotations

from forebay.segment import layout
from forebay.verification.findings import Finding, damage

__all__ = ["told"]


def told(problem: tuple[str, int, int, int, int, int], table: str, kinds: tuple[int, ...]) -> Finding:
    """A problem of a cell of `table`, whose members are of those kinds."""
    what, cell, tag, state, other, there = problem
    found, expected = {
        "kind": (
            f"kind {tag % 2**layout.KIND_BITS} (tag {tag:#x})",
            "one of " + ", ".join(map(str, (layout.KIND_EMPTY, layout.KIND_CLAIM, *kinds))),
        ),
        "empty": (f"tag {tag:#x} and state {state:#x} in an empty cell", "zeros, but for what stays with the cell"),
        "state": (f"state {state:#x}", "a time that a limiter can have written"),
        "claim": (f"a claim of a counter line that there isn't ({state:#x})", "one of those"),
        "blocked": (f"tag {tag:#x} and state {state:#x}", f"kind {layout.KIND_BLOCKED}, as it is no key's place"),
        "place": (f"a key (tag {tag:#x}) that is never looked for there", "one of this cell's keys"),
        "twice": (f"a key (tag {tag:#x}) that is in cell {other} too", "one cell for each key"),
        "position": (f"position {other} in its ring", "one within the limit"),
        "lap": (f"entry {other} of another lap ({there:#x})", "the lap of those around it"),
        "order": (f"entry {other} ({there:#x}), later than a newer one", "times that don't fall along the ring"),
        "time": (f"entry {other} ({there:#x}), later than the key's last request", "a time that has been"),
        "bucket": (f"state {state:#x}, that of bucket {other}", "the time at which a bucket leaves the window"),
        "mark place": (f"mark {there:#x} in place {other}", "a mark of a bucket that belongs there"),
        "total": (f"mark {there:#x} in place {other}, beyond the state's total", "totals that grow"),
        "hint": (f"hint {other} ({there:#x}) of slots that there aren't", "0"),
        "slot": (f"{there:#x} in slot {other}", "an owner and the end of its lease, or zeros"),
        "lease": (f"a lease until {there} ns in slot {other}", "one that a limiter can have given"),
        "rest": (f"{there:#x} behind the slots", "0"),
        "checksum": (f"checksum {there:#x} of a name", "0 or an odd number"),
        "incarnation": (f"incarnation {there:#x}, by a claim of a counter line that there isn't", "one of those"),
        "reported": (f"told counts {there:#x}", "no more bits than a count of this limiter has"),
        "until": (f"that Redis was told until {there} ns", "a time that has been"),
    }[what]
    return damage(f"cell {cell} of {table}", found, expected)
