"""Programs for the interleaving explorer, and their possible outcomes: those that one process alone could have had.

An outcome is linearizable if there is an order of its operations, one after the other, in which the oracle's rule gives
the same results. An operation that ended before another one began comes before it. An operation whose process was
killed half-way may have taken effect or not, at any clock reading that there was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from forebay.core.explorer import Done, Explored, Program
from oracle import Above, Bucket, Prepaid, Rule, ToppedUpBucket
from oracle_counts import IntervalBucket, Log

from forebay import AllOf, Concurrency, Store
from forebay.segment.layout import CELLS_PER_LINE

NS = 1_000_000_000


@dataclass(frozen=True)
class Operation:
    process: int
    kind: str  # as the method of Program that adds it
    key: str
    cost: int
    number: int  # among all of the program
    earlier: int = -1  # which one a cancellation takes back, or comes before this one in its batch
    max_wait_ns: int = 0  # of a reservation


class Scene:
    """A limiter in a store of its own, a program on it, and the rule that it is judged by.

    `exact` False: a denial that the rule would have allowed is no fault; admissions are still judged. `borrows`: a
    decision may be by another process's later clock reading, which stands in the limiter's memory. `evicts`: a key that
    comes may take the place of any other. `crowded`: a key may find no room; "another": any but the first one; "by
    claims": also one that had a cell, while another key is taking its place.
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
        crowded: bool | Literal["another", "by claims"] = False,
    ) -> None:
        self.store = Store.private(keys=1, on_full=on_full)
        self.on_full = on_full
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

    def topped_up(self, permits: int) -> Scene:
        """Add permits before the program begins."""
        assert isinstance(self.rule, (Prepaid, ToppedUpBucket))
        self.limiter.add(self.key, permits)
        self.states[self.key] = self.rule.added(self.states.get(self.key, self.rule.fresh), self.at_ns, permits)
        return self

    def given_back(self) -> Scene:
        """Give back a permit that was charged before the program begins."""
        self.limiter.refund(self.key)
        self.states[self.key] = self.rule.refunded(self.states[self.key], self.at_ns, 1)
        return self

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        key = key or self.key
        costs = () if kind in {"reset", "hit_once"} else (cost,)
        getattr(self.program, kind)(process, self.limiter, key, *costs)
        return self.added(Operation(process, kind, key, cost, len(self.operations)))

    def added(self, operation: Operation) -> Scene:
        self.operations.append(operation)
        if operation.key not in self.looked_at:
            self.looked_at.append(operation.key)
            self.program.look_at(self.limiter, operation.key)
        return self

    def reserves(self, process: int, max_wait_ns: int, *, cancels: bool = False) -> Scene:
        """Book one permit ahead, and perhaps cancel that."""
        number = self.program.reserve(process, self.limiter, self.key, max_wait_ns)
        self.added(Operation(process, "reserve", self.key, 1, number, max_wait_ns=max_wait_ns))
        if cancels:
            self.program.cancel(process, self.limiter, self.key, number)
            self.added(Operation(process, "cancel", self.key, 1, number + 1, number))
        return self

    def batch(self, process: int, *keys: str) -> Scene:
        first = len(self.operations)
        self.program.batch(process, self.limiter, keys)
        for number, key in enumerate(keys, first):
            self.added(Operation(process, "hit", key, 1, number, number - 1 if number > first else -1))
        return self

    def hits(self, *processes: int, cost: int = 1, key: str | None = None) -> Scene:
        for process in processes:
            self.add(process, "hit", cost, key)
        return self

    def hits_of_another(self, *processes: int) -> Scene:
        return self.hits(*processes, key=self.other)

    def explore(self, **bounds: Any) -> Explored:
        self.expect(**bounds)
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def expect(self, **bounds: Any) -> None:
        """Set the possible clock readings, to judge by."""
        self.jumps_ns = [0, *bounds.get("jumps_ns", ())]
        self.moves = bounds.get("clock_moves", 0)
        self.ticks = "tick_ns" in bounds

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
        """The possible clock readings: every sum of its moves, up to the last reading."""
        if self.ticks:
            return sorted({self.at_ns, final_ns, *(t for d in done for t in (d.first_ns, d.last_ns) if t)})
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
            operation = self.operations[i]
            in_batch = operation.kind == "hit" and operation.earlier >= 0 and done[i].done
            if not done[i].before <= placed or (in_batch and operation.earlier not in placed):
                continue
            for after in self.effects(operation, done[i], readings, states):
                yield from self.orders(done, readings, placed | {i}, after)

    def effects(
        self, operation: Operation, done: Done, readings: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        state = states.get(operation.key, self.rule.fresh)
        own = [t for t in readings if not done.done or done.first_ns <= t <= done.last_ns]
        if operation.kind == "reset":
            for now_ns in own or readings:
                yield states | {operation.key: self.rule.forgotten(state, now_ns)}
                if not done.done:
                    # Killed half-way.
                    for permits in range(1, self.rule.most):
                        yield states | {operation.key: self.rule.refunded(state, now_ns, permits)}
        elif operation.kind == "refund":
            if not own and any(self.rule.is_settled(state, now_ns) for now_ns in readings):
                # It has found no cell of this key, so it hasn't looked at the clock.
                yield states
            for now_ns in own:
                yield states | {operation.key: self.rule.refunded(state, now_ns, operation.cost)}
                if self.rule.is_settled(state, now_ns):
                    # Nothing counts any more, so nothing is given back, not even to an older reading.
                    yield states
        elif done.full:
            # Only where there can be no room, and never for a key that has a cell by everybody's reading.
            latest = (d.last_ns if d.done else readings[-1] for d in self.done if d.begun)
            crowded = operation.key != self.key if self.crowded == "another" else self.crowded
            may_be = crowded and any(self.rule.is_settled(state, now_ns) for now_ns in latest)
            if (may_be or crowded == "by claims") and done.allowed == (self.on_full == "allow"):
                yield states
        elif operation.kind == "top_up":
            assert isinstance(self.rule, (Prepaid, ToppedUpBucket))
            for now_ns in ([done.now_ns] if done.now_ns else own) if done.done else readings:
                yield states | {operation.key: self.rule.added(state, now_ns, operation.cost)}
        elif operation.kind == "reserve":
            yield from self.bookings(operation, done, own, states)
        elif operation.kind == "cancel":
            yield from self.cancellations(operation, own or readings[-1:], states)
        elif not done.done:
            for now_ns in readings:
                if operation.kind != "peek" and self.rule.allows(state, now_ns, operation.cost):
                    yield states | {operation.key: self.rule.charged(state, now_ns, operation.cost)}
                    if self.evicts:
                        yield {operation.key: self.rule.charged(state, now_ns, operation.cost)}
            if self.evicts:
                # Killed after it had taken the other's place, and before it had one.
                yield {operation.key: state}
        else:
            decided = [done.now_ns] if done.now_ns else own
            if isinstance(state, Above):
                # A request that ends the permits above the burst reads the clock again.
                decided = [t for t in readings if decided[0] <= t <= done.last_ns]
            yield from self.answers(operation, done, decided, states)

    def answers(
        self, operation: Operation, done: Done, own: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """The states after a request that was decided by one of these readings, or by a later one in the limiter's
        memory.
        """
        state = states.get(operation.key, self.rule.fresh)
        for now_ns in [*own, *(t for t in self.borrowed(done) if t > own[-1])]:
            allowed = self.rule.allows(state, now_ns, operation.cost)
            if done.allowed and allowed:
                charged = self.rule.charged(state, now_ns, operation.cost)
                yield states | {operation.key: charged} if operation.kind != "peek" else states
                if self.evicts and operation.kind != "peek":
                    yield {operation.key: charged}
            elif not done.allowed and not (allowed and self.exact):
                yield states

    def bookings(
        self, operation: Operation, done: Done, own: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        state = states.get(operation.key, self.rule.fresh)
        for now_ns in own:
            delay_ns = self.rule.delay_ns(state, now_ns, operation.cost)
            booked = delay_ns <= operation.max_wait_ns
            if not isinstance(self.rule, (Bucket, IntervalBucket)):
                # Only what is allowed now.
                booked, delay_ns = self.rule.allows(state, now_ns, operation.cost), done.value
            if done.done and (done.allowed, done.value) != (booked, delay_ns):
                continue
            if booked:
                charged = self.rule.charged(state, now_ns, operation.cost)
                yield states | {operation.key: charged, f"left by {operation.number}": charged}
            else:
                yield states

    def cancellations(
        self, operation: Operation, own: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Nothing is given back while a request that has booked behind is not due yet, nor a charge that counts no
        more.
        """
        if not isinstance(self.rule, Bucket):
            yield from self.cancellations_of_charges(operation, own, states)
            return
        state, left = states.get(operation.key, self.rule.fresh), states.get(f"left by {operation.earlier}", 0)
        if isinstance(state, Above) or isinstance(left, Above):
            both = isinstance(state, Above) and isinstance(left, Above)
            yield states | {operation.key: self.rule.cancelled(state, 0, operation.cost)} if both else states
            return
        for now_ns in own:
            behind = left != state and state - now_ns > self.rule.tolerance_ns
            if left <= now_ns or behind:
                yield states
            else:
                # Permits that have been refilled since aren't given back once more.
                back_ns = min(self.rule.increment_ns(operation.cost), left - now_ns)
                yield states | {operation.key: max(state - back_ns, now_ns)}

    def cancellations_of_charges(
        self, operation: Operation, own: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Without bookings ahead, a charge is given back as long as it counts."""
        state, left = states.get(operation.key, self.rule.fresh), states.get(f"left by {operation.earlier}")
        assert isinstance(self.rule, Log)
        for now_ns in own:
            if left is None or self.rule.over_ns(left) <= self.rule.past_ns(state, now_ns):
                yield states
            else:
                yield states | {operation.key: self.rule.refunded(state, now_ns, operation.cost)}

    def borrowed(self, done: Done) -> set[int]:
        """Readings of processes whose operations had begun when this one ended."""
        if not self.borrows:
            return set()
        if any(d.begun and not d.done for d in self.done):
            return set(self.all_readings)
        index = next(i for i, d in enumerate(self.done) if d is done)
        return {d.now_ns or d.last_ns for d in self.done if index not in d.before}

    def matches(self, states: dict[str, Any], finals: Sequence[int], final_ns: int) -> bool:
        for key, final in zip(self.looked_at, finals, strict=True):
            state = states.get(key, self.rule.fresh)
            most = self.rule.remaining(state, final_ns)
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
    """Several limiters joined by ``AllOf``, for one key in one table.

    A request may be denied that would have fitted if it races with another one.
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
        self.operations.append(Operation(process, kind, self.key, cost, len(self.operations)))
        return self

    def before(self, cost: int = 1, key: str | None = None) -> Scene:
        """Charge the last of the limits, and not the others."""
        assert isinstance(self.rule, Both)
        assert self.parts[-1].hit(self.keys[-1], cost)
        fresh = self.rule.fresh
        self.states[self.key] = (*fresh[:-1], self.rule.rules[-1].charged(fresh[-1], self.at_ns, cost))
        return self

    def effects(
        self, operation: Operation, done: Done, readings: Sequence[int], states: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Each limit is exact by a clock reading of its own: one that is charged late reads the clock again."""
        state = states.get(operation.key, self.rule.fresh)
        assert isinstance(self.rule, Both)
        if done.done and not done.allowed:
            races = any(d.begun and not (d.done and operation.number in d.before) for d in self.others(done))
            if races or not all(self.rule.allows(state, now_ns, operation.cost) for now_ns in readings):
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

    def others(self, done: Done) -> list[Done]:
        """Those that were not done before this one began."""
        return [d for i, d in enumerate(self.done) if d is not done and i not in done.before]

    def matches(self, states: dict[str, Any], finals: Sequence[int], final_ns: int) -> bool:
        assert isinstance(self.rule, Both)
        state = states.get(self.key, self.rule.fresh)
        for rule, part, final in zip(self.rule.rules, state, finals, strict=True):
            most = max((n for n in range(rule.most + 1) if rule.allows(part, final_ns, n)), default=0)
            if final > most or (final < most and self.exact_finals):
                return False
        return True


class SceneOfOneRequest(Scene):
    """One request, known by its id, that is sent several times: it is charged once.

    A process that is killed between the charge and the mark leaves an unknown charge: the safe side.
    """

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        if kind == "hit":
            self.program.hit_once(process, self.limiter, self.key)
            self.operations.append(Operation(process, kind, self.key, cost, len(self.operations)))
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


class SceneOfOneRequestToSeveral(SceneOfSeveral):
    """One request to several limits, known by its id, that is sent several times: each limit is charged once.

    A process that is killed before the mark leaves unknown charges: the safe side.
    """

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        assert (kind, cost, key) == ("hit", 1, None)
        self.program.hit_all_once(process, self.limiter, self.keys)
        self.operations.append(Operation(process, kind, self.key, cost, len(self.operations)))
        return self

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        assert isinstance(self.rule, Both)
        answers = [d.allowed for d in done if d.done]
        killed = sum(d.begun and not d.done for d in done)
        if not all(answers):
            return f"the request was denied: {answers}"
        for rule, final in zip(self.rule.rules, finals, strict=True):
            charged = rule.most - final
            if not bool(answers) <= charged <= 1 + killed:
                return f"charged {charged} times, with {killed} killed"
        return ""


class SceneOfAnswers(Scene):
    """Requests whose decisions describe a state that others may have changed since."""

    def add(self, process: int, kind: str, cost: int = 1, key: str | None = None) -> Scene:
        assert (kind, key) == ("hit", None)
        self.program.hit_decision(process, self.limiter, self.key, cost)
        return self.added(Operation(process, "hit" if cost else "peek", self.key, cost, len(self.operations)))

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        longest_ns = max((d.value for d in done if d.done), default=0)
        # By a clock that stands still, permits are dated some nanoseconds ahead of it.
        if longest_ns > final_ns - self.at_ns + NS + 100:
            return f"all is as if nobody had asked in {longest_ns} ns, though a window is {NS} ns"
        return super().judge(done, finals, final_ns)


class SceneOfRoomLater(Scene):
    """One request, known by its id, is sent twice while there is no room, so it is let in uncharged. Then there is
    room.

    The other requests of its key are judged, by a bucket that isn't refilled meanwhile: at most its permits are
    allowed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, on_full="allow", usable=2, **options)
        crowd = [self.other, self.program.key(self.limiter, number=2)]
        for key in crowd:
            self.before(key=key)
        for process in (0, 1):
            self.program.hit_once(process, self.limiter, self.key)
        for key in crowd:
            self.program.reset(2, self.limiter, key)
        for _ in range(self.rule.most + 1):
            self.program.hit(2, self.limiter, self.key)

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        admitted = sum(d.allowed and not d.full for d in done[-1 - self.rule.most :])
        return f"{admitted} of {self.rule.most} admitted" if admitted > self.rule.most else ""


class SceneOfExpiredKeys(Scene):
    """Keys come to a table in which the home line holds expired keys of others, and cells elsewhere are empty.

    The expired keys may return, so none of them gives way.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, usable=CELLS_PER_LINE + 2, **options)
        for cell in range(CELLS_PER_LINE):
            self.program.foreign(self.limiter, cell, self.at_ns - 1 - cell)
        self.program.look_for_foreign(self.limiter, CELLS_PER_LINE)

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        left, *finals = finals
        if left < CELLS_PER_LINE:
            return f"{CELLS_PER_LINE - left} expired keys gave way, though there were empty cells"
        return super().judge(done, finals, final_ns)


class SceneOfKeptLimit(Scene):
    """A key at its limit, and beside it two that have used less: all the room there is. Two more keys come and evict.

    The key at its limit expires first, and yet stays.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, usable=3, on_full="evict")
        others = [self.program.key(self.limiter, number=number) for number in range(1, 5)]
        self.before(self.rule.most)
        self.at_ns += 10
        self.program.move_clock(self.at_ns)
        for key in others[:2]:
            self.before(key=key)
        self.hits(0).hits(1, key=others[2]).hits(2, key=others[3])

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        if done[0].allowed or finals[0] > 0:
            return "the key at its limit was reset"
        return "" if all(d.allowed for d in done[1:] if d.done) else "a new key found no room"


@dataclass(frozen=True)
class Holding:
    """An operation on slots."""

    kind: str
    process: int
    cost: int
    acquired: int  # by which operation, of a release and of a renewal


Held = frozenset[tuple[int, int]]  # which acquisitions hold theirs, and until when


class SceneOfSlots:
    """A concurrency limit of one key; each process has a limiter object of its own, as real ones have.

    One more object belongs to an observer, which has taken some slots before, and reads in the end how many are free.
    """

    def __init__(self, limit: int, processes: int) -> None:
        self.limit = limit
        self.store = Store.private(keys=1)
        self.limiters = [Concurrency(self.store, "slots", limit, lease="1 second") for _ in range(processes + 1)]
        self.program = Program()
        self.at_ns = self.program.now_ns
        self.program.adopt_slots(self.limiters, "key")
        self.program.look(self.free_in_the_end)
        self.operations: list[Holding] = []
        self.taken_before = 0
        self.lease_may_end = False

    def holds_once(self, *processes: int, cost: int = 1, renews: bool = False) -> SceneOfSlots:
        """Each of these takes permits and gives them back."""
        for process in processes:
            acquired = self.acquires(process, cost)
            if renews:
                self.program.renew(process, self.limiters[process], acquired)
                self.operations.append(Holding("renew", process, 1, acquired))
            self.program.release(process, self.limiters[process], acquired)
            self.operations.append(Holding("release", process, cost, acquired))
        return self

    def acquires(self, process: int, cost: int = 1) -> int:
        self.operations.append(Holding("acquire", process, cost, -1))
        return int(self.program.acquire(process, self.limiters[process], "key", cost))

    def before(self, cost: int = 1) -> SceneOfSlots:
        """The observer takes some slots, for as long as the program lasts."""
        self.taken_before += cost
        assert self.limiters[-1].hit("key", cost)
        return self

    def tries(self, *processes: int) -> SceneOfSlots:
        for process in processes:
            self.acquires(process)
        return self

    def free_in_the_end(self) -> int:
        """How many can be taken; so what ended processes hold comes back."""
        free = sum(self.limiters[-1].allow("key") for _ in range(self.limit))
        self.limiters[-1].refund("key", free)
        return free

    def expect(self, **bounds: Any) -> None:
        self.lease_may_end = bool(bounds.get("clock_moves"))

    def explore(self, **bounds: Any) -> Explored:
        self.expect(**bounds)
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        self.done, self.free, self.final_ns = done, finals[0], final_ns
        self.killed = {op.process for op, d in zip(self.operations, done, strict=True) if not d.done}
        if self.is_explained():
            return ""
        said = ", ".join(
            f"{op.kind} {op.cost} by {op.process}: " + ("yes" if d.allowed else "no" if d.done else "killed")
            for op, d in zip(self.operations, done, strict=True)
        )
        return f"no order of these operations gives these answers: {said}; {finals[0]} of {self.limit} free in the end"

    def is_explained(self) -> bool:
        return self.some_order(frozenset(), frozenset())

    def some_order(self, placed: frozenset[int], held: Held) -> bool:
        if all(i in placed or not d.done for i, d in enumerate(self.done)):
            # The observer frees the slots of ended processes.
            return self.free == self.limit - self.taken_before - self.living(held, self.final_ns)
        return any(
            self.some_order(placed | {i}, after)
            for i, d in enumerate(self.done)
            if d.done and i not in placed and d.before <= placed
            for after in self.effects(i, d, held)
        )

    def living(self, held: Held, now_ns: int) -> int:
        """How many permits are held by processes that go on. A killed one's may go at any time."""
        return sum(
            self.operations[i].cost
            for i, end_ns in held
            if end_ns > now_ns and self.operations[i].process not in self.killed
        )

    def effects(self, number: int, done: Done, held: Held) -> Iterator[Held]:
        operation = self.operations[number]
        free = self.limit - self.taken_before
        without = frozenset((i, end_ns) for i, end_ns in held if i != operation.acquired)
        if operation.kind == "acquire" and done.allowed:
            if self.living(held, done.now_ns) + operation.cost <= free:
                yield frozenset((i, end_ns) for i, end_ns in held if end_ns > done.now_ns) | {
                    (number, done.now_ns + NS)
                }
        elif operation.kind == "acquire":
            # One that was taken meanwhile, by a reading of a whole lease ago, makes a CAS fail as well.
            taken = sum(
                self.operations[i].cost for i, end_ns in held if end_ns > done.now_ns or self.taken_since(i, done)
            )
            if taken + self.under_way(number, done) + operation.cost > free:
                yield held
        elif not self.done[operation.acquired].allowed:
            if not done.allowed:
                yield held
        elif not done.allowed:
            # The lease had ended, and another request holds the slot.
            if self.lease_may_end and any(i == operation.acquired and end_ns <= self.final_ns for i, end_ns in held):
                yield without
            elif self.lease_may_end and without == held:
                yield held
        elif operation.kind == "release":
            yield without
        elif self.living(without, done.now_ns) + operation.cost <= free:
            yield without | {(operation.acquired, done.now_ns + NS)}

    def taken_since(self, acquired: int, done: Done) -> bool:
        """Whether that was taken, or renewed, while this operation was under way."""
        return acquired not in done.before or any(
            op.kind == "renew" and op.acquired == acquired and i not in done.before
            for i, op in enumerate(self.operations)
        )

    def under_way(self, number: int, done: Done) -> int:
        """The number of slots that other requests may have held meanwhile. A request may have been killed while it took
        a slot; it may have taken some, and given them back because there weren't enough; or it gives several back, one
        by one.
        """
        return sum(
            op.cost
            for i, (op, d) in enumerate(zip(self.operations, self.done, strict=True))
            if d.begun and i != number and i not in done.before and number not in d.before
            if (op.cost > 1 and (op.kind == "release" or not d.allowed)) or (op.kind == "acquire" and not d.done)
        )


EARLIER = -1  # in place of the number of an acquisition: the observer's
Holders = frozenset[int]  # which acquisitions hold theirs
# A lease of one second by an id lasts up to a sixteenth longer.
MOST_LEASE_NS = NS + NS // 16


class SceneOfRepeats(SceneOfSlots):
    """One request to a concurrency limit, known by its id, that several processes send; and requests without an id.

    One lease of the id holds its permits, the latest, until it is given back, reset, refunded by the id or over. There
    are three exceptions. A request that is killed may have ended the lease before, and leaves no other. One that comes
    while the lease is just being renewed may take further permits, if there are any, and a refund then gives back none.
    One that comes while another one of its id has permits and no mark yet may be denied.

    A lease begins at some reading of its operation. So there are times at which it may have ended or not.
    """

    def __init__(self, limit: int, processes: int, cost: int = 1) -> None:
        super().__init__(limit, processes)
        self.cost = cost
        self.program.adopt_marks(self.limiters[0])
        self.request_id = self.program.request_id(self.limiters[0], "key", cost)
        self.first: Holders = frozenset()

    def sent_before(self) -> SceneOfRepeats:
        """The observer sends the request before the program begins."""
        self.first = frozenset({EARLIER})
        assert self.limiters[-1].acquire("key", self.cost, request_id=self.request_id)
        return self

    def sends(self, *processes: int, renews: bool = False, releases: bool = False) -> SceneOfRepeats:
        for process in processes:
            number = self.program.acquire_once(process, self.limiters[process], "key", self.cost, self.request_id)
            self.operations.append(Holding("send", process, self.cost, -1))
            if renews:
                self.program.renew(process, self.limiters[process], number)
                self.operations.append(Holding("renew", process, self.cost, number))
            if releases:
                self.program.release(process, self.limiters[process], number)
                self.operations.append(Holding("release", process, self.cost, number))
        return self

    def tries(self, *processes: int) -> SceneOfRepeats:
        super().tries(*processes)
        return self

    def resets(self, process: int) -> SceneOfRepeats:
        self.program.reset_slots(process, self.limiters[process], "key")
        self.operations.append(Holding("reset", process, 0, -1))
        return self

    def refunds(self, *processes: int) -> SceneOfRepeats:
        for process in processes:
            self.program.refund_once(process, self.limiters[process], "key", self.cost, self.request_id)
            self.operations.append(Holding("refund", process, self.cost, -1))
        return self

    def is_explained(self) -> bool:
        free = self.limit - self.taken_before
        return any(
            free - self.permits(i for i in held if self.may_live(i, self.final_ns))
            <= self.free
            <= free - self.permits(i for i in held if self.lives(i, self.final_ns))
            for held in self.orders(frozenset(), self.first)
        )

    def orders(self, placed: frozenset[int], held: Holders) -> Iterator[Holders]:
        if all(i in placed or not d.done for i, d in enumerate(self.done)):
            yield held
        for i, d in enumerate(self.done):
            if d.begun and i not in placed and d.before <= placed:
                for after in self.holders_after(i, d, held):
                    yield from self.orders(placed | {i}, after)

    def is_living(self, number: int) -> bool:
        """Whether the process that holds these permits goes on."""
        return number == EARLIER or self.operations[number].process not in self.killed

    def lives(self, number: int, at_ns: int) -> bool:
        """Whether this acquisition's lease certainly lasts at this time."""
        begun_ns = self.at_ns if number == EARLIER else self.done[number].first_ns
        return self.is_living(number) and (not self.lease_may_end or at_ns < begun_ns + NS)

    def may_live(self, number: int, at_ns: int) -> bool:
        """Whether this acquisition's lease may last at this time."""
        restarts = [
            d.last_ns
            for i, (op, d) in enumerate(zip(self.operations, self.done, strict=True))
            if i == number or (op.kind == "renew" and op.acquired == number)
        ]
        last_ns = max(restarts, default=self.at_ns)
        return self.is_living(number) and (not self.lease_may_end or at_ns < last_ns + MOST_LEASE_NS)

    def permits(self, held: Iterable[int]) -> int:
        return sum(self.cost if i == EARLIER else self.operations[i].cost for i in held)

    def holders_after(self, number: int, done: Done, held: Holders) -> Iterator[Holders]:
        operation = self.operations[number]
        of_id = [i for i in held if i == EARLIER or self.operations[i].kind == "send"]
        if operation.kind in {"send", "acquire"}:
            earlier = of_id if operation.kind == "send" else []
            taken_over = [held - {i} | {number} for i in earlier]
            if not done.done:
                # Killed: its own permits don't count.
                yield from [*taken_over, held | {number}]
            elif done.allowed:
                yield from taken_over
                lasting = self.permits(i for i in held if self.lives(i, done.last_ns))
                fits = lasting + operation.cost <= self.limit - self.taken_before
                if fits and not self.leads(earlier, number):
                    yield held | {number}
                    # In the place of those that have ended.
                    yield frozenset(i for i in held if self.lives(i, done.last_ns)) | {number}
            elif self.may_be_denied(number, held, earlier):
                yield held
        elif operation.kind == "reset":
            # A reset frees the slots one by one. It may free a slot that is taken meanwhile, or leave it. A reset that
            # is killed may leave any slot.
            spared = [i for i in held if not done.done or (i != EARLIER and i not in done.before)]
            for kept in product([False, True], repeat=len(spared)):
                yield frozenset(i for i, is_kept in zip(spared, kept, strict=True) if is_kept)
        elif operation.kind == "refund":
            for i in of_id:
                yield held - {i}
            if not done.done or not self.leads(of_id, number):
                yield held
        elif not done.done:
            return
        elif not done.allowed:
            # Another request may be in the place of a lease that has ended.
            if operation.acquired not in held or not self.lives(operation.acquired, done.last_ns):
                yield held - {operation.acquired}
        elif operation.acquired in held:
            yield held - {operation.acquired} if operation.kind == "release" else held

    def leads(self, earlier: list[int], number: int) -> bool:
        """Whether the mark leads to permits that are held, for as long as this operation lasts."""
        return any(self.lives(i, self.done[number].last_ns) and not self.is_renewed(i, number) for i in earlier)

    def may_be_denied(self, number: int, held: Holders, earlier: list[int]) -> bool:
        operation = self.operations[number]
        lasting = self.permits(
            i for i in held if not self.lease_may_end or self.may_live(i, self.done[number].first_ns)
        )
        taken = lasting + sum(self.operations[i].cost for i in self.meanwhile(number) if self.is_partial(i))
        between_steps = any(self.operations[i].kind in {"send", "renew", "refund"} for i in self.beyond(number))
        return taken + operation.cost > self.limit - self.taken_before and (
            between_steps or not any(self.lives(i, self.done[number].last_ns) for i in earlier)
        )

    def is_renewed(self, acquired: int, number: int) -> bool:
        return any(
            self.operations[i].kind == "renew" and self.operations[i].acquired == acquired for i in self.beyond(number)
        )

    def meanwhile(self, number: int) -> list[int]:
        """Operations that were under way while this one was; if it has the id, only when it ended."""
        if self.operations[number].kind == "send":
            sends = {i for i in self.beyond(number) if self.operations[i].kind == "send"}
        else:
            sends = set(range(len(self.done)))
        return [
            i
            for i, d in enumerate(self.done)
            if d.begun and i != number and i not in self.done[number].before and number not in d.before
            if i in sends or self.operations[i].kind != "send"
        ]

    def is_partial(self, number: int) -> bool:
        """Whether an operation may hold slots for a while that it doesn't hold before or after."""
        operation, done = self.operations[number], self.done[number]
        if operation.kind == "release":
            return operation.cost > 1
        if operation.kind == "acquire":
            return operation.cost > 1 or not done.done
        # A refund that takes permits over from another refund gives them back after that one has ended.
        return operation.kind in {"send", "refund"}

    def beyond(self, number: int) -> list[int]:
        """Operations that were under way when this one was decided. A move of the clock may come after that."""
        ended = self.done[number].value if not self.lease_may_end else 0
        return [
            i
            for i, d in enumerate(self.done)
            if d.begun and i != number and number not in d.before and i not in self.done[number].before
            if not ended >> i & 1
        ]
