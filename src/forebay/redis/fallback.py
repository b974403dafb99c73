"""Fallbacks, which decide while Redis is unavailable, by a store's policy `when_unavailable`.

``deny`` has no fallback: the call raises. ``allow`` allows everything. ``local`` decides by the host's share of the
limit, in the host's shared memory.

A limiter's *fallback* decides instead of it. It answers with the types of limiters over Redis: ``Decision`` with
``degraded``, ``Booked``, ``Taken``. Redis never learns what a fallback has admitted, and a fallback does not
know what Redis has admitted.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Final

from forebay.core.algorithms.bucketed_window import BucketedWindow
from forebay.core.algorithms.concurrency import Concurrency, lease_taken
from forebay.core.algorithms.credits import Credits
from forebay.core.algorithms.leaky_bucket import LeakyBucket
from forebay.core.algorithms.min_interval import MinInterval
from forebay.core.algorithms.sliding_log import SlidingLog
from forebay.core.algorithms.token_bucket import TokenBucket
from forebay.core.algorithms.window import FixedWindow, SlidingWindow
from forebay.core.all_of import AllOf
from forebay.core.decision import Decision, _decision
from forebay.errors import CostExceedsLimit, InvalidLimiter, StoreUnavailable, short_repr
from forebay.rate import NS, Duration, Rate, as_rate
from forebay.redis.all_of import Admitted, listed
from forebay.redis.commands import Booked, CommandFlow, LimiterCommands
from forebay.redis.concurrency import ConcurrencyCommands, Taken
from forebay.store import Store

__all__ = ["AllowFallback", "FallbackPolicy", "HostShareFallback", "HostSharesFallback", "checked_policy"]

SWEEP_AT_LEAST: Final = 1024


class ProcessCounts:
    """The unleased permits that one process has given out."""

    def __init__(self) -> None:
        # Reentrant, because a signal handler may run between any two lines.
        self.lock = threading.RLock()
        self.given: dict[Any, tuple[int, float]] = {}
        self.sweep_at = SWEEP_AT_LEAST


class UnleasedCounts:
    """For each key the number of unleased permits that a fallback has given out. They are not in Redis."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._processes: dict[int, ProcessCounts] = {}

    @property
    def own(self) -> ProcessCounts:
        """The counts of this process. A forked child has given out nothing, and has a lock of its own."""
        pid = os.getpid()
        # If several threads come here at once after a fork, all get the object that is stored first.
        return self._processes.get(pid) or self._processes.setdefault(pid, ProcessCounts())

    def add(self, key: Any, count: int) -> None:
        own, now_s = self.own, time.monotonic()
        with own.lock:
            before, _ = own.given.get(key, (0, 0.0))
            own.given[key] = before + count, now_s + self._lease_s
            if len(own.given) > own.sweep_at:
                own.given = {key: given for key, given in own.given.items() if given[1] > now_s}
                own.sweep_at = max(SWEEP_AT_LEAST, 2 * len(own.given))

    def take(self, key: Any, count: int) -> int:
        own = self.own
        if not own.given:
            return 0
        with own.lock:
            there, until_s = own.given.pop(key, (0, 0.0))
            taken = min(there, count)
            if there > taken:
                own.given[key] = there - taken, until_s
            return taken if until_s > time.monotonic() else 0


class Uncounted:
    """A lease of permits that are not counted."""

    def release(self) -> bool:
        return False

    def renew(self) -> bool:
        return True


class AllowFallback:
    """Allows everything and counts nothing."""

    def __init__(self, limiters: Sequence[LimiterCommands], unleased: list[UnleasedCounts | None]) -> None:
        self._limiters, self.unleased = limiters, unleased

    def _give_unleased(self, key: Any, cost: Any) -> None:
        if any(self.unleased):
            for unleased, its_key, its_cost in zip(self.unleased, *listed(key, cost, len(self.unleased)), strict=True):
                if unleased is not None and its_cost:
                    unleased.add(its_key, its_cost)

    def allow(self, key: Any, cost: Any = 1) -> bool:
        self._give_unleased(key, cost)
        return True

    def hit(self, key: Any, cost: Any = 1, **more: Any) -> Decision:
        # A refund with the id gives back no other permits.
        if more.get("request_id") is None:
            self._give_unleased(key, cost)
        return self.peek(key, cost)

    def hit_each(self, key: Any, cost: Any) -> list[Decision]:
        self._give_unleased(key, cost)
        return list(map(_allowed, self._limiters))

    def hit_each_once(self, key: Any, cost: Any, request_id: Any, request_ttl: Any) -> list[Decision]:
        return list(map(_allowed, self._limiters))

    def peek(self, key: Any, cost: Any = 1, **more: Any) -> Decision:
        return _allowed(min(self._limiters, key=lambda limiter: limiter.limit))

    def peek_each(self, key: Any, cost: Any) -> list[Decision]:
        return list(map(_allowed, self._limiters))

    def take_up_to(self, key: Any, most: int, *, burst: int | None = None, **more: Any) -> int:
        [limiter] = self._limiters
        return min(most, limiter.tier(more["rate"], burst).limit)

    def reserve(self, key: Any, cost: Any, max_delay: Duration | None, **more: Any) -> Booked:
        self._give_unleased(key, cost)
        return Booked.now(True, 0, None)

    def admit(self, keys: list[Any], costs: list[Any]) -> Admitted:
        taken = [
            Booked.now(True, 0, None) if unleased is None else self.acquire(key, cost)
            for unleased, key, cost in zip(self.unleased, keys, costs, strict=True)
        ]
        return list(map(_allowed, self._limiters)), taken

    def refund(self, key: Any, cost: Any, **more: Any) -> None:
        pass

    def acquire(self, key: Any, cost: Any, request_id: Any = None) -> Taken:
        return Taken(True, b"", [], os.getpid(), Uncounted())

    def take_unleased(self, key: Any, cost: int) -> tuple[Any, int]:
        """A lease for up to `cost` permits that a ``wait`` has taken here and not from Redis; and their number."""
        count = self.give_back_unleased(key, cost)
        return Uncounted() if count else None, count

    def give_back_unleased(self, key: Any, cost: int) -> int:
        [unleased] = self.unleased
        return 0 if unleased is None else unleased.take(key, cost)

    def give_back_once(self, key: Any, cost: int, request_id: Any) -> None:
        pass


def _allowed(limiter: LimiterCommands) -> Decision:
    return _decision(limiter.name, True, limiter.limit, limiter.limit, 1, 1, 0, 0, True)


class HostShareFallback:
    """Decides by the host's share of a limit, kept in the host's shared memory."""

    def __init__(
        self, limiter: LimiterCommands, native: Any, share_of: Callable[[str | Rate], Rate], hosts: int
    ) -> None:
        self.name, self.native, self._share_of, self._hosts = limiter.name, native, share_of, hosts
        self.unleased = UnleasedCounts(native.lease_ns / NS) if isinstance(native, Concurrency) else None

    def _given(self, rate: str | Rate | None, burst: int | None, more: dict[str, Any]) -> dict[str, Any]:
        """The host's share of a call's own rate and burst, and its other arguments."""
        given = {name: value for name, value in more.items() if value is not None and more["request_id"] is not None}
        if rate is not None:
            given["rate"] = self._share_of(rate)
        if burst is not None:
            given["burst"] = max(burst // self._hosts, 1)
        return given

    def ask(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return method(*arguments, **more)
        except CostExceedsLimit as error:
            raise StoreUnavailable(
                f"Redis is away, and a cost of {error.cost} is more than this host's share of limiter {self.name!r}, "
                f"which is {error.limit}"
            ) from error

    def in_own_name(self, decision: Decision) -> Decision:
        """The decision of the host's limiter, under the name of the limiter over Redis."""
        return _decision(
            self.name,
            decision.allowed,
            decision.limit,
            decision.remaining,
            1,
            1,
            decision.retry_after_ns,
            decision.reset_after_ns,
            True,
            decision.full,
        )

    def gave(self, key: Any, cost: Any) -> None:
        if self.unleased is not None and cost:
            self.unleased.add(key, cost)

    def allow(self, key: Any, cost: Any = 1) -> bool:
        return self.hit(key, cost).allowed

    def hit(
        self, key: Any, cost: Any = 1, *, rate: str | Rate | None = None, burst: int | None = None, **more: Any
    ) -> Decision:
        decision = self.ask(self.native.hit, key, cost, **self._given(rate, burst, more))
        # A refund with the id gives back these permits by it.
        if decision.allowed and more.get("request_id") is None:
            self.gave(key, cost)
        return self.in_own_name(decision)

    def peek(
        self, key: Any, cost: Any = 1, *, rate: str | Rate | None = None, burst: int | None = None, **more: Any
    ) -> Decision:
        return self.in_own_name(self.ask(self.native.peek, key, cost, **self._given(rate, burst, more)))

    def take_up_to(self, key: Any, most: int, *, rate: str | Rate | None = None, burst: int | None = None) -> int:
        taken: int = self.native.take_up_to(key, most, **self._given(rate, burst, {}))
        return taken

    def reserve(
        self,
        key: Any,
        cost: Any,
        max_delay: Duration | None,
        *,
        rate: str | Rate | None = None,
        burst: int | None = None,
    ) -> Booked:
        reservation = self.ask(self.native.reserve, key, cost, max_delay, **self._given(rate, burst, {}))
        if reservation.allowed:
            self.gave(key, cost)
        return _booked(reservation, lambda: self.cancelled(key, cost))

    def cancelled(self, key: Any, cost: int) -> None:
        if self.unleased is not None:
            self.unleased.take(key, cost)

    def refund(
        self, key: Any, cost: Any, *, rate: str | Rate | None = None, burst: int | None = None, **more: Any
    ) -> None:
        if self.unleased is not None:
            self.give_back_unleased(key, cost)
            return
        self.ask(self.native.refund, key, cost, **self._given(rate, burst, more))

    def acquire(self, key: Any, cost: Any, request_id: Any = None) -> Taken:
        lease = self.ask(self.native.acquire, key, cost, **self._given(None, None, {"request_id": request_id}))
        return Taken(lease.allowed, b"", [], os.getpid(), lease, lease.full)

    def keep(self, key: Any, cost: Any) -> Booked | Taken:
        """A charge that can be given back. It waits only for a place in a leaky bucket's queue."""
        if self.unleased is not None:
            return self.acquire(key, cost)
        return self.reserve(key, cost, None if isinstance(self.native, LeakyBucket) else 0)

    def take_unleased(self, key: Any, cost: int) -> tuple[Any, int]:
        count = self.unleased.take(key, cost) if self.unleased is not None else 0
        return lease_taken(self.native, key, count) if count else None, count

    def give_back_unleased(self, key: Any, cost: int) -> int:
        count = self.unleased.take(key, cost) if self.unleased is not None else 0
        if count:
            self.native.refund(key, count)
        return count

    def give_back_once(self, key: Any, cost: int, request_id: Any) -> None:
        self.native.refund(key, cost, request_id=request_id)


class HostSharesFallback:
    """The fallback of an ``AllOf``: the shares of its limiters."""

    def __init__(self, shares: Sequence[HostShareFallback]) -> None:
        self._shares = shares

    @functools.cached_property
    def _native(self) -> Any:
        return AllOf(*[share.native for share in self._shares])

    def _ask(self, method: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        return self._shares[0].ask(method, *arguments, **more)

    def _gave(self, key: Any, cost: Any) -> None:
        for share, its_key, its_cost in zip(self._shares, *listed(key, cost, len(self._shares)), strict=True):
            share.gave(its_key, its_cost)

    def allow(self, key: Any, cost: Any = 1) -> bool:
        return self.hit(key, cost).allowed

    def _in_own_name(self, decision: Decision) -> Decision:
        bound = next(share for share in self._shares if share.native.name == decision.limiter)
        return bound.in_own_name(decision)

    def hit(self, key: Any, cost: Any = 1, **more: Any) -> Decision:
        decision = self._ask(self._native.hit, key, cost, **more)
        if decision.allowed:
            self._gave(key, cost)
        return self._in_own_name(decision)

    def hit_each(self, key: Any, cost: Any) -> list[Decision]:
        decisions = self._ask(self._native.hit_each, key, cost)
        if all(decisions):
            self._gave(key, cost)
        return [share.in_own_name(decision) for share, decision in zip(self._shares, decisions, strict=True)]

    def hit_each_once(self, key: Any, cost: Any, request_id: Any, request_ttl: Any) -> list[Decision]:
        decision = self.hit(key, cost, request_id=request_id, request_ttl=request_ttl)
        each = self.peek_each(key, 0 if decision else cost)
        # Permits may have come back since.
        return [decision] * len(each) if all(each) and not decision else each

    def peek(self, key: Any, cost: Any = 1, **more: Any) -> Decision:
        return self._in_own_name(self._ask(self._native.peek, key, cost))

    def peek_each(self, key: Any, cost: Any) -> list[Decision]:
        lists = listed(key, cost, len(self._shares))
        return [share.peek(its_key, its_cost) for share, its_key, its_cost in zip(self._shares, *lists, strict=True)]

    def reserve(self, key: Any, cost: Any, max_delay: Duration | None) -> Booked:
        reservation = self._ask(self._native.reserve, key, cost, max_delay)
        return self._booked(reservation, key, cost)

    def _booked(self, reservation: Any, key: Any, cost: Any) -> Booked:
        if reservation.allowed:
            self._gave(key, cost)
        return _booked(reservation, lambda: self._cancelled(key, cost))

    def _cancelled(self, key: Any, cost: Any) -> None:
        for share, its_key, its_cost in zip(self._shares, *listed(key, cost, len(self._shares)), strict=True):
            share.cancelled(its_key, its_cost)

    def admit(self, keys: list[Any], costs: list[Any]) -> Admitted:
        taken: list[Booked | Taken] = []
        try:
            for share, key, cost in zip(self._shares, keys, costs, strict=True):
                taken.append(share.keep(key, cost))
                if not taken[-1].allowed:
                    break
            else:
                return [share.peek(key, 0) for share, key in zip(self._shares, keys, strict=True)], taken
        except BaseException:
            give_back(taken)
            raise
        give_back(taken)
        decisions = [share.peek(key, cost) for share, key, cost in zip(self._shares, keys, costs, strict=True)]
        if taken[-1].full and all(decisions):
            # A peek needs no room.
            last = len(taken) - 1
            decisions[last] = without_room(decisions[last], taken[last])
        return decisions, []

    def refund(self, key: Any, cost: Any, **more: Any) -> None:
        if more:
            self._ask(self._native.refund, key, cost, **more)
            return
        for share, its_key, its_cost in zip(self._shares, *listed(key, cost, len(self._shares)), strict=True):
            # The permits of a `Concurrency` have been given back before, by its own flow.
            if share.unleased is None:
                share.refund(its_key, its_cost)


def without_room(peeked: Decision, denied: Booked | Taken) -> Decision:
    """The decision of a request that the host's store has denied because it had no room for the key."""
    # Permits that are held may come back at any time, and with them room in the store.
    wait_ns = denied.delay_ns if isinstance(denied, Booked) else NS
    return _decision(peeked.limiter, False, peeked.limit, 0, 1, 1, wait_ns, wait_ns, True, True)


def give_back(taken: Iterable[Booked | Taken]) -> None:
    """Release the leases and cancel the bookings of shares."""
    for one in taken:
        if isinstance(one, Taken):
            one.local.release()
        else:
            for _ in one.cancel():
                raise AssertionError("Redis was asked to give back what the host has given")


def _booked(reservation: Any, cancelled: Callable[[], None]) -> Booked:
    booked = Booked.now(reservation.allowed, 0, _cancelling(reservation, cancelled) if reservation.allowed else None)
    booked.delay_ns, booked.full = reservation.delay_ns, reservation.full
    booked.due_ns += reservation.delay_ns
    return booked


def _cancelling(reservation: Any, cancelled: Callable[[], None]) -> CommandFlow[None]:
    """A flow that cancels a host's reservation, without a command to Redis."""
    reservation.cancel()
    cancelled()
    yield from ()


class FallbackPolicy:
    """Makes the fallbacks of limiters. ``deny`` has none."""

    def __init__(self, when_unavailable: str, namespace: str, host: Store | None, hosts: int) -> None:
        self._kind, self._namespace, self._host, self._hosts = when_unavailable, namespace, host, hosts
        self.raises = when_unavailable == "deny"

    def fallback_of(self, limiter: LimiterCommands, keys: Any) -> AllowFallback | HostShareFallback | None:
        """`keys` is the limiter's argument of that name."""
        if self.raises:
            return None
        if self._kind == "allow":
            lease_s = limiter.algorithm.lease_us / 1e6 if isinstance(limiter, ConcurrencyCommands) else None
            return AllowFallback([limiter], [None if lease_s is None else UnleasedCounts(lease_s)])
        return HostShareFallback(limiter, self._native(limiter, keys), self._share_of, self._hosts)

    def fallback_of_all(self, limiters: Sequence[Any]) -> AllowFallback | HostSharesFallback | None:
        if self.raises:
            return None
        if self._kind == "allow":
            # Each limiter's own fallback takes back the permits that they give out together.
            return AllowFallback(limiters, [unleased for limiter in limiters for unleased in limiter.fallback.unleased])
        return HostSharesFallback([limiter.fallback for limiter in limiters])

    def _native(self, limiter: LimiterCommands, keys: Any) -> Any:
        kind, store, parameters = limiter.kind, self._host, limiter.parameters
        if kind is Credits:
            raise InvalidLimiter(
                f"limiter {limiter.name!r} has no share for this host to spend while Redis is away, as its permits "
                "were paid for once: take a RedisStore with when_unavailable='deny' for it"
            )
        name = f"{self._namespace}:{limiter.name}"
        if not name.isprintable():
            name = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        # Limiters that share a state in Redis may have shares that count apart.
        store.names.expect_several(name)  # type: ignore[union-attr]  # a store, with this policy
        make: Any = kind
        if kind is Concurrency:
            lease = timedelta(microseconds=parameters["lease_ns"] // 1000)
            return make(store, name, self._share(limiter.limit), lease, keys=keys)
        if kind is MinInterval:
            # The host's share is a longer interval: the interval times the number of hosts.
            return make(store, name, timedelta(microseconds=self._hosts * parameters["interval_ns"] // 1000))
        rate = self._share_of(parameters["rate"])
        if kind is TokenBucket:
            return make(store, name, rate, burst=self._share(parameters["burst"]), refill=parameters["refill"])
        if kind is LeakyBucket:
            return make(store, name, rate, capacity=self._share(parameters["capacity"]))
        if kind is FixedWindow:
            return make(store, name, rate, align=parameters["align"])
        if kind is SlidingWindow:
            return make(store, name, rate, rounding=parameters["rounding"])
        if kind is BucketedWindow:
            return make(store, name, rate, buckets=parameters["buckets"])
        assert kind is SlidingLog
        if keys is None:
            raise InvalidLimiter(
                f"limiter {limiter.name!r} decides by the host's share while Redis is away, and a SlidingLog in shared "
                "memory needs to know how many keys there may be: say keys=1000"
            )
        return make(store, name, rate, keys=keys)

    def _share(self, limit: int) -> int:
        return max(limit // self._hosts, 1)

    def _share_of(self, rate: str | Rate) -> Rate:
        rate = as_rate(rate)
        return Rate.per_ns(self._share(rate.limit), rate.period_ns)


def checked_policy(when_unavailable: Any, namespace: str, host: Any, hosts: Any) -> FallbackPolicy:
    if when_unavailable not in ("deny", "allow", "local"):
        raise ValueError(f"when_unavailable is 'deny', 'allow' or 'local', not {short_repr(when_unavailable)}")
    if host is not None and not isinstance(host, Store):
        raise TypeError(f"host is the Store of this host that its processes share, not {short_repr(host)}")
    if when_unavailable == "local":
        if host is None:
            raise ValueError(
                "when_unavailable='local' keeps the host's share of each limit in shared memory: say host=Store(...)"
            )
        if hosts is None:
            raise ValueError("when_unavailable='local' divides each limit by the number of hosts: say hosts=4")
        if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"hosts is a whole number of at least 1, not {short_repr(hosts)}")
    elif hosts is not None:
        raise ValueError("hosts says what a host's share of each limit is: it goes with when_unavailable='local'")
    return FallbackPolicy(when_unavailable, namespace, host, hosts or 1)
