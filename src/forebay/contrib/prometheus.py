"""Metrics of stores for ``prometheus_client``: a collector that shows the whole host from any process.

``ForebayCollector(store)`` in a worker, or ``forebay metrics NAME --listen 9464`` beside the workers. docs/metrics.md
lists the metrics. Needs ``forebay[prometheus]``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from forebay.extras import Needs

with Needs("prometheus", __name__):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from forebay.metrics.readings import METRICS, Latencies, Metric
from forebay.metrics.sources import Sources

if TYPE_CHECKING:
    import os

    from prometheus_client.metrics_core import Metric as Family

__all__ = ["ForebayCollector"]


class ForebayCollector(Collector):
    """A collector of the metrics of `stores`, registered in `registry`: by default that of the process, None for none.

    `stores` are stores of any kind: a ``Store``; a ``RedisStore``, ``LeasedStore`` or ``SyncedStore``, also for
    asyncio, whose host's store is read, too. Text is the name of a store of other processes, or with a slash in it the
    path of its file: it is read from outside, as by the ``forebay`` command. It need not exist yet, and is followed
    when it is made again.

    A segment has the counts of all processes, living and gone. So each worker shows the totals of the host, its
    counters never fall, and there is no ``PROMETHEUS_MULTIPROC_DIR``: with that, use a registry of its own for each
    scrape, and register both collectors in it. A store that can't be read has ``forebay_store_up`` 0.

    Raises ``TypeError`` for an argument that is no store, ``ValueError`` for a name that can't be one, and for two
    private stores, whose labels would be the same. *Threads*, *fork*: safe. A scrape reads all bytes of the stores'
    tables: some milliseconds per million keys.
    """

    def __init__(self, *stores: Any | str | os.PathLike[str], registry: CollectorRegistry | None = REGISTRY) -> None:
        self._sources = Sources(stores)
        if registry is not None:
            registry.register(self)

    def describe(self) -> Iterable[Family]:
        """Every metric without samples, for the registry."""
        return map(_family, METRICS)

    def collect(self) -> Iterable[Family]:
        """The samples of now."""
        for metric, samples in self._sources.readings().items():
            family: Any = _family(metric)
            for labels, value in samples.items():
                shown = (list(value.up_to()), value.sum_s) if isinstance(value, Latencies) else (value,)
                family.add_metric(labels, *shown)
            yield family


def _family(metric: Metric) -> Family:
    kinds: dict[str, Any] = {
        "counter": CounterMetricFamily,
        "gauge": GaugeMetricFamily,
        "histogram": HistogramMetricFamily,
    }
    family: Family = kinds[metric.kind](metric.family, metric.help, labels=metric.labels, unit=metric.base_unit)
    return family
