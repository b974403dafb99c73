"""The algorithms in plain Python with exact integers: slow, and obviously right.

Nothing here is derived from forebay's arithmetic. A rule says whether a request is allowed and what the key's next
state is. Bisection over the rule gives the other fields of a decision: `remaining` is the largest cost that the rule
allows, `retry_after_ns` the shortest wait until it allows the request, `reset_after_ns` the shortest wait until the
key is as good as fresh.

Time never goes back: a state that was written later than now is judged at the time of that write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

__all__ = [
    "Above",
    "AllOfOracle",
    "Answer",
    "Booking",
    "Bucket",
    "InitialBucket",
    "Oracle",
    "Prepaid",
    "Queue",
    "Rule",
    "TokenBucketOracle",
    "ToppedUpBucket",
]

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Answer:
    """The fields that a ``forebay.Decision`` must have."""

    allowed: bool
    limit: int
    remaining: int
    retry_after_ns: int
    reset_after_ns: int
    limiter: str | None = None  # set by several limits: the one that bound the decision

    def __bool__(self) -> bool:
        return self.allowed


@dataclass(frozen=True, slots=True)
class Booking:
    """The fields that a ``forebay.Reservation`` must have."""

    allowed: bool
    delay_ns: int

    def __bool__(self) -> bool:
        return self.allowed


class Rule(ABC, Generic[State]):
    """One limit: pure functions of a key's state, the time and a cost."""

    fresh: State  # the state of a fresh key

    @property
    @abstractmethod
    def most(self) -> int:
        """The largest cost that can pass at once."""

    @abstractmethod
    def allows(self, state: State, now_ns: int, cost: int) -> bool: ...

    @abstractmethod
    def charged(self, state: State, now_ns: int, cost: int) -> State: ...

    @abstractmethod
    def refunded(self, state: State, now_ns: int, cost: int) -> State: ...

    def forgotten(self, state: State, now_ns: int) -> State:
        """The state after a reset."""
        return self.fresh

    @abstractmethod
    def over_ns(self, state: State) -> int:
        """A time from which on no part of `state` counts."""

    def is_settled(self, state: State, now_ns: int) -> bool:
        """Whether the key is as good as fresh."""
        return self.allows(state, now_ns, self.most)

    def has_place(self, state: State, now_ns: int, cost: int) -> bool:
        """Whether the request can be booked, for now or for later."""
        return self.allows(state, now_ns, cost)

    def delay_ns(self, state: State, now_ns: int, cost: int) -> int:
        """The delay of a request that is booked now."""
        return 0

    def remaining(self, state: State, now_ns: int) -> int:
        return _first(lambda left: not self.allows(state, now_ns, left + 1), self.most)

    def cancelled(self, state: State, now_ns: int, cost: int) -> State:
        """The state after a booking is taken back that has just been made."""
        return self.refunded(state, now_ns, cost)

    def retry_after_ns(self, state: State, now_ns: int, cost: int) -> int:
        return _first(lambda wait_ns: self.allows(state, now_ns + wait_ns, cost), max(self.over_ns(state) - now_ns, 0))


class Oracle(Generic[State]):
    """The state of each key. The caller passes the rule: the limiter's own, or that of a tier."""

    def __init__(self) -> None:
        self.states: dict[Hashable, State] = {}

    def hit(self, rule: Rule[State], key: Hashable, cost: int, now_ns: int) -> Answer:
        state = self.states.get(key, rule.fresh)
        if not rule.allows(state, now_ns, cost):
            return self.peek(rule, key, cost, now_ns)
        if cost:
            self.states[key] = rule.charged(state, now_ns, cost)
        return replace(self.peek(rule, key, 0, now_ns), allowed=True, retry_after_ns=0)

    def peek(self, rule: Rule[State], key: Hashable, cost: int, now_ns: int) -> Answer:
        state = self.states.get(key, rule.fresh)
        return Answer(
            allowed=rule.allows(state, now_ns, cost),
            limit=rule.most,
            remaining=rule.remaining(state, now_ns),
            retry_after_ns=rule.retry_after_ns(state, now_ns, cost),
            reset_after_ns=_first(
                lambda wait_ns: rule.is_settled(state, now_ns + wait_ns), max(rule.over_ns(state) - now_ns, 0)
            ),
        )

    def take_up_to(self, rule: Rule[State], key: Hashable, most: int, now_ns: int) -> int:
        count = min(most, rule.most, self.peek(rule, key, 0, now_ns).remaining)
        if count:
            self.states[key] = rule.charged(self.states.get(key, rule.fresh), now_ns, count)
        return count

    def refund(self, rule: Rule[State], key: Hashable, cost: int, now_ns: int) -> None:
        if key in self.states:
            self.states[key] = rule.refunded(self.states[key], now_ns, min(cost, rule.most))

    def cancel(self, rule: Rule[State], key: Hashable, cost: int, now_ns: int) -> None:
        if key in self.states:
            self.states[key] = rule.cancelled(self.states[key], now_ns, cost)

    def reset(self, rule: Rule[State], key: Hashable, now_ns: int) -> None:
        if key in self.states:
            self.states[key] = rule.forgotten(self.states[key], now_ns)

    def reserve(
        self, rule: Rule[State], key: Hashable, cost: int, now_ns: int, max_delay_ns: int | None = None
    ) -> Booking:
        state = self.states.get(key, rule.fresh)
        delay_ns = rule.delay_ns(state, now_ns, cost)
        if max_delay_ns is not None and delay_ns > max_delay_ns:
            return Booking(False, delay_ns)
        if not rule.has_place(state, now_ns, cost):
            return Booking(False, rule.retry_after_ns(state, now_ns, cost))
        if cost:
            self.states[key] = rule.charged(state, now_ns, cost)
        return Booking(True, delay_ns)


# The generic cell rate algorithm: the state is the theoretical arrival time.


@dataclass(frozen=True)
class Bucket(Rule[int]):
    """Continuous refill: `limit` permits per `period_ns`, at most `burst` at once."""

    limit: int
    period_ns: int
    burst: int
    fresh = 0

    @property
    def most(self) -> int:
        return self.burst

    @property
    def unit_ns(self) -> int:
        """The time of one permit."""
        return self.increment_ns(1)

    def increment_ns(self, cost: int) -> int:
        """The time of `cost` permits, rounded up once."""
        return -(-cost * self.period_ns // self.limit)

    @property
    def tolerance_ns(self) -> int:
        """How far the theoretical arrival time may lie ahead of now: the time of a whole burst.

        Every request's time is rounded up, so a burst of single requests needs more than that. The tolerance is
        widened to hold them, by less than the time of one permit.
        """
        return min(self.burst * self.unit_ns, self.burst * self.period_ns // self.limit + self.unit_ns - 1)

    def allows(self, state: int, now_ns: int, cost: int) -> bool:
        start_ns = max(state, now_ns)
        return start_ns + self.increment_ns(cost) - now_ns <= self.tolerance_ns

    def charged(self, state: int, now_ns: int, cost: int) -> int:
        return max(state, now_ns) + self.increment_ns(cost)

    def refunded(self, state: int, now_ns: int, cost: int) -> int:
        return max(state - self.increment_ns(cost), now_ns) if state > now_ns else state

    def over_ns(self, state: int) -> int:
        return state

    def is_settled(self, state: int, now_ns: int) -> bool:
        return state <= now_ns

    def has_place(self, state: int, now_ns: int, cost: int) -> bool:
        return True

    def delay_ns(self, state: int, now_ns: int, cost: int) -> int:
        return self.retry_after_ns(state, now_ns, cost)


@dataclass(frozen=True, slots=True)
class Above:
    """A state: a full bucket, and so many permits more."""

    permits: int


@dataclass(frozen=True)
class ToppedUpBucket(Bucket):
    """A bucket to which permits can be added, also above its burst. Above it nothing is refilled."""

    def allows(self, state: int | Above, now_ns: int, cost: int) -> bool:
        return cost <= self.burst if isinstance(state, Above) else super().allows(state, now_ns, cost)

    def remaining(self, state: int | Above, now_ns: int) -> int:
        return self.burst + state.permits if isinstance(state, Above) else super().remaining(state, now_ns)

    def charged(self, state: int | Above, now_ns: int, cost: int) -> Any:
        if not isinstance(state, Above):
            return super().charged(state, now_ns, cost)
        if cost < state.permits:
            return Above(state.permits - cost)
        return now_ns + self.increment_ns(cost - state.permits)

    def refunded(self, state: int | Above, now_ns: int, cost: int) -> Any:
        return state if isinstance(state, Above) else super().refunded(state, now_ns, cost)

    def cancelled(self, state: int | Above, now_ns: int, cost: int) -> Any:
        if isinstance(state, Above):
            return Above(min(state.permits + cost, self.most_above))
        return super().refunded(state, now_ns, cost)

    most_above = 2**48 - 1

    def added(self, state: int | Above, now_ns: int, permits: int) -> Any:
        """The state after an ``add``; None if that is refused."""
        if isinstance(state, Above):
            permits += state.permits
        elif state > now_ns:
            missing = -(-(state - now_ns) * self.limit // self.period_ns)
            if permits < missing:
                return state - permits * self.period_ns // self.limit
            permits -= missing
        if permits > self.most_above:
            return None
        return Above(permits) if permits else now_ns

    def over_ns(self, state: int | Above) -> int:
        return 0 if isinstance(state, Above) else state

    def is_settled(self, state: int | Above, now_ns: int) -> bool:
        return isinstance(state, Above) or super().is_settled(state, now_ns)


class Prepaid(Rule[int]):
    """Credits: the state is what a key has left, which no time changes."""

    fresh = 0
    most = 2**48 - 1

    def allows(self, state: int, now_ns: int, cost: int) -> bool:
        return cost <= state

    def charged(self, state: int, now_ns: int, cost: int) -> int:
        return state - cost

    def refunded(self, state: int, now_ns: int, cost: int) -> int:
        return min(state + cost, self.most)

    def added(self, state: int, now_ns: int, permits: int) -> int | None:
        """The state after an ``add``; None if that is refused."""
        return state + permits if state + permits <= self.most else None

    def remaining(self, state: int, now_ns: int) -> int:
        return state

    def over_ns(self, state: int) -> int:
        return 0

    def is_settled(self, state: int, now_ns: int) -> bool:
        return False


@dataclass(frozen=True)
class InitialBucket(Bucket):
    """A bucket whose keys start with `initial` permits; the others come from the first charge on.

    A key is new again when its bucket has been full for as long as a new one takes to fill.
    """

    initial: int = 1
    fresh = -1  # as a refund at time 0 may leave a bucket that is full since 0

    @property
    def missing_ns(self) -> int:
        """The time in which a new key's bucket fills."""
        return self.tolerance_ns - Bucket(self.limit, self.period_ns, self.initial).tolerance_ns

    def start_ns(self, state: int, now_ns: int) -> int:
        """The theoretical arrival time before a charge."""
        is_new = state == self.fresh or state + self.missing_ns <= now_ns
        return now_ns + self.missing_ns if is_new else max(state, now_ns)

    def allows(self, state: int, now_ns: int, cost: int) -> bool:
        return self.start_ns(state, now_ns) + self.increment_ns(cost) - now_ns <= self.tolerance_ns

    def charged(self, state: int, now_ns: int, cost: int) -> int:
        return self.start_ns(state, now_ns) + self.increment_ns(cost)

    def over_ns(self, state: int) -> int:
        return state + self.missing_ns


class Queue(Bucket):
    """A bucket as a queue of `burst` places. A request departs when those before it have departed."""

    def has_place(self, state: int, now_ns: int, cost: int) -> bool:
        return self.allows(state, now_ns, cost)

    def delay_ns(self, state: int, now_ns: int, cost: int) -> int:
        return max(state - now_ns, 0)


class TokenBucketOracle(Oracle[int]):
    @property
    def tat_ns(self) -> dict[Hashable, int]:
        """The theoretical arrival time of each key."""
        return self.states

    def live_keys(self, now_ns: int) -> set[Hashable]:
        """The keys whose state still counts."""
        return {key for key, tat_ns in self.states.items() if tat_ns > now_ns}


class AllOfOracle:
    """Several rules by name, each with an oracle of its own: a request is charged to all or to none."""

    def __init__(self, rules: Mapping[str, Rule[Any]]) -> None:
        self.rules = rules
        self.oracles: dict[str, Oracle[Any]] = {name: Oracle() for name in rules}

    def hit(self, keys: Sequence[Hashable], costs: Sequence[int], now_ns: int) -> Answer:
        decided = self.peek(keys, costs, now_ns)
        return self._answer(Oracle.hit, keys, costs, now_ns) if decided.allowed else decided

    def peek(self, keys: Sequence[Hashable], costs: Sequence[int], now_ns: int) -> Answer:
        return self._answer(Oracle.peek, keys, costs, now_ns)

    def refund(self, keys: Sequence[Hashable], costs: Sequence[int], now_ns: int) -> None:
        for (name, rule), key, cost in zip(self.rules.items(), keys, costs, strict=True):
            self.oracles[name].refund(rule, key, cost, now_ns)

    def reset(self, keys: Sequence[Hashable], now_ns: int) -> None:
        for (name, rule), key in zip(self.rules.items(), keys, strict=True):
            self.oracles[name].reset(rule, key, now_ns)

    def _answer(
        self, method: Callable[..., Answer], keys: Sequence[Hashable], costs: Sequence[int], now_ns: int
    ) -> Answer:
        """All answers as one.

        The binding limit is the denying one with the longest wait; if none denies, the one with the fewest left.
        """
        answers = {
            name: method(self.oracles[name], rule, key, cost, now_ns)
            for (name, rule), key, cost in zip(self.rules.items(), keys, costs, strict=True)
        }
        denying = [name for name, answer in answers.items() if not answer.allowed]
        if denying:
            bound = max(denying, key=lambda name: answers[name].retry_after_ns)
        else:
            bound = min(answers, key=lambda name: answers[name].remaining)
        return Answer(
            allowed=not denying,
            limit=answers[bound].limit,
            remaining=min(answer.remaining for answer in answers.values()),
            retry_after_ns=answers[bound].retry_after_ns,
            reset_after_ns=max(answer.reset_after_ns for answer in answers.values()),
            limiter=bound,
        )


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number from 0 to `most` for which the monotone `holds` is true; `most` if it is for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
