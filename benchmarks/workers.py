"""Processes or threads that decide at the same time, each on its own core, and their undisturbed paces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baselines import DictBucket, LockedBucket

from forebay import Store, TokenBucket
from forebay.benchmarking.limiters import GENEROUS
from forebay.benchmarking.workers import Task, Workers

CHUNK = 1000
ATTEMPTS = 5
# The share of a worker's time that it may spend waiting for its core.
MOST_WAITING = 0.03


@dataclass(frozen=True)
class Workload:
    """A worker's task; it is pickled to another process."""

    kind: str
    store_name: str = ""
    locked: LockedBucket | None = None
    bucket: TokenBucket | None = None
    """One for all threads; processes make their own."""

    def __call__(self, number: int) -> Mapping[str, Task]:
        """The task of worker `number`, by its kind."""
        return {self.kind: self._task(number)}

    def _task(self, number: int) -> Task:
        own_keys = [f"worker:{number}:{i % 100}" for i in range(CHUNK)]
        # An object of this worker's own: without the GIL, threads that use one object take turns at counting its
        # references.
        one_key = ["".join(["user:42:", "abcdefg"])] * CHUNK
        if self.bucket is not None:
            return self.bucket.allow, own_keys if self.kind == "own" else one_key
        if self.kind == "control":
            return DictBucket(1000, GENEROUS["burst"]).allow, own_keys
        if self.kind == "locked":
            return self.locked.allow, one_key  # type: ignore[union-attr]
        store = Store(self.store_name, keys=100_000)
        if self.kind == "denied":
            bucket = TokenBucket(store, "strict", "1/day")
            bucket.allow(one_key[0])
            return bucket.allow, one_key
        return TokenBucket(store, "api", **GENEROUS).allow, own_keys if self.kind == "own" else one_key


def undisturbed_rates(workers: Workers, kind: str, numbers: Iterable[int], duration_ns: int) -> list[float] | None:
    """Decisions per second of each of these workers, working at the same time.

    None if other processes of this host took a core in every attempt: such a figure would not show the workers'
    scaling.
    """
    chosen = list(numbers)
    for _ in range(ATTEMPTS):
        paces = workers.run(kind, chosen, duration_ns)
        if all(pace.waited_share < MOST_WAITING for pace in paces):
            return [pace.per_second for pace in paces]
    return None
