"""The programs of leased permits that are explored, as in scenes.py, and by which each planted bug is found."""

from __future__ import annotations

from leased_programs import LEASE_NS, MS, LeasedScene
from scenes import Explorable

# A reading of the clock is a microsecond later than the one before, so that all stamps differ.
TICK = {"tick_ns": 1001}
# Longer than a fetch slot is closed for; twice that, or once twice as long as a lease lasts, which is then over.
OVER_THE_FETCH_SLOT = {**TICK, "clock_moves": 1, "jumps_ns": [4 * MS]}
OVER_THE_LEASE = {**TICK, "clock_moves": 2, "jumps_ns": [6 * MS]}
REFILLED = {**TICK, "clock_moves": 1, "jumps_ns": [2 * LEASE_NS + 2 * MS]}


def refilled() -> LeasedScene:
    return LeasedScene(2, unit_ns=5 * MS)


def window() -> LeasedScene:
    """A window, three milliseconds before its end."""
    return LeasedScene(3, period_ns=LEASE_NS)


def waited_for() -> LeasedScene:
    """A fetch brings permits for one request, so that all requests come to the fetch slot."""
    return LeasedScene(6).opened(size=0)


LEASED_SCENES: dict[str, Explorable] = {
    "leased: spending": Explorable(
        lambda: LeasedScene().lent(3).does(0, "spend").does(1, "spend", cost=2).does(2, "spend"), {**TICK, "crashes": 1}
    ),
    "leased: a fetch among others": Explorable(
        lambda: LeasedScene().lent(2).does(0, "allow", cost=2).does(1, "allow").does(2, "spend"),
        TICK,
        {"crashes": 1},
    ),
    "leased: the first fetches": Explorable(
        lambda: LeasedScene().does(0, "allow").does(1, "allow"),
        {**TICK, "preemptions": 3},
        {"preemptions": 4},
    ),
    "leased: two fetches": Explorable(
        lambda: LeasedScene(6).lent(0, size=2).does(0, "allow").does(1, "allow"),
        {**OVER_THE_FETCH_SLOT, "preemptions": 3},
        {"clock_moves": 2, "preemptions": 4},
    ),
    "leased: reports that overtake each other": Explorable(
        lambda: LeasedScene().lent(1).does(0, "allow", cost=2).does(1, "allow", cost=3).does(2, "spend"),
        {**OVER_THE_FETCH_SLOT, "preemptions": 2},
        {"preemptions": 3},
    ),
    "leased: a fetch that is killed": Explorable(
        lambda: LeasedScene().lent(1).does(0, "allow", cost=2).does(1, "allow", cost=2),
        {**OVER_THE_FETCH_SLOT, "preemptions": 2, "crashes": 1},
    ),
    "leased: a fetch and a withdrawal": Explorable(
        lambda: LeasedScene().lent(2).does(0, "allow", cost=3).does(1, "withdraw").does(2, "spend"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "leased: a fetch without a reply": Explorable(
        lambda: (
            LeasedScene().lent(1).does(0, "allow", cost=2, fate="reply lost").does(0, "allow", cost=2).does(1, "allow")
        ),
        {**TICK, "preemptions": 4},
        {"preemptions": None},
    ),
    "leased: a request that is late": Explorable(
        lambda: LeasedScene().lent(1).does(0, "allow", cost=2, fate="late").does(0, "allow", cost=2).delivers(1, 0),
        {**TICK, "crashes": 1},
    ),
    "leased: a cell that is lost": Explorable(
        lambda: LeasedScene(6).opened(size=2).does(0, "allow").does(1, "lose", "allow", "allow"),
        {**OVER_THE_FETCH_SLOT, "preemptions": 2},
    ),
    "leased: a lease that ends": Explorable(
        lambda: refilled().lent(2).does(0, "spend").does(1, "spend").does(2, "allow", cost=2),
        {**REFILLED, "preemptions": 3},
        {"crashes": 1},
    ),
    "leased: a report that is later than its lease": Explorable(
        lambda: LeasedScene(unit_ns=MS).lent(2).does(0, "allow", cost=3).does(1, "spend").does(1, "spend"),
        {**OVER_THE_LEASE, "preemptions": 3},
        {"crashes": 1},
    ),
    "leased: two hosts": Explorable(
        lambda: (
            LeasedScene(hosts=2)
            .lent(1)
            .opened(host=1)
            .does(0, "allow", cost=2)
            .does(1, "allow", cost=2, host=1)
            .does(2, "withdraw")
        ),
        {**TICK, "preemptions": 3},
        {"crashes": 1, "preemptions": 2},
    ),
    "leased: a refund": Explorable(
        lambda: LeasedScene(6).used_up(1).lent(1, size=2).does(0, "refund").does(1, "allow", cost=2).does(2, "spend"),
        {**TICK, "preemptions": 3},
        {"crashes": 1},
    ),
    "leased: a server that came back empty": Explorable(
        lambda: LeasedScene(is_strict=False).lent(2).does(0, "empty", cost=3).does(0, "allow", cost=3).does(1, "spend"),
        {**TICK, "crashes": 1},
    ),
    "leased: a reset": Explorable(
        lambda: LeasedScene(is_strict=False).lent(2).does(0, "reset").does(1, "allow", cost=3).does(2, "spend"),
        {**TICK, "preemptions": 3},
        {"preemptions": 4},
    ),
    "leased: a fetch slot that is left late": Explorable(
        lambda: LeasedScene().opened().does(0, "forgive").does(1, "allow").does(2, "allow", cost=2),
        {**OVER_THE_FETCH_SLOT, "preemptions": 2},
    ),
    "leased: in turn": Explorable(
        lambda: waited_for().does(0, "allow", "allow", cost=2).does(1, "allow in turn", "allow in turn", cost=2),
        {**TICK, "preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "leased: in turn among three": Explorable(
        lambda: (
            waited_for()
            .does(0, "allow", cost=2)
            .does(1, "allow in turn", "allow in turn", cost=2)
            .does(2, "allow", cost=2)
        ),
        {**TICK, "preemptions": 2},
        {"preemptions": 3},
    ),
    "leased: two processes that have waited": Explorable(
        lambda: (
            waited_for()
            .does(0, "allow", cost=2)
            .does(1, "allow in turn", "allow in turn", cost=2)
            .does(2, "allow in turn", cost=2)
        ),
        {**TICK, "preemptions": 2},
        {"preemptions": 3},
    ),
    "leased: a turn that no process takes": Explorable(
        lambda: waited_for().does(0, "allow", "allow", cost=2).does(1, "allow in turn", cost=2),
        {**OVER_THE_FETCH_SLOT, "preemptions": 2},
        {"crashes": 1},
    ),
    "leased: a window": Explorable(
        lambda: window().lent(2).does(0, "allow", cost=3).does(1, "withdraw").does(2, "spend"),
        {**OVER_THE_FETCH_SLOT, "preemptions": 3},
    ),
    "leased: spending on weaker memory": Explorable(
        lambda: LeasedScene().lent(2).does(0, "spend").does(1, "spend", cost=2).does(2, "withdraw"),
        {**TICK, "stale_reads": 1},
        {"stale_reads": 2},
    ),
}

LEASED_FOUND_BY = {
    "any fetch may deposit": "leased: two fetches",
    "any fetch may deposit while something is pending": "leased: two fetches",
    "a fetch that overtakes takes the same generation": "leased: two fetches",
    "a begin sets nothing pending": "leased: a fetch among others",
    "a new cell's generations begin with the clock": "leased: a cell that is lost",
    "a step is stamped before it has read the state": "leased: a refund",
    "a step is stamped after it was taken": "leased: reports that overtake each other",
    "permits that a fetch has reported are withdrawn": "leased: a fetch and a withdrawal",
    "a deposit drops nothing": "leased: a report that is later than its lease",
    "an abort drops nothing": "leased: a server that came back empty",
    "permits are spent after the lease's end": "leased: a lease that ends",
    "permits of a window are kept in the next one": "leased: a window",
    "any process that leaves opens the fetch slot": "leased: a fetch slot that is left late",
    "a killed process's fetch slot is closed for twice as long": "leased: a fetch that is killed",
    "a closed fetch slot is entered": "leased: two fetches",
    "a fetch loses its fetch slot once another process waits": "leased: in turn",
    "a process that leaves a fetch slot with a waiter opens it": "leased: in turn",
    "any process enters a reserved fetch slot": "leased: in turn",
    "a process that has waited enters a fetch slot that another one holds": "leased: in turn",
    "a fetch slot is reserved for longer than it was closed for": "leased: a turn that no process takes",
    "a fetch leaves no mark at its fetch slot": "leased: in turn",
    "a process that finds a reserved fetch slot requests a turn": "leased: two processes that have waited",
    "a fetch slot stays reserved once its time is over": "leased: a turn that no process takes",
}
