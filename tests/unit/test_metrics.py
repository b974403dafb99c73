"""Metrics of stores for ``prometheus_client`` and OpenTelemetry, wherever stores keep their state."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from scrapes import scraped

from forebay import FixedWindow, Store, TokenBucket
from forebay.contrib.opentelemetry import observe_stores
from forebay.contrib.prometheus import ForebayCollector
from forebay.metrics.readings import METRICS, parts_of


@pytest.fixture
def used() -> Any:
    with Store.private(keys=1000) as store:
        bucket = TokenBucket(store, "api", "100/hour")
        assert bucket.hit("key", 100)
        assert not bucket.allow("key")
        assert not bucket.allow("key")
        assert FixedWindow(store, "login", "5/hour").allow("key")
        yield store


def test_samples_are_the_stores_statistics(used: Store) -> None:
    found = scraped(used)
    assert found["forebay_allowed_total", "private", "api", "TokenBucket"] == 1
    assert found["forebay_denied_total", "private", "api", "TokenBucket"] == 2
    assert found["forebay_allowed_total", "private", "login", "FixedWindow"] == 1
    stats = used.stats()
    for name in ("inserted", "evicted", "full", "cas_retries"):
        assert found[f"forebay_{name}_total", "private", "api", "TokenBucket"] == getattr(stats.limiters["api"], name)
    assert found["forebay_store_live_keys", "private"] == stats.live_keys == 2
    assert found["forebay_store_capacity_keys", "private"] == 1000
    assert found["forebay_store_size_bytes", "private"] == stats.bytes
    assert found["forebay_store_up", "private"] == 1


def test_limiters_of_one_name_keep_it_beside_their_algorithms(used: Store) -> None:
    """A series goes on under its labels when another limiter of that name is made."""
    FixedWindow(used, "api", "5/hour").allow("key")
    assert "api (TokenBucket)" in used.stats().limiters
    found = scraped(used)
    assert found["forebay_denied_total", "private", "api", "TokenBucket"] == 2
    assert found["forebay_allowed_total", "private", "api", "FixedWindow"] == 1


def test_names_of_others_are_escaped(used: Store) -> None:
    names = ('quote" and \\', "line\nfeed", "esc\x1b[31m", "{label}", "emoji 🎈")
    for name in names:
        TokenBucket(used, name, "5/hour").allow("key")
    registry = CollectorRegistry()
    ForebayCollector(used, registry=registry)
    text = generate_latest(registry).decode()
    assert not {char for char in text if not char.isprintable()} - {"\n"}
    shown = {labels[1] for name, *labels in scraped(used) if name == "forebay_allowed_total"}
    assert shown == {"api", "login", names[0], r"line\nfeed", r"esc\x1b[31m", *names[3:]}


def test_one_store_is_read_once_and_two_of_one_label_are_refused(used: Store) -> None:
    assert scraped(used, used) == scraped(used)
    with Store.private(keys=10) as other, pytest.raises(ValueError, match="the label 'private'"):
        ForebayCollector(used, other, registry=None)


def test_closed_store_is_down_and_fails_no_scrape(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with Store.private(keys=10) as store:
        ForebayCollector(store, registry=registry)
    with caplog.at_level(logging.WARNING, "forebay.metrics"):
        for _ in range(3):
            assert registry.get_sample_value("forebay_store_up", {"store": "private"}) == 0
    assert len(caplog.records) <= 1  # once a minute


@pytest.mark.parametrize("wrong", [(), (5,), (None,)])
def test_what_is_no_store_is_refused(wrong: tuple[Any, ...]) -> None:
    with pytest.raises((TypeError, ValueError), match="store"):
        ForebayCollector(*wrong, registry=None)


def test_registry_refuses_a_second_collector_of_the_same_metrics(used: Store) -> None:
    registry = CollectorRegistry()
    ForebayCollector(used, registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        ForebayCollector(used, registry=registry)


def test_names_follow_the_conventions() -> None:
    assert len({metric.sample for metric in METRICS}) == len(METRICS) == len({metric.name for metric in METRICS})
    for metric in METRICS:
        assert metric.sample.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")
        assert metric.unit in ("By", "s") or metric.unit.startswith("{")


# OpenTelemetry


def observed(reader: InMemoryMetricReader) -> dict[str, dict[tuple[Any, ...], Any]]:
    data = reader.get_metrics_data()
    assert data is not None
    return {
        metric.name: {tuple((point.attributes or {}).values()): point.value for point in metric.data.data_points}  # type: ignore[union-attr]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_instruments_observe_the_same_samples(used: Store) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_stores(provider.get_meter("test"), used)
    found = observed(reader)
    names = {
        ".".join(filter(None, (metric.name, part))): f"{metric.family}_{part}" if part else metric.sample
        for metric in METRICS
        for part in parts_of(metric)
    }
    expected = scraped(used)
    assert {
        (names[name], *labels): value for name, points in found.items() for labels, value in points.items()
    } == expected
    TokenBucket(used, "api", "100/hour").allow("key")
    assert observed(reader)["forebay.denied"]["private", "api", "TokenBucket"] == 3
    provider.shutdown()


def test_one_collection_reads_the_stores_once(used: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.metrics import sources

    readings, count = sources.Sources.readings, 0

    def counted(self: sources.Sources) -> Any:
        nonlocal count
        count += 1
        return readings(self)

    monkeypatch.setattr(sources.Sources, "readings", counted)
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_stores(provider.get_meter("test"), used)
    for collection in (1, 2, 3):
        observed(reader)
        assert count == collection
    provider.shutdown()


def test_counters_go_on_when_their_store_is_made_again(store_name: str) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    observe_stores(provider.get_meter("test"), store_name)
    shown = []
    for count in (3, 2, 4):
        with Store(store_name, keys=100) as store:
            for _ in range(count):
                assert TokenBucket(store, "api", "100/hour").allow("key")
                found = observed(reader)
                shown.append(found["forebay.allowed"][store_name, "api", "TokenBucket"])
            assert found["forebay.store.live_keys"][(store_name,)] == 1
        Store.unlink(store_name)
    assert shown == [*range(1, 10)]
    provider.shutdown()
