"""Programs of leased permits, and what may come of them: no more is spent than the server lends, and it counts that.

The hosts are stores, each with its own table; the server is a model of the scripts that lend. See
native/interleave/leased_explorer.pyx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.core.explorer import Done, Explored
from forebay.core.leased_explorer import LeasedProgram, Said

from forebay import Store
from forebay.core.leased import Permits
from forebay.segment import layout

MS = 1_000_000
LEASE_NS = 10 * MS
# The deadline of a fetch; and how much later a fetch slot may open, as it rounds up its time.
DEADLINE_NS = 2 * MS
QUANTUM_NS = 1 << 20
ALLOWS = {"allow", "allow in turn"}
# So near the end of a window of 10 ms that a jump of 4 ms crosses it.
EDGE_NS = 1_000_000_000 * MS + 7 * MS


@dataclass
class Terms:
    """The attributes of terms that `Permits` reads."""

    limit: int
    most_on_loan: int
    same_ns: int
    reset_ns: int
    lease_ns: int = LEASE_NS
    longest_ns: int = LEASE_NS
    fetch_deadline_ns: int = DEADLINE_NS
    longest_fetch_ns: int = 2 * LEASE_NS + DEADLINE_NS
    host_algorithm: int = layout.ALGORITHM_LEASED_TOKEN_BUCKET
    encoding: bytes = b"explored"
    strict: str = "explored"


@dataclass(frozen=True)
class Act:
    process: int
    what: str
    host: int
    cost: int
    fate: str


class LeasedScene:
    """Hosts, the server that lends to them, and what their processes do with one key.

    A bucket of `limit` permits, refilled one by one each `unit_ns`; or with a `period_ns` a window. `is_strict` False:
    the server forgets, or a key is reset, so that a host has for a while what isn't on loan any more.
    """

    def __init__(
        self,
        limit: int = 3,
        *,
        hosts: int = 1,
        unit_ns: int = 1000 * MS,
        period_ns: int = 0,
        at_ns: int = EDGE_NS,
        is_strict: bool = True,
    ) -> None:
        self.limit, self.unit_ns, self.period_ns, self.is_strict = limit, unit_ns, period_ns, is_strict
        self.terms = Terms(limit, limit, period_ns // 2, 0 if period_ns else limit * unit_ns)
        self.program = LeasedProgram(limit, unit_ns, period_ns, LEASE_NS, limit, now_ns=at_ns)
        self.stores = [Store.private(keys=1) for _ in range(hosts)]
        self.at_ns = at_ns
        for store in self.stores:
            host = self.program.adopt_host(Permits(store, "limit", self.terms))
            self.program.look(lambda host=host: self.program.left(host))
            self.program.look(lambda host=host: self.program.fetching_ns(host))
            self.program.look(lambda host=host: self.program.pending(host) + 2 * self.program.is_reserved(host))
        self.program.look(self.program.room)
        if hosts == 1:
            self.program.look(lambda: self.program.loan(0))
        self.acts: list[Act] = []
        self.used = 0

    def lent(self, permits: int, *, host: int = 0, size: int = 1) -> LeasedScene:
        """Before the program begins; the next fetch wants 2 to the power of `size`."""
        self.program.lend(host, permits, size)
        return self

    def opened(self, *, host: int = 0, size: int = 1) -> LeasedScene:
        """Before the program begins, the fetch slot has its cell."""
        self.program.open_fetch_slot(host, size)
        return self

    def used_up(self, permits: int) -> LeasedScene:
        self.program.use_up(permits)
        self.used = permits
        return self

    def does(self, process: int, *acts: str, host: int = 0, cost: int = 1, fate: str = "answered") -> LeasedScene:
        for what in acts:
            self.program.act(process, what, host, cost, fate)
            self.acts.append(Act(process, what, host, cost, fate))
        return self

    def delivers(self, process: int, earlier: int) -> LeasedScene:
        """The request of the `earlier` act reaches the server after its process has stopped waiting."""
        self.program.act(process, "deliver", 0, 0, "answered", earlier)
        self.acts.append(Act(process, "deliver", 0, 0, "answered"))
        return self

    def explore(self, **bounds: Any) -> Explored:
        self.program.expect(travels="clock_moves" in bounds or "tick_ns" in bounds, is_strict=self.is_strict)
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        self.done = done
        hosts = [tuple(finals[3 * i : 3 * i + 3]) for i in range(len(self.stores))]
        room = finals[3 * len(hosts)]
        to_be_had = room + sum(left for left, _, _ in hosts)
        said = ", ".join(
            f"{act.what} {act.cost} by {act.process}: "
            + (("yes" if d.allowed else "no") + f" {Said(d.value % Said.GRANTED)!r}" if d.done else "killed")
            for act, d in zip(self.acts, done, strict=True)
        )
        complaint = (
            self.too_much(to_be_had, final_ns)
            or self.overtaken_too_early()
            or self.left_behind(hosts)
            or self.out_of_turn(final_ns)
            or self.closed_too_long()
            or self.not_believed(finals)
        )
        return complaint and f"{complaint}: {said}; in the end {hosts}, {room} at the server"

    def too_much(self, to_be_had: int, final_ns: int) -> str:
        """In no span of time more is spent than the limit and the refill in it. In the end all remaining permits are
        spent at once.

        Permits of a fetch are spent when the server has granted them, or later.
        """
        spent = [
            (d.now_ns or d.first_ns, d.last_ns if d.value & Said.BY_DEPOSIT else d.now_ns or d.last_ns, act.cost)
            for act, d in zip(self.acts, self.done, strict=True)
            if act.what in ALLOWS | {"spend"} and d.done and d.allowed
        ]
        spent.append((final_ns, final_ns, to_be_had))
        given_back = sum(
            act.cost for act, d in zip(self.acts, self.done, strict=True) if act.what == "refund" and d.begun
        )
        forgotten = sum(act.what in {"empty", "reset"} and d.begun for act, d in zip(self.acts, self.done, strict=True))
        for from_ns in {first_ns for first_ns, _, _ in spent}:
            for to_ns in {last_ns for _, last_ns, _ in spent if last_ns >= from_ns}:
                within = sum(cost for first, last, cost in spent if from_ns <= first and last <= to_ns)
                if within > self.most_in(from_ns, to_ns) + given_back + self.limit * forgotten:
                    return f"{within} permits from {from_ns - self.at_ns:+} to {to_ns - self.at_ns:+}"
        return ""

    def most_in(self, from_ns: int, to_ns: int) -> int:
        if self.period_ns:
            return self.limit * (to_ns // self.period_ns - from_ns // self.period_ns + 1)
        return self.limit + (to_ns - from_ns) // self.unit_ns

    def overtaken_too_early(self) -> str:
        """A grant is deposited, unless this fetch or another one takes longer than its fetch slot is closed for."""
        if any(act.what in {"lose", "reset", "empty"} or act.fate != "answered" for act in self.acts):
            return ""
        for act, d in zip(self.acts, self.done, strict=True):
            overtaken = d.value & Said.LATER or (d.value >= Said.GRANTED and not d.value & Said.DEPOSITED)
            if not d.done or act.what not in ALLOWS or not overtaken:
                continue
            late = [
                other
                for its, other in zip(self.acts, self.done, strict=True)
                if its.what in ALLOWS | {"refund"} and other.begun and its.host == act.host
                if not other.done
                or other.last_ns - other.first_ns >= DEADLINE_NS
                or (its.what == "refund" and not other.value & Said.ENTERED)
            ]
            if not late:
                return "a fetch was overtaken while its fetch slot was closed"
        return ""

    def left_behind(self, hosts: Sequence[tuple[int, ...]]) -> str:
        """Only a killed process leaves a fetch slot closed, for no longer than a fetch, or a fetch pending. But a fetch
        slot is reserved for a process that has waited, and it isn't known whether that one still waits."""
        for host, (_, fetching_ns, pending_or_reserved) in enumerate(hosts):
            its = [d for act, d in zip(self.acts, self.done, strict=True) if act.host == host]
            asked = any(
                d.begun and (not d.done or d.value & Said.REQUESTED)
                for act, d in zip(self.acts, self.done, strict=True)
                if act.what == "allow in turn"
            )
            if fetching_ns > DEADLINE_NS + QUANTUM_NS:
                return f"the fetch slot is closed for {fetching_ns} ns"
            if fetching_ns and all(d.done for d in its) and not (pending_or_reserved & 2 and asked):
                return "the fetch slot is closed for nobody"
            if pending_or_reserved & 1 and all(d.done and not d.value & Said.NOT_HELD for d in its):
                return "a fetch is pending that nobody makes"
        return ""

    def out_of_turn(self, final_ns: int) -> str:
        """A process that has requested a turn, and comes again, passes before all that haven't."""
        if final_ns - self.at_ns >= DEADLINE_NS:
            return ""
        waiting = [i for i, act in enumerate(self.acts) if act.what == "allow in turn"]
        for i in waiting:
            again = next((j for j in waiting if j > i and self.acts[j].process == self.acts[i].process), None)
            others_came = any(
                self.done[j].begun and (not self.done[j].done or self.done[j].value & Said.ENTERED)
                for j in waiting
                if self.acts[j].process != self.acts[i].process
            )
            if others_came or not self.done[i].done or not self.done[i].value & Said.REQUESTED:
                continue
            for k, (act, d) in enumerate(zip(self.acts, self.done, strict=True)):
                passed = act.what == "allow" and d.done and d.value & Said.ENTERED and i in d.before
                if passed and (again is None or not self.done[again].begun or k in self.done[again].before):
                    return "somebody else's turn was taken"
        return ""

    def closed_too_long(self) -> str:
        """Once all others have ended, and for as long as a fetch may take, the fetch slot is open."""
        for act, d in zip(self.acts, self.done, strict=True):
            if act.what not in ALLOWS or not d.done or not d.value & Said.FOUND_BUSY:
                continue
            others = [other for other in self.done if other is not d and other.begun]
            if all(other.done and d.first_ns - other.last_ns > DEADLINE_NS + QUANTUM_NS for other in others):
                return "the fetch slot is closed for too long"
        return ""

    def not_believed(self, finals: Sequence[int]) -> str:
        """Once a fetch has had a reply of a server that has lost its state, the host has no more permits than that
        server knows.
        """
        forgotten = {i for i, act in enumerate(self.acts) if act.what in {"empty", "reset"}}
        for act, d in zip(self.acts, self.done, strict=True):
            answered = d.done and d.value & Said.ANSWER and not d.value & (Said.NOT_HELD | Said.LATER)
            if act.what in ALLOWS and forgotten and forgotten <= d.before and answered and finals[0] > finals[-1]:
                return f"{finals[0]} permits are left, and {finals[-1]} on loan"
        return ""
