"""The end of a request: its leases are released, and its reservations are charged or refunded.

A `RequestCleanup` lists what one request holds. In an event loop a `BackgroundRelease` awaits the calls to Redis, and a
`LeaseRenewal` renews the leases while the handler runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Final

from forebay.core.algorithms.concurrency import Concurrency, Lease
from forebay.core.reservation import Reservation
from forebay.errors import StoreClosed, StoreUnavailable
from forebay.rate import NS
from forebay.shedding.shedder import Admission, Outcome
from forebay.web.renewals import Renewals
from forebay.web.rules import DISCONNECTED, Rule
from forebay.web.store_errors import STORE_ERRORS
from forebay.web.turns import Turn, sleep_until_due, sleep_until_due_async

if TYPE_CHECKING:
    from forebay.redis.transport.deadline import Patience

__all__ = ["BackgroundRelease", "LeaseRenewal", "RequestCleanup"]


DROPPED: Final = frozenset({503, 504})
"""Responses of a handler whose backend refuses a request, or doesn't answer in time."""
_log: Final = logging.getLogger("forebay.web")
# An event loop holds its tasks by weak references only.
_tasks: Final[set[asyncio.Task[None]]] = set()


class BackgroundRelease:
    """Awaits the releases of one request in tasks of the running event loop, also if the request is cancelled.

    If the store is unavailable, leases expire and reservations stay charged; the response is unchanged. The response
    waits for the releases until the request's `patience` is used up; None means without a bound.
    """

    __slots__ = ("_loop", "_patience", "_tasks")

    def __init__(self, patience: Patience | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience = patience
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Start `work` from any thread: frameworks close responses in threads."""
        try:
            is_in_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_in_loop = False
        if is_in_loop:
            self._start(work)
            return
        try:
            self._loop.call_soon_threadsafe(self._start, work)
        except RuntimeError:
            # The loop is closed: the leases expire.
            work.close()

    def _start(self, work: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(_run(work))
        for tasks in (self._tasks, _tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def wait(self) -> None:
        """Return when all started work is done, or when the patience is used up: the work then goes on."""
        if self._tasks and (self._patience is None or self._patience.left_s > 0):
            since_s = self._loop.time()
            await asyncio.wait(self._tasks, timeout=None if self._patience is None else self._patience.left_s)
            if self._patience is not None:
                self._patience.left_s -= self._loop.time() - since_s


async def _run(work: Coroutine[Any, Any, object]) -> None:
    with _store_may_fail():
        await work


@contextlib.contextmanager
def _store_may_fail() -> Generator[None]:
    """Within the block permits come back. If they can't, the response is unchanged."""
    try:
        with contextlib.suppress(StoreUnavailable, StoreClosed):
            yield
    except STORE_ERRORS as error:
        _log.warning("a request's permits were not released: %s", error)


class RequestCleanup:
    """The leases and the reservations of one request.

    Call `begin` when the response starts and `end` before its last part is sent, both with the status. If the store is
    unavailable, leases expire and reservations stay charged; the response is unchanged.
    """

    __slots__ = (
        "_remote_batch",
        "admissions",
        "background",
        "ended_status",
        "full_patience_s",
        "has_remote_lease",
        "leases",
        "patience",
        "renew_after_s",
        "renew_at_s",
        "reserved",
        "turns",
    )

    def __init__(self, patience: Patience | None = None, background: BackgroundRelease | None = None) -> None:
        self.patience = patience
        """How long the request still waits for Redis, in all its calls."""
        self.full_patience_s = 0.0 if patience is None else patience.left_s
        self.background = background
        """Awaits the releases, where they have to be awaited."""
        self.leases: list[Lease] = []
        self.reserved: list[tuple[Rule, Reservation]] = []
        """Reservations that are charged or refunded when the response ends."""
        self.admissions: list[Admission] = []
        """By which shedders count the request."""
        self.turns: list[Turn] = []
        """The turns that the request waits for before it is handled."""
        self.ended_status: int | None = None
        self.renew_after_s = 0.0
        self.renew_at_s = 0.0
        self.has_remote_lease = False
        self._remote_batch: list[Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.leases or self.reserved or self.turns or self.admissions)

    @property
    def has_renewals(self) -> bool:
        """Whether something is held that ends unless it is renewed."""
        return bool(self.leases or self.admissions)

    def wait_turn(self, others: Renewals | None = None) -> None:
        """Wait in this thread until the request may be handled. Call it before the handler of an admitted request.

        Its leases are renewed meanwhile, and those of the `others`, which the request holds already.
        """
        if self.turns:
            with self._rolled_back_unless_due():
                sleep_until_due(self.turns, (others or Renewals()).beside(self))

    async def wait_turn_async(self) -> None:
        """As ``wait_turn``, for a task. The event loop renews the leases of other cleanups."""
        if self.turns:
            with self._rolled_back_unless_due():
                await sleep_until_due_async(self.turns, Renewals([self]))

    @contextlib.contextmanager
    def _rolled_back_unless_due(self) -> Generator[None]:
        """Within the block, wait for the turns. If that is cancelled or interrupted, they come back."""
        try:
            yield
        except BaseException:
            self.roll_back()
            raise
        self.end_turns()
        self.begin_work()

    def begin_work(self) -> None:
        """The request has waited until now: for the shedders its latency counts from here."""
        for admission in self.admissions:
            admission.begin()

    def end_turns(self) -> list[Turn]:
        """The request is no longer held back. Returns the turns that it had."""
        turns, self.turns = self.turns, []
        for turn in turns:
            turn.end()
        return turns

    def merge(self, other: RequestCleanup) -> None:
        """Add what another gate took for the same request.

        The request may have ended already, or end now, while its view still runs in a thread: then `other` ends at
        once.
        """
        if self.ended_status is None:
            self.background = self.background or other.background
            self.patience = self.patience or other.patience
            self.full_patience_s = max(self.full_patience_s, other.full_patience_s)
            if self.patience is not None and other.patience is not None:
                self.patience.left_s = min(self.patience.left_s, other.patience.left_s)
            self.reserved += other.reserved
            self.leases += other.leases
            self.admissions += other.admissions
            self.has_remote_lease = self.has_remote_lease or other.has_remote_lease
            self.renew_after_s = min(other.renew_after_s or math.inf, self.renew_after_s or math.inf)
            self.renew_at_s = min(other.renew_at_s or math.inf, self.renew_at_s or math.inf)
        # Looked at last: an `end` of another thread has missed what was added since. What both give back comes back
        # once.
        if self.ended_status is not None:
            other.end(self.ended_status)

    def hold(self, rule: Rule, lease: Lease) -> None:
        self.leases.append(lease)
        limiter: Any = rule.limiter
        self.has_remote_lease = self.has_remote_lease or not isinstance(limiter, Concurrency)
        self._renew_within(limiter.lease_ns)

    def count(self, admission: Admission, lease_ns: int) -> None:
        """The request counts for a shedder until it ends."""
        self.admissions.append(admission)
        self._renew_within(lease_ns)

    def _renew_within(self, lease_ns: int) -> None:
        self.renew_after_s = min(lease_ns / NS / 3, self.renew_after_s or math.inf)
        self.renew_at_s = time.monotonic() + self.renew_after_s

    def renew(self) -> None:
        for lease in self.leases:
            self._call(lease.renew)
        for admission in self.admissions:
            self._call(admission.renew)

    def renew_if_due(self) -> None:
        """Renew the leases where no timer does: with each part of a response, for example.

        Leases in Redis are renewed only after a third of their length.
        """
        if self.has_renewals and (not self.has_remote_lease or time.monotonic() >= self.renew_at_s):
            self.renew()
            self.renew_at_s = time.monotonic() + self.renew_after_s

    def begin(self, status: int) -> None:
        """The response starts: refund what is not charged however it ends, before the client can ask again.

        If Redis is slow, `end` refunds together with its release of the leases.
        """
        if self._is_redis_slow():
            return
        with self._one_round_trip():
            for pair in list(self.reserved):
                rule, reservation = pair
                # An async charge_on is awaited at the end only.
                is_decided = not rule.awaits_charge_on and not rule.stays_charged(DISCONNECTED)
                if is_decided and not rule.stays_charged(status):
                    self.reserved.remove(pair)
                    self.release(reservation)

    def end(self, status: int) -> None:
        """Release the leases, and refund what a response of `status` is not charged. A second call does nothing."""
        if self.ended_status is None:
            self.ended_status = status
        reserved, self.reserved = self.reserved, []
        leases, self.leases = self.leases, []
        admissions, self.admissions = self.admissions, []
        for admission in admissions:
            self._call(admission.end, _outcome_of(status))
        with self._one_round_trip(), contextlib.ExitStack() as stack:
            # Each of them, also if another one fails.
            for lease in leases:
                stack.callback(self.release, lease)
            for rule, reservation in reserved:
                stack.callback(self._settle, rule, reservation, status)

    def roll_back(self) -> None:
        """Release and refund everything: the request is denied, or admission failed."""
        turns = self.end_turns()
        reserved, self.reserved = self.reserved, []
        with self._one_round_trip():
            for turn in turns:
                self._call(turn.cancel)
            for _, reservation in reserved:
                self.release(reservation)
            self.end(0)

    def release(self, taken: Any) -> None:
        """Release a lease, or refund a reservation."""
        if self._remote_batch is not None and hasattr(taken, "give_back_flow"):
            self._remote_batch.append(taken)
        else:
            self._call(taken.release if isinstance(taken, Lease) else taken.cancel)

    async def wait(self) -> None:
        """Wait until the event loop has released what was given to it, or the patience is used up."""
        if self.background is not None:
            await self.background.wait()

    def _is_redis_slow(self) -> bool:
        """Whether a refund now could prevent the release of the leases.

        It times out if it takes as long as the admission did, and a call that times out closes its connection. The
        release would have no time left to open another one, so the permits would be held until the leases expire. Where
        a release runs in the background it has its own time.
        """
        if not self.leases or self.background is not None or self.patience is None:
            return False
        return self.patience.left_s < self.full_patience_s / 2

    def _settle(self, rule: Rule, reservation: Reservation, status: int) -> None:
        if rule.awaits_charge_on:
            assert self.background is not None
            self.background.start(self._settle_async(rule, reservation, status))
        elif not rule.stays_charged(status):
            self.release(reservation)

    async def _settle_async(self, rule: Rule, reservation: Any, status: int) -> None:
        charge_on: Any = rule.charge_on
        try:
            is_charged = rule.checked_charge(await charge_on(status))
        except Exception:
            _log.exception("a request stays charged: charge_on of the rule of %r failed", rule.limiter)
            return
        if not is_charged:
            cancelled = reservation.cancel()
            if isinstance(cancelled, Coroutine):
                await cancelled

    @contextlib.contextmanager
    def _one_round_trip(self) -> Generator[None]:
        """Send what this block releases in Redis as one batch for each store."""
        if self._remote_batch is not None:
            yield
            return
        self._remote_batch = []
        try:
            yield
        finally:
            batch, self._remote_batch = self._remote_batch, None
            for store in dict.fromkeys(taken.store for taken in batch):
                self._call(store.executor.give_back, [taken for taken in batch if taken.store is store], self.patience)

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with _store_may_fail():
            result = function(*arguments)
            if self.background is not None and isinstance(result, Coroutine):
                self.background.start(result)


def _outcome_of(status: int) -> Outcome:
    """The outcome of a request for the shedders. An error of the handler shows nothing of the load, nor does a client
    that left, nor how long a WebSocket was open (101), nor a request that was denied after all (0).
    """
    if status in DROPPED:
        return "dropped"
    return "ignored" if status < 200 or status == DISCONNECTED or status >= 500 else "done"


class LeaseRenewal:
    """Renews the leases of a request from ``start`` to ``stop``, by a timer of the event loop: no task, no thread."""

    __slots__ = ("_cleanup", "_is_stopped", "_timer")

    def __init__(self, cleanup: RequestCleanup) -> None:
        self._cleanup = cleanup
        self._timer: asyncio.TimerHandle | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Does nothing without a lease, when the timer runs already, and after ``stop``."""
        if self._timer is None and self._cleanup.has_renewals and not self._is_stopped:
            self._timer = asyncio.get_running_loop().call_later(self._cleanup.renew_after_s, self._renew)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()

    def _renew(self) -> None:
        self._cleanup.renew()
        self._timer = None
        self.start()
