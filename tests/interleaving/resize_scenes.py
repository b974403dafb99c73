"""The programs with a resize that are explored, as in scenes.py, and by which each planted bug is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from forebay.core.explorer import Done
from forebay.core.resize_explorer import ResizeProgram
from oracle import Bucket
from programs import NS, Operation, Scene
from scenes import Explorable

from forebay import Store, TokenBucket

AT_NS = 1_000_000 * NS
PROCESSES = 3


class SceneOfResize(Scene):
    """Requests to a token bucket while its table is moved. None is admitted twice, and no charge is lost.

    A request that would wait may be denied for want of room.
    """

    def __init__(self, burst: int, *, on_full: str = "deny", usable: int = 16) -> None:
        self.store, self.target = Store.private(keys=1, on_full=on_full), Store.private(keys=1)
        self.on_full = on_full
        self.views = [TokenBucket(self.store, "limit", "1/second", burst=burst) for _ in range(PROCESSES)]
        self.limiter = self.views[0]
        self.rule = Bucket(1, NS, burst)
        self.exact = self.exact_finals = True
        self.borrows = self.evicts = False
        self.crowded = "by claims"
        self.program = ResizeProgram(now_ns=AT_NS)
        self.at_ns = AT_NS
        self.program.adopt_views(self.views, TokenBucket(self.target, "limit", "1/second", burst=burst), usable)
        self.operations: list[Operation] = []
        self.states: dict[str, Any] = {}
        self.looked_at: list[str] = []
        self.key = self.program.key(self.limiter)
        self.other = self.program.key(self.limiter, number=1)

    def behind_a_vacancy(self) -> SceneOfResize:
        """Charge the key before the program begins, so that its cell is not the first one, which is empty."""
        assert self.limiter.hit(self.other)
        self.before()
        self.limiter.reset(self.other)
        self.looked_at.append(self.key)
        self.program.look_at(self.limiter, self.key)
        return self

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        self.limiter = self.views[process]
        return super().add(process, kind, cost, key)

    def resizes(self, process: int) -> SceneOfResize:
        self.program.resize(process)
        self.operations.append(Operation(process, "resize", "", 0, len(self.operations)))
        return self

    def thaws(self, process: int) -> SceneOfResize:
        self.program.thaw(process)
        self.operations.append(Operation(process, "thaw", "", 0, len(self.operations)))
        return self

    def effects(
        self, operation: Operation, done: Done, readings: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if operation.kind in ("resize", "thaw"):
            yield states
        else:
            mover = next(o.number for o in self.operations if o.kind == "resize")
            if operation.kind == "refund" and self.done[mover].begun and mover not in done.before:
                # It may have given up waiting, with a stopped mover.
                yield states
            yield from super().effects(operation, done, readings, states)


RESIZE_SCENES: dict[str, Explorable] = {
    "resize": Explorable(
        lambda: SceneOfResize(3).before().hits(0, 0).resizes(1),
        {"preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
    "resize beside an insertion by two": Explorable(
        lambda: SceneOfResize(1).hits(0, 1).resizes(2), {"preemptions": 2}, {"preemptions": 3}
    ),
    "resize beside an insertion, with few cells": Explorable(
        lambda: SceneOfResize(2, on_full="evict", usable=2).behind_a_vacancy().hits_of_another(0).resizes(1),
        {"preemptions": 2},
        {"crashes": 1},
    ),
    "resize beside a refund": Explorable(
        lambda: SceneOfResize(2).before().add(0, "refund").resizes(1), {"preemptions": 2}, {"crashes": 1}
    ),
    "resize on weaker memory": Explorable(
        lambda: SceneOfResize(2).before().hits(0).resizes(1),
        {"preemptions": 2, "stale_reads": 1},
        {"stale_reads": 2},
    ),
    "resize that is given up": Explorable(
        lambda: SceneOfResize(2).before().hits(0).thaws(0).hits(0).resizes(1),
        {"preemptions": 2, "crashes": 1},
        {"preemptions": 3},
    ),
}

RESIZE_FOUND_BY = {
    "a cell that changes while it is frozen stays as it is": "resize",
    "a claim is carried on while its cell is frozen": "resize beside an insertion by two",
    "keys are carried over before all cells are frozen": "resize",
    "the new table is published before the keys are in it": "resize",
    "cells are frozen before that is announced": "resize",
    "an insertion doesn't look for a resize after its scan": "resize beside an insertion by two",
    "an insertion evicts a key while vacancies are frozen": "resize beside an insertion, with few cells",
    "a refund takes a frozen key for absent": "resize beside a refund",
}
