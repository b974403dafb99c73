"""Programs of synced limiters, and what may come of them: nothing lost and nothing counted twice, once all is reported.

See native/interleave/synced_explorer.pyx.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.core.explorer import Done, Explored
from forebay.core.synced_explorer import SyncedProgram

from forebay import Store
from forebay.core.synced.token_bucket import SyncedTokenBucket
from forebay.core.synced.window import SyncedWindow

NS = 1_000_000_000
SECOND_US = 1_000_000


@dataclass(frozen=True)
class Act:
    process: int
    what: str
    key: int


class SyncedScene:
    """A limiter of one host, of 3 permits per second, and two keys of it.

    In the end the host reports what is pending and learns what others have. Then Redis has of a key what was charged,
    neither more nor less, and the host knows what others have. `evicts`: the keys have one cell, so what
    wasn't reported yet when a key goes is lost. `nameless`: this key has lost its name on its way to its cell.
    """

    def __init__(
        self,
        *,
        bucket: bool = False,
        slides: bool = False,
        evicts: bool = False,
        nameless: int = -1,
        at_ns: int = 1_000_000 * NS + NS // 2,
    ) -> None:
        self.bucket, self.slides, self.evicts, self.nameless = bucket, slides, evicts, nameless
        # Half a window further on. A bucket has none.
        self.window_end_ns = at_ns + (10**9 if bucket else 1) * NS // 2
        self.store = Store.private(keys=1, on_full="evict" if evicts else "deny")
        self.named: list[bytes] = []
        usable = 1 if evicts else 2
        self.program = SyncedProgram(now_ns=at_ns)
        self.limiter = self.made()
        self.keys = self.program.adopt_synced(self.limiter, usable, bucket, slides)
        for key in self.keys:
            self.limiter.allow(key)
        self.program.begin_afresh(self.named, nameless)
        self.program.look_at(self.limiter, self.keys[0])
        self.program.look(self.program.tell)
        for key in range(len(self.keys)):
            self.program.look(lambda key=key: self.program.sum_at_redis(key))
        self.program.look(lambda: self.program.sum_at_redis(0, 1))
        self.program.look(self.program.learn)
        self.program.look_at(self.limiter, self.keys[0])
        self.acts: list[Act] = []
        self.counted_before = 0

    def made(self) -> Any:
        # A SyncedStore is only shown in messages, and never called.
        if self.bucket:
            return SyncedTokenBucket(self.store, "limit", "3/second", 3, None, 1, self.name_of)  # type: ignore[arg-type]
        return SyncedWindow(self.store, "limit", "3/second", None, self.slides, 1, self.name_of)  # type: ignore[arg-type]

    def name_of(self, key: object) -> bytes:
        self.named.append(b"name %11d" % len(self.named))
        return self.named[-1]

    def before(self, permits: int = 1, *, others: int = 0) -> SyncedScene:
        """Before the program begins, so many are charged, and so many by others; this host and Redis know."""
        assert self.limiter.hit(self.keys[0], permits)
        self.program.others_now(0, others * SECOND_US // 3 if self.bucket else others)
        self.program.exchanges_now()
        self.counted_before = permits + others
        return self

    def does(self, process: int, *acts: str, key: int = 0) -> SyncedScene:
        for what in acts:
            self.program.gives_back |= what == "refund"
            if what in {"hit", "refund"}:
                getattr(self.program, what)(process, self.limiter, self.keys[key])
            elif what == "others":
                self.program.others_count(process, key, SECOND_US // 3 if self.bucket else 1)
            elif what == "others later":
                # In the next window.
                self.program.others_count(process, key, 1, 1)
            else:
                {
                    "exchange": self.program.exchange,
                    "read lists": self.program.read_lists,
                    "ask": self.program.ask,
                    "learn": self.program.learn_answer,
                }[what](process)
            self.acts.append(Act(process, what, key))
        return self

    def explore(self, **bounds: Any) -> Explored:
        explored: Explored = self.program.explore(self.judge, **bounds)
        return explored

    def judge(self, done: Sequence[Done], finals: Sequence[int], final_ns: int) -> str:
        early, unnamed, *sums, later, _, left = finals
        complaint = (
            self.wrongly_reported(done)
            or self.wrongly_counted([sums[0] + later, sums[1]], later, done, final_ns)
            or ("" if self.evicts or self.nameless >= 0 or not unnamed else "nothing can be reported")
            or self.wrongly_denied(done)
            or self.wrongly_known(early, left, sums[0], done, final_ns)
            or self.wrongly_forgotten(early, done, final_ns)
            or self.wrongly_unaware(done, final_ns)
        )
        said = ", ".join(
            f"{act.what} {act.key} by {act.process}: {('yes' if d.allowed else 'no') if d.done else 'killed'}"
            for act, d in zip(self.acts, done, strict=True)
        )
        return complaint and (
            f"{complaint}: {said}; at Redis {sums}, then {later}; {early} left, then {left}; {unnamed} without a name"
        )

    def wrongly_reported(self, done: Sequence[Done]) -> str:
        reported = [d for act, d in zip(self.acts, done, strict=True) if act.what in {"exchange", "ask", "read lists"}]
        wrong = "a key was reported by another one's name, or less than before"
        return wrong if any(d.done and not d.allowed for d in reported) else ""

    def wrongly_counted(self, sums: Sequence[int], later: int, done: Sequence[Done], final_ns: int) -> str:
        """A late charge of a bucket that lost its cell may be reported as the next one's, and counts once."""
        charged = [self.charged(key, done) for key in range(len(sums))]
        if self.bucket and self.evicts:
            sums, charged = [sum(sums)], [(0, sum(most for _, most in charged))]
        for key, (reported, (least, most)) in enumerate(zip(sums, charged, strict=True)):
            if self.bucket:
                # In whole microseconds, a fraction of one less for each message.
                least, most = least * SECOND_US // 3 - len(self.acts), most * SECOND_US // 3 + 1
            if final_ns >= self.window_end_ns and not self.slides:
                # A fixed window that is over is not reported any more; the next one is, up to its time.
                least = 0
            if reported > most or (reported < least and not self.is_lost(key)):
                return f"between {least} and {most} of key {key} were charged, and {reported} reported"
        counted = sum(d.allowed and d.now_ns >= self.window_end_ns for d in done if d.done)
        return f"{counted} were charged in the next window, and {later} reported" if later < counted else ""

    def is_lost(self, key: int) -> bool:
        """Whether a key may be gone, or be without a name, when it is to be reported."""
        return key == self.nameless or (self.evicts and any(act.key != key for act in self.acts))

    def wrongly_denied(self, done: Sequence[Done]) -> str:
        """A denial of a key that has fewer requests than permits."""
        for key in range(len(self.keys)):
            hits = [d for act, d in zip(self.acts, done, strict=True) if (act.what, act.key) == ("hit", key)]
            others = sum((act.what, act.key) == ("others", key) for act in self.acts)
            before = self.counted_before if key == 0 else 0
            if len(hits) + others + before <= 3 and any(d.done and not d.allowed and not d.full for d in hits):
                return f"key {key} was denied"
        return ""

    def wrongly_known(self, early: int, left: int, reported: int, done: Sequence[Done], final_ns: int) -> str:
        """The charges that others had counted before the only exchange began are known; and in the end all are."""
        if self.evicts or final_ns >= self.window_end_ns:
            return ""
        if not self.bucket and left != max(3 - reported, 0):
            return "in the end the host knows of others what isn't so"
        for number, (act, d) in enumerate(zip(self.acts, done, strict=True)):
            if act.what == "learn" and d.done and self.is_all_known_to(number, done):
                least, _ = self.charged(0, done)
                if early > 3 - least:
                    return "what others have isn't known to who has learned of it"
        return ""

    def wrongly_forgotten(self, early: int, done: Sequence[Done], final_ns: int) -> str:
        """The host knows the counts of others in the next window that it has learned there."""
        for number, (act, d) in enumerate(zip(self.acts, done, strict=True)):
            if act.what == "learn" and d.done and self.window_end_ns <= min(done[number - 1].first_ns, final_ns):
                before = done[number - 1].before
                later = sum(i in before for i, other in enumerate(self.acts) if other.what == "others later")
                if early > 3 - later:
                    return "what others have counted in the next window was learned and forgotten"
        return ""

    def wrongly_unaware(self, done: Sequence[Done], final_ns: int) -> str:
        """A request that begins after its host has read the hot lists knows what was published.

        Not if another request, which inserts the key, or another exchange was under way meanwhile.
        """
        if self.evicts or final_ns >= self.window_end_ns:
            return ""
        hits = [i for i, act in enumerate(self.acts) if (act.what, act.key) == ("hit", 0)]
        readings = [i for i, act in enumerate(self.acts) if act.what == "read lists"]
        for number, (act, d) in enumerate(zip(self.acts, done, strict=True)):
            if act.what != "read lists" or not d.done:
                continue
            others = (i for i in hits + readings if i != number)
            if any(done[i].begun and i not in d.before and number not in done[i].before for i in others):
                continue
            published = sum(i in d.before for i, other in enumerate(self.acts) if other.what == "others")
            admitted = sum(done[i].done and done[i].allowed for i in hits)
            if any(done[i].done and done[i].allowed and number in done[i].before for i in hits) and (
                self.counted_before + published + admitted > 3
            ):
                return "more was admitted than the published sum has left"
        return ""

    def is_all_known_to(self, learned: int, done: Sequence[Done]) -> bool:
        """Whether others had made all their charges before this exchange began, for a key that was counted by then.

        In a bucket, a charge under way while a reply is merged may hide an equal amount of the others' charges, until
        the next exchange.
        """
        before = done[learned - 1].before
        hits = [i for i, act in enumerate(self.acts) if act.what == "hit"]
        if not self.counted_before and not any(i in before and done[i].allowed for i in hits):
            return False
        if self.bucket and not all(i in done[learned].before or learned in done[i].before for i in hits):
            return False
        return all(i in before for i, act in enumerate(self.acts) if act.what == "others")

    def charged(self, key: int, done: Sequence[Done]) -> tuple[int, int]:
        """The least and the most that was charged of a key, with what was given back, and by the others."""
        least = most = self.counted_before if key == 0 else 0
        for act, d in zip(self.acts, done, strict=True):
            if act.key != key or not d.begun:
                continue
            if act.what == "hit":
                least += d.done and d.allowed
                most += not d.done or d.allowed
            elif act.what == "refund":
                least -= 1
                # Else it may have come before there was anything to give back.
                most -= d.done and self.counted_before > 0
            elif act.what in {"others", "others later"}:
                least += d.done and act.what == "others"
                most += 1
        return least, most
