"""Programs for the interleaving explorer, and what may come of them: whatever one process could have done alone.

An outcome is judged by searching for an order of its operations, one after the other, in which the oracle's rule gives
the same answers: an operation that was done before another one began comes before it; one whose process was killed
half-way may have taken effect or not, at any clock reading that there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oracle import Rule
from penstock.core.explorer import Done, Explored, Program

from penstock import Store

NS = 1_000_000_000


@dataclass(frozen=True)
class Operation:
    process: int
    kind: str  # "hit", "refund", "peek" or "reset"
    key: str
    cost: int


class Scene:
    """A limiter in a store of its own, a program on it, and the rule that it is judged by.

    `exact` False: a denial that the rule would have allowed is no fault; what is admitted still is judged. `borrows`: a
    decision may be by another process's later clock reading, of which the limiter's memory told. `evicts`: a key that
    comes may take the place of any other.
    """

    def __init__(
        self,
        make: Callable[[Store], Any],
        rule: Rule[Any],
        *,
        at_ns: int = 1_000_000 * NS,
        usable: int = 16,
        on_full: Any = "deny",
        exact: bool = True,
        exact_finals: bool = True,
        borrows: bool = False,
        evicts: bool = False,
    ) -> None:
        self.store = Store.private(keys=1, on_full=on_full)
        self.limiter = make(self.store)
        self.rule, self.exact, self.exact_finals, self.borrows = rule, exact, exact_finals, borrows
        self.evicts = evicts
        self.program = Program(now_ns=at_ns)
        self.at_ns = at_ns
        self.program.adopt(self.limiter, usable=usable)
        self.operations: list[Operation] = []
        self.states: dict[str, Any] = {}
        self.looked_at: list[str] = []
        self.key = self.program.key(self.limiter)
        self.other = self.program.key(self.limiter, number=1)

    def before(self, cost: int = 1, key: str | None = None) -> Scene:
        """Charge a key before the program begins."""
        key = key or self.key
        assert self.limiter.hit(key, cost)
        self.states[key] = self.rule.charged(self.states.get(key, self.rule.fresh), self.at_ns, cost)
        return self

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        key = key or self.key
        costs = () if kind == "reset" else (cost,)
        getattr(self.program, kind)(process, self.limiter, key, *costs)
        self.operations.append(Operation(process, kind, key, cost))
        if key not in self.looked_at:
            self.looked_at.append(key)
            self.program.look_at(self.limiter, key)
        return self

    def hits(self, *processes: int, cost: int = 1, key: str | None = None) -> Scene:
        for process in processes:
            self.add(process, "hit", cost, key)
        return self

    def explore(self, **bounds: Any) -> Explored:
        self.jumps_ns = [0, *bounds.get("jumps_ns", ())]
        self.moves = bounds.get("clock_moves", 0)
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        readings = self.readings(done, final_ns)
        self.used = {d.now_ns for d in done if d.done}
        if any(d.begun and not d.done for d in done):
            self.used |= set(readings)
        for states in self.orders(done, readings, frozenset(), dict(self.states)):
            if self.matches(states, finals, final_ns):
                return ""
        said = ", ".join(
            f"{op.kind} {op.cost} of {op.key} by {op.process}: "
            + (
                ("yes" if d.allowed else "no room" if d.full else "no")
                if d.done
                else "killed"
                if d.begun
                else "not begun"
            )
            + (f" at {d.now_ns - self.at_ns:+}" if d.now_ns else "")
            for op, d in zip(self.operations, done, strict=True)
        )
        return f"no order of these operations gives these answers: {said}; left at {final_ns - self.at_ns:+}: {finals}"

    def readings(self, done: Sequence[Done], final_ns: int) -> list[int]:
        """What the clock may have said: every sum of its moves, up to what it said in the end."""
        sums = {self.at_ns}
        for _ in range(self.moves):
            sums |= {s + jump for s in sums for jump in self.jumps_ns}
        return sorted(s for s in sums if s <= final_ns)

    def orders(
        self, done: Sequence[Done], readings: Sequence[int], placed: frozenset[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        left = [i for i, d in enumerate(done) if d.begun and i not in placed]
        if all(not done[i].done for i in left):
            yield states
        for i in left:
            if not done[i].before <= placed:
                continue
            for after in self.effects(self.operations[i], done[i], readings, states):
                yield from self.orders(done, readings, placed | {i}, after)

    def effects(
        self, operation: Operation, done: Done, readings: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        state = states.get(operation.key, self.rule.fresh)
        if operation.kind == "reset":
            yield states | {operation.key: self.rule.fresh}
            return
        if operation.kind == "refund":
            for now_ns in readings:
                yield states | {operation.key: self.rule.refunded(state, now_ns, operation.cost)}
                if self.rule.is_settled(state, now_ns):
                    # Nothing counts any more, so nothing is given back, not even to an older reading.
                    yield states
            return
        if not done.done:
            for now_ns in readings:
                if operation.kind == "hit" and self.rule.allows(state, now_ns, operation.cost):
                    yield states | {operation.key: self.rule.charged(state, now_ns, operation.cost)}
            return
        if done.full:
            yield states
            return
        for now_ns in [done.now_ns, *(t for t in self.used if t > done.now_ns and self.borrows)]:
            allowed = self.rule.allows(state, now_ns, operation.cost)
            if done.allowed and allowed:
                charged = self.rule.charged(state, now_ns, operation.cost)
                yield states | {operation.key: charged} if operation.kind == "hit" else states
                if self.evicts and operation.kind == "hit":
                    yield {operation.key: charged}
            elif not done.allowed and not (allowed and self.exact):
                yield states

    def matches(self, states: dict[str, Any], finals: Sequence[int], final_ns: int) -> bool:
        for key, final in zip(self.looked_at, finals, strict=True):
            state = states.get(key, self.rule.fresh)
            most = max((n for n in range(self.rule.most + 1) if self.rule.allows(state, final_ns, n)), default=0)
            if final > most or (final < most and self.exact_finals):
                return False
        return True
