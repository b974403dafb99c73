"""``wait`` and ``wait_async`` of every limiter: sleep until a request is allowed.

A limiter that books ahead returns the time at which each request may proceed, so requests proceed in the order in which
they called. A limiter that can't book, or whose queue is full, only returns when a retry may succeed. Threads and tasks
of this process that wait for such a permit, for one key of one limiter, stand in a *wait queue*. The first sleeps and
retries, the others sleep until they are first, and a new waiter joins at the end. No waiter is charged before its
permits are due.

Wait queues are not shared between processes: another process may take the permit for which the first waiter slept. That
waiter then sleeps again. A task whose event loop is stopped, but not closed, delays the waiters behind it.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

from forebay import forking
from forebay.errors import ForebayError, StoreClosed, short_repr
from forebay.host_time import host_ns
from forebay.rate import NS, Duration, Rate, as_delay_ns, is_never

if TYPE_CHECKING:
    import asyncio

    from forebay.clock import ManualClock

__all__ = ["FIRST_BACKOFF_NS", "LAST_BACKOFF_NS", "check_pauses", "jittered", "released", "wait", "wait_async"]

NEVER_NS: Final = 2**63
LONGEST_SLEEP_NS: Final = 86_400 * NS  # every kind of sleep supports this; a longer sleep is several
FIRST_BACKOFF_NS: Final = 1_000_000
LAST_BACKOFF_NS: Final = 50_000_000


class Timed(Protocol):
    """The part of a store that waiting needs."""

    @property
    def closed(self) -> bool: ...
    @property
    def manual_clock(self) -> ManualClock | None: ...
    def now_ns(self) -> int: ...


class Booking(Protocol):
    """The result of a limiter's ``reserve``."""

    @property
    def allowed(self) -> bool: ...
    @property
    def delay_ns(self) -> int: ...
    @property
    def due_ns(self) -> int: ...
    def cancel(self) -> None: ...


class WaitedFor(Protocol):
    """The part of a limiter that waiting needs."""

    @property
    def store(self) -> Timed: ...
    @property
    def name(self) -> str: ...
    @property
    def may_free_early(self) -> bool: ...
    @property
    def reserve(self) -> Callable[..., Booking]:
        """Takes a key, a cost and a longest delay; `rate` and `burst` if the caller of ``wait`` gave them."""
        ...


def wait(
    limiter: WaitedFor,
    key: object,
    cost: object,
    timeout: Duration | None,
    jitter: float,
    rate: str | Rate | None = None,
    burst: int | None = None,
) -> bool:
    """Sleep until `cost` permits of `key` are charged and due: True. False if that would take more than `timeout`."""
    event = Wakeup()
    waiter = _Waiter(limiter, key, cost, timeout, jitter, tier_of(rate, burst), event, None)
    try:
        while (answer := waiter.proceed()) is None:
            if waiter.wakeable:
                event.wait(None if waiter.clock else waiter.left_s())
            elif waiter.clock:
                waiter.move_clock()
            else:
                while (seconds := waiter.left_s()) > 0:
                    time.sleep(seconds)
        return answer
    except BaseException:
        waiter.give_up()
        raise


async def wait_async(
    limiter: WaitedFor,
    key: object,
    cost: object,
    timeout: Duration | None,
    jitter: float,
    rate: str | Rate | None = None,
    burst: int | None = None,
) -> bool:
    """``wait`` for a task."""
    import asyncio  # seldom needed, and slow to import

    event = asyncio.Event()
    waiter = _Waiter(limiter, key, cost, timeout, jitter, tier_of(rate, burst), event, asyncio.get_running_loop())
    try:
        while (answer := waiter.proceed()) is None:
            if waiter.wakeable:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if waiter.clock else waiter.left_s()):
                        await event.wait()
            elif waiter.clock:
                await asyncio.sleep(0)  # a caller that waits in a loop must let other tasks run here, too
                waiter.move_clock()
            else:
                while (seconds := waiter.left_s()) > 0:
                    await asyncio.sleep(seconds)
        return answer
    except BaseException:
        waiter.give_up()
        raise


def tier_of(rate: str | Rate | None, burst: int | None) -> dict[str, Any]:
    """The rate and the burst that a caller gave, as arguments of ``reserve``.

    Waiters with different ones stand in queues of their own: a permit may be there for one of them, and not for others.
    """
    given: dict[str, Any] = {} if rate is None else {"rate": rate}
    return given if burst is None else given | {"burst": burst}


def check_pauses(timeout: Duration | None, jitter: float) -> int | None:
    """The timeout in ns."""
    if not isinstance(jitter, (int, float)) or not 0 <= jitter < 1:
        raise ValueError(f"jitter is a number from 0 to below 1, not {short_repr(jitter)}")
    return None if timeout is None else as_delay_ns(timeout, "timeout is None or")


def jittered(duration_ns: int, jitter: float, left_ns: int) -> int:
    """Lengthen the duration by a random share of up to `jitter`. Never shorten it: the retry would be too early.

    The share is drawn from what fits into `left_ns`. If it were drawn first and then cut, waiters with one deadline
    would go together at that deadline.
    """
    if not jitter or not 0 < duration_ns < left_ns:
        return duration_ns
    share = min(jitter, left_ns / duration_ns - 1)
    return min(duration_ns + round(duration_ns * random.uniform(0, share)), left_ns)


def released(limiter: WaitedFor, key: object) -> None:
    """A permit came back early: wake the first waiter for it, which retries at once."""
    if _queues:
        with _lock:
            _wake_first(_queues.get(_queue_id(limiter, key, {})))


class Wakeup:
    """An event for a thread, which a signal handler that interrupts this thread may set.

    ``threading.Event`` is guarded by a lock that is not reentrant: a handler that interrupts ``clear`` or ``wait``
    would wait for its own thread. Here each method is one call of a C function, which no handler interrupts half done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is set already
            self._lock.release()

    def clear(self) -> None:
        self._lock.acquire(blocking=False)

    def wait(self, timeout_s: float | None) -> None:
        """Return when the event is set, which clears it, or after `timeout_s` seconds."""
        self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0))


class _Waiter:
    """One call of ``wait``: its booking, and its place in the wait queue.

    KeyboardInterrupt may come at any instruction. So each step is either not done yet, or `give_up` undoes it.
    """

    def __init__(
        self,
        limiter: WaitedFor,
        key: object,
        cost: object,
        timeout: Duration | None,
        jitter: float,
        tier: dict[str, Any],
        event: Wakeup | asyncio.Event,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        timeout_ns = check_pauses(timeout, jitter)
        self.limiter, self.key, self.cost, self.jitter = limiter, key, cost, jitter
        self.tier = tier
        self.reserve = functools.partial(limiter.reserve, **tier) if tier else limiter.reserve
        self.event, self.loop = event, loop
        self.store = limiter.store
        self.clock = self.store.manual_clock
        # Sleep follows the host's clock, whatever clock decisions follow.
        self.now_ns = self.segment_ns if self.clock else host_ns
        self.deadline_ns = NEVER_NS
        if timeout_ns is not None:
            self.deadline_ns = min(self.now_ns() + timeout_ns, NEVER_NS)
        self.queue: deque[_Waiter] | None = None
        self.checked = False
        self.booked: list[Booking] = []
        self.backoff_ns = FIRST_BACKOFF_NS
        # The pause that follows when `proceed` returns None, and whether the event ends it.
        self.until_ns = 0
        self.wakeable = False

    def proceed(self) -> bool | None:
        """True if the permits are due, False if they can't be in time, None to pause and call this again."""
        if self.booked:
            self.segment_ns()  # raises StoreClosed
            return True
        self.event.clear()
        if self.is_first(join=False):
            return self.attempt()
        self.check()
        return self.queue_up()

    def check(self) -> None:
        """Raise for a request that can never be allowed, before it stands in line for that.

        Over Redis a look would be a call. So these limiters have a check without one.
        """
        if not self.checked:
            limiter: Any = self.limiter
            check = getattr(limiter, "check_request", None) or limiter.peek
            check(self.key, self.cost, **self.tier)
        self.checked = True

    def attempt(self) -> bool | None:
        left_ns = max(self.deadline_ns - self.now_ns(), 0)
        max_delay = None if self.deadline_ns == NEVER_NS else left_ns / NS
        # Python may raise KeyboardInterrupt between a call and the assignment of its result, which would lose the
        # booking. A list that is extended from a map holds it before that.
        self.booked.extend(map(self.reserve, (self.key,), (self.cost,), (max_delay,)))
        reservation = self.booked[0]
        if reservation.allowed:
            self.leave()
            if reservation.delay_ns == 0:
                return True
            self.pause_until_due(reservation)
            return None
        self.booked.clear()
        may_free_early = self.limiter.may_free_early and not self.clock
        if left_ns == 0 or is_never(reservation.delay_ns) or (reservation.delay_ns > left_ns and not may_free_early):
            self.leave()
            return False
        if not self.is_first(join=True):
            return self.queue_up()
        self.pause_until_due(reservation)
        if may_free_early:
            # No signal wakes this process when another one gives a permit back.
            self.wakeable = True
            now_ns = self.now_ns()
            backoff_ns = jittered(self.backoff_ns, self.jitter, self.deadline_ns - now_ns)
            self.until_ns = min(self.until_ns, now_ns + backoff_ns, self.deadline_ns)
            self.backoff_ns = min(2 * self.backoff_ns, LAST_BACKOFF_NS)
        return None

    def pause_until_due(self, reservation: Booking) -> None:
        """Jitter makes the end of the pause later, up to the deadline."""
        # A denial without a time must not become a loop without sleep.
        delay_ns = reservation.delay_ns or FIRST_BACKOFF_NS
        # The segment's time is read first, so time that passes between the readings only makes the pause longer.
        attempted_ns = reservation.due_ns - reservation.delay_ns - self.segment_ns() + self.now_ns()
        self.until_ns = attempted_ns + jittered(delay_ns, self.jitter, self.deadline_ns - attempted_ns)
        self.wakeable = False

    def queue_up(self) -> bool | None:
        """Pause until this waiter is first, or its deadline."""
        if self.now_ns() >= self.deadline_ns:
            self.leave()
            return False
        self.until_ns = self.deadline_ns
        self.wakeable = True
        return None

    def segment_ns(self) -> int:
        if self.store.closed:
            raise StoreClosed(f"limiter {self.limiter.name!r} was used after its store was closed: {self.store!r}")
        return self.store.now_ns()

    def left_s(self) -> float:
        """The rest of the pause, up to the longest sleep."""
        return min(self.until_ns - self.now_ns(), LONGEST_SLEEP_NS) / NS

    def move_clock(self) -> None:
        """Pause by moving a manual clock."""
        with _lock:
            if self.clock and self.now_ns() < self.until_ns:
                self.clock.set_ns(self.until_ns)

    def is_first(self, *, join: bool) -> bool:
        """Whether no waiter is ahead of this one. It joins the queue if there is one ahead, or if `join` is true."""
        if self.queue is None and not (_queues or join):
            return True
        with _lock:
            if self.queue is None:
                queue_id = _queue_id(self.limiter, self.key, self.tier)
                try:
                    queue = _queues.get(queue_id)
                except TypeError:
                    # All keys and rates can be hashed: the attempt will raise.
                    return True
                if not (join or _first(queue)):
                    _queues.pop(queue_id, None)
                    return True
                self.queue = deque() if queue is None else queue
                self.queue.append(self)
                _queues[queue_id] = self.queue
            return _first(self.queue) is self

    def leave(self) -> None:
        """Leave the queue, and wake the next waiter."""
        if self.queue is None:
            return
        with _lock:
            if self in self.queue:
                self.queue.remove(self)
            _wake_first(self.queue)
            queue_id = _queue_id(self.limiter, self.key, self.tier)
            if not self.queue and _queues.get(queue_id) is self.queue:
                del _queues[queue_id]
            self.queue = None

    def give_up(self) -> None:
        self.leave()
        for reservation in self.booked:
            with contextlib.suppress(ForebayError):
                reservation.cancel()


_queues: dict[object, deque[_Waiter]] = {}
# Held for a few instructions, never during a decision. Reentrant, because signal handlers and the garbage collector
# may call `released` and `give_up`.
_lock = threading.RLock()


def _queue_id(limiter: WaitedFor, key: object, tier: dict[str, Any]) -> object:
    if queue_key := getattr(limiter, "queue_key", None):
        # Over Redis, limiters of one name and kind have separate states if their windows differ.
        return id(limiter.store), queue_key(key), *tier.items()
    # A limiter over several others may have a list of keys, one for each of them.
    return (id(limiter.store), type(limiter), limiter.name, tuple(key) if isinstance(key, list) else key, *tier.items())


def _first(queue: deque[_Waiter] | None) -> _Waiter | None:
    """The first waiter, except tasks whose event loop was closed."""
    while queue and queue[0].loop and queue[0].loop.is_closed():
        queue.popleft()
    return queue[0] if queue else None


def _wake_first(queue: deque[_Waiter] | None) -> None:
    first = _first(queue)
    if first and first.loop:
        with contextlib.suppress(RuntimeError):  # closed at this moment
            first.loop.call_soon_threadsafe(first.event.set)
    elif first:
        first.event.set()


def _reset_in_child() -> None:
    """A forked child has neither the waiting threads nor the thread that holds the lock.

    It may have one wait: that of its own thread, if a signal handler forked. That one goes on as if it were alone.
    """
    global _queues, _lock
    left, _queues = _queues, {}
    _lock = threading.RLock()
    if left:
        for waiter in chain.from_iterable(left.values()):
            if not waiter.loop:
                waiter.queue = None
                waiter.event.set()


forking.in_child(_reset_in_child)
