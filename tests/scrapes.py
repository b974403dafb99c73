"""A scrape of stores' metrics, as Prometheus reads it."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.contrib.prometheus import ForebayCollector
from forebay.metrics.readings import METRICS


def scraped(*stores: Any) -> dict[tuple[str, ...], float]:
    """The text of a scrape, parsed: values by the sample's name and its labels' values, in the labels' order."""
    registry = CollectorRegistry()
    ForebayCollector(*stores, registry=registry)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    order = {metric.sample: metric.labels for metric in METRICS}
    for metric in METRICS:
        if metric.kind == "histogram":
            order |= {metric.sample: (*metric.labels, "le")}
            order |= {f"{metric.family}_{part}": metric.labels for part in ("count", "sum")}
    return {
        (sample.name, *(sample.labels[label] for label in order[sample.name])): sample.value
        for family in families
        for sample in family.samples
    }
