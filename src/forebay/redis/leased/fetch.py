"""The steps that fetch a lease for one request, and those that give back unused leases.

Sans-I/O: both executors (``leased/executor.py``) drive the steps.

A fetch is a single flight: a host has at most one fetch of a key under way, by the request that holds the key's fetch
slot. It borrows a batch for its own request. Other threads, tasks and processes of the host spend the permits that are
left. The top of core/leased.pyx has the proof.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from forebay.core.arguments import cost_of
from forebay.core.decision import Decision
from forebay.core.leased import BUSY, CLOSED, FETCH_SLOT_QUANTUM_NS, FULL, UNKNOWN_SIZE, Permits
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, ForeignState, StoreClosed, StoreUnavailable
from forebay.redis.commands import (
    Command,
)
from forebay.redis.leased.terms import OVERTAKEN, BucketTerms, Place, Terms, WindowTerms

__all__ = [
    "Holdings",
    "Outcome",
    "Steps",
    "alone",
    "borrowed",
    "cancelled",
    "charged",
    "is_alone",
    "peeked",
    "refunded",
    "reset",
    "shared",
]

T = TypeVar("T")
# A generator that yields commands, seconds to sleep and, in an event loop only, awaitables. The results of commands and
# awaitables are sent back to it.
Steps = Generator[Command[Any] | Awaitable[Any] | float, Any, T]

FIRST_PAUSE_S: Final = 0.000_05
LAST_PAUSE_S: Final = 0.001
# A request that has waited for longer while others fetched takes the next turn.
LONG_S: Final = 0.02
# How often within one lease the unused leases are checked.
CHECKS_PER_LEASE: Final = 4


class Outcome(NamedTuple):
    allowed: bool
    left: int = 0
    retry_ns: int = 0
    rest_ns: int = 0
    full: bool = False
    """Whether the host's store had no room for the key, and its `on_full` decided."""

    def decision(self, permits: Permits) -> Decision:
        return permits.decision(*self)


INSUFFICIENT: Final = Outcome(False)


@dataclass(slots=True)
class Holding:
    """A lease that this process has fetched."""

    permits: Permits
    tag: int
    place: Place
    end_ns: int
    window_us: int
    seen: int = -1
    """The permits that were left at the last check."""


class Holdings:
    """The leases that this process has fetched and that may have permits left."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.leases: dict[tuple[int, int], Holding] = {}
        self.closed = False
        """Whether their store is closed: a fetch that ends later gives back its lease itself."""
        # Reentrant, because a signal handler may fetch, too.
        self._lock = threading.RLock()

    def add(self, holding: Holding) -> None:
        if self.pid != os.getpid():
            # A forked child: the other leases are the parent's.
            self.pid, self.leases = os.getpid(), {}
        with self._lock:
            self.leases[id(holding.permits), holding.tag] = holding

    def unused(self, *, everything: bool = False) -> Iterator[Command[Any]]:
        """Commands that give back the leases that are unused since the last check or end soon; all with `everything`.

        The first command, if there is one, is a query. The generator takes permits out of a lease only after Redis has
        answered it: while Redis is unavailable, permits taken out would be lost, and the host could have spent them.
        """
        if self.pid != os.getpid():
            return
        has_queried = False
        for at, holding in self.leases.copy().items():
            permits, terms = holding.permits, holding.permits.terms
            left, end_ns, is_pending = permits.left(holding.tag)
            now_ns = permits.now_ns()
            # If another process has fetched since, its holdings have the lease.
            if left == 0 or end_ns != holding.end_ns:
                if not is_pending or now_ns >= holding.end_ns:
                    self._drop(at, holding)
                continue
            if everything or left == holding.seen or end_ns - now_ns < terms.lease_ns // CHECKS_PER_LEASE:
                if not has_queried:
                    yield terms.peek(holding.place, 1)
                    has_queried = True
                    # The state was read before the query: by now another lease may be there.
                    if permits.left(holding.tag)[1] != holding.end_ns:
                        continue
                withdrawn = permits.withdraw(holding.tag)
                if withdrawn:
                    self._drop(at, holding)
                    permits.shrink(holding.tag)
                    yield terms.give_back(holding.place, *withdrawn, holding.window_us)
            holding.seen = left

    def _drop(self, at: tuple[int, int], holding: Holding) -> None:
        """Forget `holding`, unless another thread has replaced it by a newer one."""
        with self._lock:
            if self.leases.get(at) is holding:
                self.leases.pop(at, None)


def alone(permits: Permits, key: Key, cost: int) -> Steps[Decision | None]:
    answer = yield from charged(permits, key, cost)
    return answer and answer.decision(permits)


def shared(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Decision]:
    return (yield from borrowed(permits, holdings, key, cost)).decision(permits)


def is_alone(permits: Permits, cost: int) -> bool:
    """Whether a request needs at least as much as the host may have on loan, so that no other request can share it."""
    terms: Terms = permits.terms
    return bool(cost >= terms.most_on_loan)


def charged(permits: Permits, key: Key, cost: int) -> Steps[Outcome | None]:
    """Charge a request at Redis, without borrowing.

    None if the reply came too late to be used, or if Redis denied it and this host has permits on loan, which may
    suffice together with what Redis has.
    """
    terms: Terms = permits.terms
    sent_ns = permits.now_ns()
    granted = yield terms.charge(terms.place(key), cost)
    terms.count_fetch()
    tag = permits.tag(key)
    left, _, _ = permits.left(tag)
    if granted.permits:
        rest_ns = sent_ns + granted.left_ns - permits.now_ns()
        if rest_ns <= 0:
            return None
        permits.count_allowed()
        return Outcome(True, left, 0, rest_ns)
    if left:
        return None
    now_ns = permits.now_ns()
    closed_until_ns = closing_ns(now_ns + granted.retry_ns)
    _, _, seen, size = permits.enter(tag, cost)
    if seen:
        permits.leave(tag, seen, size, closed_until_ns, cost)
    return denied(permits, tag, closed_until_ns - now_ns)


def patience_s(terms: Terms) -> float:
    """The time that a request waits for other fetches: within it, two fetches, one after the other, must have ended."""
    return 2 * (terms.fetch_deadline_ns + 2 * FETCH_SLOT_QUANTUM_NS) / 1e9


def borrowed(permits: Permits, holdings: Holdings, key: Key, cost: int) -> Steps[Outcome]:
    """Decide a request by the lease, and borrow what it lacks."""
    terms: Terms = permits.terms
    tag = permits.tag(key)
    since_s = time.monotonic()
    pause_s = FIRST_PAUSE_S
    busy_until_ns = 0
    were_others_let_in = False
    # Whether Redis has answered a fetch of any process meanwhile.
    has_brought = False
    while True:
        has_waited = were_others_let_in and time.monotonic() - since_s > LONG_S
        slot, until_ns, seen, size = permits.enter(tag, cost, has_waited)
        if slot == FULL and until_ns == 0:
            return without_room(permits, tag, 0)
        if slot in (CLOSED, FULL):
            retry_ns = until_ns - permits.now_ns()
            if retry_ns > 0:
                return denied(permits, tag, retry_ns) if slot == CLOSED else without_room(permits, tag, retry_ns)
            continue
        if slot == BUSY:
            busy_until_ns = busy_until_ns or until_ns
            if until_ns != busy_until_ns:
                were_others_let_in = True
                has_brought |= size != UNKNOWN_SIZE
            yield pause_s
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        else:
            answer = yield from fetched(permits, holdings, key, tag, cost, seen, size, until_ns)
            if holdings.closed:
                yield from given_back(holdings)
            if answer is INSUFFICIENT:
                has_brought = True
            elif answer:
                return answer
        if permits.take(tag, cost):
            return allowed(permits, tag)
        if time.monotonic() - since_s > patience_s(terms):
            return timed_out(permits, tag, has_brought)


def given_back(holdings: Holdings) -> Steps[None]:
    """Give back the leases that a fetch has brought after its store was closed: the store gives back no more."""
    with contextlib.suppress(ForebayError):
        for command in holdings.unused(everything=True):
            with contextlib.suppress(ForeignState):
                yield command


def timed_out(permits: Permits, tag: int, has_brought: bool) -> Outcome:
    """The outcome of a request that has waited for other fetches for ``patience_s``."""
    if has_brought:
        # Redis works; other requests were faster.
        return denied(permits, tag, FETCH_SLOT_QUANTUM_NS)
    raise StoreUnavailable(
        f"{permits!r} has not decided: within {patience_s(permits.terms):.3g} s no fetch by another worker of this "
        "host has had a reply from Redis"
    )


def fetched(
    permits: Permits, holdings: Holdings, key: Key, tag: int, cost: int, seen: int, size: int, open_ns: int
) -> Steps[Outcome | None]:
    """Fetch a lease from Redis; the caller holds the fetch slot, which was open since `open_ns`.

    None if the reply could not be used; INSUFFICIENT if it could, but other requests have spent it.
    """
    terms: Terms = permits.terms
    generation, closed_until_ns, closed_for, dropped = None, 0, 0, 0
    try:
        if permits.take(tag, cost):
            return allowed(permits, tag)
        begun = permits.begin(tag)
        if begun is None:
            return without_room(permits, tag, 0 if terms.on_full == "allow" else terms.pause_ns)
        generation, now_ns, stamp_us, left, unspent, was_end_ns = begun
        wanted_size = (
            0 if size == UNKNOWN_SIZE else next_size(terms, size, left, unspent, was_end_ns - now_ns, now_ns - open_ns)
        )
        # Other requests may spend what is left, so `want` by itself covers the whole cost. `need` is what is missing.
        need = max(cost - max(left, 0), 1)
        want = max(cost, min(1 << wanted_size, terms.most_on_loan) - max(left, 0))
        place = terms.place(key)
        # If this reply is lost, its grant is lost. So until a reply comes, no fetch borrows more than it needs.
        size = UNKNOWN_SIZE
        granted = yield terms.borrow(place, stamp_us, left, unspent, need, want)
        dropped = granted.dropped
        terms.count_fetch()
        if granted.status == OVERTAKEN:
            return None
        if granted.permits == 0:
            size = wanted_size
            now_ns = permits.now_ns()
            closed_until_ns, closed_for = closing_ns(now_ns + granted.retry_ns), cost
            return denied(permits, tag, closed_until_ns - now_ns)
        if granted.permits < want:
            closed_until_ns, closed_for = closing_ns(permits.now_ns() + max(granted.retry_ns, terms.pause_ns)), 1
        end_ns = now_ns + granted.left_ns
        if not permits.holds(tag, seen):
            # Another fetch holds the slot, and the pending state may be its own.
            generation = None
            return None
        deposited, served = permits.deposit(tag, generation, granted.permits, end_ns, cost, dropped)
        if not deposited:
            return None
        generation, size = None, wanted_size
        left, end_ns, _ = permits.left(tag)
        if left:
            holdings.add(Holding(permits, tag, place, end_ns, granted.window_us))
        return allowed(permits, tag) if served else INSUFFICIENT
    finally:
        with contextlib.suppress(StoreClosed):
            if generation is not None:
                permits.abort(tag, generation, dropped)
            permits.leave(tag, seen, size, closed_until_ns, closed_for)


def closing_ns(until_ns: int) -> int:
    """Round up to the resolution of a fetch slot."""
    return (until_ns // FETCH_SLOT_QUANTUM_NS + 1) * FETCH_SLOT_QUANTUM_NS


def next_size(terms: Terms, size: int, left: int, unspent: int, rest_ns: int, since_ns: int) -> int:
    """The size of the next loan, as a power of two: larger if the last was used up early, smaller if it was unused.

    The last fetch ended `since_ns` ago.
    """
    if left < 0:
        return size
    if rest_ns > terms.early_ns:
        # Permits that no request takes for so long are given back.
        is_busy = since_ns < terms.lease_ns // CHECKS_PER_LEASE << size
        return size + 1 if is_busy and 1 << size < terms.most_on_loan else size
    return max(size - 1, 0) if unspent > 1 << size >> 1 else size


def allowed(permits: Permits, tag: int) -> Outcome:
    left, end_ns, _ = permits.left(tag)
    return Outcome(True, left, 0, max(end_ns - permits.now_ns(), 0))


def denied(permits: Permits, tag: int, retry_ns: int) -> Outcome:
    permits.count_denied(tag)
    return Outcome(False, permits.left(tag)[0], retry_ns, retry_ns)


def without_room(permits: Permits, tag: int, retry_ns: int) -> Outcome:
    """The outcome of a request for whose key the host's store has no room: denied for `retry_ns`, or allowed if 0."""
    if retry_ns:
        permits.count_denied(tag)
    else:
        permits.count_allowed()
    return Outcome(not retry_ns, 0, retry_ns, retry_ns, full=True)


def peeked(permits: Permits, key: Key, cost: int) -> Steps[Decision]:
    """The decision that a request would get. Queries Redis only if the lease doesn't suffice."""
    cost = permits.checked(cost)
    left, end_ns, _ = permits.left(permits.tag(key))
    if left >= cost > 0:
        return permits.decision(True, left, 0, max(end_ns - permits.now_ns(), 0))
    free, retry_ns = yield permits.terms.peek(permits.terms.place(key), cost - left if cost else 0)
    is_allowed = left + free >= cost
    return permits.decision(is_allowed, left + free, 0 if is_allowed else retry_ns, retry_ns)


def refunded(permits: Permits, key: Key, cost: int) -> Steps[None]:
    """Refund in Redis: permits added to the lease would exceed the loan that Redis has recorded."""
    cost = min(cost_of(cost), permits.terms.limit)
    if isinstance(permits.terms, WindowTerms):
        yield from permits.terms.refund(key, cost)
        forgive(permits, key)
    else:
        yield from reported(permits, key, cost)


def cancelled(permits: Permits, key: Key, cost: int, since_ns: int) -> Steps[None]:
    """Give back a charge that this process has made after `since_ns`.

    A token bucket takes back only as much as may still be missing of it: the rest has been refilled.

    A window takes it back only if it had begun by then. Otherwise the charge may have been made in the window before,
    and the current one would admit more than its limit. A window's end by this host's clock is at most as long after
    the reply as Redis says, so the current window is never taken for an older one.
    """
    if isinstance(permits.terms, BucketTerms):
        undone = min(cost, permits.terms.still_missing(permits.now_ns() - since_ns))
        if undone:
            yield from reported(permits, key, undone)
        return
    terms: WindowTerms = permits.terms
    place = terms.place(key)
    # A borrow of nothing charges nothing.
    seen = yield terms.borrow(place, 0, 0, 0, 0, 0)
    if since_ns >= permits.now_ns() + seen.left_ns - terms.period_ns:
        yield terms.give_back(place, 0, cost, seen.window_us)
        forgive(permits, key)


def reported(permits: Permits, key: Key, undone: int) -> Steps[None]:
    """Refund permits of a token bucket. Reports how many are left, as Redis counts the rest of the loan as spent."""
    terms: BucketTerms = permits.terms
    tag = permits.tag(key)
    since_s = time.monotonic()
    slot, until_ns, seen, size = permits.enter(tag, 0)
    busy_until_ns = until_ns
    # A refund takes the fetch slot, as a fetch does. If it has waited for two fetches, it goes on without the slot.
    while slot == BUSY and (waited_s := time.monotonic() - since_s) < patience_s(terms):
        yield LAST_PAUSE_S
        were_others_let_in = until_ns != busy_until_ns
        slot, until_ns, seen, size = permits.enter(tag, 0, were_others_let_in and waited_s > LONG_S)
    generation, dropped = None, 0
    try:
        begun = permits.begin(tag)
        generation, _, stamp_us, left, unspent, _ = begun or (None, 0, 0, -1, 0, 0)
        granted = yield terms.refund(terms.place(key), stamp_us, left, unspent, undone)
        dropped = granted.dropped
    finally:
        with contextlib.suppress(StoreClosed):
            if generation is not None:
                permits.abort(tag, generation, dropped)
            if seen:
                permits.leave(tag, seen, size)


def reset(permits: Permits, key: Key) -> Steps[None]:
    yield from permits.terms.reset(key)
    permits.forget(permits.tag(key))


def forgive(permits: Permits, key: Key) -> None:
    """Forget a denial that the fetch slot remembers."""
    tag = permits.tag(key)
    _, _, seen, size = permits.enter(tag, 0)
    if seen:
        permits.leave(tag, seen, size)
