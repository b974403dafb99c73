"""Metrics of segments: from outside, of memory of their own, of shedders, and after a removal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from scrapes import scraped

from forebay import BucketedWindow, Concurrency, Store, TokenBucket
from forebay.shedding import AdaptiveLimit, BusyWorkers
from forebay.testing import ManualClock


def label_of(store: Store) -> str:
    (label,) = {labels[0] for name, *labels in scraped(store) if name == "forebay_store_up"}
    return label


def test_from_outside_everything_is_the_same(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        assert TokenBucket(store, "api", "5/hour").allow("key")
        held = Concurrency(store, "held", 2, keys=10)
        assert held.acquire("job")
        expected = scraped(store)
        assert scraped(store_name) == scraped(store.path) == expected
        assert scraped(store, store_name) == expected
        assert expected["forebay_store_attached_processes", store_name] == 1
        assert expected["forebay_limiter_held_permits", store_name, "held", "Concurrency"] == 1
        assert expected["forebay_limiter_live_keys", store_name, "held", "Concurrency"] == 1
        assert expected["forebay_limiter_capacity_keys", store_name, "held", "Concurrency"] == 10
    assert scraped(store_name)["forebay_store_attached_processes", store_name] == 0


def test_looking_from_outside_makes_and_changes_nothing(store_name: str) -> None:
    path = Path(f"/dev/shm/forebay-{store_name}")
    assert scraped(store_name) == {("forebay_store_up", store_name): 0}
    assert not path.exists()
    with Store(store_name, keys=1000) as store:
        TokenBucket(store, "api", "5/hour").allow("key")
    before, status = path.read_bytes(), path.stat()
    assert scraped(store_name)["forebay_allowed_total", store_name, "api", "TokenBucket"] == 1
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (before, status.st_mtime_ns)


def test_a_store_of_a_path_has_it_as_its_label(tmp_path: Path) -> None:
    with Store("shop", keys=1000, path=tmp_path / "limits") as store:
        assert scraped(store)["forebay_store_up", str(tmp_path / "limits")] == 1
    assert scraped(tmp_path / "limits")["forebay_store_up", str(tmp_path / "limits")] == 1


def test_a_store_that_is_made_again_is_followed(tmp_path: Path) -> None:
    path = str(tmp_path / "forebay-shop")
    counter = ("forebay_allowed_total", path, "api", "TokenBucket")
    with Store("shop", keys=1000, directory=tmp_path) as first:
        bucket = TokenBucket(first, "api", "5/hour")
        assert all(bucket.allow("key") for _ in range(3))
        assert scraped(path)[counter] == 3
        assert scraped(first)["forebay_store_removed_segments", path] == 0
        Store.unlink("shop", directory=tmp_path)
        assert scraped(path) == {("forebay_store_up", path): 0}
        assert scraped(first)["forebay_store_removed_segments", path] == 1
        with pytest.warns(UserWarning, match="removed"):
            second = Store("shop", keys=1000, directory=tmp_path)
        with second:
            assert TokenBucket(second, "api", "5/hour").allow("key")
            assert scraped(path)[counter] == 1
            assert scraped(path)["forebay_store_removed_segments", path] == 1
            assert scraped(first)[counter] == 3
            assert scraped(first)["forebay_store_removed_segments", path] == 1
            first.close()
            assert scraped(path)["forebay_store_removed_segments", path] == 0


def test_the_fullest_memory_of_a_limiter_is_shown(store: Store, clock: ManualClock) -> None:
    label = label_of(store)
    old = BucketedWindow(store, "parts", "60/hour", 60, keys=10)
    new = BucketedWindow(store, "parts", "60/minute", 60, keys=100)
    assert all(old.allow(f"key {number}") for number in range(9))
    assert new.allow("key")
    found = scraped(store)
    of = (label, "parts", "BucketedWindow")
    assert (found["forebay_limiter_live_keys", *of], found["forebay_limiter_capacity_keys", *of]) == (9, 10)
    sizes = [BucketedWindow.bytes_needed(60, keys=keys) for keys in (10, 100)]
    assert abs(found["forebay_limiter_size_bytes", *of] - sum(sizes)) < 2 * 65536


def test_shedders_show_their_limit_and_level(store: Store, clock: ManualClock) -> None:
    label = label_of(store)
    adaptive = AdaptiveLimit(store, "search", window="1s")
    busy = BusyWorkers(store, "workers", 2, ["critical", "default"], interval="80ms")
    assert ("forebay_shedder_limit", label, "search", "Concurrency") not in scraped(store)
    for _ in range(30):
        with adaptive.admit():
            clock.advance(0.1)
    with busy.admit("critical"), busy.admit("critical"):
        for _ in range(20):
            clock.advance(0.02)
            busy.admit("default").end()
        found = scraped(store)
        assert found["forebay_shedder_level", label, "workers", "Concurrency"] == busy.level > 0
        assert found["forebay_limiter_held_permits", label, "workers", "Concurrency"] == 2
    assert found["forebay_shedder_limit", label, "search", "Concurrency"] == adaptive.limit
    assert not [key for key in found if "load shedder" in key or "search, measured" in key]


def test_store_without_its_descriptor_shows_its_counts(tmp_path: Path) -> None:
    """A program that becomes a daemon closes all descriptors."""
    with Store("shop", keys=1000, directory=tmp_path) as store:
        TokenBucket(store, "api", "5/hour").allow("key")
        expected = scraped(store)
        for entry in os.listdir("/proc/self/fd"):
            try:
                if os.path.samestat(os.fstat(int(entry)), os.stat(store.path or "")):
                    os.close(int(entry))
            except OSError:
                continue
        found = scraped(store)
        assert found.items() <= expected.items()
        assert found["forebay_allowed_total", store.path or "", "api", "TokenBucket"] == 1
