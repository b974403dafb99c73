"""A segment that a process has attached: its clock stays, its name is watched, and no reader holds others up."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest
from process_helpers import (
    FREE_USER,
    Crew,
    Meeting,
    SharedNumbers,
    Worker,
    as_user,
    path_of,
    wait_until,
)

from forebay import SlidingLog, Store, TokenBucket
from forebay.errors import ClockMismatch, SegmentBusy, SegmentError, SegmentRemovedWarning, UntrustedSegment
from forebay.segment import attachment_locks, creation, file, host_clock, layout, ofd_locks
from forebay.segment.header import Header
from forebay.verification import verify

LIMIT: Final = 10
HOUR_S: Final = 3600


@dataclass(frozen=True)
class Host:
    """The host that a process sees: its boot id and clocks."""

    boot: str = "11111111-2222-3333-4444-555555555555"
    step_s: int = 0
    """By how much its wall clock is ahead."""

    def enter(self) -> None:
        real_ns, boot_id = time.time_ns, uuid.UUID(self.boot).bytes
        host_clock.read_boot_id = lambda: boot_id  # type: ignore[assignment]
        time.time_ns = lambda: real_ns() + self.step_s * 10**9


OTHER: Final = Host()


def _header(name: str) -> Header:
    with open(path_of(name), "rb") as file:
        return Header.unpack(file.read(layout.HEADER.size))


def _admitted(name: str, host: Host | None = None, attached: SharedNumbers | None = None) -> int:
    """The number admitted of 30 requests. With `attached`, the process reports that it has attached, and stays so."""
    if host is not None:
        host.enter()
    with Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10/hour", burst=LIMIT)
        admitted = sum(bucket.allow("key") for _ in range(30))
        if attached is not None:
            attached[0] = 1
            wait_until(lambda: attached[0] == 2, "the end")
        return admitted


def _refusal(name: str, host: Host) -> str:
    host.enter()
    with pytest.raises(ClockMismatch) as caught:
        Store(name, keys=1000)
    return str(caught.value)


@pytest.mark.parametrize("step_s", [0, HOUR_S, -HOUR_S])
def test_a_segment_in_use_is_not_taken_for_one_of_another_boot(crew: Crew, name: str, step_s: int) -> None:
    """Its users' limit would be another one from then on; for those that start, too."""
    attached = SharedNumbers(1)
    user = crew.start(_admitted, name, None, attached)
    wait_until(lambda: attached[0], "its attaching")
    before, inode = _header(name), Path(path_of(name)).stat().st_ino
    message = crew.start(_refusal, name, Host(step_s=step_s)).result()
    assert OTHER.boot in message
    assert str(uuid.UUID(bytes=before.boot_id)) in message
    assert "boot ids of their own" in message
    assert (_header(name), Path(path_of(name)).stat().st_ino) == (before, inode)
    assert crew.start(_admitted, name).result() == 0
    attached[0] = 2
    assert user.result() == LIMIT


@pytest.mark.parametrize("decided", [False, True], ids=["", "decided"])
def test_a_forked_child_goes_on_using_a_segment(crew: Crew, name: str, decided: bool) -> None:
    """Whether it has taken over the parent's mark or has one of its own by its first decision."""
    attached = SharedNumbers(1)
    parent = crew.start(_leave_a_child, name, attached, decided)
    wait_until(lambda: attached[0], "the child")
    parent.kill()
    crew.start(_refusal, name, OTHER).result()
    attached[0] = 2
    wait_until(lambda: attached[0] == 3, "the child's end")
    assert crew.start(_eventually_admitted, name).result() == 0


def _leave_a_child(name: str, attached: SharedNumbers, decided: bool) -> None:
    store = Store(name, keys=1000)
    bucket = TokenBucket(store, "api", "10/hour", burst=LIMIT)
    assert bucket.hit("key", LIMIT)
    if os.fork() == 0:
        if decided:
            assert not bucket.allow("key")
            assert not store.attachment.is_inherited
        attached[0] = 1
        wait_until(lambda: attached[0] == 2, "the end")
        attached[0] = 3
        os._exit(0)
    wait_until(lambda: False, "the end")


def _eventually_admitted(name: str) -> int:
    """Once the child has really ended, the segment has the other boot's clock."""
    OTHER.enter()
    stores = []

    def attach() -> bool:
        try:
            stores.append(Store(name, keys=1000))
        except ClockMismatch:
            return False
        return True

    wait_until(attach, "the child's end")
    with stores[0] as store:
        return sum(TokenBucket(store, "api", "10/hour", burst=LIMIT).allow("key") for _ in range(30))


def test_a_killed_user_keeps_no_process_out(crew: Crew, name: str) -> None:
    attached = SharedNumbers(1)
    user = crew.start(_admitted, name, None, attached)
    wait_until(lambda: attached[0], "its attaching")
    user.kill()
    assert crew.start(_admitted, name, OTHER).result() == 0
    assert _header(name).boot_id == uuid.UUID(OTHER.boot).bytes


def _stop_before_joining(name: str, turn: int) -> int:
    """Attach, but be stopped after the header was read for that many times."""
    join, turns = attachment_locks.attach, itertools.count()

    def stop_first(fd: int, place: int) -> int | None:
        if next(turns) == turn:
            os.kill(os.getpid(), signal.SIGSTOP)
        return join(fd, place)

    attachment_locks.attach = stop_first
    return _admitted(name)


def test_a_process_stopped_while_attaching_holds_up_no_other(crew: Crew, name: str) -> None:
    assert crew.start(_admitted, name).result() == LIMIT
    stopped = crew.start(_stop_before_joining, name, 0)
    stopped.wait_for_stop()
    assert crew.start(_admitted, name).result() == 0
    # Not a user yet: the clock may be moved, and it finds that out.
    attached = SharedNumbers(1)
    other = crew.start(_admitted, name, OTHER, attached)
    wait_until(lambda: attached[0], "its attaching")
    stopped.resume()
    with pytest.raises(AssertionError, match="ClockMismatch"):
        stopped.result()
    attached[0] = 2
    assert other.result() == 0


def test_a_process_attaches_to_the_segment_that_took_a_removed_ones_place(crew: Crew, name: str) -> None:
    """It has opened the file that was removed before it became a user: there it would admit a second limit."""
    Store(name, keys=1000).close()
    stopped = crew.start(_stop_before_joining, name, 0)
    stopped.wait_for_stop()
    Store.unlink(name)
    assert crew.start(_admitted, name).result() == LIMIT
    stopped.resume()
    assert stopped.result() == 0


def test_an_attaching_process_waits_for_one_that_moves_the_clock(crew: Crew, name: str) -> None:
    """No process moves the clock between the two readings of the header. An attaching process waits for one that does,
    for a while only.
    """
    assert crew.start(_admitted, name).result() == LIMIT
    stopped = crew.start(_stop_before_joining, name, 0)
    stopped.wait_for_stop()
    rebasing = crew.start(_stop_while_rebasing, name)
    rebasing.wait_for_stop()
    message = crew.start(_busy, name).result()
    assert "stopped process" in message
    rebasing.resume()
    assert rebasing.result() == 0
    stopped.resume()
    assert stopped.result() == 0


def _stop_while_rebasing(name: str, attached: SharedNumbers | None = None) -> int:
    rebase = creation._rebase

    def stop_first(*arguments: object) -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return rebase(*arguments)  # type: ignore[arg-type]

    creation._rebase = stop_first
    return _admitted(name, OTHER, attached)


def _busy(name: str) -> str:
    ofd_locks.TIMEOUT_S = 0.05  # type: ignore[misc]
    with pytest.raises(SegmentBusy) as caught:
        Store(name, keys=1000)
    return str(caught.value)


def test_a_process_that_waited_to_move_the_clock_finds_it_moved(crew: Crew, name: str) -> None:
    """The process that moved it uses the segment by then: no process can move the clock any more."""
    assert crew.start(_admitted, name).result() == LIMIT
    attached, begun = SharedNumbers(1), SharedNumbers(1)
    rebasing = crew.start(_stop_while_rebasing, name, attached)
    rebasing.wait_for_stop()
    waiting = crew.start(_tell_before_rebasing, name, begun)
    wait_until(lambda: begun[0], "the waiting")
    rebasing.resume()
    assert waiting.result() == 0
    attached[0] = 2
    assert rebasing.result() == 0


def _tell_before_rebasing(name: str, begun: SharedNumbers) -> int:
    make_usable = file.make_usable

    def tell_first(*arguments: object) -> bool:
        begun[0] = 1
        return make_usable(*arguments)  # type: ignore[arg-type]

    file.make_usable = tell_first
    return _admitted(name, OTHER)


def test_a_process_that_waited_leaves_a_new_segment_alone(crew: Crew, name: str) -> None:
    """By its clock the removed one makes no sense, and would be removed: its path is that of another one by now."""
    host = Host(step_s=-HOUR_S)
    Store(name, keys=1000).close()
    waiting = crew.start(_stop_before_making_usable, name, host)
    waiting.wait_for_stop()
    Store.unlink(name)
    assert crew.start(_admitted, name, host).result() == LIMIT
    waiting.resume()
    assert waiting.result() == 0


def _stop_before_making_usable(name: str, host: Host) -> int:
    make_usable = file.make_usable

    def stop_first(*arguments: object) -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return make_usable(*arguments)  # type: ignore[arg-type]

    file.make_usable = stop_first
    return _admitted(name, host)


def test_a_killed_rebaser_leaves_the_clock_to_the_next(crew: Crew, name: str) -> None:
    assert crew.start(_admitted, name).result() == LIMIT
    rebasing = crew.start(_stop_while_rebasing, name)
    rebasing.wait_for_stop()
    waiting = [crew.start(_admitted, name) for _ in range(3)]
    rebasing.kill()
    assert crew.results(waiting) == [0, 0, 0]


def test_processes_of_two_boot_ids_that_start_at_once_share_one_clock(crew: Crew, name: str) -> None:
    """The first to attach decides which boot's; processes of that boot share its limit, the others are refused."""
    for _ in range(20):
        meeting = Meeting(4)
        results = crew.run(4, _admitted_or_refused, name, meeting)
        assert sum(admitted for admitted in results if admitted is not None) <= LIMIT
        assert any(admitted is not None for admitted in results)
        Store.unlink(name)


def _admitted_or_refused(me: int, name: str, meeting: Meeting) -> int | None:
    if me % 2:
        Host(step_s=HOUR_S // 2).enter()
    meeting.wait(me)
    with warnings.catch_warnings():
        # A process of the other boot may come between a creation and the creator's attaching. To it the segment was
        # made in the future: it warns, and starts an empty one.
        warnings.filterwarnings("ignore", message=".* which can't be, and starts empty", category=RuntimeWarning)
        try:
            store = Store(name, keys=1000)
        except ClockMismatch:
            store = None
    admitted = None
    if store is not None:
        bucket = TokenBucket(store, "api", "10/day", burst=LIMIT)
        admitted = sum(bucket.allow("key") for _ in range(30))
    meeting.wait(me)
    return admitted


@pytest.fixture
def read_lock(as_root: None, crew: Crew, name: str) -> Iterator[Worker]:
    """A segment that another user may read, and has locked as a reader can."""
    Store(name, keys=1000).close()
    Path(path_of(name)).chmod(0o644)
    locked = SharedNumbers(1)
    worker = crew.start(as_user, FREE_USER, FREE_USER, [], _lock_what_can_be_read, name, locked)
    wait_until(lambda: locked[0], "the lock")
    return worker


def _lock_what_can_be_read(name: str, locked: SharedNumbers) -> None:
    with open(path_of(name), "rb") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
        locked[0] = 1
        wait_until(lambda: False, "the end")


def test_a_reader_keeps_no_process_from_attaching(
    read_lock: Worker, crew: Crew, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor from making a limiter with memory of its own, nor from counting."""
    # The three processes may wait for each other, but not for the reader.
    monkeypatch.setattr(ofd_locks, "TIMEOUT_S", 5.0)
    assert crew.run(3, _admitted_by_a_log, name) in ([LIMIT, 0, 0], [0, LIMIT, 0], [0, 0, LIMIT])
    with Store(name, keys=1000) as store:
        log = SlidingLog(store, "log", "10/hour", keys=5)
        assert not log.allow("key")
        assert store.stats().limiters["log"].allowed == LIMIT
    assert read_lock.is_running()


def _admitted_by_a_log(me: int, name: str) -> int:
    with Store(name, keys=1000) as store:
        log = SlidingLog(store, "log", "10/hour", keys=5)
        taken = 0
        while taken < LIMIT and log.allow("key"):
            taken += 1
        return taken


@pytest.mark.parametrize("forked", [False, True], ids=["", "forked"])
def test_a_program_that_closes_all_files_loses_none_of_its_own(
    crew: Crew, name: str, tmp_path: Path, forked: bool
) -> None:
    """As one that becomes a daemon: the number of the segment's file is that of another one by then."""
    with Store(name, keys=1000) as store:
        TokenBucket(store, "api", "10/hour").hit("key", 4)
        log = tmp_path / "log"
        daemon = crew.start(_use_as_a_daemon, name, store if forked else None, log)
        assert daemon.result() == (6, "closes its files", ["api"])
        assert log.read_text() == "begin\nend\n"
        assert verify(name).findings == ()
        assert SlidingLog(store, "log", "1/hour", keys=10).allow("key")


def _use_as_a_daemon(name: str, inherited: Store | None, path: Path) -> tuple[int, str, list[str]]:
    store = inherited or Store(name, keys=1000)
    [segment] = store.attachment._files.values()
    with open(path, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), segment)
    os.write(segment, b"begin\n")
    bucket = TokenBucket(store, "api", "10/hour")
    admitted = sum(bucket.allow("key") for _ in range(10))
    with pytest.raises(SegmentError) as caught:
        SlidingLog(store, "log", "1/hour", keys=10)
    limiters = list(store.stats().limiters)
    store.close()
    os.write(segment, b"end\n")
    os.close(segment)
    return admitted, caught.value.remedy[-16:], limiters


def test_a_removed_segment_in_use_is_noticed_when_another_is_made(crew: Crew, name: str) -> None:
    """By the process that makes it, whichever processes use the old one; and by the old one's users when they read
    their statistics.
    """
    attached = SharedNumbers(1)
    user = crew.start(_tells_of_the_removal, name, attached)
    wait_until(lambda: attached[0], "its attaching")
    os.unlink(path_of(name))
    with pytest.warns(SegmentRemovedWarning, match="removed while processes use it") as warned:
        store = Store(name, keys=1000)
    assert [warning.filename for warning in warned] == [__file__]
    with Store(name, keys=1000):
        store.stats()
    attached[0] = 2
    assert user.result() == [__file__]
    # Closed, but still mapped.
    store.close()
    os.unlink(path_of(name))
    Store(name, keys=1000).close()


def test_a_process_that_ends_warns_that_its_segment_was_removed(name: str) -> None:
    """Most often it is a worker that is replaced. With no other process left on the old segment, only it can warn."""
    program = (
        "import os, sys, forebay\n"
        "store = forebay.Store(sys.argv[1], keys=1000)\n"
        "if sys.argv[2] == 'closed':\n"
        "    store.close()\n"
        "if sys.argv[2] in ('removed', 'closed'):\n"
        "    os.unlink(store.path)\n"
        "if sys.argv[2] == 'unlinked':\n"
        "    forebay.Store.unlink(sys.argv[1])\n"
    )
    for what, times in (("there", 0), ("unlinked", 0), ("removed", 1), ("closed", 0)):
        ended = subprocess.run([sys.executable, "-c", program, name, what], check=True, capture_output=True, text=True)
        assert ended.stderr.count("was removed while processes use it") == times, ended.stderr


def test_a_process_ends_while_a_thread_is_at_a_segments_file(name: str) -> None:
    """It may be waiting for a process that is stopped: no reason to wait for the thread as well."""
    program = (
        "import sys, threading, forebay\n"
        "store = forebay.Store(sys.argv[1], keys=1000)\n"
        "locked = threading.Event()\n"
        "def stay():\n"
        "    with store.attachment.lock():\n"
        "        locked.set()\n"
        "        threading.Event().wait()\n"
        "threading.Thread(target=stay, daemon=True).start()\n"
        "locked.wait()\n"
    )
    subprocess.run([sys.executable, "-c", program, name], check=True, timeout=10)


def _tells_of_the_removal(name: str, attached: SharedNumbers) -> list[str]:
    with Store(name, keys=1000) as store:
        store.stats()
        attached[0] = 1
        wait_until(lambda: attached[0] == 2, "the end")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            store.stats()
            store.stats()
        assert [warning.category for warning in caught] == [SegmentRemovedWarning]
        return [warning.filename for warning in caught]


def test_another_store_or_place_is_no_removed_segment(name: str, tmp_path: Path) -> None:
    with Store(name, keys=1000), Store("a", keys=1000, path=tmp_path / f"forebay-{name}"):
        (tmp_path / "below").mkdir()
        Store("a", keys=1000, path=tmp_path / "below" / f"forebay-{name}").close()
        Store("a", keys=1000, path=tmp_path / "b").close()
        with Store.private(keys=1000) as private:
            private.stats()


def test_stores_share_a_segment_by_any_path_of_its_directory(tmp_path: Path) -> None:
    """Containers have one directory at several places."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("directory")
    with Store("a", keys=1000, path=tmp_path / "directory" / "store") as store:
        assert TokenBucket(store, "api", "10/hour", burst=LIMIT).hit("key", LIMIT)
        with Store("a", keys=1000, path=tmp_path / "link" / "store") as again:
            assert not TokenBucket(again, "api", "10/hour", burst=LIMIT).allow("key")


def test_a_store_whose_directory_is_gone_warns_of_nothing(tmp_path: Path) -> None:
    """No process can make another segment there."""
    directory = tmp_path / "gone"
    directory.mkdir()
    with Store("a", keys=1000, path=directory / "store") as store:
        shutil.rmtree(directory)
        store.stats()
        directory.touch()
        with pytest.warns(SegmentRemovedWarning):
            store.stats()


def test_a_process_that_may_no_longer_read_the_directory_warns_of_nothing(
    as_root: None, crew: Crew, tmp_path: Path
) -> None:
    """It can't see whether its segment was removed."""
    tmp_path.chmod(0o700)
    crew.start(_count_after_giving_up_root, tmp_path / "store").result()


def _count_after_giving_up_root(path: Path) -> None:
    with Store("a", keys=1000, path=path) as store:
        assert as_user(FREE_USER, FREE_USER, [], store.stats).keys == 1000


def test_a_store_on_another_file_system_is_no_removed_segment(as_root: None, tmp_path: Path) -> None:
    """The directories have one inode number, as the roots of two tmpfs do, so the stores' marks have one place."""
    with contextlib.ExitStack() as stack:
        places = [tmp_path / "one", tmp_path / "two"]
        for place in places:
            place.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", place], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=True)
        assert len({place.stat().st_ino for place in places}) == 1
        # So that the files have other numbers.
        (places[1] / "first").touch()
        for place in places:
            stack.enter_context(Store("a", keys=1000, path=place / "store"))


def test_a_segment_under_another_stores_name_is_refused(name: str) -> None:
    """Two stores would share their limits. The one that it belongs to isn't held up."""
    other = f"{name}-other"
    with Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10/hour", burst=LIMIT)
        assert bucket.hit("key", LIMIT)
        os.link(path_of(name), path_of(other))
        try:
            with pytest.raises(UntrustedSegment, match=f"another file name, expected .*{other}.*remove this name"):
                Store(other, keys=1000)
            with Store(name, keys=1000) as again:
                assert not TokenBucket(again, "api", "10/hour", burst=LIMIT).allow("key")
        finally:
            os.unlink(path_of(other))
    os.rename(path_of(name), path_of(other))
    try:
        with pytest.raises(UntrustedSegment, match="give it back its own"):
            Store(other, keys=1000)
    finally:
        os.unlink(path_of(other))
