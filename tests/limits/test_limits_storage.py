"""The storage for the limits library: the guarantees for its callers, sync and async."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import mmap
import os
import pickle
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import time_machine
from flask import Flask
from flask_limiter import Limiter as FlaskLimiter
from flask_limiter.commands import cli as flask_limiter_commands
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import parse
from limits.errors import ConfigurationError, StorageError
from limits.storage import MemoryStorage
from limits_storages import SCHEMES, STRATEGIES, Blocking, limiter, open_storage
from slowapi import Limiter as SlowapiLimiter
from slowapi import _rate_limit_exceeded_handler
from slowapi.errors import RateLimitExceeded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from forebay import (
    InvalidRate,
    SegmentRemovedWarning,
    SegmentSizeWarning,
    SegmentSpaceError,
    Store,
    StoreClosed,
    TokenBucket,
    connect,
)
from forebay.limits import AsyncForebayStorage, AsyncGCRARateLimiter, ForebayStorage, GCRARateLimiter
from forebay.segment import free_space
from forebay.testing import ManualClock, private_stores

Open = Callable[..., Any]


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    scheme: str = request.param
    return scheme


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def opened(scheme: str, store_name: str, clock: ManualClock) -> Iterator[Open]:
    """Open a storage over the test's store, whose clock does not move by itself."""
    storages = []

    def open_one(query: str = "keys=1000&moving_window_keys=100", **options: Any) -> Any:
        storages.append(open_storage(f"{scheme}:///{store_name}?{query}", clock=clock, **options))
        return storages[-1]

    yield open_one
    for storage in storages:
        storage.store.close()


@contextlib.contextmanager
def reported_in(seconds: float) -> Iterator[list[float]]:
    """Assert that the block appends a wall-clock time `seconds` after some moment of the block."""
    times: list[float] = []
    before = time.time()
    yield times
    assert before + seconds - 0.5 <= times[0] <= time.time() + seconds + 0.5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_limit_is_used_up_and_cleared(opened: Open, strategy: str) -> None:
    storage = opened()
    limited, item = limiter(strategy, storage), parse("10/hour")
    assert limited.test(item, "ada", cost=10)
    assert not limited.test(item, "ada", cost=11)
    assert not limited.hit(item, "bob", cost=11)
    assert [limited.hit(item, "ada") for _ in range(6)] == [True] * 6
    assert limited.get_window_stats(item, "ada").remaining == 4
    assert not limited.test(item, "ada", cost=5)
    assert limited.test(item, "ada", cost=4)
    assert limited.hit(item, "ada", cost=4)
    assert not limited.test(item, "ada")
    assert not limited.hit(item, "ada")
    assert limited.get_window_stats(item, "ada").remaining == 0
    assert limited.hit(item, "cyd")
    limited.clear(item, "ada")
    assert limited.get_window_stats(item, "ada").remaining == 10
    assert limited.get_window_stats(item, "cyd").remaining == 9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reset_forgets_all_keys(opened: Open, strategy: str) -> None:
    storage = opened()
    limited, item = limiter(strategy, storage), parse("2/hour")
    for key in "abc":
        limited.hit(item, key, cost=2)
    live = storage.reset()
    # The keys of moving windows are in a separate part of the segment and not counted.
    assert live == (0 if strategy == "moving-window" else 3)
    assert all(limited.hit(item, key, cost=2) for key in "abc")


@pytest.mark.parametrize(
    ("strategy", "fresh_s", "used_s"),
    [("fixed-window", 0, 50), ("moving-window", 60, 50), ("gcra", 0, 2)],
)
def test_window_stats_report_the_time_of_the_next_permit(
    opened: Open, strategy: str, fresh_s: float, used_s: float, clock: ManualClock
) -> None:
    limited, item = limiter(strategy, opened()), parse("5/minute")
    with reported_in(fresh_s) as times:
        times.append(limited.get_window_stats(item, "ada").reset_time)
    limited.hit(item, "ada", cost=2)
    clock.advance(10)
    limited.hit(item, "ada")
    with reported_in(used_s) as times:
        stats = limited.get_window_stats(item, "ada")
        times.append(stats.reset_time)
    assert stats.remaining == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_limit_of_zero_denies_all_requests(opened: Open, strategy: str) -> None:
    limited, item = limiter(strategy, opened()), parse("0/minute")
    assert not limited.test(item, "ada")
    assert not limited.hit(item, "ada")
    assert limited.get_window_stats(item, "ada").remaining == 0


def test_fixed_window_counts_denied_requests_as_the_library(opened: Open) -> None:
    storage = opened()
    limited, item = limiter("fixed-window", storage), parse("3/minute")
    assert [limited.hit(item) for _ in range(5)] == [True, True, True, False, False]
    assert storage.get(item.key_for()) == 5


def test_count_beyond_the_maximum_is_above_every_limit(opened: Open, clock: ManualClock) -> None:
    storage = opened()
    most = 2**20 - 1
    assert storage.incr("key", 1, most) == most
    assert storage.incr("key", 1) == sys.maxsize
    assert storage.incr("other", 1, most + 1) == sys.maxsize
    assert (storage.get("key"), storage.get("other")) == (most, 0)
    clock.advance(1)
    assert storage.incr("key", 1) == 1


@pytest.mark.parametrize("limit", [999_999, 1_000_000, 12_345_678, 999_999_999_999])
def test_fixed_window_enforces_a_large_limit(opened: Open, clock: ManualClock, limit: int) -> None:
    item = parse(f"{limit}/day")
    limited, other = limiter("fixed-window", opened()), limiter("fixed-window", opened())
    assert limited.hit(item, "ada", cost=limit - 1)
    assert other.get_window_stats(item, "ada").remaining == 1
    assert other.hit(item, "ada")
    assert not limited.hit(item, "ada")
    clock.advance(86400)
    assert limited.get_window_stats(item, "ada").remaining == limit
    other.hit(item, "ada")
    limited.clear(item, "ada")
    assert other.get_window_stats(item, "ada").remaining == limit


def test_fixed_window_denies_above_the_largest_count(opened: Open) -> None:
    """The largest count of a window of a second is below this limit."""
    limited, item = limiter("fixed-window", opened()), parse("9999999999999/second")
    assert limited.hit(item, "ada", cost=2**29 - 1)
    assert not limited.hit(item, "ada")


@pytest.mark.parametrize("key", ["a/b/c", "a/1/2/3", "a/12345678/1/day", "a/x/1/day", "///", "a/१२३४५६७८/1/day"])
def test_keys_of_any_form_are_counted_by_all_storages(opened: Open, key: str) -> None:
    storage, other = opened(), opened()
    assert [storage.incr(key, 60), other.incr(key, 60)] == [1, 2]
    assert (other.get(key), storage.get(key + "x")) == (2, 0)


@pytest.mark.parametrize("period_s", [1, 60, 3600, 86400])
def test_fixed_window_ends_at_the_reported_time(opened: Open, clock: ManualClock, period_s: int) -> None:
    storage, key = opened(), f"LIMITER/key/9999/{period_s}/second"
    clock.advance(12.3456789)
    for _ in range(20):
        storage.incr(key, period_s)
        before_s = time.time()
        left_s = storage.get_expiry(key) - time.time()
        # The window starts up to 50 us before its first request.
        assert period_s - 0.00006 - (time.time() - before_s) <= left_s <= period_s + (time.time() - before_s)
        clock.advance(period_s - 0.00006)
        assert storage.get(key) == 1
        clock.advance(0.00006)
        assert storage.get(key) == 0


@pytest.mark.parametrize("strategy", ["fixed-window", "moving-window"])
def test_reset_time_in_whole_seconds_is_exact(store_name: str, scheme: str, strategy: str) -> None:
    with time_machine.travel(1_700_000_000, tick=False) as traveller:
        storage = open_storage(f"{scheme}:///{store_name}?keys=1000&moving_window_keys=10&clock=time")
        limited, item = limiter(strategy, storage), parse("1/minute")
        for _ in range(20):
            assert limited.hit(item, "ada")
            assert limited.get_window_stats(item, "ada").reset_time == time.time() + 60
            traveller.shift(59)
            assert not limited.hit(item, "ada")
            traveller.shift(1)


def test_full_store_denies_or_allows_by_on_full(scheme: str, store_name: str) -> None:
    for on_full in ("deny", "allow"):
        storage = open_storage(f"{scheme}:///{store_name}-{on_full}?keys=1&on_full={on_full}")
        try:
            counts = {storage.incr(str(i), 3600) for i in range(3000)}
            assert counts == ({1, sys.maxsize} if on_full == "deny" else {1})
        finally:
            storage.store.close()
            Store.unlink(f"{store_name}-{on_full}")


@pytest.mark.parametrize("strategy", ["fixed-window", "moving-window"])
def test_keys_that_come_once_never_reset_one_at_its_limit(scheme: str, store_name: str, strategy: str) -> None:
    storage = open_storage(f"{scheme}:///{store_name}?keys=1&on_full=evict&moving_window_keys=100")
    limited, item = limiter(strategy, storage), parse("3/hour")
    victims = [f"victim {number}" for number in range(24)]
    for victim in victims:
        assert [limited.hit(item, victim) for _ in range(4)] == [True, True, True, False]
    for number in range(5000):
        assert limited.hit(item, str(number))
    assert storage.store.stats().total.evicted > 3000, "this was no flood"
    assert not any(limited.test(item, victim) for victim in victims)


def test_url_of_connect_is_a_uri_of_the_library(tmp_path: Path, scheme: str) -> None:
    prefix = scheme.removesuffix("forebay")
    url = f"shm:///shop?keys=100&directory={tmp_path}"
    limit = parse("5/minute")
    with open_storage(f"{prefix}{url}").store as store, connect(url) as connected:
        assert isinstance(connected, Store)
        assert connected.path == store.path == str(tmp_path / "forebay-shop")
        storage = open_storage(f"{prefix}{url}")
        assert limiter("fixed-window", storage).hit(limit, "ada")
        assert connected.stats().total.allowed == 1
        storage.store.close()


def test_storages_share_windows_and_limits(opened: Open) -> None:
    here, there = opened(), opened()
    here.incr("key", 61)
    assert there.get("key") == 1
    here.incr("key2", 62)
    with reported_in(62) as times:
        times.append(there.get_expiry("key2"))
    large, log = parse("1000000/hour"), parse("7/minute")
    assert limiter("sliding-window-counter", here).hit(large, "ada", cost=999_999)
    assert limiter("sliding-window-counter", there).get_window_stats(large, "ada").remaining == 1
    assert limiter("moving-window", here).hit(log, "ada", cost=7)
    there.clear(log.key_for("ada"))
    assert limiter("moving-window", here).hit(log, "ada", cost=7)


@pytest.mark.parametrize("limit", [100_000_000, 10**12 // 17])
def test_sliding_window_enforces_a_large_limit(opened: Open, limit: int) -> None:
    """Remaining permits are reported even above the largest exact count."""
    item = parse(f"{limit} per 1000 second")
    limited = limiter("sliding-window-counter", opened())
    assert limited.hit(item, "ada", cost=limit - 3)
    assert limited.get_window_stats(item, "ada").remaining == 3
    assert limited.test(item, "ada", cost=3)
    assert not limited.test(item, "ada", cost=4)
    limited.clear(item, "ada")
    assert limited.hit(item, "ada", cost=limit)


@pytest.mark.parametrize(
    ("previous", "current"), [(0, 0), (0, 1), (1, 0), (1, 1), (3, 2), (7, 93), (100, 0), (1000, 0)]
)
@pytest.mark.parametrize("share_left", [0.999, 0.5, 0.25, 0.001])
def test_sliding_window_reports_both_counts_and_their_ends(
    opened: Open, clock: ManualClock, previous: int, current: int, share_left: float
) -> None:
    storage = opened()
    period_s = 60
    _, _, _, left_s = storage.get_sliding_window("key", period_s)
    clock.advance(left_s - period_s)  # to the top of a window
    if previous:
        assert storage.acquire_sliding_window_entry("key", 1000, period_s, previous)
    clock.advance(period_s * (2 - share_left))
    if current:
        assert storage.acquire_sliding_window_entry("key", 10_000, period_s, current)
    found_previous, previous_s, found_current, current_s = storage.get_sliding_window("key", period_s)
    # A weighted count below one is reported as zero.
    expected = previous if previous * share_left >= 1 else 0
    assert (found_previous, found_current) == (expected, current)
    assert previous_s == pytest.approx(period_s * share_left if expected else 0)
    assert current_s == pytest.approx(period_s * (1 + share_left))


def test_check_is_true_while_the_store_is_open_and_linked(opened: Open, store_name: str) -> None:
    storage = opened()
    assert storage.check()
    Store.unlink(store_name)
    assert not storage.check()  # new storages would count in another segment
    with pytest.warns(SegmentRemovedWarning):
        assert opened().check()
    assert not storage.check()
    storage.store.close()
    assert not storage.check()


def test_errors_are_wrapped_if_wrap_exceptions_is_set(opened: Open) -> None:
    for wraps, expected in {True: StorageError, False: StoreClosed}.items():
        storage = opened(wrap_exceptions=wraps)
        storage.store.close()
        with pytest.raises(expected):
            storage.incr("key", 60)
        for call in (storage.acquire_entry, storage.acquire_sliding_window_entry, storage.acquire_gcra):
            with pytest.raises(expected):
                call("key", 10, 60)
        with pytest.raises(expected):
            storage.get_gcra("key", 10, 60)


def test_moving_window_without_room_names_the_option(opened: Open) -> None:
    storage = opened("keys=1000&moving_window_keys=4000000000")
    with pytest.raises(
        SegmentSpaceError, match=r"for 4000000000 keys by the .* moving_window_keys; .* moving_windows"
    ) as raised:
        storage.acquire_entry("key", 100, 60)
    assert raised.value.path.endswith(storage.store.name)


def test_moving_windows_option_allocates_memory_at_start(opened: Open) -> None:
    storage = opened("keys=1000&moving_windows=50/minute;1000000/day")
    size = storage.store.stats().bytes
    assert list(storage.store.stats().limiters) == [
        "limits moving-window 60 50",
        "limits moving-window 86400 1000000 parts",
    ]
    for limit in ("50/minute", "1000000/day"):
        assert limiter("moving-window", storage).hit(parse(limit), "ada")
    assert storage.store.stats().bytes == size
    assert opened("keys=1000", moving_windows="50/minute, 1000000/day").store.stats().bytes == size


def test_start_is_refused_without_room_for_the_moving_windows_option(opened: Open, store_name: str) -> None:
    with pytest.raises(
        SegmentSpaceError,
        match=r"\d+ for a store of 1000 keys and \d+ for the limits of moving_windows",
    ):
        opened("keys=1000&moving_window_keys=4000000000&moving_windows=50/minute")
    assert not any(store_name in mapped for mapped in Path("/proc/self/maps").read_text().splitlines())


@pytest.fixture
def small_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 8 MiB that counts as /dev/shm; 3 MiB of it are in use."""
    directory = tmp_path / "shm"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs", directory], check=True)
    monkeypatch.setattr(free_space, "SHARED_MEMORY", f"{directory}/")
    (directory / "other").write_bytes(bytes(3 << 20))
    yield directory
    subprocess.run(["umount", "--lazy", directory], check=True)


@pytest.mark.parametrize("keys", [1000, 1_000_000])
@pytest.mark.parametrize("is_there", [False, True])
def test_refused_start_names_the_room_for_all_moving_windows(
    scheme: str, small_shared_memory: Path, keys: int, is_there: bool
) -> None:
    """Enlarged once, to the size that the error names, the shared memory is large enough. It isn't a MiB less."""
    path = small_shared_memory / "segment"
    limits = "100/minute; 500/hour; 500/hour; 10000/day; 20/minute"
    options = {"path": str(path), "keys": keys, "moving_window_keys": 5000}

    def resize(mib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={mib}m", small_shared_memory], check=True)

    if is_there:
        resize(40)
        open_storage(f"{scheme}://", moving_windows="20/minute", **options).store.close()
        resize(-(-sum(file.stat().st_blocks for file in small_shared_memory.iterdir()) * 512 >> 20))
    with pytest.raises(SegmentSpaceError) as caught:
        open_storage(f"{scheme}://", moving_windows=limits, **options)
    assert path.exists() == is_there
    count = 3 if is_there else 4
    assert f" for the limits of moving_windows that aren't made yet ({count} of them)" in caught.value.expected
    assert (f" for a store of {keys} keys and " in caught.value.expected) == (not is_there)
    advice = re.search(r"enlarge /dev/shm to (\d+) MiB \((\d+) MiB in use", caught.value.remedy)
    assert advice
    size, used = map(int, advice.groups())
    assert used >= 3
    # Each of the two figures is rounded up.
    resize(size - 2)
    with pytest.raises(SegmentSpaceError):
        open_storage(f"{scheme}://", moving_windows=limits, **options)
    # With CPython 3.12 the error is in a cycle, and the frames of its traceback keep the memory of limits mapped.
    gc.collect()
    resize(size)
    storage = open_storage(f"{scheme}://", moving_windows=limits, **options)
    assert len(storage.store.stats().limiters) == 4
    storage.store.close()


@pytest.mark.parametrize("pages", [10, 1500, 2000])
def test_a_start_that_is_refused_in_a_new_file_names_the_room_for_the_store_too(
    scheme: str, small_shared_memory: Path, pages: int
) -> None:
    """The start removes the file, so an empty file system needs as many bytes as the error names, and not a page less.

    The smallest file system has no room for the store, the others have room for one or two of the moving windows.
    """
    (small_shared_memory / "other").unlink()
    options = {"path": str(small_shared_memory / "segment"), "keys": 1000, "moving_window_keys": 1000}

    def resize(size: int) -> None:
        gc.collect()  # the caught errors keep removed segments mapped
        subprocess.run(["mount", "-o", f"remount,size={size}", small_shared_memory], check=True)

    def start() -> None:
        open_storage(f"{scheme}://", moving_windows="300/minute;400/minute;500/minute", **options).store.close()

    def refused() -> tuple[int, int]:
        """The bytes found and those expected."""
        with pytest.raises(SegmentSpaceError, match=r"a store of 1000 keys and \d+ .* yet \(3 of them\)") as caught:
            start()
        assert not list(small_shared_memory.iterdir())
        return int(caught.value.found.split()[0]), int(caught.value.expected.split()[0])

    resize(pages * mmap.PAGESIZE)
    found, needed = refused()
    assert found == pages * mmap.PAGESIZE
    resize(needed - mmap.PAGESIZE)
    assert refused() == (needed - mmap.PAGESIZE, needed)
    resize(needed)
    start()


def test_start_warns_without_room_for_a_moving_window(
    scheme: str, small_shared_memory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"path": str(small_shared_memory / "segment"), "keys": 1000}

    def warned(keys: int) -> bool:
        caplog.clear()
        open_storage(f"{scheme}://", moving_window_keys=keys, **options).store.close()
        return bool(caplog.messages)

    assert not warned(1000)
    assert warned(10_000)
    (message,) = caplog.messages
    found = re.search(r": found (\d+) bytes free on .*, expected (\d+) bytes: a moving window of 100/minute; ", message)
    assert found
    assert int(found[1]) < 5 << 20 < int(found[2])
    for remedy in ("enlarge /dev/shm to 15 MiB", "moving_window_keys", "gcra"):
        assert remedy in message
    storage = open_storage(f"{scheme}://", moving_window_keys=10_000, **options)
    with pytest.raises(SegmentSpaceError):
        storage.acquire_entry("ada", 100, 60)
    # The service's limits are smaller.
    assert storage.acquire_entry("ada", 10, 60)
    storage.store.close()
    assert not warned(10_000)


def test_refused_store_names_its_own_room_if_a_moving_window_is_invalid(scheme: str, small_shared_memory: Path) -> None:
    path = small_shared_memory / "segment"
    with pytest.raises(SegmentSpaceError, match="bytes for 1000000 keys"):
        open_storage(f"{scheme}://", path=str(path), keys=1_000_000, moving_windows="0/minute")


def test_refused_start_leaves_only_an_existing_file(opened: Open, store_name: str, clock: ManualClock) -> None:
    options = "keys=1000&moving_window_keys=4000000000&moving_windows=50/minute"
    with pytest.raises(SegmentSpaceError):
        opened(options)
    path = Path(f"/dev/shm/forebay-{store_name}")
    assert not path.exists()
    Store(store_name, keys=1000, clock=clock).close()
    with pytest.raises(SegmentSpaceError):
        opened(options)
    assert path.exists()


@pytest.mark.parametrize(
    ("limit", "most_bytes"),
    [("10/day", 1_300_000), ("157/day", 2**24), ("158/day", 10_900_000), ("10000000/day", 10_900_000)],
)
def test_moving_window_takes_little_memory_for_any_limit(opened: Open, limit: str, most_bytes: int) -> None:
    storage = opened("keys=100000")
    before = storage.store.stats().bytes
    assert limiter("moving-window", storage).hit(parse(limit), "ada")
    assert storage.store.stats().bytes - before <= most_bytes


@pytest.mark.parametrize("first", [0, 1])
def test_storages_with_different_moving_window_keys_share_a_moving_window(opened: Open, first: int) -> None:
    """One storage has the memory to log each request; the other does not."""
    queries = ["keys=1000&moving_window_keys=10", "keys=1000&moving_window_keys=10000"]
    storages = [opened(query) for query in (queries if first == 0 else reversed(queries))]
    item = parse("1000/day")
    assert limiter("moving-window", storages[0]).hit(item, "ada", cost=999)
    with pytest.warns(SegmentSizeWarning, match="was made for"):
        assert limiter("moving-window", storages[1]).hit(item, "ada")
    assert not limiter("moving-window", storages[0]).hit(item, "ada")
    assert len(storages[0].store.stats().limiters) == 1


def test_two_storages_that_make_a_moving_window_at_once_share_it(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = (
        ForebayStorage(f"forebay:///{store_name}?keys=1000&moving_window_keys={keys}") for keys in (10, 10_000)
    )
    item, make = parse("1000/day"), here._log

    def make_late(*arguments: Any) -> Any:
        assert limiter("moving-window", Blocking(there)).hit(item, "ada", cost=999)
        return make(*arguments)

    monkeypatch.setattr(here, "_log", make_late)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert limiter("moving-window", Blocking(here)).hit(item, "ada")
    assert [warning.category for warning in caught] == [SegmentSizeWarning]
    assert not limiter("moving-window", Blocking(there)).hit(item, "ada")


@settings(max_examples=30)
@given(requests=st.lists(st.tuples(st.sampled_from((0, 0.1, 0.7, 3, 20, 59, 61)), st.integers(1, 150)), max_size=60))
def test_moving_window_of_a_large_limit_holds_in_any_period(requests: list[tuple[float, int]]) -> None:
    clock = ManualClock()
    with private_stores(clock):
        storage = open_storage("forebay:///shop?keys=10&moving_window_keys=14000")
    limited, item = limiter("moving-window", storage), parse("150/minute")
    at_s, taken = 0.0, []
    with storage.store:
        for step_s, cost in requests:
            clock.advance(step_s)
            at_s += step_s
            counts = sum(cost for then_s, cost in taken if then_s > at_s - 60)
            counts_longer = sum(cost for then_s, cost in taken if then_s > at_s - 60.7)
            allowed = limited.hit(item, "ada", cost=cost)
            assert not allowed or counts + cost <= 150
            assert allowed or counts_longer + cost > 150
            if allowed:
                taken.append((at_s, cost))
            assert list(storage.store.stats().limiters) == ["limits moving-window 60 150 parts"]
            stats = limited.get_window_stats(item, "ada")
            assert 150 - stats.remaining >= counts + allowed * cost
            if not allowed:
                clock.advance(stats.reset_time - time.time() + 0.5)
                at_s += stats.reset_time - time.time() + 0.5
                assert limited.get_window_stats(item, "ada").remaining > stats.remaining


def test_pickled_storage_opens_the_store_again(store_name: str, scheme: str) -> None:
    storage = open_storage(f"{scheme}:///{store_name}?keys=1000", wrap_exceptions=True)
    storage.incr("key", 60)
    again = type(storage)(pickle.loads(pickle.dumps(storage.wrapped)))
    assert again.get("key") == 1
    assert again.wrap_exceptions


def test_gcra_refills_evenly(opened: Open, clock: ManualClock) -> None:
    limited, item = limiter("gcra", opened()), parse("6/minute")
    assert limited.hit(item, "ada", cost=6)
    for _ in range(3):
        clock.advance(9.9)
        assert not limited.hit(item, "ada")
        clock.advance(0.1)
        assert limited.hit(item, "ada")


def test_gcra_refuses_other_storages() -> None:
    for strategy in (GCRARateLimiter, AsyncGCRARateLimiter):
        with pytest.raises(NotImplementedError, match="forebay:///shop or async"):
            strategy(MemoryStorage())


@pytest.mark.parametrize(
    ("uri", "options", "message"),
    [
        ("forebay://", {}, "'forebay://' names no store"),
        ("forebay:///", {}, "names no store"),
        ("forebay://a/b", {}, "'forebay://a/b' names no store"),
        ("forebay:///shop?kees=5", {}, "no option 'kees'; its options are keys, moving_window_keys, moving_w"),
        ("forebay:///shop", {"kees": 5}, "no option 'kees'"),
        ("forebay:///shop?keys=5&keys=6", {}, "the option keys .* given twice"),
        ("forebay:///shop?keys=5", {"keys": 5}, "the option keys .* given twice, in 'forebay:///shop.keys=5'"),
        ("forebay:///shop?keys=many", {}, "the option keys of a forebay storage is a whole number, not 'many'"),
        ("forebay:///shop?keys=", {}, "is a whole number, not ''"),
        ("forebay:///shop", {"keys": None}, "keys is a whole number from 1 to .*, not None"),
        ("forebay:///shop?moving_window_keys=0", {}, r"moving_window_keys .* from 1 to 2\*\*32, not 0"),
        ("forebay:///shop?moving_window_keys=4294967297", {}, "moving_window_keys .*, not 4294967297"),
        ("forebay:///shop", {"moving_window_keys": 2.5}, "moving_window_keys .*, not 2.5"),
        ("forebay:///shop", {"moving_window_keys": True}, "moving_window_keys .*, not True"),
        (
            "forebay:///shop?moving_windows=often",
            {},
            "the option moving_windows .* is text with limits, .* not 'often'",
        ),
        ("forebay:///shop?moving_windows=", {}, "the option moving_windows .*, not ''"),
        ("forebay:///shop", {"moving_windows": ["5/minute"]}, "the option moving_windows .*, not \\['5/minute'\\]"),
        ("forebay:///shop?mode=rw", {}, "the option mode .* is an octal number, not 'rw'"),
        ("forebay:///shop?path=/dev/shm/x", {}, "names a store and a path"),
    ],
)
def test_invalid_options_are_refused(scheme: str, uri: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message.replace("'forebay:", f"'{re.escape(scheme)}:")):
        open_storage(uri.replace("forebay:", f"{scheme}:"), **options)


def test_storage_class_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="None names no store"):
        ForebayStorage()


def test_invalid_moving_windows_option_is_refused(store_name: str, scheme: str) -> None:
    with pytest.raises(ConfigurationError, match=r"the option moving_windows .*: a rate allows at least 1"):
        open_storage(f"{scheme}:///{store_name}?keys=100&moving_windows=0/minute")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("keys=0", "keys is a whole number from 1"),
        ("on_full=never", "on_full is"),
        ("clock=sundial", "clock is"),
        ("mode=777", "mode is 0o600"),
        ("group=www-data", "group='www-data' needs mode=0o660"),
    ],
)
def test_values_that_the_store_refuses_are_configuration_errors(
    scheme: str, store_name: str, query: str, message: str
) -> None:
    uri = f"{scheme}:///{store_name}?{query}"
    with pytest.raises(ConfigurationError, match=f"^'{re.escape(uri)}' can't be a forebay storage.*: {message}"):
        open_storage(uri)


@pytest.mark.parametrize("name", ["a b", "a%20b", "/a", "a:b", ".a", "ä", "a" * 101, "user@host"])
def test_invalid_store_names_are_refused(scheme: str, name: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        open_storage(f"{scheme}:///{name}")
    message = str(raised.value)
    assert message.startswith(f"'{scheme}:///{name}'"[:90])
    assert "whose URI is like forebay:///shop?keys=100000: a store's name is 1 to 100 letters, digits" in message
    assert message.endswith(f"not {name!r}"[:90]) or len(name) > 90


@pytest.mark.parametrize("kind", [ForebayStorage, AsyncForebayStorage])
def test_invalid_uri_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^'forebay://\[shop' is no URI: .* like forebay:///shop"):
        kind("forebay://[shop")


def test_frameworks_raise_the_reason_of_a_refused_name() -> None:
    refusal = r"'forebay:///my shop' can't be .* letters, digits"
    with pytest.raises(ConfigurationError, match=refusal):
        FlaskLimiter(str, app=Flask(__name__), storage_uri="forebay:///my shop")
    with pytest.raises(ConfigurationError, match=refusal):
        SlowapiLimiter(str, storage_uri="forebay:///my shop")


def test_store_statistics_report_the_size_of_the_file(opened: Open) -> None:
    """The size includes the memory of moving windows, allocated at their first request."""
    storage = opened()
    before = storage.store.stats().bytes
    assert before == os.path.getsize(storage.store.path)
    assert limiter("moving-window", storage).hit(parse("1000/hour"), "ada")
    after = storage.store.stats().bytes
    assert after == os.path.getsize(storage.store.path) >= before + 100 * 1000 * 8
    storage.store.close()
    with pytest.raises(StoreClosed, match="no statistics"):
        storage.store.stats()


def test_uri_or_options_name_a_store(store_name: str, tmp_path: Any) -> None:
    for uri in (f"forebay://{store_name}", f"forebay:///{store_name}", f"async+forebay://{store_name}?keys=100000"):
        storage = open_storage(uri)
        assert (storage.store.path, storage.store.keys) == (f"/dev/shm/forebay-{store_name}", 100_000)
    storage = open_storage(f"forebay://?path={tmp_path}/limits&keys=1_000&mode=660")
    assert (storage.store.path, storage.store.keys) == (f"{tmp_path}/limits", 1000)
    assert (tmp_path / "limits").stat().st_mode & 0o777 == 0o660
    assert open_storage("forebay://", path=tmp_path / "limits", keys=1000, mode=0o660).check()


def test_storage_counts_in_a_private_store() -> None:
    clock = ManualClock()
    with private_stores(clock):
        storage = open_storage("forebay:///shop")
        assert [storage.incr("key", 60), storage.incr("key", 60)] == [1, 2]
        clock.advance(61)
        assert storage.get("key") == 0
        assert storage.check()


def test_storage_makes_few_limiters_and_leaves_others_unchanged(opened: Open) -> None:
    storage = opened()
    own = TokenBucket(storage.store, "own", "1/hour")
    assert own.allow("key")
    for limit in range(1, 50):
        for strategy in ("fixed-window", "sliding-window-counter", "gcra"):
            limiter(strategy, storage).hit(parse(f"{limit}/hour"), "ada", "x" * limit)
    assert list(storage.store.stats().limiters) == [
        "own",
        "limits fixed-window 3600 4",
        "limits sliding-window 3600",
        "limits gcra",
    ]
    storage.clear("key")
    assert not own.allow("key")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", [float, Decimal, Fraction], ids=lambda kind: kind.__name__)
def test_cost_of_any_number_type_is_rounded_up(opened: Open, strategy: str, kind: Any) -> None:
    limited, item = limiter(strategy, opened()), parse("10/hour")
    assert limited.hit(item, "ada", cost=kind(1))
    assert limited.hit(item, "ada", cost=kind(15) / 2)
    assert limited.get_window_stats(item, "ada").remaining == 1
    assert not limited.hit(item, "ada", cost=kind(2))


class Unreadable:
    """A cost that claims to be a number, and whose every conversion raises."""

    def __ge__(self, other: object) -> bool:
        return True

    def __float__(self) -> float:
        raise RuntimeError("no number")

    def __repr__(self) -> str:
        return "Unreadable()"


class Textual(Unreadable):
    def __ceil__(self) -> str:
        return "1"


INVALID_COSTS: Final = [-1, -0.5, math.nan, math.inf, "1", None, "many", Decimal("NaN"), Decimal("sNaN"), 1j]
INVALID_COSTS += [Unreadable(), Textual()]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cost", INVALID_COSTS, ids=repr)
def test_invalid_cost_is_denied_and_logged(
    opened: Open, strategy: str, cost: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Callers would treat an exception as an outage and admit the request."""
    limited, item = limiter(strategy, opened()), parse("10/hour")
    assert not limited.hit(item, "ada", cost=cost)
    assert caplog.messages == [f"a cost is a number of at least 0, not {cost!r}: the request is denied"]
    assert limited.hit(item, "ada", cost=10 if strategy != "fixed-window" else 1)


@pytest.mark.parametrize("cost", INVALID_COSTS, ids=repr)
def test_gcra_tests_no_invalid_cost_as_allowed(opened: Open, cost: Any) -> None:
    limited, item = limiter("gcra", opened()), parse("10/hour")
    assert not limited.test(item, "ada", cost=cost)
    assert limited.test(item, "ada", cost=9.5)
    assert not limited.test(item, "ada", cost=10.5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unusable_limit_raises_no_storage_error(opened: Open, strategy: str) -> None:
    limited, item = limiter(strategy, opened(wrap_exceptions=True)), parse(f"{10**30}/second")
    if strategy == "fixed-window":
        assert limited.hit(item, "ada")
    else:
        with pytest.raises(InvalidRate):
            limited.hit(item, "ada")


def test_flask_limiter_does_not_fall_back_on_an_invalid_cost(store_name: str) -> None:
    app = Flask(__name__)
    limits = FlaskLimiter(
        lambda: "ada",
        app=app,
        storage_uri=f"forebay:///{store_name}?keys=1000",
        swallow_errors=True,
        in_memory_fallback=["1000/hour"],
    )
    costs = iter([1.0, -1, math.nan, 0.5, 1])

    @app.route("/")
    @limits.limit("2/hour", cost=lambda: next(costs))
    def view() -> str:
        return ""

    client = app.test_client()
    assert [client.get("/").status_code for _ in range(5)] == [200, 429, 429, 200, 429]


def test_slowapi_accepts_a_cost_that_is_not_an_integer(store_name: str) -> None:
    limits = SlowapiLimiter(lambda: "ada", storage_uri=f"forebay:///{store_name}?keys=1000")
    app = Starlette()
    app.state.limiter = limits
    app.add_exception_handler(RateLimitExceeded, _rate_limit_exceeded_handler)  # type: ignore[arg-type]

    @limits.limit("5/hour", cost=lambda request: 4.5)
    def view(request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    app.add_route("/", view)

    async def send_twice() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
            return [(await client.get("/")).status_code for _ in range(2)]

    assert asyncio.run(send_twice()) == [200, 429]


def test_flask_limiter_commands_report_the_limits(store_name: str) -> None:
    app = Flask(__name__)
    limits = FlaskLimiter(lambda: "ada", app=app, storage_uri=f"forebay:///{store_name}?keys=1000")

    @app.route("/")
    @limits.limit("2/hour")
    def view() -> str:
        return ""

    assert app.test_client().get("/").status_code == 200
    runner = app.test_cli_runner()
    for command in (["config"], ["limits", "--key=ada"]):
        result = runner.invoke(flask_limiter_commands, args=command, env={"COLUMNS": "200"})
        assert result.exception is None, result.output
    assert "1 out of 2 remaining" in result.output


def test_storage_attribute_is_the_store(opened: Open) -> None:
    storage = opened()
    assert storage.wrapped.storage is storage.store
