"""A segment's file that is removed while a store uses it: when the process warns, and what ``Store.unlink`` refuses."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from limiter_kinds import Kind, every_kind

from forebay import (
    AllOf,
    Concurrency,
    FixedWindow,
    ForeignSegment,
    SegmentError,
    SegmentRemovedWarning,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.clock import ManualClock
from forebay.segment import attachment_locks, removal

REMOVED = "was removed while processes use it"


def _let_the_check_be_due(store: Store) -> None:
    """Ten seconds after the last one, by the host's clock."""
    store.segment.name_check_due_ns = 0


@every_kind
def test_the_decision_after_an_insertion_warns_once(store_name: str, kind: Kind) -> None:
    with Store(store_name, keys=1000, clock=ManualClock(10**6)) as store:
        limiter = kind.make(store, "api", kind.limit, 60_000)
        assert limiter.allow("a")
        os.unlink(store.path or "")
        assert limiter.allow("b")  # no check is due
        _let_the_check_be_due(store)
        assert limiter.allow("c")
        with pytest.warns(SegmentRemovedWarning, match=REMOVED) as warned:
            assert limiter.allow("d")
        assert [warning.filename for warning in warned] == [__file__]
        _let_the_check_be_due(store)
        assert limiter.allow("e")
        assert limiter.hit("f").allowed
        store.stats()


def test_other_calls_check_too(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        permits = Concurrency(store, "permits", 5, lease="1 hour", keys=100)
        bucket = TokenBucket(store, "bucket", "10/hour")
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        assert bucket.allow_many(["a", "b"])
        with pytest.warns(SegmentRemovedWarning):
            assert bucket.hit("a").allowed
    with Store(store_name, keys=1000) as store:
        permits = Concurrency(store, "permits", 5, lease="1 hour", keys=100)
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        assert permits.acquire("a")
        with pytest.warns(SegmentRemovedWarning):
            assert permits.acquire("b")


def test_a_replaced_file_is_a_removed_one(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        os.unlink(store.path or "")
        Path(store.path or "").touch()
        _let_the_check_be_due(store)
        assert bucket.allow("a")
        with pytest.warns(SegmentRemovedWarning):
            assert bucket.allow("b")


def test_a_file_in_its_place_warns_of_nothing(store: Store) -> None:
    bucket = TokenBucket(store, "api", "10/hour")
    for key in "abc":
        _let_the_check_be_due(store)
        assert bucket.allow(key)
    assert store.segment.name_check_due_ns != 0


def test_a_live_key_leaves_the_check_alone(store: Store) -> None:
    bucket = TokenBucket(store, "api", "1000/hour", 1000)
    assert bucket.allow("a")
    _let_the_check_be_due(store)
    for _ in range(100):
        assert bucket.allow("a")
    assert store.segment.name_check_due_ns == 0


def test_a_warning_as_an_error_fails_no_decision(store_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_type))
    with Store(store_name, keys=1000) as store, warnings.catch_warnings():
        warnings.simplefilter("error")
        bucket = TokenBucket(store, "api", "2/hour", 2)
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        assert bucket.allow("a")
        assert [bucket.allow("a"), bucket.allow("a")] == [True, False]
    assert seen == [SegmentRemovedWarning]


def test_a_warning_that_cannot_be_shown_fails_no_decision(store_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(*_: object, **__: object) -> None:
        raise ValueError("I/O operation on closed file")

    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: seen.append(report.exc_type))
    with Store(store_name, keys=1000) as store, warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        bucket = TokenBucket(store, "api", "2/hour", 2)
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        assert bucket.allow("a")
        assert [bucket.allow("a"), bucket.allow("a")] == [True, False]
    assert seen == [ValueError]


def test_an_interrupt_while_the_warning_is_shown_ends_the_call(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with Store(store_name, keys=1000) as store, warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        bucket = TokenBucket(store, "api", "2/hour", 2)
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        assert bucket.allow("a")
        with pytest.raises(KeyboardInterrupt):
            bucket.allow("a")
        assert [bucket.allow("a"), bucket.allow("a")] == [True, False]


def test_a_request_of_several_limits_rolls_back_before_the_check(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with Store(store_name, keys=1000) as store, warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        bucket, window = TokenBucket(store, "bucket", "9/hour"), FixedWindow(store, "window", "1/hour")
        os.unlink(store.path or "")
        _let_the_check_be_due(store)
        # The bucket inserts the key. The window allows each of its two charges alone, but not both.
        assert not AllOf(bucket, window, window).allow("a")
        with pytest.raises(KeyboardInterrupt):
            bucket.peek("a")
        assert bucket.peek("a").remaining == 9


def test_a_forked_child_warns(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        assert bucket.allow("a")
        os.unlink(store.path or "")
        child = os.fork()
        if child == 0:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _let_the_check_be_due(store)
                bucket.allow("b")
                bucket.allow("b")
            os._exit(len(caught))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_closed_store_is_not_checked(store_name: str) -> None:
    with Store(store_name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        _let_the_check_be_due(store)
        assert bucket.allow("a")
        os.unlink(store.path or "")
    with pytest.raises(StoreClosed):
        bucket.allow("b")


def test_own_unlink_is_expected_for_that_file_only(store_name: str) -> None:
    with Store(store_name, keys=1000) as old:
        bucket = TokenBucket(old, "api", "10/hour")
        Store.unlink(store_name)
        _let_the_check_be_due(old)
        assert bucket.allow("a")
        assert bucket.allow("b")
    with Store(store_name, keys=1000) as new:
        bucket = TokenBucket(new, "api", "10/hour")
        os.unlink(new.path or "")
        _let_the_check_be_due(new)
        assert bucket.allow("a")
        with pytest.warns(SegmentRemovedWarning):
            assert bucket.allow("b")


def _errors_of(program: str, *arguments: str, options: tuple[str, ...] = ()) -> str:
    ended = subprocess.run(
        [sys.executable, *options, "-c", "import os, sys, forebay\n" + program, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return ended.stderr


def test_an_ending_process_warns_after_an_earlier_unlink_of_the_name(store_name: str) -> None:
    program = (
        "forebay.Store(sys.argv[1], keys=1000).close()\n"
        "forebay.Store.unlink(sys.argv[1])\n"
        "store = forebay.Store(sys.argv[1], keys=1000)\n"
        "os.unlink(store.path)\n"
    )
    assert _errors_of(program, store_name).count(REMOVED) == 1


def test_an_ending_process_reports_every_store_even_with_warnings_as_errors(store_name: str, tmp_path: Path) -> None:
    program = (
        "stores = [forebay.Store('a', keys=1000, path=path) for path in sys.argv[1:]]\n"
        "for store in stores:\n"
        "    os.unlink(store.path)\n"
    )
    errors = _errors_of(program, str(tmp_path / "a"), str(tmp_path / "b"), options=("-W", "error"))
    assert f"{tmp_path}/a {REMOVED}" in errors
    assert f"{tmp_path}/b {REMOVED}" in errors


def test_an_ending_process_reports_every_store_even_if_no_warning_can_be_shown(tmp_path: Path) -> None:
    program = (
        "stores = [forebay.Store('a', keys=1000, path=path) for path in sys.argv[1:]]\n"
        "for store in stores:\n"
        "    os.unlink(store.path)\n"
        "import warnings\n"
        "warnings.showwarning = None\n"  # so each warning raises
    )
    errors = _errors_of(program, str(tmp_path / "a"), str(tmp_path / "b"))
    assert f"{tmp_path}/a {REMOVED}" in errors
    assert f"{tmp_path}/b {REMOVED}" in errors


def test_unlink_refuses_the_file_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "letters.txt"
    path.write_text("Dear Ada,")
    with pytest.raises(ForeignSegment, match=r"a file that begins with b'Dear Ada'.*nothing was removed"):
        Store.unlink(path=path)
    assert path.read_text() == "Dear Ada,"
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(ForeignSegment, match="a symbolic link"):
        Store.unlink(path=link, missing_ok=True)
    assert link.is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ForeignSegment, match="a device, a pipe or a socket"):
        Store.unlink(path=tmp_path / "pipe")


@pytest.mark.parametrize("content", ["empty", "damaged", "newer"])
def test_unlink_removes_a_segment_in_any_state(tmp_path: Path, content: str) -> None:
    path = tmp_path / "forebay-a"
    Store("a", keys=100, path=path).close()
    raw = path.read_bytes()
    path.write_bytes({"empty": b"", "damaged": raw[:100], "newer": raw[:8] + b"\xff" * 4 + raw[12:]}[content])
    Store.unlink(path=path)
    assert not path.exists()
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(path=path)


def test_a_new_file_is_removed_only_while_no_other_store_is_attached(store_name: str) -> None:
    """As where a start fails after the store was made."""
    with Store(store_name, keys=100) as new:
        path = Path(new.path or "")
        with Store(store_name, keys=100) as other:
            assert not new.attachment.remove_if_new()
            assert path.exists()
            assert not other.attachment.remove_if_new()
            assert path.exists()
        assert new.attachment.remove_if_new()
        assert not path.exists()
    with Store.private(keys=100) as private:
        assert not private.attachment.remove_if_new()


def test_segment_in_use_is_not_unlinked_as_unused(store_name: str) -> None:
    """Also if the other process attaches after the last look at it."""
    with Store(store_name, keys=1000) as store:
        path = store.path or ""
        assert not removal.unlink_unused(path)
        assert os.path.exists(path)
    assert removal.unlink_unused(path)
    assert not os.path.exists(path)
    with pytest.raises(FileNotFoundError):
        removal.unlink_unused(path)


def test_segment_that_took_the_place_of_an_unused_one_is_not_unlinked(
    store_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process removes the file, and a third one makes it again, after the first was opened."""
    with Store(store_name, keys=1000) as old:
        path = old.path or ""
    made = []
    exclude_all = attachment_locks.exclude_all

    def replaced_before(fd: int) -> bool:
        if not made:
            Store.unlink(store_name)
            made.append(Store(store_name, keys=1000))
        return exclude_all(fd)

    monkeypatch.setattr(attachment_locks, "exclude_all", replaced_before)
    assert not removal.unlink_unused(path)
    assert os.path.exists(path)
    made[0].close()
    assert removal.unlink_unused(path)


def test_unlink_removes_live_rules_and_no_store_with_such_a_name(tmp_path: Path) -> None:
    rules = ["1", "27", "loader", "loader.new"]
    for name in rules:
        (tmp_path / f"forebay-shop.rules-0123abcd.{name}").touch()
    others = ["shop.rules-2", "shop.rules-0123abcd", "shop.rules-01234567.v1", "shop.rules-2.rules-0123abcd.1"]
    with Store("shop", keys=100, directory=tmp_path), Store("shop.rules-2", keys=100, directory=tmp_path):
        for name in others[1:]:
            (tmp_path / f"forebay-{name}").touch()
        Store.unlink("shop", directory=tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {f"forebay-{name}" for name in others}
        Store.unlink("shop.rules-2", directory=tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {f"forebay-{name}" for name in others[1:3]}


def test_unlink_spares_the_live_rules_of_a_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the store again, and publishes rules, as soon as the file has gone."""
    Store("shop", keys=100, directory=tmp_path).close()
    old, new = (tmp_path / f"forebay-shop.rules-{identity}.1" for identity in ("0123abcd", "4567abcd"))
    old.touch()
    os_unlink = os.unlink

    def unlink(path: str) -> None:
        os_unlink(path)
        if path == str(tmp_path / "forebay-shop"):
            new.touch()

    monkeypatch.setattr(os, "unlink", unlink)
    Store.unlink("shop", directory=tmp_path)
    assert (old.exists(), new.exists()) == (False, True)


def test_foreign_file_is_not_unlinked_as_unused(tmp_path: Path) -> None:
    file = tmp_path / "forebay-shop"
    file.write_text("another program's")
    with pytest.raises(ForeignSegment):
        removal.unlink_unused(str(file))
    file.unlink()
    file.symlink_to("/etc/passwd")
    with pytest.raises(ForeignSegment):
        removal.unlink_unused(str(file))
    assert file.is_symlink()
