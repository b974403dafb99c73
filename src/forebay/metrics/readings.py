"""Every metric, once: its name, kind, unit and labels, and its samples."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from forebay import own_counts
from forebay.errors import printable
from forebay.rate import NS
from forebay.segment import layout
from forebay.stats import LimiterStats

__all__ = [
    "COUNTERS",
    "METRICS",
    "OWN_COUNTERS",
    "POLICY",
    "SHEDDER",
    "Latencies",
    "Memory",
    "Metric",
    "Observed",
    "Reading",
    "Shed",
    "Value",
    "is_own",
    "parts_of",
    "redis_readings",
    "samples_of",
    "store_readings",
]

Kind = Literal["counter", "gauge", "histogram"]
UNITS: Final = {"By": "bytes", "s": "seconds"}


class Metric(NamedTuple):
    """A metric. Its labels are in one order for all samples."""

    name: str
    """As OpenTelemetry names it, such as ``forebay.store.size``."""
    kind: Kind
    unit: str
    """As OpenTelemetry does: ``By``, ``s``, or what is counted, in braces."""
    help: str
    labels: tuple[str, ...]

    @property
    def base_unit(self) -> str:
        """The unit at the end of Prometheus' name; empty for a number of things."""
        return UNITS.get(self.unit, "")

    @property
    def family(self) -> str:
        """Prometheus' name, of a counter without ``_total``."""
        return self.name.replace(".", "_") + (f"_{self.base_unit}" if self.base_unit else "")

    @property
    def sample(self) -> str:
        """Prometheus' name of a sample; of a histogram that of a bucket."""
        return self.family + {"counter": "_total", "gauge": "", "histogram": "_bucket"}[self.kind]


@dataclass(frozen=True, slots=True)
class Latencies:
    """A histogram of times, which the value of its metric's sample is."""

    counts: tuple[int, ...]
    """Of each bucket."""
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def up_to(self) -> Iterator[tuple[str, int]]:
        """The bounds of the buckets in seconds, as Prometheus writes them, each with the count of all below."""
        yield from zip(BOUNDS, itertools.accumulate(self.counts), strict=True)


BOUNDS: Final = (*(str(layout.LATENCY_LEAST_NS * 4**at / NS) for at in range(layout.LATENCY_BUCKETS - 1)), "+Inf")
Value: TypeAlias = float | Latencies

METRICS: Final[list[Metric]] = []


def _metric(labels: tuple[str, ...]) -> Callable[[str, Kind, str, str], Metric]:
    def make(name: str, kind: Kind, unit: str, text: str) -> Metric:
        METRICS.append(Metric(f"forebay.{name}", kind, unit, text, labels))
        return METRICS[-1]

    return make


LIMITER_LABELS: Final = ("store", "limiter", "algorithm")
_limiter, _store, _redis, _sync = map(_metric, (LIMITER_LABELS, ("store",), ("server", "scope"), ("store", "server")))

COUNTERS: Final = {
    "allowed": _limiter("allowed", "counter", "{decision}", "Decisions that allowed a request."),
    "denied": _limiter(
        "denied",
        "counter",
        "{decision}",
        "Decisions that denied a request, or would have, in the shadow.",
    ),
    "inserted": _limiter("inserted", "counter", "{key}", "Keys put into the table."),
    "evicted": _limiter("evicted", "counter", "{key}", "Live keys that were forgotten, as a new key found no room."),
    "full": _limiter("full", "counter", "{decision}", "Decisions by on_full, as their key found no room."),
    "cas_retries": _limiter("cas_retries", "counter", "{retry}", "CASes lost to another thread or process."),
}
MEMORY_LIVE: Final = _limiter("limiter.live_keys", "gauge", "{key}", "Live keys in a limiter's own memory.")
MEMORY_KEYS: Final = _limiter("limiter.capacity_keys", "gauge", "{key}", "Keys that a limiter's own memory is for.")
MEMORY_BYTES: Final = _limiter("limiter.size", "gauge", "By", "Bytes of a limiter's own memory.")
HELD: Final = _limiter("limiter.held_permits", "gauge", "{permit}", "Permits of a Concurrency that are held.")
SHED_LEVEL: Final = _limiter("shedder.level", "gauge", "{priority}", "Priorities that a BusyWorkers sheds.")
SHED_LIMIT: Final = _limiter("shedder.limit", "gauge", "{request}", "Requests that an AdaptiveLimit admits at a time.")

UP: Final = _store("store.up", "gauge", "{store}", "1 if the store could be read, 0 if not.")
LIVE: Final = _store("store.live_keys", "gauge", "{key}", "Live keys in the store's table.")
KEYS: Final = _store("store.capacity_keys", "gauge", "{key}", "Live keys that the store was made for.")
BYTES: Final = _store("store.size", "gauge", "By", "Bytes of the store's file.")
ATTACHED: Final = _store("store.attached_processes", "gauge", "{process}", "Processes that have the store attached.")
REMOVED: Final = _store(
    "store.removed_segments", "gauge", "{segment}", "Removed segments of the store's path that processes still use."
)
RULES_VERSION: Final = _store("rules.version", "gauge", "{version}", "Number of the live rules; 0 if there are none.")
DECISION_LATENCY: Final = _store(
    "decision_latency", "histogram", "s", "Time of web requests' decisions in shared memory, of one in 128."
)
REDIS_LATENCY: Final = _store("redis.latency", "histogram", "s", "Time of calls that Redis replied to.")
DELAYED: Final = _store("delayed", "counter", "{request}", "Web requests that the delay of a rule held back.")
POLICY: Final = _store(
    "redis.decided_by_policy", "counter", "{decision}", "Requests that when_unavailable decided in place of Redis."
)
PROBES: Final = _store("redis.probes", "counter", "{call}", "Calls that looked whether Redis is back.")
LEASE_FETCHES: Final = _store(
    "lease.fetches", "counter", "{call}", "Calls in which Redis answered how many permits a leased limit gets."
)
ROUNDS: Final = _store("sync.rounds", "counter", "{round}", "Rounds of exchanges of synced limits.")

BREAKER: Final = _metric(("server", "scope", "state"))(
    "redis.breaker", "gauge", "{breaker}", "1 for the state of a server's circuit breaker, 0 for the others."
)
FAILURES: Final = _redis("redis.failures", "gauge", "{call}", "Failed calls in a row, up to those that open a breaker.")
FAILING: Final = _redis("redis.failing", "gauge", "s", "Time since the first failed call in a row.")

SYNC_AGE: Final = _sync("sync.age", "gauge", "s", "Time since this host last exchanged all counts.")
SYNC_PENDING: Final = _sync("sync.pending_keys", "gauge", "{key}", "Keys with counts that Redis doesn't know.")
SYNC_UNNAMED: Final = _sync("sync.unnamed_keys", "gauge", "{key}", "Keys that can't be exchanged yet.")

# Limiters that forebay makes for itself, by name: those whose decisions are a metric of their own, and the others.
OWN_COUNTERS: Final = {
    "forebay.redis decided": POLICY,
    "forebay.redis probes": PROBES,
    "forebay.turns": ROUNDS,
    own_counts.LEASE_FETCHES: LEASE_FETCHES,
    own_counts.DELAYED: DELAYED,
}
OWN: Final = frozenset(
    {
        *OWN_COUNTERS,
        *("forebay.redis trouble", "forebay.redis recovering", "forebay.redis at once"),
        *("forebay.sync", "forebay.synced", "forebay.news", "forebay carried", "forebay.hot keys"),
    }
)


SHEDDER: Final = "load shedder"
"""The algorithm's name of a shedder's measurements. It decides by the ``Concurrency`` of its name."""


def is_own(limiter: str) -> bool:
    """Whether forebay made the limiter of that name for itself."""
    return limiter in OWN


@dataclass(frozen=True, slots=True)
class Memory:
    """The extent of a limiter with memory of its own."""

    limiter: str
    algorithm: str
    keys: int
    live_keys: int
    held: int
    """Permits of a ``Concurrency`` whose leases have not ended."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Shed:
    """The measurement of a load shedder."""

    limiter: str
    level: float | None = None
    """How many priorities a ``BusyWorkers`` sheds."""
    limit: int | None = None
    """The limit of an ``AdaptiveLimit``."""


@dataclass(frozen=True, slots=True)
class Observed:
    """A store at one moment. None stands for what can't be seen there."""

    keys: int
    live_keys: int
    bytes: int
    limiters: dict[tuple[str, str], LimiterStats]
    """By name and algorithm's name."""
    memories: tuple[Memory, ...] = ()
    shedders: tuple[Shed, ...] = ()
    attached: int | None = None
    removed: int | None = None
    rules_version: int | None = None
    decision_latency: Latencies | None = None
    redis_latency: Latencies | None = None


class Reading(NamedTuple):
    """A sample."""

    metric: Metric
    labels: tuple[str, ...]
    value: Value


def clean(text: str) -> str:
    """A label's value: text that others made, without control characters and what isn't UTF-8."""
    return printable(os.fsencode(text).decode(errors="replace"))


def store_readings(label: str, seen: Observed | None) -> Iterator[Reading]:
    """The samples of a store; None if it can't be read."""
    store = (clean(label),)
    yield Reading(UP, store, int(seen is not None))
    if seen is None:
        return
    yield Reading(LIVE, store, seen.live_keys)
    yield Reading(KEYS, store, seen.keys)
    yield Reading(BYTES, store, seen.bytes)
    for metric, value in ((ATTACHED, seen.attached), (REMOVED, seen.removed), (RULES_VERSION, seen.rules_version)):
        if value is not None:
            yield Reading(metric, store, value)
    for histogram, latencies in ((DECISION_LATENCY, seen.decision_latency), (REDIS_LATENCY, seen.redis_latency)):
        # A store without web requests, or calls to Redis, has no such series.
        if latencies is not None and latencies.count:
            yield Reading(histogram, store, latencies)
    # Damaged names may look alike.
    totals = Counter[tuple[Metric, tuple[str, ...]]]()
    for (name, algorithm), stats in seen.limiters.items():
        if is_own(name):
            if name in OWN_COUNTERS:
                totals[OWN_COUNTERS[name], store] += stats.allowed
        elif algorithm != SHEDDER:
            for count, metric in COUNTERS.items():
                totals[metric, (*store, clean(name), algorithm)] += getattr(stats, count)
    for (metric, labels), total in totals.items():
        yield Reading(metric, labels, total)
    yield from _memory_readings(store, seen)


def _memory_readings(store: tuple[str], seen: Observed) -> Iterator[Reading]:
    by_limiter: dict[tuple[str, ...], list[Memory]] = {}
    for memory in seen.memories:
        if not is_own(memory.limiter) and memory.algorithm != SHEDDER:
            by_limiter.setdefault((*store, clean(memory.limiter), memory.algorithm), []).append(memory)
    for labels, memories in by_limiter.items():
        # A limiter whose limit was changed has several. The fullest one is that which has no room.
        fullest = max(memories, key=lambda memory: memory.live_keys / memory.keys)
        yield Reading(MEMORY_LIVE, labels, fullest.live_keys)
        yield Reading(MEMORY_KEYS, labels, fullest.keys)
        yield Reading(MEMORY_BYTES, labels, sum(memory.bytes for memory in memories))
        if labels[-1] == "Concurrency":
            yield Reading(HELD, labels, sum(memory.held for memory in memories))
    for shed in {shed.limiter: shed for shed in seen.shedders}.values():
        labels = (*store, clean(shed.limiter), "Concurrency")
        if shed.level is not None:
            yield Reading(SHED_LEVEL, labels, shed.level)
        if shed.limit is not None:
            yield Reading(SHED_LIMIT, labels, shed.limit)


def parts_of(metric: Metric) -> tuple[str, ...]:
    """The parts in which a metric is shown where there is no type for it: a histogram's; the empty one of others."""
    return ("bucket", "count", "sum") if metric.kind == "histogram" else ("",)


def samples_of(
    metric: Metric, part: str, values: Mapping[tuple[str, ...], Value]
) -> Iterator[tuple[dict[str, str], float]]:
    """The samples of one of `parts_of` a metric, with their labels."""
    for texts, value in values.items():
        labels = dict(zip(metric.labels, texts, strict=True))
        if not isinstance(value, Latencies):
            yield labels, value
        elif part == "bucket":
            yield from (({**labels, "le": bound}, count) for bound, count in value.up_to())
        else:
            yield labels, value.count if part == "count" else value.sum_s


def redis_readings(server: str, is_shared: bool, state: str, failures: int, failing_for_s: float) -> Iterator[Reading]:
    """The samples of a Redis server. `is_shared`: whether all processes of the host know the same."""
    labels = (clean(server), "host" if is_shared else "process")
    for one in ("closed", "open", "recovering"):
        yield Reading(BREAKER, (*labels, one), int(one == state))
    yield Reading(FAILURES, labels, failures)
    yield Reading(FAILING, labels, failing_for_s)
