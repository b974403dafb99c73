"""Helpers for users' tests: pytest fixtures, private stores in place of an application's, and `reset_store`."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import (
    BucketedWindow,
    ClockMismatch,
    Concurrency,
    FixedWindow,
    LeakyBucket,
    LimiterStats,
    MinInterval,
    SegmentError,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.testing import ManualClock, private_stores, reset_store

MAKERS: dict[str, Callable[[Store], Any]] = {
    "bucket": lambda store: TokenBucket(store, "api", "1/hour"),
    "interval": lambda store: TokenBucket(store, "api", "1/hour", refill="interval"),
    "queue": lambda store: LeakyBucket(store, "api", "1/hour", 1),
    "gap": lambda store: MinInterval(store, "api", "1 hour"),
    "fixed": lambda store: FixedWindow(store, "api", "1/hour"),
    "sliding": lambda store: SlidingWindow(store, "api", "1/hour"),
    "bucketed": lambda store: BucketedWindow(store, "api", "1/hour", 4, keys=20),
    "bucketed, many": lambda store: BucketedWindow(store, "api", "1/hour", 4, keys=500),
    "log": lambda store: SlidingLog(store, "api", "1/hour", keys=20),
    "log, many": lambda store: SlidingLog(store, "api", "1/hour", keys=500),
    "slots": lambda store: Concurrency(store, "api", 1, lease="1 hour", keys=20),
}

APPLICATION = """
from forebay import FixedWindow, SlidingLog, Store

store = Store("{name}", keys=1_000_000)
logins = FixedWindow(store, "login", "2/minute")
exports = SlidingLog(store, "export", "1/hour", keys=50)
"""


def run_pytest(directory: Path, *options: str, **files: str) -> str:
    """Run pytest on these files as a user does; return its output."""
    for file, text in files.items():
        (directory / f"{file}.py").write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *options, str(directory)]
    # Without the variables of this run of pytest.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, check=False)
    return done.stdout + done.stderr


# The fixtures, with the package installed and no configuration.


def test_fixtures_work_without_configuration(forebay_store: Store, forebay_clock: ManualClock) -> None:
    assert forebay_clock.now() == 0.0
    assert forebay_store.path is None
    assert forebay_store.keys == 10_000
    limiter = TokenBucket(forebay_store, "api", "1/minute")
    assert [limiter.allow("k") for _ in range(2)] == [True, False]
    forebay_clock.advance(60)
    assert [limiter.allow("k") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_gets_its_own_store(forebay_store: Store, forebay_clock: ManualClock, turn: int) -> None:
    assert forebay_clock.now() == 0.0
    assert forebay_store.stats().limiters == {}
    assert TokenBucket(forebay_store, "api", "1/year").allow("k")
    forebay_clock.advance(turn)


def test_private_stores_replace_stores_made_at_call_time(
    forebay_private_stores: None, forebay_clock: ManualClock, store_name: str
) -> None:
    application = make_application(store_name)
    assert [application.logins.allow("ada") for _ in range(3)] == [True, True, False]
    forebay_clock.advance(60)
    assert application.logins.allow("ada")
    assert not os.path.exists(f"/dev/shm/forebay-{store_name}")


def test_user_needs_no_configuration(tmp_path: Path, store_name: str) -> None:
    shown = run_pytest(
        tmp_path,
        application=APPLICATION.format(name=store_name),
        conftest="""
import pytest
from forebay.testing import ManualClock, private_stores, reset_store

clock = ManualClock()
with private_stores(clock):
    import application


@pytest.fixture(autouse=True)
def fresh_limits():
    reset_store(application.store)
""",
        test_it="""
import application
import pytest
from conftest import clock
from forebay import TokenBucket


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_application(turn):
    assert [application.logins.allow("ada") for _ in range(3)] == [True, True, False]
    clock.advance(60)
    assert application.logins.allow("ada")
    assert [application.exports.allow("ada") for _ in range(2)] == [True, False]
    stats = application.store.stats()
    assert stats.limiters["login"].denied == stats.limiters["export"].denied == 1


def test_fixtures(forebay_store, forebay_clock):
    assert TokenBucket(forebay_store, "api", "1/hour").allow("k")
    assert forebay_clock.now() == 0
""",
    )
    assert "4 passed" in shown, shown
    assert not os.path.exists(f"/dev/shm/forebay-{store_name}")


def test_unused_plugin_imports_nothing(tmp_path: Path) -> None:
    shown = run_pytest(
        tmp_path,
        test_it="""
import sys


def test_nothing_of_it_is_loaded():
    assert "pytest_forebay" in sys.modules
    assert "forebay" not in sys.modules
""",
    )
    assert "1 passed" in shown, shown


def test_fixtures_are_documented(tmp_path: Path) -> None:
    shown = run_pytest(tmp_path, "--fixtures", test_it="")
    for name in ("forebay_clock", "forebay_store", "forebay_private_stores"):
        assert f"\n{name} -- " in shown
        assert "no docstring" not in shown.partition(f"\n{name} -- ")[2].splitlines()[1]


def test_forebay_needs_no_pytest() -> None:
    program = (
        "import sys; sys.modules['pytest'] = None; import forebay.testing; assert 'pytest_forebay' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# Private stores in place of an application's.


def make_application(name: str) -> Any:
    application = types.ModuleType("application")
    exec(APPLICATION.format(name=name), application.__dict__)
    return application


def test_private_stores_replace_stores_made_at_import_time(store_name: str) -> None:
    clock = ManualClock()
    with private_stores(clock):
        application = make_application(store_name)
    assert not [name for name in os.listdir("/dev/shm") if store_name in name]
    # The stores stay private after the block.
    assert application.store.keys == 10_000
    for _ in range(3):
        assert [application.logins.allow("ada") for _ in range(3)] == [True, True, False]
        clock.advance(60)
    assert [application.exports.allow("ada") for _ in range(2)] == [True, False]
    with pytest.warns(match="was made for 50 keys"):
        assert not SlidingLog(application.store, "export", "1/hour", keys=60).allow("ada")
    assert SlidingLog(application.store, "new", "1/hour", keys=60).allow("ada")


def test_children_share_a_private_store(store_name: str, in_child: Any) -> None:
    clock = ManualClock()
    with private_stores(clock):
        application = make_application(store_name)
    assert in_child(lambda: application.logins.allow("ada"))
    assert in_child(lambda: application.exports.allow("ada"))
    assert [application.logins.allow("ada") for _ in range(2)] == [True, False]
    assert not application.exports.allow("ada")
    in_child(lambda: clock.advance(60))
    assert application.logins.allow("ada")
    in_child(lambda: reset_store(application.store))
    assert [application.logins.allow("ada") for _ in range(3)] == [True, True, False]


def test_stores_of_one_name_or_path_are_one_store(store_name: str, tmp_path: Path) -> None:
    with private_stores(ManualClock()):
        for first, second, same in (
            ({"name": "a"}, {"name": "a"}, True),
            ({"name": "b"}, {"name": "c"}, False),
            ({"name": "d", "path": tmp_path / "x"}, {"name": "e", "path": tmp_path / "x"}, True),
            ({"name": "f", "path": tmp_path / "y"}, {"name": "f"}, False),
            ({"name": "g"}, {"name": "h", "path": "/dev/shm/forebay-g"}, True),
            ({"name": "i" * 100, "path": f"{tmp_path}/{'i' * 250}"}, {"name": "i" * 100}, False),
        ):
            one, two = (TokenBucket(Store(keys=100, **options), "api", "1/hour") for options in (first, second))
            assert one.allow("k")
            assert two.allow("k") is not same
        one, two = (TokenBucket(Store.private(keys=100), "api", "1/hour") for _ in range(2))
        assert one.allow("k")
        assert two.allow("k")
        with pytest.raises(ValueError, match="a store's name"):
            Store("../a", keys=1)
    assert list(tmp_path.iterdir()) == []


def test_private_stores_keep_the_applications_other_options(store_name: str) -> None:
    clock = ManualClock(5)
    with private_stores(clock, keys=200):
        for store in (
            Store(store_name, keys=100, on_full="deny", clock="monotonic", mode=0o660, group=0),
            Store.private(keys=100, on_full="deny", clock="time"),
        ):
            assert (store.keys, store.on_full) == (100, "deny")
            clock.advance(1)
            assert store.segment.now_ns() == clock.now() * 1e9
        for store in (Store(f"{store_name}-large", keys=10**9), Store.private(keys=10**9)):
            assert (store.keys, store.on_full) == (200, None)

        class Mine(Store):
            pass

        assert isinstance(Mine(store_name, keys=100), Mine)
        assert isinstance(Mine.private(keys=100), Mine)


def test_private_stores_refuse_invalid_arguments() -> None:
    make: Any = Store
    with private_stores(ManualClock()):
        for kind, arguments in ((make, ("a",)), (make.private, ())):
            with pytest.raises(TypeError, match="keyword-only argument: 'keys'"):
                kind(*arguments)
            for keys in ("many", True, None, 0):
                with pytest.raises(ValueError, match="keys is a whole number"):
                    kind(*arguments, keys=keys)


def test_unlink_in_the_block_leaves_the_real_store(store_name: str) -> None:
    with Store(store_name, keys=1) as real:
        limiter = TokenBucket(real, "api", "1/hour")
        assert limiter.allow("k")
        with private_stores(ManualClock()):
            with pytest.raises(SegmentError, match="no such file"):
                Store.unlink(store_name)
            Store.unlink(store_name, missing_ok=True)
            with Store(store_name, keys=1) as other:
                assert other.path != real.path
                assert TokenBucket(other, "api", "1/hour").allow("k")
            Store.unlink(store_name)
            assert TokenBucket(Store(store_name, keys=1), "api", "1/hour").allow("k")
        with Store(store_name, keys=1) as again:
            assert not TokenBucket(again, "api", "1/hour").allow("k")


def test_stores_are_real_after_the_block(store_name: str) -> None:
    made = Store.__init__, Store.private, Store.unlink
    with pytest.raises(ZeroDivisionError), private_stores(ManualClock()):
        1 / 0  # noqa: B018
    assert (Store.__init__, Store.private, Store.unlink) == made
    with Store(store_name, keys=1) as store:
        assert store.path == f"/dev/shm/forebay-{store_name}"
    with pytest.raises(ClockMismatch):
        Store(store_name, keys=1, clock=ManualClock())


def test_private_stores_can_follow_time_time(store_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_800_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    with private_stores("time"):
        application = make_application(store_name)
    for _ in range(3):
        assert [application.logins.allow("ada") for _ in range(3)] == [True, True, False]
        now[0] += 60


# Reset stores.


@pytest.mark.parametrize("kind", MAKERS)
def test_reset_store_forgets_every_key(store: Store, clock: ManualClock, kind: str) -> None:
    limiter = MAKERS[kind](store)
    keys = range(20)
    for turn in range(3):
        clock.advance(turn * 1800)
        assert [limiter.allow(key) for key in keys] == [True] * 20
        assert [limiter.allow(key) for key in keys] == [False] * 20
        assert store.stats().total.denied == 20
        now = clock.now()
        reset_store(store)
        assert clock.now() == now
        assert store.stats().live_keys == 0
        assert list(store.stats().limiters) == ["api"]
        assert store.stats().total == LimiterStats()
        assert all(limiter.peek(key) for key in keys)


@pytest.mark.parametrize("kind", ["bucketed", "log", "slots"])
def test_reset_store_has_no_more_room_than_before(store: Store, kind: str) -> None:
    """Memory for this many keys has reserved cells; they stay reserved."""
    limiter = MAKERS[kind](store)
    for _ in range(2):
        for key in range(200):
            limiter.allow(key)
        total = store.stats().total
        assert 0 < total.inserted <= 20
        assert total.full == 200 - total.inserted
        reset_store(store)


def test_reset_store_forgets_request_ids(store: Store) -> None:
    limiter = TokenBucket(store, "api", "5/hour")
    for _ in range(2):
        assert limiter.hit("k", request_id="r").remaining == 4
        assert limiter.hit("k", request_id="r").remaining == 4
        reset_store(store)


@pytest.mark.parametrize("clock", ["monotonic", "time"])
def test_stores_with_other_clocks_can_be_reset(store_name: str, clock: Any) -> None:
    with Store(store_name, keys=1, clock=clock) as store, Store(store_name, keys=1, clock=clock) as again:
        limiters = [FixedWindow(each, "api", "1/year", align="first") for each in (store, again)]
        for each in (store, again):
            assert [limiter.allow("k") for limiter in limiters] == [True, False]
            reset_store(each)
        assert [limiter.allow("k") for limiter in limiters] == [True, False]
        assert store.stats() == again.stats()
        assert store.stats().total == LimiterStats(allowed=1, denied=1, inserted=1)


def test_large_store_is_reset_completely(clock: ManualClock) -> None:
    with Store.private(keys=200_000, clock=clock) as store:
        limiter = TokenBucket(store, "api", "1/hour")
        limiter.allow_many(range(50_000))
        reset_store(store)
        assert store.stats().live_keys == 0
        assert all(limiter.allow_many(range(50_000)))


def test_closed_store_cannot_be_reset(store: Store) -> None:
    store.close()
    with pytest.raises(StoreClosed, match="can't be reset"):
        reset_store(store)


def test_reset_store_refuses_other_objects() -> None:
    wrong: Any = "shop"
    with pytest.raises(TypeError, match=r"reset_store takes a Store, not 'shop'.* namespace"):
        reset_store(wrong)
