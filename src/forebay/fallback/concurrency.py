"""Concurrency: which permits of a key are held, and until when."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from inspect import Signature
from types import TracebackType
from typing import Any, ClassVar, Final, NamedTuple, NoReturn, Self, TypeVar, final

from forebay import holding, waiting
from forebay.core.arguments import costs_of, keys_of
from forebay.core.limiter_arguments import concurrency_shape
from forebay.errors import CostExceedsLimit, LimitExceeded
from forebay.fallback.cell_limiter import CellAlgorithm, mark_tag, whole_cost
from forebay.fallback.decision import Decision, Outlook, decision_of
from forebay.fallback.keys import Key
from forebay.fallback.limiter import Attempt, Limiter
from forebay.fallback.memory import Charge, LimitParams, Tag, Verdict
from forebay.fallback.reservation import Reservation, longest_delay_ns, reservation_of
from forebay.rate import Duration, as_period_ns

__all__ = ["Concurrency", "Lease", "lease_taken"]

F = TypeVar("F", bound=Callable[..., Any])

# When the number of keys with unleased permits is this or twice as much and so on, those that have ended are forgotten.
SWEEP_AT_LEAST: Final = 2**10


class Slots(NamedTuple):
    """The permits of a key that are held."""

    forget_ns: int
    """From when on the key may be forgotten: no lease ends later."""
    ends_ns: dict[int, int]
    """When the lease of each permit ends, by its number. One that has ended stays until another is taken."""


_numbers: Final = itertools.count(1)


class Touch:
    """Keeps a key until the end of a lease that begins now; always allowed. See ``memory.Algorithm``."""

    fresh: Any = None

    def __init__(self, lease_ns: int) -> None:
        self._lease_ns = lease_ns

    def take(self, tag: Tag, state: Slots | None, now_ns: int, charge: Charge) -> Slots:
        end_ns = now_ns + self._lease_ns
        return Slots(end_ns, {}) if state is None else Slots(max(state.forget_ns, end_ns), state.ends_ns)

    def give_back(self, tag: Tag, state: Slots, now_ns: int, charge: Charge) -> None:
        """Permits are freed by their numbers."""

    def expiry_ns(self, state: Slots) -> int:
        return state.forget_ns

    def used(self, state: Slots, now_ns: int) -> int:
        return len(state.ends_ns)


class HeldMark(CellAlgorithm):
    """The mark of a request with an id: the permits that it holds, and until when.

    It has used nothing, so it is evicted before any key.
    """

    def __init__(self, end_ns: int, numbers: frozenset[int]) -> None:
        self._state = end_ns, numbers

    def take(self, tag: Tag, state: Any, now_ns: int, charge: Charge) -> tuple[int, frozenset[int]]:
        return self._state

    def expiry_ns(self, state: tuple[int, frozenset[int]]) -> int:
        return state[0]

    def used(self, state: Any, now_ns: int) -> int:
        return 0


@final
class Lease:
    """Permits that this process holds. True if the request was allowed, as is ``allowed``.

    Give them back with ``release``, or use the lease as a context manager. Without that, the permits come back at the
    end of the lease, but not when this object is garbage. ``full``: the store had no room for the key, and its
    ``on_full`` decided.
    """

    __slots__ = ("_key", "_limiter", "_mark", "_numbers", "_pid", "_released", "allowed", "full")
    __signature__: ClassVar[Signature] = Signature()

    allowed: bool
    full: bool

    def __new__(cls) -> Self:
        raise TypeError("leases are made by limiters: use limiter.acquire(key)")

    def __init_subclass__(cls) -> None:
        raise TypeError("no class derives from Lease")

    def begin(
        self, limiter: Concurrency, key: Key, numbers: Iterable[int] | None, full: bool, mark: Tag | None = None
    ) -> Self:
        """Called by a limiter. `numbers` are those of the permits; None if the request was denied. `mark` is the tag of
        the mark of a request with an id.
        """
        self._limiter, self._key, self._numbers, self._mark = limiter, key, set(numbers or ()), mark
        self._pid, self._released = os.getpid(), False
        self.allowed, self.full = numbers is not None, full
        return self

    def release(self) -> bool:
        """Give the permits back. Whether they were still held. Does nothing if repeated or after the lease's end."""
        self._released = True
        if not self._numbers or self._pid != os.getpid():
            return False
        with self._limiter.memory.lock:
            # Taken out first: of several threads that release, one gives back.
            numbers, self._numbers = self._numbers, set()
            held = self._limiter.free(self._limiter.tag_of(self._key), numbers)
        waiting.released(self._limiter, self._key)
        return held

    def renew(self) -> bool:
        """Restart the lease. False if it has ended; then another request may hold the permits."""
        if not self._numbers or self._pid != os.getpid():
            return False
        with self._limiter.memory.lock:
            held = self._limiter.restart(self._limiter.tag_of(self._key), self._numbers)
            if held and self._mark is not None:
                self._limiter.mark(self._mark, self._numbers)
            return held

    def __bool__(self) -> bool:
        return self.allowed

    def __enter__(self) -> Self:
        if not self.allowed:
            raise self._limiter.exceeded(self._key)
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Lease of {self._limiter.name!r}: {'held' if self._numbers else 'not held'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Lease can't be pickled or copied")


class Concurrency(Limiter):
    """At most `limit` permits of a key held at one time.

    ``Concurrency(store, "reports", 20)``, then ``with reports.hold("user:42", timeout=0.5):`` or ``async with``, or
    ``lease = reports.acquire("user:42")``, or ``@reports.limited("nightly")``. ``allow``, ``hit``, ``wait`` and the
    other methods of every limiter take permits that ``refund`` gives back.

    A permit becomes free when it is given back, or at the end of its `lease`: text, seconds or a ``timedelta``;
    ``lease_ns`` is the same in nanoseconds. Work that takes longer renews the lease. `keys` is the number of keys that
    can be live at once; by default as many as half a megabyte of the compiled core holds, but at least 64.

    Raises ``InvalidLimiter``, ``InvalidRate`` for an invalid lease, ``TooManyLimiters``.
    """

    may_free_early = True

    limit: int
    lease_ns: int
    keys: int

    def __init__(self, store: Any, name: str, limit: int, lease: Duration = "30s", *, keys: int | None = None) -> None:
        self.begin(store, name)
        shape = concurrency_shape(limit, keys, name)
        self.limit, self.lease_ns = limit, as_period_ns(lease)
        self._touch = Touch(self.lease_ns)
        self._charge = Charge(1, 0, LimitParams(limit, limit, 1))
        self._unleased_of: dict[int, dict[Tag, list[tuple[int, int]]]] = {}
        encoding = f"concurrency {limit}"
        self.keys = self.open_extent(encoding, shape)
        self.register("Concurrency", encoding, limit)

    @property
    def _unleased(self) -> dict[Tag, list[tuple[int, int]]]:
        """By tag, what this process took without a lease object: numbers and the ends of leases, oldest first.

        A forked child owns nothing of its parent's.
        """
        return self._unleased_of.setdefault(os.getpid(), {})

    @staticmethod
    def bytes_needed(limit: int, *, keys: int | None = None) -> int:
        """How many bytes a limiter of this limit and number of keys takes with the compiled core."""
        return concurrency_shape(limit, keys, "").bytes

    def __repr__(self) -> str:
        return f"<Concurrency {self.name!r} {self.limit}, lease={self.lease_ns / 1e9:g}s, keys={self.keys}>"

    def checked_cost(self, cost: Any) -> int:
        permits = whole_cost(cost)
        if permits > self.limit:
            raise CostExceedsLimit(cost, self.limit, self.name)
        return permits

    def ends_ns(self, tag: Tag) -> dict[int, int]:
        """When the lease of each permit of a key ends, by its number."""
        found: Slots | None = self.table.find(tag)
        return {} if found is None else found.ends_ns

    def has_room(self, ends_ns: dict[int, int], cost: int, now_ns: int) -> bool:
        """Whether so many permits are free."""
        if cost <= self.limit - len(ends_ns):
            return True
        return cost <= self.limit - sum(end_ns > now_ns for end_ns in list(ends_ns.values()))

    def take(self, tag: Tag, cost: int, now_ns: int) -> tuple[Verdict, list[int] | None]:
        """Take permits, all or none. Returns their numbers, or None; none if the table is full and allows it."""
        verdict = self.table.decide(tag, now_ns, self._touch, self._charge, self.on_full, self.counts)
        if verdict.full:
            return verdict, [] if verdict.allowed else None
        ends_ns: dict[int, int] = verdict.state.ends_ns
        if not self.has_room(ends_ns, cost, now_ns):
            verdict.allowed = False
            return verdict, None
        first = next(iter(ends_ns), None)
        # The oldest come first: unless that one has ended, the others are looked at only for lack of room.
        if cost > self.limit - len(ends_ns) or (first is not None and ends_ns.get(first, 0) <= now_ns):
            for number, end_ns in ends_ns.copy().items():
                if end_ns <= now_ns:
                    ends_ns.pop(number, None)
        taken = list(itertools.islice(_numbers, cost))
        ends_ns.update(dict.fromkeys(taken, now_ns + self.lease_ns))
        return verdict, taken

    def free(self, tag: Tag, numbers: Iterable[int]) -> bool:
        """Free permits. Whether any of them was held."""
        ends_ns = self.ends_ns(tag)
        freed = [ends_ns.pop(number, None) for number in numbers]
        return any(end_ns is not None for end_ns in freed)

    def restart(self, tag: Tag, numbers: set[int]) -> bool:
        """Restart the leases of permits. Whether all of them were held."""
        now_ns, ends_ns = self.open_now_ns(), self.ends_ns(tag)
        held = [number for number in numbers if number in ends_ns]
        if held:
            ends_ns.update(dict.fromkeys(held, now_ns + self.lease_ns))
            before: Slots = self.table.find(tag)
            self.table.put(tag, Slots(max(before.forget_ns, now_ns + self.lease_ns), ends_ns), self._touch)
        return len(held) == len(numbers)

    def marked(self, mark: Tag, tag: Tag, now_ns: int) -> frozenset[int]:
        """The permits that the latest request with an id holds; none if any of them has come back."""
        found = self.memory.table.find(mark)
        numbers: frozenset[int] = frozenset() if found is None else found[1]
        ends_ns = self.ends_ns(tag)
        return numbers if all(ends_ns.get(number, 0) > now_ns for number in numbers) else frozenset()

    def mark(self, mark: Tag, numbers: Iterable[int]) -> None:
        """Let an id lead to permits whose lease begins now, unless the store has no room for the mark."""
        now_ns = self.open_now_ns()
        algorithm, on_full = HeldMark(now_ns + self.lease_ns, frozenset(numbers)), self.store.on_full or "evict"
        self.memory.table.decide(mark, now_ns, algorithm, self._charge, on_full, self.counts)

    def take_once(self, mark: Tag, tag: Tag, cost: int, now_ns: int) -> tuple[Verdict, list[int] | None]:
        """``take`` for a request with an id: the permits of an earlier one move to it."""
        self.free(tag, self.marked(mark, tag, now_ns))
        verdict, taken = self.take(tag, cost, now_ns)
        if taken:
            self.mark(mark, taken)
        return verdict, taken

    def take_unleased(self, tag: Tag, cost: int, now_ns: int, mark: Tag | None = None) -> Verdict:
        """Take permits that come back by a refund."""
        verdict, taken = self.take(tag, cost, now_ns) if mark is None else self.take_once(mark, tag, cost, now_ns)
        if taken:
            held = self._unleased.setdefault(tag, [])
            held.extend((number, verdict.now_ns + self.lease_ns) for number in taken)
            self._trim(tag, verdict.now_ns)
            if len(self._unleased) >= SWEEP_AT_LEAST and len(self._unleased).bit_count() == 1:
                for other in list(self._unleased):
                    self._trim(other, verdict.now_ns)
        return verdict

    def _trim(self, tag: Tag, now_ns: int) -> None:
        """Forget the unleased permits whose lease has ended."""
        held = self._unleased.get(tag, [])
        # Oldest first.
        ended = next((place for place, (_, end_ns) in enumerate(held) if end_ns > now_ns), len(held))
        del held[:ended]
        if not held:
            self._unleased.pop(tag, None)

    def take_back(self, tag: Tag, cost: int) -> list[int]:
        """Up to `cost` of the unleased permits, the newest first, for a lease."""
        held = self._unleased.get(tag, [])
        taken = [held.pop()[0] for _ in range(min(cost, len(held)))]
        if not held:
            self._unleased.pop(tag, None)
        return taken

    def count(self, allowed: bool) -> None:
        if allowed:
            self.counts.allowed += 1
        else:
            self.counts.denied += 1

    def acquire(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> Lease:
        """Take `cost` permits of `key` if they are free now: a ``Lease``, which is true if they were.

        With a `request_id`, a request that is repeated with the same id and cost while its permits are held takes no
        others: they move to the new lease, and the lease of the earlier attempt has ended.

        Raises ``CostExceedsLimit``, ``InvalidCost``, ``InvalidKey``, ``StoreClosed``.
        """
        tag, permits = self.tag_of(key), self.checked_cost(cost)
        mark = self.mark_of(tag, permits, request_id)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            verdict, taken = (
                self.take(tag, permits, now_ns) if mark is None else self.take_once(mark, tag, permits, now_ns)
            )
            self.count(verdict.allowed)
            return object.__new__(Lease).begin(self, key, taken, verdict.full, mark)

    def mark_of(self, tag: Tag, permits: int, request_id: Key | None) -> Tag | None:
        """The tag of a request's mark; None if it needs none."""
        return None if request_id is None or permits == 0 else mark_tag(self, request_id, tag, permits)

    def hold(self, key: Key, cost: int = 1, timeout: Duration | None = None) -> holding.Hold[Lease]:
        """A context manager, with or without ``async``, that waits for `cost` permits and gives them back at the end.

        Entering raises ``LimitExceeded`` if they don't become free within `timeout`: text like ``"500 ms"``, seconds or
        a ``timedelta``. With None it waits until they are free.
        """
        return holding.Hold(self, lease_taken, key, cost, timeout)

    def limited(
        self, key: Key | Callable[..., Key], cost: int = 1, timeout: Duration | None = None
    ) -> Callable[[F], F]:
        """A decorator: each call of the function, or each run of the coroutine, holds `cost` permits.

        `key` is a key, or a callable that makes a key from the call's arguments.
        """
        return holding.limited(self, key, cost, timeout)

    def exceeded(self, key: Key) -> LimitExceeded:
        """The exception for a wait in which no permit of `key` became free in time."""
        return LimitExceeded(self.name, self.limit, self.peek(key).retry_after)

    def allow(self, key: Key, /) -> bool:
        """Take one permit of `key` and say whether it was free. It comes back by ``refund``, or as leases do."""
        tag = self.tag_of(key)
        with self.memory.lock:
            verdict = self.take_unleased(tag, 1, self.open_now_ns())
            self.count(verdict.allowed)
            return verdict.allowed

    def hit(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> Decision:
        """Take `cost` permits of `key` if they are free, and return the ``Decision``.

        ``retry_after`` is the time until enough leases end if no permit is given back before. `request_id` is that of
        ``acquire``: a ``refund`` with it gives the permits back.
        """
        permits, tag = self.checked_cost(cost), self.tag_of(key)
        if permits == 0:
            return self.peek(key, 0)
        mark = self.mark_of(tag, permits, request_id)
        with self.memory.lock:
            verdict = self.take_unleased(tag, permits, self.open_now_ns(), mark)
            self.count(verdict.allowed)
            return self.decision_by(verdict, permits)

    def decision_by(self, verdict: Verdict, cost: int) -> Decision:
        if verdict.full and not verdict.allowed:
            # The key has no state. The verdict's state is the time at which there will be room.
            wait_ns = verdict.state - verdict.now_ns
            outlook = Outlook(0, retry_after_ns=wait_ns, reset_after_ns=wait_ns)
            return decision_of(self.name, False, self.limit, outlook, full=True)
        return self.decision(verdict.tag, verdict.now_ns, cost, verdict.allowed, verdict.full)

    def peek(self, key: Key, cost: int = 1) -> Decision:
        """The decision that ``hit`` would return now. Takes nothing."""
        tag, permits = self.tag_of(key), self.checked_cost(cost)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            return self.decision(tag, now_ns, permits, None)

    def decision(self, tag: Tag, now_ns: int, cost: int, allowed: bool | None, full: bool = False) -> Decision:
        """The Decision for the current slots. With `allowed` None, it allows if `cost` permits are free."""
        ends_ns = sorted(end_ns for end_ns in list(self.ends_ns(tag).values()) if end_ns > now_ns)
        available = self.limit - len(ends_ns)
        if allowed is None:
            allowed = available >= cost
        outlook = Outlook(
            available,
            retry_after_ns=ends_ns[cost - available - 1] - now_ns if not allowed and cost > available else 0,
            reset_after_ns=ends_ns[-1] - now_ns if ends_ns else 0,
        )
        return decision_of(self.name, allowed, self.limit, outlook, full=full)

    def allow_many(self, keys: Iterable[Key], costs: Iterable[int] | None = None) -> list[bool]:
        """A list of bools, one per key, decided in order: ``allow`` for each. `costs` is an iterable of as many."""
        tags = [self.tag_of(key) for key in keys_of(keys)]
        permits = [self.checked_cost(cost) for cost in costs_of(costs, len(tags))]
        results = []
        with self.memory.lock:
            now_ns = self.open_now_ns()
            for tag, cost in zip(tags, permits, strict=True):
                results.append(cost == 0 or self.take_unleased(tag, cost, now_ns).allowed)
                if cost:
                    self.count(results[-1])
        return results

    def reserve(self, key: Key, cost: int = 1, max_delay: Duration | None = None) -> Reservation:
        """Take `cost` permits if they are free now: a ``Reservation`` with a delay of 0, whose ``cancel`` gives them
        back.

        Otherwise nothing is taken, and ``delay`` is the time until enough leases end if no permit is given back before.
        """
        permits, tag = self.checked_cost(cost), self.tag_of(key)
        longest_delay_ns(max_delay)
        if permits == 0:
            return reservation_of(True, self.store.now_ns(), 0, None, full=False)
        with self.memory.lock:
            verdict = self.take_unleased(tag, permits, self.open_now_ns())
            self.count(verdict.allowed)
            if verdict.allowed:
                undo = None if verdict.full else self.undo(key, permits, verdict)
                return reservation_of(True, verdict.now_ns, 0, undo, full=verdict.full)
            delay_ns = self.decision_by(verdict, permits).retry_after_ns
            return reservation_of(False, verdict.now_ns, delay_ns, None, full=verdict.full)

    def undo(self, key: Key, cost: int, verdict: Verdict) -> Callable[[], object]:
        """A function that gives back permits that were just taken."""

        def cancel() -> None:
            with self.memory.lock:
                self.give_back(verdict.tag, cost, self.open_now_ns(), verdict.now_ns + self.lease_ns)
            waiting.released(self, key)

        return cancel

    def refund(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> None:
        """Give back `cost` of the permits that ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process.

        If those are fewer, all of them. With a `request_id`, gives back the permits of the requests with this id and
        cost.
        """
        permits, tag = whole_cost(cost), self.tag_of(key)
        mark = self.mark_of(tag, permits, request_id)
        with self.memory.lock:
            now_ns = self.open_now_ns()
            if mark is not None:
                self.free(tag, self.marked(mark, tag, now_ns))
            elif request_id is None:
                self.give_back(tag, min(permits, self.limit), now_ns, None)
        waiting.released(self, key)

    def give_back(self, tag: Tag, cost: int, now_ns: int, until_ns: int | None) -> None:
        """Free unleased permits: those whose lease ends at `until_ns`, or any if that is None."""
        self._trim(tag, now_ns)
        if until_ns is not None:
            cost = self._free_unleased(tag, cost, until_ns)
        if until_ns is None or until_ns > now_ns:
            # A refund can't tell permits apart, and may have freed one of these instead of its own. Then free that one.
            self._free_unleased(tag, cost, None)

    def _free_unleased(self, tag: Tag, cost: int, until_ns: int | None) -> int:
        """Free up to `cost` of the unleased permits; return the number that is missing."""
        held = self._unleased.get(tag, [])
        place = 0
        # Oldest first: the permits that are left may last longer than necessary, but never shorter.
        while cost > 0 and place < len(held):
            number, end_ns = held[place]
            if until_ns not in (None, end_ns):
                place += 1
                continue
            del held[place]
            was_held = self.free(tag, [number])
            # A permit that a reset or the loss of the key's state took away doesn't count: the next one is freed.
            cost -= was_held or until_ns is not None
        if not held:
            self._unleased.pop(tag, None)
        return cost

    def reset(self, key: Key) -> None:
        """Free all permits of `key`, whichever process holds them."""
        tag = self.tag_of(key)
        with self.memory.lock:
            self.open_now_ns()
            self.free(tag, list(self.ends_ns(tag)))
        waiting.released(self, key)

    def attempt_for(self, key: Any, cost: Any) -> Attempt:
        attempt = Attempt()
        attempt.tag = self.tag_of(key)
        attempt.charge = Charge(self.checked_cost(cost), 0, self._charge.params)
        return attempt

    def check(self, attempt: Attempt, now_ns: int) -> bool:
        allowed = self.has_room(self.ends_ns(attempt.tag), attempt.charge.amount, now_ns)
        attempt.verdict = Verdict(attempt.tag, now_ns, None, allowed)
        return allowed

    def commit(self, attempt: Attempt, now_ns: int) -> bool:
        if attempt.charge.amount:
            attempt.verdict = self.take_unleased(attempt.tag, attempt.charge.amount, now_ns)
        return attempt.verdict.allowed

    def roll_back(self, attempt: Attempt, now_ns: int) -> None:
        # A request that was allowed because the table was full holds nothing.
        if attempt.charge.amount and not attempt.verdict.full:
            self.give_back(attempt.tag, attempt.charge.amount, now_ns, attempt.verdict.now_ns + self.lease_ns)

    def decision_on(self, attempt: Attempt) -> Decision:
        return self.decision_by(attempt.verdict, attempt.charge.amount)


def lease_taken(limiter: Concurrency, key: Key, cost: int) -> Lease:
    """A lease for the permits that a ``wait`` of this process has just taken."""
    tag, permits = limiter.tag_of(key), limiter.checked_cost(cost)
    with limiter.memory.lock:
        return object.__new__(Lease).begin(limiter, key, limiter.take_back(tag, permits), False)
