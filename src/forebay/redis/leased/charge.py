"""The charge of one request to a leased limiter, which can be given back."""

from __future__ import annotations

from typing import Any

from forebay.core.decision import Decision
from forebay.core.leased import Permits
from forebay.core.table.keys import Key
from forebay.host_time import host_ns
from forebay.rate import Duration
from forebay.redis.leased.fetch import Steps

__all__ = ["LeasedCharge", "LeasedPart"]


class LeasedPart:
    """A leased limiter as ``wait``, ``AllOf`` and the web use it: its charges can be given back.

    With asyncio, the methods that may call Redis return coroutines.
    """

    may_free_early = False

    def __init__(self, store: Any, permits: Permits) -> None:
        self.store, self.name, self.permits = store, permits.name, permits

    def queue_key(self, key: Key) -> object:
        return id(self.store), self.name, self.permits.tag(key)

    def check_request(self, key: Key, cost: int) -> None:
        """Raise for a request that can never be allowed, without a call to Redis."""
        self.permits.tag(key)
        self.permits.checked(cost)

    def charge(self, key: Key, cost: int, **more: Any) -> Any:
        """A ``LeasedCharge``: by the lease if it suffices, else by a call to Redis. A fallback gets `more`, too."""
        return self.store.executor.run(self._charge(key, cost, more))

    def charge_now(self, key: Key, cost: int) -> LeasedCharge | None:
        """As ``charge``; None if only a call to Redis can decide."""
        since_ns = self.permits.now_ns()
        decision = self.permits.hit_now(key, cost)
        return None if decision is None else LeasedCharge(self, key, cost, since_ns, decision)

    def reserve(self, key: Key, cost: int, max_delay: Duration | None) -> Any:
        """For ``wait``: a charge that is due now, or a denial with the time of the next try."""
        return self.charge(key, cost)

    def peek(self, key: Key, cost: int) -> Any:
        executor = self.store.executor
        return executor.run(executor.peek(self.permits, key, cost))

    def refund(self, key: Key, cost: int) -> Any:
        executor = self.store.executor
        return executor.run_to_end(executor.refund(self.permits, key, cost))

    def reset(self, key: Key) -> Any:
        executor = self.store.executor
        return executor.run(executor.reset(self.permits, key))

    def give_back(self, key: Key, cost: int) -> Any:
        """As ``refund``, of permits that Redis has lent. A fallback that has charged nothing gives nothing back."""
        executor = self.store.executor
        return executor.run_to_end(executor.give_back_charged(self.permits, key, cost))

    def _charge(self, key: Key, cost: int, more: dict[str, Any]) -> Steps[LeasedCharge]:
        since_ns = self.permits.now_ns()
        decision = yield from self.store.executor.hit(self.permits, key, cost, **more)
        return LeasedCharge(self, key, cost, since_ns, decision)


class LeasedCharge:
    """A charge, or a denial with the time of the next try. True if it was charged."""

    __slots__ = ("_part", "cost", "decision", "key", "since_ns")

    def __init__(self, part: LeasedPart, key: Key, cost: int, since_ns: int, decision: Decision) -> None:
        self._part, self.key, self.cost, self.since_ns, self.decision = part, key, cost, since_ns, decision

    @property
    def allowed(self) -> bool:
        return self.decision.allowed

    @property
    def is_counted(self) -> bool:
        """Whether permits that Redis has lent were spent. Else a fallback has charged it, or a full store let it in."""
        return self.decision.allowed and not self.decision.degraded and not self.decision.full

    @property
    def delay(self) -> float:
        return self.decision.retry_after

    @property
    def delay_ns(self) -> int:
        return self.decision.retry_after_ns

    @property
    def due_ns(self) -> int:
        """By the host's monotonic clock. A wait that begins now is never too short."""
        return host_ns() + self.delay_ns

    def cancel(self) -> Any:
        """Give back what still counts. Call it once. With asyncio, a coroutine."""
        executor = self._part.store.executor
        return executor.run_to_end(
            executor.cancel(self._part.permits, self.key, self.cost, self.since_ns, self.decision)
        )

    def __bool__(self) -> bool:
        return self.decision.allowed
