"""Metrics of several workers: each shows the totals of the host, and no counter falls."""

from __future__ import annotations

import os
import signal

import pytest
from process_helpers import FREE_USER, Crew, Meeting, as_user
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay import Store, TokenBucket
from forebay.contrib.prometheus import ForebayCollector

WORKERS = 4
TURNS = 30
LATENCIES = 20_000
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scraped(registry: CollectorRegistry) -> Samples:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if family.type == "counter"
    }


def collector_of(store: Store | str) -> CollectorRegistry:
    registry = CollectorRegistry()
    ForebayCollector(store, registry=registry)
    return registry


def _scrape_in_turn(index: int, name: str, meeting: Meeting) -> list[Samples]:
    found = []
    with Store(name, keys=1000) as store:
        registry = collector_of(store)
        bucket = TokenBucket(store, "api", "1000/year")
        for _ in range(TURNS):
            for worker in range(WORKERS):
                bucket.allow(f"key {index}")
                meeting.wait(index)
                if worker == index:
                    found.append(scraped(registry))
                meeting.wait(index)
    return found


def test_workers_scraped_in_turn_show_the_same_growing_counters(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        found = crew.run(WORKERS, _scrape_in_turn, name, Meeting(WORKERS))
        in_turn = [found[worker][turn] for turn in range(TURNS) for worker in range(WORKERS)]
        key = ("forebay_allowed_total", (("algorithm", "TokenBucket"), ("limiter", "api"), ("store", name)))
        # All workers had made as many decisions when one of them was scraped.
        assert [samples[key] for samples in in_turn] == [WORKERS * (1 + at) for at in range(TURNS * WORKERS)]
        outside = scraped(collector_of(name))
        assert scraped(collector_of(store)) == outside == in_turn[-1]


def _add_latencies(index: int, name: str, meeting: Meeting) -> None:
    with Store(name, keys=1000) as store:
        meeting.wait(index)
        for _ in range(LATENCIES):
            store.segment.note_decision_latency(1000)


def test_workers_add_latencies_to_one_histogram(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        crew.run(WORKERS, _add_latencies, name, Meeting(WORKERS))
        registry = collector_of(store)
        labels = {"store": name}
        assert registry.get_sample_value("forebay_decision_latency_seconds_count", labels) == WORKERS * LATENCIES
        total_s = registry.get_sample_value("forebay_decision_latency_seconds_sum", labels)
        assert total_s == pytest.approx(WORKERS * LATENCIES * 1e-6)


def _note_latencies(name: str) -> bool:
    with Store.attach(name) as store:
        store.segment.note_decision_latency(1000)
        store.segment.note_redis_latency(1000)
        return store.attachment.is_writable


def test_process_that_may_only_read_notes_no_latency(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        os.chmod(f"/dev/shm/forebay-{name}", 0o644)
        # A write to its memory would end it.
        assert not crew.start(as_user, FREE_USER, FREE_USER, [], _note_latencies, name).result()
        registry = collector_of(store)
        assert registry.get_sample_value("forebay_store_up", {"store": name}) == 1
        assert registry.get_sample_value("forebay_decision_latency_seconds_count", {"store": name}) is None


def _decide_and_die(store_name: str) -> None:
    bucket = TokenBucket(Store(store_name, keys=1000), "api", "1000/year")
    for _ in range(10):
        bucket.allow("key")
    os.kill(os.getpid(), signal.SIGKILL)


def test_counters_keep_what_a_killed_worker_has_counted(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        registry = collector_of(store)
        for killed in range(1, 6):
            worker = crew.start(_decide_and_die, name)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            total = registry.get_sample_value(
                "forebay_allowed_total", {"store": name, "limiter": "api", "algorithm": "TokenBucket"}
            )
            assert total == 10 * killed


def _scrape(name: str) -> Samples:
    return scraped(collector_of(name))


def _scrape_inherited(store: Store) -> tuple[Samples, float | None]:
    registry = collector_of(store)
    return scraped(registry), registry.get_sample_value("forebay_store_up", {"store": store.name})


def test_worker_of_another_user_shows_what_it_inherited(crew: Crew, name: str) -> None:
    """gunicorn's master as root, its workers as another user: they may not open the file again."""
    with Store(name, keys=1000) as store:
        assert TokenBucket(store, "api", "1000/year").allow("key")
        worker = crew.start(as_user, FREE_USER, FREE_USER, [], _scrape_inherited, store)
        found, up = worker.result()
        assert up == 1
        assert found == scraped(collector_of(store))
        # From outside that user may not read it, and is refused without a failure.
        assert crew.start(as_user, FREE_USER, FREE_USER, [], _scrape, name).result() == {}
