"""Metrics of stores for OpenTelemetry: instruments that are observed when a reader collects.

``observe_stores(meter, store)``. docs/metrics.md lists the metrics. Needs ``forebay[opentelemetry]``, and an SDK that
the application configures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from forebay import forking
from forebay.extras import Needs

with Needs("opentelemetry", __name__):
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

from forebay.metrics.readings import METRICS, Metric, Value, parts_of, samples_of
from forebay.metrics.sources import Sources

if TYPE_CHECKING:
    import os

__all__ = ["observe_stores"]


def observe_stores(meter: Meter, *stores: Any | str | os.PathLike[str]) -> None:
    """Make an observable instrument of `meter` for each metric of `stores`, which are as in ``ForebayCollector``.

    OpenTelemetry observes no histogram. So one is three counters: ``forebay.decision_latency.bucket``, with the
    attribute ``le``, and the same with ``.count`` and ``.sum``.

    The values are those of the whole host, whichever process observes them. A backend that adds up the instances of a
    service would count them once for each process, so observe them in one process of the host: in one that serves no
    requests, or by the collector's Prometheus receiver from ``forebay metrics --listen``.

    Raises ``TypeError`` and ``ValueError``, as ``ForebayCollector``. *Threads*, *fork*: safe. One collection reads the
    stores once: some milliseconds per million keys.
    """
    collection = _Collection(Sources(stores))
    for metric in METRICS:
        make = meter.create_observable_gauge if metric.kind == "gauge" else meter.create_observable_counter
        for part in parts_of(metric):
            unit = "{call}" if part in ("bucket", "count") else metric.unit
            make(".".join(filter(None, (metric.name, part))), [collection.callback_of(metric, part)], unit, metric.help)


class _Collection:
    """What the stores showed, for all instruments of one collection.

    An SDK asks one instrument after another. One that asks again begins the next collection.

    A counter of OpenTelemetry never falls. So a store that was made again or restored, and counts anew, goes on from
    what it has shown.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._readings: dict[Metric, dict[tuple[str, ...], Value]] = {}
        self._waiting: set[tuple[Metric, str]] = set()
        self._totals: dict[tuple[Metric, str, tuple[str, ...]], tuple[float, float]] = {}
        """What each counter has shown last, and what it had shown before it began anew."""

    def callback_of(self, metric: Metric, part: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda options: self._observed(metric, part)

    def _observed(self, metric: Metric, part: str) -> list[Observation]:
        with _lock:
            if (metric, part) not in self._waiting:
                self._readings = self._sources.readings()
                self._waiting = {(each, one) for each in METRICS for one in parts_of(each)}
            self._waiting.discard((metric, part))
            samples = samples_of(metric, part, self._readings.get(metric, {}))
            if metric.kind == "gauge":
                return [Observation(value, labels) for labels, value in samples]
            return [Observation(self._total(metric, part, labels, value), labels) for labels, value in samples]

    def _total(self, metric: Metric, part: str, labels: dict[str, str], value: float) -> float:
        key = metric, part, tuple(labels.values())
        latest, before = self._totals.get(key, (0, 0))
        if value < latest:
            before += latest
        self._totals[key] = value, before
        return before + value


_lock = threading.Lock()


def _reset_in_child() -> None:
    global _lock
    _lock = threading.Lock()


# A forked child doesn't have the thread that holds the lock.
forking.in_child(_reset_in_child)
