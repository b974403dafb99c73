"""Programs for the interleaving explorer, and what may come of them: whatever one process could have done alone.

An outcome is judged by searching for an order of its operations, one after the other, in which the oracle's rule gives
the same answers: an operation that was done before another one began comes before it; one whose process was killed
half-way may have taken effect or not, at any clock reading that there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from oracle import Rule
from penstock.core.explorer import Done, Explored, Program

from penstock import AllOf, Concurrency, Store

NS = 1_000_000_000


@dataclass(frozen=True)
class Operation:
    process: int
    kind: str  # as the method of Program that adds it
    key: str
    cost: int


class Scene:
    """A limiter in a store of its own, a program on it, and the rule that it is judged by.

    `exact` False: a denial that the rule would have allowed is no fault; what is admitted still is judged. `borrows`: a
    decision may be by another process's later clock reading, of which the limiter's memory told. `evicts`: a key that
    comes may take the place of any other. `crowded`: a key may find no room.
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
        crowded: bool = False,
    ) -> None:
        self.store = Store.private(keys=1, on_full=on_full)
        self.limiter = make(self.store)
        self.rule, self.exact, self.exact_finals, self.borrows = rule, exact, exact_finals, borrows
        self.evicts, self.crowded = evicts, crowded
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

    def hits_of_another(self, *processes: int) -> Scene:
        return self.hits(*processes, key=self.other)

    def explore(self, **bounds: Any) -> Explored:
        self.jumps_ns = [0, *bounds.get("jumps_ns", ())]
        self.moves = bounds.get("clock_moves", 0)
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        readings = self.readings(done, final_ns)
        self.done = done
        self.all_readings = readings
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
                    if self.evicts:
                        yield {operation.key: self.rule.charged(state, now_ns, operation.cost)}
            if self.evicts:
                # Killed after it had taken the other's place, and before it had one.
                yield {operation.key: state}
            return
        if done.full:
            # Only where there can be no room, and never for a key that has a cell by everybody's reading.
            if self.crowded and any(self.rule.is_settled(state, d.now_ns) for d in self.done if d.begun):
                yield states
            return
        for now_ns in [done.now_ns, *(t for t in self.borrowed(done) if t > done.now_ns)]:
            allowed = self.rule.allows(state, now_ns, operation.cost)
            if done.allowed and allowed:
                charged = self.rule.charged(state, now_ns, operation.cost)
                yield states | {operation.key: charged} if operation.kind == "hit" else states
                if self.evicts and operation.kind == "hit":
                    yield {operation.key: charged}
            elif not done.allowed and not (allowed and self.exact):
                yield states

    def borrowed(self, done: Done) -> set[int]:
        """Readings of processes whose operations had begun when this one ended."""
        if not self.borrows:
            return set()
        if any(d.begun and not d.done for d in self.done):
            return set(self.all_readings)
        index = next(i for i, d in enumerate(self.done) if d is done)
        return {d.now_ns for d in self.done if index not in d.before}

    def matches(self, states: dict[str, Any], finals: Sequence[int], final_ns: int) -> bool:
        for key, final in zip(self.looked_at, finals, strict=True):
            state = states.get(key, self.rule.fresh)
            most = max((n for n in range(self.rule.most + 1) if self.rule.allows(state, final_ns, n)), default=0)
            if final > most or (final < most and self.exact_finals):
                return False
        return True


@dataclass(frozen=True)
class Both(Rule[tuple[Any, ...]]):
    """Several rules, all or none."""

    rules: tuple[Rule[Any], ...]

    @property
    def fresh(self) -> tuple[Any, ...]:  # type: ignore[override]
        return tuple(rule.fresh for rule in self.rules)

    @property
    def most(self) -> int:
        return min(rule.most for rule in self.rules)

    def allows(self, state: tuple[Any, ...], now_ns: int, cost: int) -> bool:
        return all(rule.allows(part, now_ns, cost) for rule, part in zip(self.rules, state, strict=True))

    def charged(self, state: tuple[Any, ...], now_ns: int, cost: int) -> tuple[Any, ...]:
        return tuple(rule.charged(part, now_ns, cost) for rule, part in zip(self.rules, state, strict=True))

    def refunded(self, state: tuple[Any, ...], now_ns: int, cost: int) -> tuple[Any, ...]:
        return tuple(rule.refunded(part, now_ns, cost) for rule, part in zip(self.rules, state, strict=True))

    def over_ns(self, state: tuple[Any, ...]) -> int:
        return max(rule.over_ns(part) for rule, part in zip(self.rules, state, strict=True))


class SceneOfSeveral(Scene):
    """Several limiters asked as one, by ``AllOf``, of one key in one table.

    In a race a request may be denied that would have fitted, so denials are not judged.
    """

    def __init__(self, makes: Sequence[tuple[Callable[[Store], Any], Rule[Any]]], **options: Any) -> None:
        super().__init__(makes[0][0], Both(tuple(rule for _, rule in makes)), exact=False, **options)
        self.parts = [self.limiter, *(make(self.store) for make, _ in makes[1:])]
        for part in self.parts[1:]:
            self.program.adopt(part)
        self.limiter = AllOf(*self.parts)
        self.keys = [self.program.key(part) for part in self.parts]
        for part, its_key in zip(self.parts, self.keys, strict=True):
            self.program.look_at(part, its_key)

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        assert (kind, cost, key) == ("hit", 1, None)
        self.program.hit_all(process, self.limiter, self.keys)
        self.operations.append(Operation(process, kind, self.key, cost))
        return self

    def effects(
        self, operation: Operation, done: Done, readings: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Each limit is exact by a clock reading of its own: one that is charged late reads the clock again."""
        state = states.get(operation.key, self.rule.fresh)
        assert isinstance(self.rule, Both)
        if done.done and not done.allowed:
            yield states
            return
        for times_ns in product(readings, repeat=len(self.parts)):
            charged = []
            for rule, part, now_ns in zip(self.rule.rules, state, times_ns, strict=True):
                if not rule.allows(part, now_ns, operation.cost):
                    break
                charged.append(rule.charged(part, now_ns, operation.cost))
                if not done.done:
                    # Killed: the first ones may be charged, and the others not.
                    yield states | {operation.key: (*charged, *state[len(charged) :])}
            if done.done and len(charged) == len(self.parts):
                yield states | {operation.key: tuple(charged)}

    def matches(self, states: dict[str, Any], finals: Sequence[int], final_ns: int) -> bool:
        assert isinstance(self.rule, Both)
        state = states.get(self.key, self.rule.fresh)
        for rule, part, final in zip(self.rule.rules, state, finals, strict=True):
            most = max((n for n in range(rule.most + 1) if rule.allows(part, final_ns, n)), default=0)
            if final > most or (final < most and self.exact_finals):
                return False
        return True


class SceneOfOneRequest(Scene):
    """One request, told by its id, that is sent several times: it is charged once.

    Whoever is killed between the charge and the mark leaves a charge that nobody knows of: the safe side.
    """

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        if kind == "hit":
            self.program.hit_once(process, self.limiter, self.key)
            self.operations.append(Operation(process, kind, self.key, cost))
            if not self.looked_at:
                self.looked_at.append(self.key)
                self.program.look_at(self.limiter, self.key)
        return self

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        answers = [d.allowed for d in done if d.done]
        killed = sum(d.begun and not d.done for d in done)
        charged = self.rule.most - finals[0]
        if not all(answers):
            return f"the request was denied: {answers}"
        if not bool(answers) <= charged <= 1 + killed:
            return f"charged {charged} times, with {killed} killed"
        return ""


class SceneOfSlots:
    """A concurrency limit of one key; each process has a limiter object of its own, as real ones have."""

    def __init__(self, limit: int, processes: int) -> None:
        self.limit = limit
        self.store = Store.private(keys=1)
        self.limiters = [Concurrency(self.store, "slots", limit, lease="1 second") for _ in range(processes)]
        self.program = Program()
        self.program.adopt_slots(self.limiters, "key")
        self.kinds: list[tuple[str, int, int]] = []  # kind, process, and of a release what it releases

    def holds_once(self, *processes: int) -> SceneOfSlots:
        """Each of these takes a permit and gives it back."""
        for process in processes:
            acquired = self.acquires(process)
            self.program.release(process, self.limiters[process], acquired)
            self.kinds.append(("release", process, acquired))
        return self

    def acquires(self, process: int) -> int:
        self.kinds.append(("acquire", process, -1))
        return int(self.program.acquire(process, self.limiters[process], "key"))

    def explore(self, **bounds: Any) -> Explored:
        self.lease_may_end = bool(bounds.get("clock_moves"))
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        if self.some_order(done, frozenset(), frozenset()):
            return ""
        return f"more than {self.limit} held: " + ", ".join(
            f"{kind} by {process}: " + ("yes" if d.allowed else "no" if d.done else "killed")
            for (kind, process, _), d in zip(self.kinds, done, strict=True)
        )

    def some_order(self, done: Sequence[Done], placed: frozenset[int], held: frozenset[int]) -> bool:
        """Whether the operations can follow each other with never more permits held than there are.

        A killed process's permits may go at any time; a lease that has ended, by the reading of whoever looks, too.
        """
        killed = {process for (_, process, _), d in zip(self.kinds, done, strict=True) if not d.done}
        if all(i in placed or not d.done for i, d in enumerate(done)):
            return True
        for i, d in enumerate(done):
            if i in placed or not d.done or not d.before <= placed:
                continue
            kind, _, acquired = self.kinds[i]
            if kind == "release":
                after = held - {acquired}
            elif d.allowed:
                still = {h for h in held if self.kinds[h][1] not in killed and done[h].now_ns + NS > d.now_ns}
                if len(still) >= self.limit:
                    continue
                after = frozenset(still | {i})
            else:
                after = held
            if self.some_order(done, placed | {i}, after):
                return True
        return False
