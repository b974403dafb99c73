"""Stores as objects: options, names, statistics, closing. tests/process has their files."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from forebay import (
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    LeakyBucket,
    LimiterStats,
    MinInterval,
    SegmentError,
    SegmentRemovedWarning,
    SegmentSizeWarning,
    SlidingLog,
    Store,
    StoreClosed,
    StoreStats,
    TokenBucket,
    TooManyLimiters,
)
from forebay.segment import layout
from forebay.testing import ManualClock

LIMITERS = 256


def open_files() -> list[str]:
    """The targets of this process's open descriptors."""
    gc.collect()
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(link for link in links if "forebay" in link)


def mappings() -> set[str]:
    """The lines of this process's mappings of segments, with their addresses."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/memfd:forebay" in line or "/dev/shm/" in line}


# Options


@pytest.mark.parametrize("keys", [0, -1, True, 1.0, "1", None, 2**36 + 1, 2**64])
def test_keys_must_be_a_positive_integer(keys: Any, store_name: str) -> None:
    for make in (Store.private, lambda **options: Store(store_name, **options)):
        with pytest.raises(ValueError, match="keys is a whole number from 1"):
            make(keys=keys)


def test_store_checks_its_options_before_it_makes_a_file(store_name: str) -> None:
    for options in (
        {"on_full": "drop"},
        {"on_full": ""},
        {"clock": "wall"},
        {"clock": None},
        {"clock": ManualClock},
        {"mode": 0o666},
        {"mode": 0o644},
        {"group": "root"},
    ):
        with pytest.raises(ValueError, match=r"on_full|clock|mode|group"):
            Store(store_name, keys=1, **options)  # type: ignore[arg-type]
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(store_name)


def test_group_that_does_not_exist_is_refused(store_name: str) -> None:
    with pytest.raises(ValueError, match="no such group"):
        Store(store_name, keys=1, mode=0o660, group="no such group")
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(store_name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", ".a", "a/b", "/a", "a b", "a\0", "a\n", "é", "a" * 101, None, 5, b"a"]
)
def test_name_that_could_be_another_path_is_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="store's name"):
        Store(name, keys=1)
    if name is not None:
        with pytest.raises(ValueError, match="store's name"):
            Store.unlink(name)


def test_named_store_is_in_shared_memory(store_name: str) -> None:
    with Store(store_name, keys=1) as store:
        assert store.path == f"/dev/shm/forebay-{store_name}"
        assert Path(store.path).stat().st_mode & 0o777 == 0o600
        assert Path(store.path).stat().st_size == store.stats().bytes
        assert store_name in repr(store)
    Store.unlink(store_name)
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(store_name)


def test_unlink_takes_a_name_or_a_path(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    Store("any", keys=1, path=path).close()
    for arguments, options in (((), {}), (("any",), {"path": path})):
        with pytest.raises(ValueError, match="a name or a path"):
            Store.unlink(*arguments, **options)
    Store.unlink(path=path)
    assert not path.exists()


@pytest.mark.parametrize("keys", [100_000, 1_000_000])
def test_segment_takes_21_bytes_per_key_and_100_kib(keys: int, store_name: str) -> None:
    with Store(store_name, keys=keys) as store:
        assert 0 <= store.stats().bytes - 21 * keys - 100 * 1024 < layout.GROUP_BYTES
        status = os.stat(store.path)
        assert status.st_size == store.stats().bytes
        # All blocks are allocated, so no later write can fail.
        assert status.st_blocks * 512 >= status.st_size
        assert store.stats().keys == store.keys == keys


# Two attachments in one process


def test_two_stores_of_one_name_share_one_segment(store_name: str) -> None:
    with Store(store_name, keys=10) as one, Store(store_name, keys=10) as two:
        first, second = TokenBucket(one, "api", "2/hour"), TokenBucket(two, "api", "2/hour")
        assert first.allow("k")
        assert second.allow("k")
        assert not first.allow("k")
        assert one.stats() == two.stats()
        assert one.stats().limiters == {"api": LimiterStats(allowed=2, denied=1, inserted=1, algorithm="TokenBucket")}
        one.close()
        assert not second.allow("k")
        assert two.stats().total.denied == 2


def test_segment_outlives_its_stores(store_name: str, clock: ManualClock) -> None:
    with Store(store_name, keys=10, clock=clock) as store:
        TokenBucket(store, "api", "1/hour").allow("k")
    with Store(store_name, keys=10, clock=clock) as store:
        assert not TokenBucket(store, "api", "1/hour").allow("k")
        assert store.stats().limiters["api"] == LimiterStats(allowed=1, denied=1, inserted=1, algorithm="TokenBucket")


def test_attached_store_keeps_an_unlinked_segment(store_name: str) -> None:
    with Store(store_name, keys=10) as old:
        before = TokenBucket(old, "api", "1/hour")
        assert before.allow("k")
        Store.unlink(store_name)
        with pytest.warns(SegmentRemovedWarning):
            new = Store(store_name, keys=10)
        with new:
            assert TokenBucket(new, "api", "1/hour").allow("k")
            assert not before.allow("k")


def test_store_of_another_size_warns_with_both_sizes(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        for keys in (1, 999, 1001, 2_000_000):
            with pytest.warns(SegmentSizeWarning, match=rf"\b1000 keys\b.* keys={keys};") as caught:
                other = Store(store_name, keys=keys)
            assert [warning.filename for warning in caught] == [__file__]
            with other:
                assert other.keys == 1000
                assert other.stats().bytes == store.stats().bytes
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Store(store_name, keys=1000).close()


def test_size_warning_as_an_error_leaves_nothing_open(store_name: str) -> None:
    with Store(store_name, keys=1000):
        before = open_files()
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with pytest.raises(SegmentSizeWarning):
                    Store(store_name, keys=5)
        assert open_files() == before


def test_closed_store_has_nothing_open(store_name: str) -> None:
    before, mapped_before = open_files(), mappings()
    for _ in range(3):
        with Store(store_name, keys=10) as store:
            TokenBucket(store, "api", "1/hour").allow("k")
        with Store.private(keys=10) as store:
            TokenBucket(store, "api", "1/hour").allow("k")
    assert open_files() == before
    del store
    gc.collect()
    # Free-threaded CPython 3.13 never frees a class: one of another test may hold that test's limiter and its memory.
    assert mappings() <= mapped_before


# Closing


def test_closed_store_refuses_every_use(store: Store) -> None:
    used, unused = TokenBucket(store, "used", "1/hour"), TokenBucket(store, "unused", "1/hour")
    used.allow("k")
    assert store.closed is False
    store.close()
    assert store.closed is True
    for limiter in (used, unused):
        for method in (limiter.allow, limiter.hit, limiter.peek, limiter.refund, limiter.reset):
            with pytest.raises(StoreClosed, match=limiter.name):
                method("k")
        for batch in ([], ["k"]):
            with pytest.raises(StoreClosed):
                limiter.allow_many(batch)
    with pytest.raises(StoreClosed):
        store.stats()
    for name in ("used", "new"):
        with pytest.raises(StoreClosed):
            TokenBucket(store, name, "1/hour")
    assert "closed" in repr(store)
    store.close()


def test_error_names_the_closed_store() -> None:
    store = Store.private(keys=1)
    limiter = TokenBucket(store, "api", "1/hour")
    store.close()
    with pytest.raises(StoreClosed) as caught:
        limiter.allow("k")
    assert "None" not in str(caught.value)


def test_closing_one_store_leaves_others_open(clock: ManualClock) -> None:
    with Store.private(keys=1, clock=clock) as store:
        limiter = TokenBucket(store, "api", "3/hour")
        for n in range(5):
            other = Store.private(keys=1)
            TokenBucket(other, "api", "1/hour").allow("k")
            other.close()
            assert limiter.allow("k") is (n < 3)
        assert store.stats().total == LimiterStats(allowed=3, denied=2, inserted=1)


def test_context_manager_closes_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), Store.private(keys=1) as store:
        raise ZeroDivisionError
    assert store.closed


def test_stores_and_limiters_refuse_pickling(store: Store) -> None:
    limiter = TokenBucket(store, "api", "1/hour")
    for thing in (store, limiter):
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            with pytest.raises(TypeError, match="can't be pickled"):
                pickle.dumps(thing, protocol)
        for duplicate in (copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="can't be pickled"):
                duplicate(thing)


# Limiters


@pytest.mark.parametrize("name", ["", "a\0b", "\0", "a" * 50 + "\0", "\ud800"])
def test_limiter_name_must_be_text_of_accepted_length(store: Store, name: str) -> None:
    with pytest.raises(InvalidLimiter, match="a limiter's name is text"):
        TokenBucket(store, name, "1/hour")
    assert store.stats().limiters == {}


@pytest.mark.parametrize("name", [None, 5, b"api", ("api",)])
def test_limiter_name_of_another_type_is_refused(store: Store, name: Any) -> None:
    with pytest.raises((TypeError, InvalidLimiter)):
        TokenBucket(store, name, "1/hour")


def test_limiter_needs_a_store() -> None:
    for other in (None, "shop", object()):
        with pytest.raises((TypeError, AttributeError)):
            TokenBucket(other, "api", "1/hour")  # type: ignore[arg-type]


def test_store_has_room_for_256_limiters(store: Store) -> None:
    limiters = [TokenBucket(store, f"limiter {n}", "1/hour") for n in range(LIMITERS)]
    with pytest.raises(TooManyLimiters, match=r"256 limiters.*'one more'"):
        TokenBucket(store, "one more", "1/hour")
    # The first 256 can still be made again, and each keeps its own counters.
    again = TokenBucket(store, "limiter 255", "1/hour")
    assert all(limiter.allow("k") for limiter in limiters)
    assert not again.allow("k")
    stats = store.stats()
    assert list(stats.limiters) == [f"limiter {n}" for n in range(LIMITERS)]
    assert stats.limiters["limiter 255"] == LimiterStats(allowed=1, denied=1, inserted=1, algorithm="TokenBucket")
    assert stats.total == LimiterStats(allowed=LIMITERS, denied=1, inserted=LIMITERS)
    assert stats.live_keys == LIMITERS


def test_limiter_with_an_invalid_rate_is_refused_repeatedly(store: Store) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="is not a rate"):
            TokenBucket(store, "api", "fast")
    assert TokenBucket(store, "api", "1/hour").allow("k")


# Statistics


def test_statistics_count_per_limiter_and_in_total(store: Store, clock: ManualClock) -> None:
    assert store.stats() == StoreStats(keys=1, live_keys=0, bytes=store.stats().bytes, limiters={})
    assert store.stats().total == LimiterStats()
    api, login = TokenBucket(store, "api", "2/second"), TokenBucket(store, "login", "1/second")
    assert store.stats().limiters == {
        "api": LimiterStats(algorithm="TokenBucket"),
        "login": LimiterStats(algorithm="TokenBucket"),
    }
    for _ in range(3):
        api.allow("k")
    api.hit("k", 0)
    api.hit("l", 2)
    api.hit("l", 2)
    api.allow_many(["m", "m", "m", "n"])
    api.allow_many(["o", "o"], [2, 1])
    api.peek("p")
    login.hit("k")
    stats = store.stats()
    assert stats.limiters == {
        "api": LimiterStats(allowed=2 + 1 + 1 + 3 + 1, denied=1 + 1 + 1 + 1, inserted=5, algorithm="TokenBucket"),
        "login": LimiterStats(allowed=1, inserted=1, algorithm="TokenBucket"),
    }
    assert stats.total == LimiterStats(allowed=9, denied=4, inserted=6)
    assert stats.live_keys == 6
    clock.advance(0.5)
    assert store.stats().live_keys == 5
    clock.advance(10)
    assert store.stats().live_keys == 0
    assert store.stats().total == stats.total
    # An expired key that still has its cell is not inserted again.
    api.allow("k")
    assert store.stats().limiters["api"] == LimiterStats(allowed=9, denied=4, inserted=5, algorithm="TokenBucket")


def test_refused_calls_are_not_counted(store: Store) -> None:
    limiter = TokenBucket(store, "api", "2/second")
    for wrong in (
        lambda: limiter.allow(None),
        lambda: limiter.hit("k", 3),
        lambda: limiter.hit("k", -1),
        lambda: limiter.allow_many(["k", None]),
        lambda: limiter.allow_many(["k"], [3]),
    ):
        with pytest.raises((TypeError, ValueError)):
            wrong()
    assert store.stats().total == LimiterStats()
    assert store.stats().live_keys == 0


def test_refunds_and_resets_are_not_counted_and_free_the_key(store: Store) -> None:
    limiter = TokenBucket(store, "api", "2/second")
    for give_up in (limiter.refund, limiter.reset):
        limiter.hit("k")
        assert store.stats().live_keys == 1
        give_up("k")
        assert store.stats().live_keys == 0
    assert store.stats().total.allowed == 2
    assert store.stats().total.denied == 0


def test_limiters_of_one_name_and_several_algorithms_are_counted_apart(store_name: str) -> None:
    with Store(store_name, keys=100) as store, Store(store_name, keys=100) as other:
        bucket = TokenBucket(store, "api", "2/hour")
        assert bucket.allow("k")
        assert store.stats().limiters == {"api": LimiterStats(allowed=1, inserted=1, algorithm="TokenBucket")}
        # They share a bucket's state, but no counts.
        assert LeakyBucket(other, "api", "2/hour", 2).allow("k")
        assert not MinInterval(store, "api", "1 hour").allow("k")
        assert FixedWindow(other, "api", "1/hour").allow("k")
        assert SlidingLog(other, "api", "1/hour", keys=1).allow("k")
        assert Concurrency(store, "api", 1, lease="1 hour", keys=1).acquire("k")
        FixedWindow(store, "login", "1/hour")
        expected = {
            "api (TokenBucket)": LimiterStats(allowed=1, inserted=1, algorithm="TokenBucket"),
            "api (LeakyBucket)": LimiterStats(allowed=1, algorithm="LeakyBucket"),
            "api (MinInterval)": LimiterStats(denied=1, algorithm="MinInterval"),
            "api (FixedWindow)": LimiterStats(allowed=1, inserted=1, algorithm="FixedWindow"),
            "api (SlidingLog)": LimiterStats(allowed=1, inserted=1, algorithm="SlidingLog"),
            "api (Concurrency)": LimiterStats(allowed=1, inserted=1, algorithm="Concurrency"),
            "login": LimiterStats(algorithm="FixedWindow"),
        }
        assert store.stats().limiters == other.stats().limiters == expected
        assert list(store.stats().limiters) == list(expected)
        assert store.stats().total == LimiterStats(allowed=5, denied=1, inserted=4)


def test_verification_names_limiters_as_the_statistics_do(store_name: str) -> None:
    from forebay.verification import verify

    with Store(store_name, keys=100) as store:
        assert TokenBucket(store, "api", "2/hour").allow("k")
        assert FixedWindow(store, "api", "1/hour").allow("k")
        FixedWindow(store, "login", "1/hour")
        assert verify(store_name).limiters == tuple(store.stats().limiters)
        assert verify(store_name).findings == ()


def test_a_name_that_reads_like_a_limiter_of_another_name(store: Store) -> None:
    for name in ("api", "api (FixedWindow)", "api (TokenBucket) (TokenBucket)"):
        assert TokenBucket(store, name, "1/hour").allow("k")
    assert list(store.stats().limiters) == ["api", "api (FixedWindow)", "api (TokenBucket) (TokenBucket)"]
    FixedWindow(store, "api", "1/hour")
    FixedWindow(store, "api (TokenBucket)", "1/hour")
    assert {label: counts.allowed for label, counts in store.stats().limiters.items()} == {
        "api (TokenBucket)": 1,
        "api (FixedWindow) (TokenBucket)": 1,
        "api (TokenBucket) (TokenBucket)": 1,
        "api (FixedWindow)": 0,
        "api (TokenBucket) (FixedWindow)": 0,
    }


def test_two_limiters_of_one_name_share_counters(store: Store) -> None:
    one, two = TokenBucket(store, "api", "2/second"), TokenBucket(store, "api", "2/second")
    assert [limiter.allow("k") for limiter in (one, two, one, two)] == [True, True, False, False]
    assert store.stats().limiters == {"api": LimiterStats(allowed=2, denied=2, inserted=1, algorithm="TokenBucket")}


def test_decisions_of_a_forked_child_are_counted(store: Store, in_child: Callable[[Callable[[], Any]], Any]) -> None:
    limiter = TokenBucket(store, "api", "3/second")
    assert limiter.allow("k")
    for _ in range(3):
        in_child(lambda: limiter.allow("k"))
    assert store.stats().limiters == {"api": LimiterStats(allowed=3, denied=1, inserted=1, algorithm="TokenBucket")}
    assert not limiter.allow("k")
    assert store.stats() == in_child(store.stats)


def test_statistics_are_immutable_values(store: Store) -> None:
    stats = store.stats()
    with pytest.raises(AttributeError):
        stats.keys = 5  # type: ignore[misc]
    one = LimiterStats(1, 2, 3, 4, 5, 6)
    assert one + one == LimiterStats(2, 4, 6, 8, 10, 12)
    assert pickle.loads(pickle.dumps(stats)) == stats


def test_segment_reveals_no_key(store_name: str) -> None:
    """It holds neither the key nor a fingerprint that another segment shares: the hash key is random per segment."""
    key = "a-key-that-would-be-recognised"
    cells = []
    for _ in range(2):
        with Store(store_name, keys=100) as store:
            assert TokenBucket(store, "api", "1/hour").allow(key)
            raw = store.segment.read(0, store.stats().bytes)
            table = raw[layout.TABLE_OFFSET :]
            cells.append({tag for tag, _ in layout.CELL.iter_unpack(table) if tag})
        Store.unlink(store_name)
        assert key.encode() not in raw
        assert key.encode()[:8] not in raw
    assert len(cells[0]) == len(cells[1]) == 1
    assert cells[0] != cells[1]


def test_call_that_charges_nothing_takes_no_cell_and_is_no_decision(store: Store) -> None:
    bucket = TokenBucket(store, "api", "10/second")
    for _ in range(30):
        assert bucket.peek("k", 10)
    assert store.stats().total == type(store.stats().total)()
    assert bucket.hit("k", 0)
    assert store.stats().total.inserted == 0
    assert bucket.hit("k", 10)
    assert not bucket.peek("k")
    assert store.stats().total.denied == 0
    assert bucket.allow_many([]) == []
    assert store.stats().total.allowed == 2


@pytest.mark.parametrize(
    ("names", "beginning"),
    [
        (
            ["shop.views.orders.OrderView." + "a" * 21, "shop.views.orders.OrderView." + "a" * 22],
            b"shop.views.orders.Orde",
        ),
        (["é" * 25, "é" * 26], "é".encode() * 15),
        (["€" * 17, "a" * 30 + "€" * 7, "a" * 10**6], b""),
    ],
)
def test_long_limiter_name_is_stored_as_its_beginning_and_a_digest(
    store_name: str, names: list[str], beginning: bytes
) -> None:
    with Store(store_name, keys=100) as here, Store(store_name, keys=100) as there:
        for name in names:
            limiter = TokenBucket(here, name, "1/hour")
            assert limiter.name == name
            assert limiter.allow("k")
            assert not TokenBucket(there, name, "1/hour").allow("k")
        kept = [name.encode() for name in there.stats().limiters]
        assert len(kept) == len(names)
        assert all(40 <= len(name) <= 48 and name.startswith(beginning) for name in kept)
        log = SlidingLog(here, names[0] + " log", "1/hour", keys=10)
        assert log.allow("k")
        assert not SlidingLog(there, names[0] + " log", "1/hour", keys=10).allow("k")


def test_every_limiter_name_has_its_own_counters(store: Store) -> None:
    names = ["a", "b", "aa", "A", " a", "a ", "0a", "1a", "é", "e\u0301", "a" * 48, "é" * 24]
    for name in names:
        assert TokenBucket(store, name, "1/hour").allow("k")
    assert set(store.stats().limiters) == set(names)


def test_first_call_of_a_limiter_reads_few_counter_lines_in_python(store: Store) -> None:
    limiters = [TokenBucket(store, f"bucket {number}", "5/minute") for number in range(3)]
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    for limiter in limiters:
        sys.settrace(trace)
        try:
            assert limiter.allow("k")
        finally:
            sys.settrace(before)
    assert 0 < lines < layout.OWNED_COUNTER_LINES // 2
