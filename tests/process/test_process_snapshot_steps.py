"""``restore`` and ``resize`` killed before each of their system calls, beside each other, and without room."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest
from click.testing import CliRunner
from process_helpers import Crew, Meeting, Worker, open_fds, opened_since

from forebay import FixedWindow, SlidingLog, Store, TokenBucket
from forebay.cli.commands import forebay
from forebay.errors import SegmentError, SegmentSpaceError
from forebay.rules.live.publication import Board, Publication
from forebay.snapshots import making, resize, restore, snapshot
from forebay.verification import verify

# All by which a file is made, written, named or removed.
CALLS: Final = (
    *("open", "close", "link", "rename", "replace", "unlink", "pwrite", "posix_fallocate", "ftruncate"),
    *("fchown", "fchmod", "fsync"),
)
OLD, NEW = 300, 2000
RULES: Final = Publication("limits.toml", "a test", 1, datetime(2026, 1, 1, tzinfo=UTC), {}, b"# no limits")
OTHER_RULES: Final = Publication("limits.toml", "a test", 1, datetime(2026, 1, 2, tzinfo=UTC), {}, b"# none either")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "stores").mkdir()
    return tmp_path / "stores" / "forebay-shop"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "shop.snapshot"


def make(path: Path, used: int) -> None:
    """A store with live rules, in which so many of ten requests were used."""
    with Store("a", keys=OLD, path=path) as store:
        assert TokenBucket(store, "api", "10/year").hit("key", used)
        assert SlidingLog(store, "log", "10/year", keys=3).hit("key", used)
        assert Board(store).publish(RULES, 0) == 1


def make_two_snapshots(path: Path, file: Path) -> Path:
    """A snapshot of a store of which 7 requests were used, and one of 9, which have other live rules of one number.

    Returns the latter's path. Both come from one store, so the names of their rules' files have the same secret.
    """
    with Store("a", keys=OLD, path=path) as store:
        assert TokenBucket(store, "api", "10/year").hit("key", 7)
        assert SlidingLog(store, "log", "10/year", keys=3).hit("key", 7)
        snapshot(path, before := Path(f"{file}.before"))
        assert Board(store).publish(RULES, 0) == 1
    snapshot(path, file)
    Store.unlink(path=path)
    restore(before, path)
    with Store.attach(path=path) as store:
        assert TokenBucket(store, "api", "10/year").hit("key", 2)
        assert SlidingLog(store, "log", "10/year", keys=3).hit("key", 2)
        assert Board(store).publish(OTHER_RULES, 0) == 1
    snapshot(path, later := Path(f"{file}.later"))
    return later


def used_of(path: Path) -> int:
    with Store.attach(path=path) as store:
        return 10 - TokenBucket(store, "api", "10/year").peek("key").remaining


def used_in(path: Path, rules: Publication = RULES) -> tuple[int, int]:
    """The size of a sound and whole store with these live rules, and how many requests of the key were used."""
    report = verify(path)
    assert report.sound, report.damage
    with Store.attach(path=path) as store:
        left = {
            TokenBucket(store, "api", "10/year").peek("key").remaining,
            SlidingLog(store, "log", "10/year", keys=3).peek("key").remaining,
        }
        board = Board(store)
        assert board.read(board.version) == rules
        (remaining,) = left
        return store.keys, 10 - remaining


Call = Callable[[], Any]
"""A system call with its arguments."""


def killed(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failed(call: Call) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def interrupted(call: Call) -> None:
    call()
    raise KeyboardInterrupt


def _run_up_to(step: int, end: Callable[[Call], None], work: Callable[[], Any]) -> bool:
    """Do the work, and end it at its call of that number. Whether all was done."""
    calls = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def ended_or_called(*arguments: Any, **more: Any) -> Any:
            if next(calls) == step:
                end(lambda: call(*arguments, **more))
            return call(*arguments, **more)

        return ended_or_called

    for name in CALLS if end is not failed else (*{*CALLS} - {"close", "unlink"},):
        setattr(os, name, counted(getattr(os, name)))
    with contextlib.suppress(OSError, SegmentError, KeyboardInterrupt):
        work()
    return next(calls) <= step


def kills(crew: Crew, work: Callable[[], Any]) -> Iterator[int]:
    """Kill the work before each of its calls in turn; the last number is of a process that has done all."""
    for step in itertools.count():
        worker = crew.start(_run_up_to, step, killed, work)
        was_killed = is_killed(worker)
        yield step
        if not was_killed:
            assert step > 20
            return


def is_killed(worker: Worker) -> bool:
    try:
        worker.result()
    except AssertionError:
        assert worker.status is not None
        assert os.WIFSIGNALED(worker.status), worker.status
        assert os.WTERMSIG(worker.status) == signal.SIGKILL
        return True
    return False


def ends(crew: Crew, end: Callable[[Call], None], work: Callable[[], Any]) -> Iterator[int]:
    """End the work at each of its calls in turn."""
    for step in itertools.count():
        is_done = crew.start(_run_up_to, step, end, work).result()
        if is_done:
            assert step > 20
            return
        yield step


def refusal_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except SegmentError as error:
        return str(error)
    return ""


def rules_beside(path: Path) -> set[str]:
    """Files of live rules."""
    return {name for name in os.listdir(path.parent) if name.startswith(f"{path.name}.rules-")}


def others_beside(path: Path) -> set[str]:
    """Files that are neither the store nor live rules."""
    return {*os.listdir(path.parent)} - {path.name} - rules_beside(path)


def test_a_resize_that_is_killed_anywhere_leaves_the_old_store_or_the_new_one(path: Path, crew: Crew) -> None:
    make(path, 7)
    seen = []
    for _ in kills(crew, lambda: resize(path, NEW)):
        keys, used = used_in(path)
        assert used == 7
        assert others_beside(path) <= {".forebay-shop.new"}
        seen.append(keys)
        if keys == NEW:
            resize(path, OLD)
            assert others_beside(path) == set()
    assert seen[:-1].count(OLD) >= len(seen) - 10
    assert seen[-1] == NEW


def test_a_restore_that_is_killed_anywhere_leaves_no_store_or_a_whole_one(path: Path, file: Path, crew: Crew) -> None:
    make(path, 7)
    snapshot(path, file)
    Store.unlink(path=path)
    made = left = 0
    for _ in kills(crew, lambda: restore(file, path)):
        assert others_beside(path) == set()
        if path.exists():
            assert used_in(path) == (OLD, 7)
            Store.unlink(path=path)
            assert os.listdir(path.parent) == []
            made += 1
        elif rules_beside(path):
            # Rules without a store, as a kill leaves them, are of no harm to the next one, which removes them.
            restore(file, path)
            assert used_in(path) == (OLD, 7)
            assert len(rules_beside(path)) == 1
            Store.unlink(path=path)
            left += 1
    assert made >= 1
    assert left >= 1


def test_a_replacement_that_is_killed_anywhere_leaves_the_old_store_or_the_new_one(
    path: Path, file: Path, crew: Crew
) -> None:
    later = make_two_snapshots(path, file)
    seen = []
    for _ in kills(crew, lambda: restore(file, path, replace=True)):
        seen.append(used_in(path, OTHER_RULES if used_of(path) == 9 else RULES))
        assert others_beside(path) <= {".forebay-shop.new"}
        restore(later, path, replace=True)
        assert used_in(path, OTHER_RULES) == (OLD, 9)
        assert others_beside(path) == set()
        assert len(rules_beside(path)) == 1
        make_anew(path, later)
    assert set(seen) == {(OLD, 9), (OLD, 7)}
    assert seen[-1] == (OLD, 7)


def make_anew(path: Path, file: Path) -> None:
    """Restore the store without files beside it, so its rules have the number that they had."""
    Store.unlink(path=path)
    assert os.listdir(path.parent) == []
    restore(file, path)


@pytest.mark.parametrize("end", [failed, interrupted])
def test_a_replacement_that_fails_anywhere_leaves_the_old_store_or_the_new_one(
    end: Callable[[Call], None], path: Path, file: Path, crew: Crew
) -> None:
    later = make_two_snapshots(path, file)
    seen = set()
    for _ in ends(crew, end, lambda: restore(file, path, replace=True)):
        seen.add(used_in(path, OTHER_RULES if used_of(path) == 9 else RULES))
        if end is failed:
            assert others_beside(path) == set()
        else:
            # An interrupt may come right after the file has its name.
            assert others_beside(path) <= {".forebay-shop.new"}
        make_anew(path, later)
    assert (OLD, 9) in seen


def test_what_a_killed_resize_left_is_named_by_doctor_and_removed_with_the_store(path: Path, crew: Crew) -> None:
    make(path, 7)
    for _ in kills(crew, lambda: resize(path, NEW)):
        if others_beside(path):
            break
    left = path.with_name(".forebay-shop.new")
    assert left.exists()
    result = CliRunner().invoke(forebay, ["doctor", str(path), "--json"], prog_name="forebay")
    (finding,) = [one for one in json.loads(result.stdout)["findings"] if one["where"] == str(left)]
    assert finding["severity"] == "problem"
    assert "a killed resize or restore" in finding["found"]
    assert str(left) in finding["remedy"]
    Store.unlink(path=path)
    assert os.listdir(path.parent) == []


def test_of_restores_at_once_one_makes_the_store(path: Path, file: Path, crew: Crew) -> None:
    make(path, 7)
    snapshot(path, file)
    Store.unlink(path=path)

    def try_to(me: int, meeting: Meeting) -> str:
        meeting.wait(me)
        return refusal_of(lambda: restore(file, path))

    for _ in range(20):
        made, *refused = sorted(crew.run(3, try_to, Meeting(3)))
        assert made == ""
        assert all("a file that is there already" in one for one in refused)
        assert used_in(path) == (OLD, 7)
        Store.unlink(path=path)
        assert os.listdir(path.parent) == []


def test_a_restore_that_comes_too_late_leaves_the_live_rules_of_the_one_before(
    path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path, 7)
    snapshot(path, file)
    Store.unlink(path=path)
    name_file = making.name_file

    def after_another(fd: int, target: str) -> None:
        monkeypatch.setattr(making, "name_file", name_file)
        restore(file, path)
        name_file(fd, target)

    monkeypatch.setattr(making, "name_file", after_another)
    with pytest.raises(SegmentError, match="a file that is there already"):
        restore(file, path)
    assert used_in(path) == (OLD, 7)


def test_replacements_at_once_leave_one_whole_store(path: Path, file: Path, crew: Crew) -> None:
    make(path, 7)
    snapshot(path, file)

    def try_to(me: int, meeting: Meeting) -> str:
        meeting.wait(me)
        return refusal_of(lambda: restore(file, path, keys=(OLD, NEW)[me], replace=True))

    for _ in range(20):
        first, second = sorted(crew.run(2, try_to, Meeting(2)))
        assert first == ""
        assert second == "" or "another resize or restore" in second
        keys, used = used_in(path)
        assert (keys in (OLD, NEW), used) == (True, 7)
        assert others_beside(path) == set()


def test_without_room_nothing_is_made_and_the_message_names_the_file(small_disk: Path, tmp_path: Path) -> None:
    path, file = small_disk / "forebay-shop", tmp_path / "shop.snapshot"
    with Store("a", keys=10_000, path=path) as store:
        assert TokenBucket(store, "api", "10/year").hit("key", 7)
        window = FixedWindow(store, "window", "10/day")
        for key in range(5000):
            window.allow(key)
    fds = open_fds()
    with pytest.raises(SegmentSpaceError, match="bytes free"):
        resize(path, 40_000)
    snapshot(path, file)
    with pytest.raises(SegmentSpaceError, match="bytes free"):
        restore(file, small_disk / "forebay-other", keys=40_000)
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096 - 40_000))
    small = small_disk / "shop.snapshot"
    with pytest.raises(OSError, match="No space left on device") as caught:
        snapshot(path, small)
    assert str(small) in str(caught.value)
    assert sorted(os.listdir(small_disk)) == ["filler", "forebay-shop"]
    assert not opened_since(fds)
    assert verify(path).sound
