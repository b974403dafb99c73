"""``Concurrency`` over Redis: the commands, the leases and the limiters, for both executors.

Redis keeps a key's permits in a sorted set: one member for each permit, with a unique name and the end of its lease. A
release names the permits, so only the process that took them can give them back. Permits of a request with an id move
to the latest request with it: they get its name, in one script, so that a release of the earlier one finds nothing. The
id's mark is a key that holds this name until the lease ends. A lease object from ``acquire`` holds
the names of its permits. The names of *unleased* permits, which ``allow``, ``hit``, ``wait`` and ``reserve`` take, are
in this process's memory (``UnleasedPermits``), for ``refund``.

The scripts in ``scripts/`` decide, release and renew. ``fallback.py`` decides while Redis is unavailable.

The rest is about cancellation over asyncio: a caller may be cancelled while the reply to its request is on its way.

State
-----
Over asyncio, a call that takes permits runs in a task of its own. The call is

* *awaited*: the caller waits for the reply;
* *taken*: the caller has the reply, and so the permits;
* *given up*: the caller was cancelled before it had the reply;
* *to be released*: the caller was cancelled, and then a reply came that grants permits.

Transitions
-----------
* awaited -> taken: the reply comes.
* awaited -> given up: the caller is cancelled.
* given up -> to be released: the reply comes and grants permits. Another task of the store then releases them, once.

Invariant
---------
If a caller is cancelled before it has the reply, its permits come back: by a release, or at the end of their leases.

Proof
-----
A release must reach Redis after the request. A release over another connection may overtake the request: it finds
nothing, and then the request takes the permits until the end of their leases. Closing the request's connection doesn't
prevent that, because Redis reads what was sent before it sees the end. So the call isn't cancelled. It goes on for no
longer than its deadline, and its reply shows whether there is anything to release.

A release goes on in the same way. To release a permit twice is the same as once, because a release removes the permit
by its name. A ``refund`` and a ``cancel`` go on as a whole, with all their calls. Each takes the names that it releases
out of the process's memory before the call, so no other refund counts these permits meanwhile.

Crash and stall
---------------
The deadline may pass without a reply, Redis may be unavailable, and the process or the event loop may end. In each case
the permits come back at the end of their leases.

With either executor, no interrupt and no failed call makes the process forget a permit that it knows to be held. It
forgets the permit after a reply that the permit is gone, or when its lease has ended.

Not handled
-----------
A blocking call can't go on without its caller. An interrupt (a signal handler's exception) between a request and its
reply closes the connection, and the permits come back at the end of their leases.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from forebay.core.arguments import cost_of
from forebay.core.decision import Decision
from forebay.core.table.keys import Key
from forebay.errors import ForebayError, InvalidCost, InvalidLimiter, StoreUnavailable, short_repr
from forebay.rate import Duration, Rate
from forebay.redis.algorithms import Algorithm, Charge, Concurrency, Seen
from forebay.redis.async_executor import AsyncExecutor
from forebay.redis.commands import HIT, Command, CommandFlow, LimiterCommands, LimiterSpec, encode_args, mark_key
from forebay.redis.executor import Executor
from forebay.redis.keys import KeySpace
from forebay.redis.limiter import BaseLimiter
from forebay.redis.operations import Operated, Pending, asyncio_operations, operation
from forebay.redis.scripts import script

__all__ = [
    "AsyncRedisLease",
    "BaseConcurrency",
    "ConcurrencyCommands",
    "Permit",
    "RedisLease",
    "Taken",
    "lease_taken",
]

T = TypeVar("T")
E = TypeVar("E")
R = TypeVar("R")
L = TypeVar("L")

SWEEP_AT_LEAST: Final = 1024
# Each permit is an entry, and Redis runs nothing else while a script writes them.
MOST_AT_ONCE: Final = 10_000
_GONE: Final = object()


class Permit(NamedTuple):
    member: bytes
    end_us: int


class Taken(NamedTuple):
    """The outcome of an ``acquire``; without permits if it was denied."""

    allowed: bool
    key: bytes
    permits: list[Permit]
    pid: int
    """The process that holds the permits; its forked children don't."""
    local: Any = None
    """The lease of the host's share, if the share has decided."""
    full: bool = False
    """Whether the store of the host's share had no room for the key."""
    mark: bytes | None = None
    """The key of the mark, if the request had an id."""

    @property
    def is_own(self) -> bool:
        return self.pid == os.getpid()


class UnleasedPermits:
    """The unleased permits of one process: for each key, in the order in which they were taken."""

    def __init__(self) -> None:
        # Reentrant, because a signal handler may run between any two lines. It does no harm there.
        self.lock = threading.RLock()
        self.of_keys: dict[bytes, OrderedDict[Permit, None]] = {}
        self.sweep_at = SWEEP_AT_LEAST


class ConcurrencyCommands(LimiterCommands):
    algorithm: Concurrency

    def __init__(self, keyspace: KeySpace, owner: str, name: str, kind: type, spec: LimiterSpec) -> None:
        super().__init__(keyspace, owner, name, kind, spec)
        self._leases = script("concurrency_leases", "concurrency")
        self._once = script("concurrency_once", "concurrency")
        self._processes: dict[int, UnleasedPermits] = {}

    def charge_for(self, key: Key, cost: Any, algorithm: Algorithm | None = None) -> Charge:
        charge = super().charge_for(key, cost)
        if charge.cost > MOST_AT_ONCE:
            raise InvalidCost(
                f"{self!r} takes at most {MOST_AT_ONCE} permits at once, not {charge.cost}: take them in turn"
            )
        return self.algorithm.named(charge, b"h" + secrets.token_hex(12).encode())

    def tier(self, rate: str | Rate | None, burst: int | None) -> Algorithm:
        if rate is not None or burst is not None:
            raise InvalidLimiter(f"{self!r} has one limit for all calls: make a second limiter for another one")
        return self.algorithm

    def take_up_to(self, key: Key, most: Any, rate: str | Rate | None = None, burst: int | None = None) -> Command[int]:
        raise InvalidLimiter(f"{self!r} holds permits, which come back one by one: take them with acquire")

    def check_request_ids(self) -> None:
        raise InvalidLimiter(
            f"{self!r} takes no request_id beside other limits: held permits go to the latest request with an id, and "
            "charges don't. Give it the id in a call of its own"
        )

    def hit(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
        request_ttl: Duration | None = None,
    ) -> Command[Decision]:
        algorithm = self.tier(rate, burst)
        if request_id is None or not cost_of(cost):
            return super().hit(key, cost, request_ttl=request_ttl)
        if request_ttl is not None:
            raise InvalidLimiter(
                f"{self!r} remembers a request_id as long as its permits are held: leave out the request_ttl of "
                f"{short_repr(request_ttl)}"
            )
        charge, redis_key = self.charge_for(key, cost), self.key(key)

        def read(reply: list[int]) -> Decision:
            seen = Seen(reply[0] != 0, reply[1], reply[3:])
            if seen.allowed:
                self.took(redis_key, charge, seen)
            return algorithm.decision(self.name, charge, seen)

        return self._hit_once(redis_key, charge, request_id, read)

    def _hit_once(self, key: bytes, charge: Charge, request_id: Key, read: Callable[[list[int]], T]) -> Command[T]:
        keys = [key, mark_key([key], [charge], request_id)]
        arguments = [HIT, *encode_args(charge.arguments)]
        return Command(self._once, keys, arguments, self.size, read, partial(self._given_up, key, charge))

    def _given_up(self, key: bytes, charge: Charge, reply: list[int]) -> CommandFlow[None]:
        """Release the permits of a cancelled caller, which never got them."""
        if reply[0] and charge.cost:
            yield self.release(key, self._permits(charge, Seen(True, reply[1], reply[3:])))

    def _permits(self, charge: Charge, seen: Seen) -> list[Permit]:
        name, end_us = charge.arguments[3], seen.now_us + self.algorithm.lease_us
        assert isinstance(name, bytes)
        return [Permit(b"%b:%d" % (name, number), end_us) for number in range(1, charge.cost + 1)]

    def took(self, key: bytes, charge: Charge, seen: Seen) -> None:
        """Remember the unleased permits of an allowed request. Forget those whose leases have ended."""
        if not charge.cost:
            return
        taken = OrderedDict.fromkeys(self._permits(charge, seen))
        unleased = self._unleased
        with unleased.lock:
            permits = unleased.of_keys.setdefault(key, OrderedDict())
            _trim(permits, seen.now_us)
            permits.update(taken)
            # A signal handler's sweep may have removed the key's dict meanwhile.
            unleased.of_keys.setdefault(key, OrderedDict()).update(taken)
            if len(unleased.of_keys) > unleased.sweep_at:
                for other, permits in list(unleased.of_keys.items()):
                    _trim(permits, seen.now_us)
                    if not permits:
                        unleased.of_keys.pop(other, None)
                unleased.sweep_at = max(SWEEP_AT_LEAST, 2 * len(unleased.of_keys))

    @property
    def _unleased(self) -> UnleasedPermits:
        """The permits of this process. A forked child begins without its parent's permits, and with a lock of its own:
        a thread of the parent may have held the parent's lock at the fork.
        """
        pid = os.getpid()
        # If several threads come here at once after a fork, all get the object that is stored first.
        return self._processes.get(pid) or self._processes.setdefault(pid, UnleasedPermits())

    def _take_remembered(self, key: bytes, count: int, newest: bool = False) -> list[Permit]:
        unleased = self._unleased
        taken: list[Permit] = []
        with unleased.lock, suppress(KeyError):
            while len(taken) < count:
                taken.append(unleased.of_keys[key].popitem(last=newest)[0])
        return taken

    def _remember_again(self, key: bytes, permits: list[Permit]) -> None:
        """Remember permits whose release may have failed, before all others: the oldest are given back first."""
        unleased = self._unleased
        with unleased.lock, suppress(KeyError):
            remembered = unleased.of_keys.setdefault(key, OrderedDict())
            for permit in reversed(permits):
                remembered[permit] = None
                remembered.move_to_end(permit, last=False)

    def _forget(self, key: bytes, taken: list[Permit]) -> list[Permit]:
        """Forget the permits of `taken`, under the lock. Return those that were remembered."""
        permits = self._unleased.of_keys.get(key) or OrderedDict()
        return [permit for permit in taken if permits.pop(permit, _GONE) is not _GONE]

    def allow(self, key: Key, cost: Any) -> Command[bool]:
        charge, redis_key = self.charge_for(key, cost), self.key(key)

        def read(reply: list[int]) -> bool:
            if reply[0]:
                self.took(redis_key, charge, Seen(True, reply[1], reply[3:]))
            return reply[0] != 0

        return self._command(HIT, redis_key, charge, self.size, read)

    def acquire(self, key: Key, cost: Any, request_id: Key | None = None) -> Command[Taken]:
        charge, redis_key = self.charge_for(key, cost), self.key(key)
        mark = None if request_id is None else mark_key([redis_key], [charge], request_id)

        def read(reply: list[int]) -> Taken:
            seen = Seen(reply[0] != 0, reply[1], reply[3:])
            permits = self._permits(charge, seen) if seen.allowed else []
            return Taken(seen.allowed, redis_key, permits, os.getpid(), mark=mark)

        if request_id is not None and charge.cost:
            return self._hit_once(redis_key, charge, request_id, read)
        return self._command(HIT, redis_key, charge, self.size, read)

    def release(self, key: bytes, permits: list[Permit]) -> Command[int]:
        """The command that releases permits. Its result is the number of them that were still held."""
        return self._lease_command(b"release", [key], permits)

    def renew(self, key: bytes, permits: list[Permit], mark: bytes | None) -> Command[int]:
        return self._lease_command(b"renew", [key] if mark is None else [key, mark], permits)

    def _lease_command(self, what: bytes, keys: list[bytes], permits: list[Permit]) -> Command[int]:
        arguments = [what, b"%d" % self.algorithm.lease_us, *(permit.member for permit in permits)]
        return Command(self._leases, keys, arguments, 2, lambda reply: reply[0])

    def refund(
        self,
        key: Key,
        cost: Any,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> CommandFlow[None]:
        self.tier(rate, burst)
        charge, redis_key = self.refund_charge(key, cost), self.key(key)
        if request_id is not None:
            if cost_of(cost) == charge.cost > 0:
                yield from self._refund_once(key, redis_key, charge, request_id)
            return
        count = charge.cost
        if self.fallback is not None:
            count -= self.fallback.give_back_unleased(key, count)
        yield from self._give_back(redis_key, count)

    def _refund_once(self, key: Key, redis_key: bytes, charge: Charge, request_id: Key) -> CommandFlow[None]:
        keys = [redis_key, mark_key([redis_key], [charge], request_id)]
        if self.fallback is not None:
            self.fallback.give_back_once(key, charge.cost, request_id)
        yield Command(self._once, keys, [b"release", *encode_args(charge.arguments)], 2, lambda reply: reply[0])

    def keep(self, key: bytes, charge: Charge, seen: Seen) -> Taken:
        """Move the permits of a request from the process's memory to a lease."""
        with self._unleased.lock:
            own = self._forget(key, self._permits(charge, seen))
            # A refund of another request may have taken some of these permits instead of its own.
            own += self._take_remembered(key, charge.cost - len(own), newest=True)
        return Taken(True, key, own, os.getpid())

    def cancel(self, key: bytes, charge: Charge, seen: Seen) -> CommandFlow[None]:
        permits = self._permits(charge, seen)
        with self._unleased.lock:
            own = self._forget(key, permits)
        released = self.release(key, own)
        released.read = lambda reply: reply[1]
        try:
            now_us = yield released
        except BaseException:
            self._remember_again(key, own)
            raise
        # A refund or a `hold` takes any remembered permit, so it may have taken one of these. Then another remembered
        # permit is released instead, if these would still count.
        if permits[0].end_us > now_us:
            yield from self._give_back(key, len(permits) - len(own))

    def _give_back(self, key: bytes, count: int) -> CommandFlow[None]:
        """Release `count` unleased permits, or all if there are fewer."""
        # The oldest first: then the remaining permits last longer than they need to, never shorter.
        while count > 0 and (permits := self._take_remembered(key, count)):
            # A permit that was not held any more doesn't count, and the next one is released instead.
            try:
                count -= yield self.release(key, permits)
            except BaseException:
                self._remember_again(key, permits)
                raise

    def take_unleased(self, key: Key, cost: int) -> Taken:
        """The unleased permits that a ``wait`` of this process has just taken, for a lease."""
        redis_key, local, given = self.key(key), None, 0
        if self.fallback is not None:
            local, given = self.fallback.take_unleased(key, cost)
        permits = self._take_remembered(redis_key, cost - given, newest=True)
        return Taken(True, redis_key, permits, os.getpid(), local)


def _trim(permits: OrderedDict[Permit, None], now_us: int) -> None:
    """Remove the permits whose leases have ended. The oldest come first."""
    # A signal handler may change the dict meanwhile. Then the next call removes the rest.
    with suppress(RuntimeError):
        while (oldest := next(iter(permits), None)) and oldest.end_us <= now_us:
            permits.pop(oldest, None)


class BaseLease(Operated[E], Generic[E]):
    __slots__ = ("_executor", "_key", "_limiter", "_permits", "_released", "_taken")

    def __init__(self, limiter: Any, key: Key, taken: Taken) -> None:
        self._limiter, self._key, self._taken = limiter, key, taken
        self._executor = limiter.store.executor
        self._permits: list[Permit] = taken.permits
        self._released = False

    @property
    def store(self) -> Any:
        """The store that the permits belong to."""
        return self._limiter.store

    @property
    def allowed(self) -> bool:
        return self._taken.allowed

    @property
    def full(self) -> bool:
        return self._taken.full

    @operation
    def release(self) -> Pending[bool]:
        """Give the permits back, also if the task is cancelled meanwhile. Return whether any was still held.

        If it raises, or a policy has decided as Redis is unavailable, it may be called again.
        """
        self._released = True
        local = self._taken.local
        held = local is not None and bool(local.release())
        return self._executor.run(self._release(held), lambda: self._wake(held))

    @operation
    def renew(self) -> Pending[bool]:
        """Begin the lease anew. False if any of the permits was not held any more."""
        return self._executor.run(self._renew(), lambda: False)

    def _release(self, held: bool) -> CommandFlow[bool]:
        if self._is_held_in_redis:
            held |= (yield self._limiter.commands.release(self._taken.key, self._permits)) > 0
        return self._end(held)

    def _end(self, held: bool) -> bool:
        self._wake(held)
        self._permits = []
        return held

    def _wake(self, held: bool) -> bool:
        if self._is_held_in_redis:
            self._executor.permits_came_back(self._limiter, self._key)
        return held

    def _renew(self) -> CommandFlow[bool]:
        local = self._taken.local
        if local is not None and not local.renew():
            return False
        if not self._is_held_in_redis:
            return local is not None
        # Another thread may release the lease before the reply.
        permits = self._permits
        held: int = yield self._limiter.commands.renew(self._taken.key, permits, self._taken.mark)
        return held == len(permits)

    @property
    def _is_held_in_redis(self) -> bool:
        return bool(self._permits) and self._taken.is_own

    def give_back_flow(self) -> CommandFlow[None]:
        """The commands of ``release``, for a caller that needs no result."""
        self._released = True
        if self._taken.local is not None:
            self._taken.local.release()
        if self._is_held_in_redis:
            yield self._limiter.commands.release(self._taken.key, self._permits)
        self._permits = []
        self._executor.permits_came_back(self._limiter, self._key)

    def _check_can_enter(self) -> None:
        if self._released:
            raise RuntimeError(f"{self!r} was released before: acquire another one")

    def __bool__(self) -> bool:
        return self._taken.allowed

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._limiter.name!r}: {'held' if self._permits else 'not held'}>"


class RedisLease(BaseLease[Executor]):
    """Permits that are held, as ``forebay.Lease``: given back by ``release`` or at the end of a ``with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ()

    def releasing(self) -> CommandFlow[bool]:
        """The commands of ``release``, for a caller that runs them without a policy."""
        self._released = True
        local = self._taken.local
        return (yield from self._release(local is not None and bool(local.release())))

    def renewing(self) -> CommandFlow[bool]:
        """The commands of ``renew``, for a caller that runs them without a policy."""
        return (yield from self._renew())

    def __enter__(self) -> Self:
        if not self.allowed:
            raise self._limiter.exceeded(self._key)
        self._check_can_enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The block's outcome matters more: permits that can't be released come back by themselves.
        with suppress(unimportant_after(error)):
            self.release()


@asyncio_operations
class AsyncRedisLease(BaseLease[AsyncExecutor]):
    """Permits that are held: given back by ``release`` or at the end of an ``async with`` block.

    They come back by themselves at the end of the lease, however the process that holds them has ended.
    """

    __slots__ = ()

    async def __aenter__(self) -> Self:
        if not self.allowed:
            raise await self._limiter.exceeded(self._key)
        self._check_can_enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(unimportant_after(error)):
            await self.release()


class BaseConcurrency(BaseLimiter[E, R], Generic[E, R, L]):
    """`L` is the class of leases."""

    commands: ConcurrencyCommands
    _lease: type[L]

    @operation
    def acquire(self, key: Key, cost: int = 1, *, request_id: Key | None = None) -> Pending[L]:
        commands = self.commands
        lease: Callable[[Taken], L] = partial(self.view, key)
        return self._executor.run_command(
            commands.acquire(key, cost, request_id).then(lease),
            lambda: lease(commands.fallback.acquire(key, cost, request_id)),
        )

    @operation
    def refund(
        self,
        key: Key,
        cost: int = 1,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
        request_id: Key | None = None,
    ) -> Pending[None]:
        """Give back permits that ``allow``, ``hit``, ``wait`` or ``reserve`` took in this process.

        With a `request_id`, give back the permits of the requests with this id, whichever process holds them. The
        refund goes on if the task is cancelled meanwhile.
        """
        flow = self.commands.refund(key, cost, rate, burst, request_id)
        return self._executor.run_to_end(self._giving_back(key, flow), lambda: self._wake(key))

    def view(self, key: Key, taken: Any) -> Any:
        make: Any = self._lease
        return make(self, key, taken)


def lease_taken(limiter: Any, key: Key, cost: int) -> Any:
    """A lease for the permits that a ``wait`` of this process has just taken."""
    return limiter.view(key, limiter.commands.take_unleased(key, cost))


def unimportant_after(error: BaseException | None) -> type[ForebayError]:
    """The errors of a release that are suppressed at the end of a block that has raised `error`, or nothing."""
    return StoreUnavailable if error is None else ForebayError
