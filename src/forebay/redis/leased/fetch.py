"""Borrowing for one request, and giving back what nobody uses: which steps there are, whoever takes them, and however.

What is safe about them is argued at the top of core/leased.pyx.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from forebay.core.decision import Decision
from forebay.core.leased import BUSY, CLOSED, FETCH_SLOT_QUANTUM_NS, LOST, Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, ForeignState, StoreClosed, StoreUnavailable
from forebay.redis.commands import Command, whole_cost
from forebay.redis.leased.terms import OVERTAKEN, BucketTerms, Place, Terms, WindowTerms

__all__ = [
    "Answer",
    "Holdings",
    "Steps",
    "admitted",
    "alone",
    "answered",
    "borrowed",
    "decided",
    "is_alone",
    "looked",
    "refunded",
    "reset",
    "shared",
]

T = TypeVar("T")
# Calls to Redis, whose answers are sent back, and seconds to sleep.
Steps = Generator[Command[Any] | float, Any, T]

FIRST_PAUSE_S: Final = 0.000_05
LAST_PAUSE_S: Final = 0.001
# Who has waited for longer, while others were let in, is next.
LONG_S: Final = 0.02
# Of a lease: so often it is looked at what isn't used.
LOOKS: Final = 4


class Answer(NamedTuple):
    allowed: bool
    left: int = 0
    retry_ns: int = 0
    rest_ns: int = 0

    def decision(self, permits: Permits) -> Decision:
        return permits.decision(*self)


INSUFFICIENT: Final = Answer(False)


@dataclass(slots=True)
class Holding:
    """A lease that this process has fetched."""

    permits: Permits
    tag: int
    place: Place
    end_ns: int
    window_us: int
    seen: int = -1
    """The permits that were left when it was looked at."""


class Holdings:
    """The leases that this process has fetched and that may have something left."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.leases: dict[tuple[int, int], Holding] = {}
        self.closed = False
        """Whether their store gives back no more: what is fetched from then on, whoever has fetched it does."""

    def add(self, holding: Holding) -> None:
        if self.pid != os.getpid():
            # The others are the parent's.
            self.pid, self.leases = os.getpid(), {}
        self.leases[id(holding.permits), holding.tag] = holding

    def unused(self, *, everything: bool = False) -> Iterator[Command[Any]]:
        """What gives back leases of which nothing was used since the last look, or that end soon; all, at the end.

        First a question, if there is anything: nothing is taken out of a lease before Redis has answered it. What can't
        be given back then would be lost, and the host's to spend while Redis is away.
        """
        if self.pid != os.getpid():
            return
        has_asked = False
        for at, holding in list(self.leases.items()):
            permits, terms = holding.permits, holding.permits.terms
            left, end_ns, is_pending = permits.left(holding.tag)
            now_ns = permits.now_ns()
            # What another process has fetched meanwhile is that one's to give back.
            if left == 0 or end_ns != holding.end_ns:
                if not is_pending or now_ns >= holding.end_ns:
                    self._drop(at, holding)
                continue
            if everything or left == holding.seen or end_ns - now_ns < terms.lease_ns // LOOKS:
                if not has_asked:
                    yield terms.peek(holding.place, 1)
                    has_asked = True
                    # What was seen is as old as the question: by now another lease may be there.
                    if permits.left(holding.tag)[1] != holding.end_ns:
                        continue
                withdrawn = permits.withdraw(holding.tag)
                if withdrawn:
                    self._drop(at, holding)
                    permits.shrink(holding.tag)
                    yield terms.give_back(holding.place, *withdrawn, holding.window_us)
            holding.seen = left

    def _drop(self, at: tuple[int, int], holding: Holding) -> None:
        """But not one that another thread has fetched since."""
        if self.leases.get(at) is holding:
            self.leases.pop(at, None)


def admitted(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[bool]:
    return (yield from answered(permits, holdings, key, cost)).allowed


def decided(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Decision]:
    return (yield from answered(permits, holdings, key, cost)).decision(permits)


def alone(permits: Permits, key: Key, cost: int) -> Steps[Decision | None]:
    answer = yield from charged(permits, key, cost)
    return answer and answer.decision(permits)


def shared(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Decision]:
    return (yield from borrowed(permits, holdings, key, cost)).decision(permits)


def answered(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Answer]:
    """Decide a request for which the lease doesn't suffice."""
    answer = (yield from charged(permits, key, cost)) if is_alone(permits, cost) else None
    return answer or (yield from borrowed(permits, holdings, key, cost))


def is_alone(permits: Permits, cost: int) -> bool:
    """Whether a request would borrow for itself only, so that it needn't wait for others, nor they for it."""
    terms: Terms = permits.terms
    return bool(cost >= terms.most_on_loan)


def charged(permits: Permits, key: Key, cost: int) -> Steps[Answer | None]:
    """Charge a request at Redis, beside all who borrow. None if the answer came too late to be used, or if it was a
    denial and what this host has on loan may suffice besides."""
    terms: Terms = permits.terms
    asked_ns = permits.now_ns()
    granted = yield terms.charge(terms.place(key), cost)
    tag = permits.tag(key)
    left, _, _ = permits.left(tag)
    if granted.permits:
        rest_ns = asked_ns + granted.left_ns - permits.now_ns()
        if rest_ns <= 0:
            return None
        permits.count_allowed()
        return Answer(True, left, 0, rest_ns)
    if left:
        return None
    now_ns = permits.now_ns()
    closed_until_ns = closing_ns(now_ns + granted.retry_ns)
    _, _, seen, size = permits.enter(tag, cost)
    if seen:
        permits.leave(tag, seen, size, closed_until_ns, cost)
    return denied(permits, tag, closed_until_ns - now_ns)


def patience_s(terms: Terms) -> float:
    """How long to wait for others. Who finds somebody at the gate waits until that one must have ended, and then until
    the next one must have, who may be served first."""
    return 2 * (terms.deadline_ns + 2 * FETCH_SLOT_QUANTUM_NS) / 1e9


def borrowed(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Answer]:
    """Decide a request by the lease, and borrow what it lacks."""
    terms: Terms = permits.terms
    tag = permits.tag(key)
    since_s = time.monotonic()
    pause_s = FIRST_PAUSE_S
    busy_until_ns = 0
    were_others_let_in = False
    # Whether an answer of Redis came meanwhile, to anybody.
    has_brought = False
    while True:
        has_waited = were_others_let_in and time.monotonic() - since_s > LONG_S
        gate, until_ns, seen, size = permits.enter(tag, cost, has_waited)
        if gate == CLOSED:
            if until_ns == 0:
                return Answer(True)
            retry_ns = until_ns - permits.now_ns()
            if retry_ns > 0:
                return denied(permits, tag, retry_ns)
            continue
        if gate == BUSY:
            busy_until_ns = busy_until_ns or until_ns
            if until_ns != busy_until_ns:
                were_others_let_in = True
                has_brought |= size != LOST
            yield pause_s
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        else:
            answer = yield from fetched(permits, holdings, key, tag, cost, seen, size)
            if holdings.closed:
                yield from given_back(holdings)
            if answer is INSUFFICIENT:
                has_brought = True
            elif answer:
                return answer
        if permits.take(tag, cost):
            return allowed(permits, tag)
        if time.monotonic() - since_s > patience_s(terms):
            return late(permits, tag, has_brought)


def given_back(holdings: Holdings) -> Steps[None]:
    """By a fetch whose answer came after its store was closed: nobody else will."""
    with contextlib.suppress(ForebayError):
        for command in holdings.unused(everything=True):
            with contextlib.suppress(ForeignState):
                yield command


def late(permits: Permits, tag: int, has_brought: bool) -> Answer:
    """Of a request that has waited for others for as long as it may."""
    if has_brought:
        # Redis is well, and others were faster.
        return denied(permits, tag, FETCH_SLOT_QUANTUM_NS)
    raise StoreUnavailable(
        f"{permits!r} has not decided: within {patience_s(permits.terms):.3g} s other workers of this host, which were "
        "asking Redis, have brought nothing"
    )


def fetched(
    permits: Permits, holdings: Holdings, key: Key, tag: int, cost: int, seen: int, size: int
) -> Steps[Answer | None]:
    """Fetch a lease from Redis; the caller holds the fetch slot.

    None if the reply could not be used; INSUFFICIENT if it could, but other requests have spent it.
    """
    terms: Terms = permits.terms
    ticket, closed_until_ns, closed_for, dropped = None, 0, 0, 0
    try:
        if permits.take(tag, cost):
            return allowed(permits, tag)
        begun = permits.begin(tag)
        if begun is None:
            return Answer(True) if terms.on_full == "allow" else denied(permits, tag, terms.pause_ns)
        ticket, now_ns, asked_us, left, unspent, was_end_ns = begun
        asked_size = 0 if size == LOST else next_size(terms, size, left, unspent, was_end_ns - now_ns)
        # As much as serves the request alone, as others spend what is left; if there isn't so much, what is missing.
        need = max(cost - max(left, 0), 1)
        want = max(cost, min(1 << asked_size, terms.most_on_loan) - max(left, 0))
        place = terms.place(key)
        # What is granted now is lost with its answer; so ask for no more than is needed until one comes.
        size = LOST
        granted = yield terms.borrow(place, asked_us, left, unspent, need, want)
        dropped = granted.dropped
        if granted.status == OVERTAKEN:
            return None
        if granted.permits == 0:
            size = asked_size
            now_ns = permits.now_ns()
            closed_until_ns, closed_for = closing_ns(now_ns + granted.retry_ns), cost
            return denied(permits, tag, closed_until_ns - now_ns)
        if granted.permits < want:
            closed_until_ns, closed_for = closing_ns(permits.now_ns() + max(granted.retry_ns, terms.pause_ns)), 1
        end_ns = now_ns + granted.left_ns
        if not permits.holds(tag, seen):
            # Somebody else's turn: what is pending may be that one's.
            ticket = None
            return None
        deposited, served = permits.deposit(tag, ticket, granted.permits, end_ns, cost, dropped)
        if not deposited:
            return None
        ticket, size = None, asked_size
        left, end_ns, _ = permits.left(tag)
        if left:
            holdings.add(Holding(permits, tag, place, end_ns, granted.window_us))
        return allowed(permits, tag) if served else INSUFFICIENT
    finally:
        with contextlib.suppress(StoreClosed):
            if ticket is not None:
                permits.abort(tag, ticket, dropped)
            permits.leave(tag, seen, size, closed_until_ns, closed_for)


def closing_ns(until_ns: int) -> int:
    """Rounded up, as a gate knows it."""
    return (until_ns // FETCH_SLOT_QUANTUM_NS + 1) * FETCH_SLOT_QUANTUM_NS


def next_size(terms: Terms, size: int, left: int, unspent: int, rest_ns: int) -> int:
    """Of what is borrowed at a time, as a power of two: more if it was used up early, less if it wasn't used."""
    if left < 0:
        return size
    if rest_ns > terms.early_ns:
        return size + 1 if 1 << size < terms.most_on_loan else size
    return max(size - 1, 0) if unspent > 1 << size >> 1 else size


def allowed(permits: Permits, tag: int) -> Answer:
    left, end_ns, _ = permits.left(tag)
    return Answer(True, left, 0, max(end_ns - permits.now_ns(), 0))


def denied(permits: Permits, tag: int, retry_ns: int) -> Answer:
    permits.count_denied()
    return Answer(False, permits.left(tag)[0], retry_ns, retry_ns)


def looked(permits: Permits, key: Key, cost: int) -> Steps[Decision]:
    """What a request would be told. What Redis has besides the lease is asked only if the lease doesn't suffice."""
    cost = permits.checked(cost)
    left, end_ns, _ = permits.left(permits.tag(key))
    if left >= cost > 0:
        return permits.decision(True, left, 0, max(end_ns - permits.now_ns(), 0))
    free, retry_ns = yield permits.terms.peek(permits.terms.place(key), cost - left if cost else 0)
    is_allowed = left + free >= cost
    return permits.decision(is_allowed, left + free, 0 if is_allowed else retry_ns, retry_ns)


def refunded(permits: Permits, key: Key, cost: int) -> Steps[None]:
    """In Redis, as what is back in the lease would be more than Redis knows to be on loan."""
    cost = min(whole_cost(cost), permits.terms.limit)
    if isinstance(permits.terms, WindowTerms):
        yield from permits.terms.refund(key, cost)
        forgive(permits, key)
    else:
        yield from reported(permits, key, cost)


def reported(permits: Permits, key: Key, undone: int) -> Steps[None]:
    """Give back what was spent. Redis is told how many permits are left, as it takes the rest for spent."""
    terms: BucketTerms = permits.terms
    tag = permits.tag(key)
    since_s = time.monotonic()
    gate, until_ns, seen, size = permits.enter(tag, 0)
    busy_until_ns = until_ns
    # In turn, as who borrows; whoever has outlasted two that ask goes on beside them.
    while gate == BUSY and (waited_s := time.monotonic() - since_s) < patience_s(terms):
        yield LAST_PAUSE_S
        were_others_let_in = until_ns != busy_until_ns
        gate, until_ns, seen, size = permits.enter(tag, 0, were_others_let_in and waited_s > LONG_S)
    ticket, dropped = None, 0
    try:
        begun = permits.begin(tag)
        ticket, _, asked_us, left, unspent, _ = begun or (None, 0, 0, -1, 0, 0)
        granted = yield terms.refund(terms.place(key), asked_us, left, unspent, undone)
        dropped = granted.dropped
    finally:
        with contextlib.suppress(StoreClosed):
            if ticket is not None:
                permits.abort(tag, ticket, dropped)
            if seen:
                permits.leave(tag, seen, size)


def reset(permits: Permits, key: Key) -> Steps[None]:
    yield from permits.terms.reset(key)
    permits.forget(permits.tag(key))


def forgive(permits: Permits, key: Key) -> None:
    """Forget a denial."""
    tag = permits.tag(key)
    _, _, seen, size = permits.enter(tag, 0)
    if seen:
        permits.leave(tag, seen, size)
