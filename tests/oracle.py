"""The algorithms once more, in plain Python with exact integers: slow, and right at a glance.

Nothing here is derived from how penstock computes. What a decision reports besides its verdict is found by asking the
rule itself again: `remaining` is the largest cost that it would allow, `retry_after_ns` the shortest wait after which
it would allow, each by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

__all__ = ["Answer", "Bucket", "TokenBucketOracle"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a ``penstock.Decision`` has to say."""

    allowed: bool
    limit: int
    remaining: int
    retry_after_ns: int
    reset_after_ns: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """`limit` permits per `period_ns`, at most `burst` at once."""

    limit: int
    period_ns: int
    burst: int

    @property
    def unit_ns(self) -> int:
        """The time of one permit."""
        return self.increment_ns(1)

    def increment_ns(self, cost: int) -> int:
        """The time of `cost` permits, rounded up once."""
        return -(-cost * self.period_ns // self.limit)

    @property
    def tolerance_ns(self) -> int:
        """How far ahead of now the theoretical arrival time may come to lie.

        The time of a whole burst. Since every request's time is rounded up, a burst of single requests would not fit
        in it; so it is widened to hold them, but by less than the time of one more permit.
        """
        return min(self.burst * self.unit_ns, self.burst * self.period_ns // self.limit + self.unit_ns - 1)

    def allows(self, tat_ns: int, now_ns: int, cost: int) -> bool:
        start_ns = max(tat_ns, now_ns)
        return start_ns + self.increment_ns(cost) - now_ns <= self.tolerance_ns


class TokenBucketOracle:
    """Continuous token buckets (GCRA): a theoretical arrival time per key, 0 for a key never seen."""

    def __init__(self) -> None:
        self.tat_ns: dict[Hashable, int] = {}

    def hit(self, bucket: Bucket, key: Hashable, cost: int, now_ns: int) -> Answer:
        tat_ns = self.tat_ns.get(key, 0)
        if not bucket.allows(tat_ns, now_ns, cost):
            return self.peek(bucket, key, cost, now_ns)
        if cost:
            self.tat_ns[key] = max(tat_ns, now_ns) + bucket.increment_ns(cost)
        after = self.peek(bucket, key, 0, now_ns)
        return Answer(True, bucket.burst, after.remaining, 0, after.reset_after_ns)

    def peek(self, bucket: Bucket, key: Hashable, cost: int, now_ns: int) -> Answer:
        tat_ns = self.tat_ns.get(key, 0)
        ahead_ns = max(tat_ns - now_ns, 0)
        return Answer(
            allowed=bucket.allows(tat_ns, now_ns, cost),
            limit=bucket.burst,
            remaining=_first(lambda left: not bucket.allows(tat_ns, now_ns, left + 1), bucket.burst),
            retry_after_ns=_first(
                lambda wait_ns: bucket.allows(tat_ns, now_ns + wait_ns, cost), ahead_ns + bucket.increment_ns(cost)
            ),
            reset_after_ns=ahead_ns,
        )

    def refund(self, bucket: Bucket, key: Hashable, cost: int, now_ns: int) -> None:
        tat_ns = self.tat_ns.get(key, 0)
        if tat_ns > now_ns:
            self.tat_ns[key] = max(tat_ns - bucket.increment_ns(cost), now_ns)

    def reset(self, key: Hashable) -> None:
        self.tat_ns.pop(key, None)

    def live_keys(self, now_ns: int) -> set[Hashable]:
        """The keys whose state still matters."""
        return {key for key, tat_ns in self.tat_ns.items() if tat_ns > now_ns}


def _first(holds: Callable[[int], bool], most: int) -> int:
    """The smallest number from 0 to `most` for which `holds`, which it does from there on; `most` if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
