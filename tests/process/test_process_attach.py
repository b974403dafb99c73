"""``Store.attach``: a process that looks makes nothing, locks nobody out, and writes only where it may."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from process_helpers import (
    FREE_USER,
    SHARED_GROUP,
    Crew,
    SharedNumbers,
    as_user,
    files_of,
    path_of,
    wait_until,
)

from forebay import (
    AllOf,
    BucketedWindow,
    Concurrency,
    FixedWindow,
    InvalidLimiter,
    LeakyBucket,
    MinInterval,
    SlidingLog,
    SlidingWindow,
    Store,
    StoreClosed,
    TokenBucket,
)
from forebay.errors import (
    ClockMismatch,
    ForeignSegment,
    SegmentBusy,
    SegmentError,
    SegmentMissing,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.segment import host_clock, layout
from forebay.testing import ManualClock, reset_store

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


def status_of(path: str) -> tuple[int, ...]:
    status = os.stat(path)
    return status.st_ino, status.st_uid, status.st_gid, status.st_mode, status.st_size


@pytest.fixture
def used(name: str) -> str:
    with Store(name, keys=1000) as store:
        assert TokenBucket(store, "api", "100/hour").hit("key", 40)
        assert SlidingLog(store, "log", "5/hour", keys=3).hit("key", 2)
        assert FixedWindow(store, "fixed", "10/hour").hit("key", 4)
    return name


# What it makes, and what it locks


@pytest.mark.parametrize("given", ["name", "path", "directory"])
def test_missing_segment_is_not_made(name: str, tmp_path: Path, given: str) -> None:
    arguments: dict[str, Any] = {
        "name": {"name": name},
        "path": {"path": tmp_path / "limits"},
        "directory": {"name": name, "directory": tmp_path / "none"},
    }[given]
    with pytest.raises(SegmentMissing, match="found no such file, expected a segment"):
        Store.attach(**arguments)
    assert files_of(name) == []
    assert list(tmp_path.iterdir()) == []


def test_attach_takes_a_name_or_a_path() -> None:
    with pytest.raises(ValueError, match="a name or a path"):
        Store.attach()
    with pytest.raises(ValueError, match="a name or a path"):
        Store.attach("shop", path="/dev/shm/forebay-shop")


def test_attached_store_sees_and_changes_the_states(used: str) -> None:
    before = status_of(path_of(used))
    with Store.attach(used) as store:
        assert (store.name, store.path, store.keys) == (used, path_of(used), 1000)
        bucket = TokenBucket(store, "api", "100/hour")
        assert 60 <= bucket.peek("key").remaining <= 61
        assert SlidingLog(store, "log", "5/hour", keys=3).peek("key").remaining == 3
        fixed = FixedWindow(store, "fixed", "10/hour")
        fixed.reset("key")
        assert fixed.peek("key").remaining == 10
        stats = store.stats()
        assert (stats.limiters["api"].allowed, stats.live_keys) == (1, 1)
    assert status_of(path_of(used)) == before


def test_attached_store_adds_no_limiter(used: str) -> None:
    names = "TokenBucket 'api', SlidingLog 'log', FixedWindow 'fixed'"
    with Store.attach(used) as store:
        before = store.stats().limiters
        for make in (
            lambda: TokenBucket(store, "apo", "100/hour"),
            lambda: LeakyBucket(store, "api", "100/hour", capacity=5),
            lambda: MinInterval(store, "api", "1s"),
            lambda: SlidingWindow(store, "fixed", "10/hour"),
        ):
            with pytest.raises(InvalidLimiter, match=f"adds none: it has {names}; give the name"):
                make()
        assert store.stats().limiters == before


def test_attached_store_adds_no_extent(used: str) -> None:
    size = os.stat(path_of(used)).st_size
    with Store.attach(used) as store:
        for make in (
            lambda: SlidingLog(store, "log", "6/hour", keys=3),
            lambda: SlidingLog(store, "other", "5/hour", keys=3),
            lambda: Concurrency(store, "held", 5),
            lambda: BucketedWindow(store, "parts", "5/hour"),
        ):
            with pytest.raises(InvalidLimiter, match=r"Store\.attach adds none"):
                make()
    assert os.stat(path_of(used)).st_size == size
    with Store(used, keys=1000) as store:
        assert set(store.stats().limiters) == {"api", "log", "fixed"}


def test_attached_store_keeps_the_clock(name: str) -> None:
    clock = ManualClock(50)
    with Store(name, keys=1000, clock=clock) as store:
        bucket = TokenBucket(store, "api", "1/minute")
        assert bucket.allow("key")
        with Store.attach(name) as other:
            assert TokenBucket(other, "api", "1/minute").peek("key").retry_after == 60
            clock.advance(45)
            assert TokenBucket(other, "api", "1/minute").peek("key").retry_after == 15
            assert other.now_ns() == clock.now_ns()


def test_number_that_another_limiter_has_got_meanwhile_is_not_used(used: str) -> None:
    with Store.attach(used) as store:
        late = Mock(limiter_number=Mock(return_value=0), read=store.segment.read)
        store.attachment.segment = late
        with pytest.raises(InvalidLimiter, match="has no TokenBucket 'new'"):
            store.attachment.limiter_number("new", layout.ALGORITHM_TOKEN_BUCKET)


def _locks(name: str, fd: int) -> list[tuple[int, int, int]]:
    """Locks on a segment's file that would hinder another process: of the header, exclusive, on all ids."""
    question = struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 2**62, 0)
    kind, _, start, length, _ = struct.unpack("hhqqi4x", fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question))
    return [] if kind == fcntl.F_UNLCK else [(kind, start, length)]


def test_attaching_takes_no_lock_of_the_header(used: str) -> None:
    with Store.attach(used), open(path_of(used), "r+b") as file:
        assert _locks(used, file.fileno()) == []
        with Store(used, keys=1000) as store:
            assert TokenBucket(store, "api", "100/hour").allow("key")


def test_attaching_does_not_wait_for_a_creator(name: str) -> None:
    """It neither creates what a killed creator left, nor waits."""
    Path(path_of(name)).touch(mode=0o600)
    with pytest.raises(SegmentBusy, match="being created"):
        Store.attach(name)
    assert os.stat(path_of(name)).st_size == 0
    with Store(name, keys=1000):
        whole = Path(path_of(name)).read_bytes()
    Store.unlink(name)
    unfinished = bytearray(whole[: layout.HEADER_STATE + 4])
    unfinished[layout.HEADER_CHECKSUM :] = struct.pack("<II", 0, layout.STATE_CREATING)
    Path(path_of(name)).write_bytes(unfinished)
    os.chmod(path_of(name), 0o600)
    with pytest.raises(SegmentBusy, match="being created"):
        Store.attach(name)
    assert Path(path_of(name)).read_bytes() == unfinished


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda path: path.write_bytes(b"something else" * 1000), ForeignSegment),
        (lambda path: os.truncate(path, layout.TABLE_OFFSET), TruncatedSegment),
        (lambda path: path.rename(f"{path}-moved") and path.symlink_to(f"{path}-moved"), UntrustedSegment),
        (lambda path: path.unlink() or path.mkdir(), ForeignSegment),
        (lambda path: path.unlink() or os.mkfifo(path), ForeignSegment),
        (lambda path: path.chmod(0o666), UntrustedSegment),
    ],
)
def test_files_that_are_no_sound_segment_are_refused(
    tmp_path: Path, spoil: Callable[[Path], Any], error: type[SegmentError]
) -> None:
    path = tmp_path / "limits"
    Store("limits", keys=1000, path=path).close()
    spoil(path)
    with pytest.raises(error):
        Store.attach(path=path)


def _attach_in_another_boot(name: str) -> str:
    host_clock.read_boot_id = lambda: uuid.uuid4().bytes  # type: ignore[assignment]
    with pytest.raises(ClockMismatch, match="earlier boot") as caught:
        Store.attach(name)
    return str(caught.value)


def test_segment_of_an_earlier_boot_keeps_its_clock(crew: Crew, used: str) -> None:
    before = Path(path_of(used)).read_bytes()
    assert "start a process that uses the store" in crew.start(_attach_in_another_boot, used).result()
    assert Path(path_of(used)).read_bytes() == before


def test_root_directory_and_path(used: str, tmp_path: Path) -> None:
    Store("shop", keys=1000, directory=tmp_path).close()
    with Store.attach("shop", directory=tmp_path) as store:
        assert store.path == str(tmp_path / "forebay-shop")
    with Store.attach(path=tmp_path / "forebay-shop") as store:
        assert store.name == "forebay-shop"


# Users


def _make(name: str, ready: SharedNumbers, **options: Any) -> int:
    with Store(name, keys=1000, **options) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        assert bucket.hit("key", 4)
        ready[0] = 1
        wait_until(lambda: ready[0] == 2, "the operator")
        return bucket.peek("key").remaining


@as_root
def test_root_attaches_to_a_users_store_and_leaves_it_to_the_user(crew: Crew, name: str) -> None:
    ready = SharedNumbers(1)
    user = crew.start(as_user, FREE_USER, FREE_USER, [], _make, name, ready)
    wait_until(lambda: ready[0], "the store")
    before = status_of(path_of(name))
    with Store.attach(name) as store:
        bucket = TokenBucket(store, "api", "10/hour")
        assert bucket.peek("key").remaining == 6
        bucket.reset("key")
        assert bucket.hit("key", 1)
        with pytest.raises(InvalidLimiter):
            SlidingLog(store, "api", "10/hour", keys=10)
    assert status_of(path_of(name)) == before
    ready[0] = 2
    assert user.result() == 9
    # A process of the user that starts later attaches, too.
    ready[0] = 2
    assert crew.start(as_user, FREE_USER, FREE_USER, [], _make, name, SharedNumbersAt(2)).result() == 5


class SharedNumbersAt(SharedNumbers):
    """One number, which keeps its value."""

    def __init__(self, value: int) -> None:
        super().__init__(1)
        super().__setitem__(0, value)

    def __setitem__(self, index: int, value: int) -> None:
        pass


@as_root
def test_member_of_the_group_attaches_and_others_do_not(crew: Crew, name: str) -> None:
    Store(name, keys=1000, mode=0o660, group=SHARED_GROUP).close()
    before = status_of(path_of(name))
    assert crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _attached, name).result() is True
    assert status_of(path_of(name)) == before
    assert "may open" in crew.start(as_user, FREE_USER, FREE_USER, [], _refused, name).result()
    os.chmod(path_of(name), 0o600)
    assert "may open" in crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _refused, name).result()


def _attached(name: str) -> bool:
    with Store.attach(name) as store:
        return store.attachment.is_writable


def _refused(name: str) -> str:
    with pytest.raises(UntrustedSegment) as caught:
        Store.attach(name)
    return str(caught.value)


@as_root
def test_strangers_file_is_refused_to_users_that_may_write_it(crew: Crew, name: str) -> None:
    crew.start(as_user, FREE_USER - 1, FREE_USER - 1, [], _made_with, name, 0o600).result()
    os.chmod(path_of(name), 0o666)
    assert "others may write" in crew.start(as_user, FREE_USER, FREE_USER, [], _refused, name).result()


def _made_with(name: str, mode: int) -> None:
    Store(name, keys=1000).close()
    os.chmod(path_of(name), mode)


READ_ONLY: dict[str, Callable[[Store], Any]] = {
    "allow": lambda store: TokenBucket(store, "api", "100/hour").allow("key"),
    "allow_many": lambda store: TokenBucket(store, "api", "100/hour").allow_many(["key"]),
    "hit": lambda store: TokenBucket(store, "api", "100/hour").hit("key"),
    "hit of a fresh key": lambda store: TokenBucket(store, "api", "100/hour").hit("other"),
    "hit of cost 0": lambda store: TokenBucket(store, "api", "100/hour").hit("key", 0),
    "hit with an id": lambda store: TokenBucket(store, "api", "100/hour").hit("key", request_id="a"),
    "hit by a rate": lambda store: TokenBucket(store, "api", "100/hour").hit("key", rate="5/hour"),
    "take_up_to": lambda store: TokenBucket(store, "api", "100/hour").take_up_to("key", 5),
    "reserve": lambda store: TokenBucket(store, "api", "100/hour").reserve("key", 1, "1 hour"),
    "reserve of cost 0": lambda store: TokenBucket(store, "api", "100/hour").reserve("key", 0),
    "wait": lambda store: TokenBucket(store, "api", "100/hour").wait("key", timeout="1 s"),
    "refund": lambda store: TokenBucket(store, "api", "100/hour").refund("key"),
    "refund with an id": lambda store: TokenBucket(store, "api", "100/hour").refund("key", request_id="a"),
    "reset": lambda store: TokenBucket(store, "api", "100/hour").reset("key"),
    "add": lambda store: TokenBucket(store, "api", "100/hour").add("key", 5),
    "convert": lambda store: TokenBucket(store, "api", "100/hour").convert("key", "100/hour"),
    "all of": lambda store: AllOf(TokenBucket(store, "api", "100/hour"), FixedWindow(store, "fixed", "10/hour")).hit(
        "key"
    ),
    "all of, peek": lambda store: AllOf(
        TokenBucket(store, "api", "100/hour"), FixedWindow(store, "fixed", "10/hour")
    ).peek("key"),
    "window": lambda store: FixedWindow(store, "fixed", "10/hour").allow("key"),
    "window, reset": lambda store: FixedWindow(store, "fixed", "10/hour").reset("key"),
    "log": lambda store: SlidingLog(store, "log", "5/hour", keys=3).peek("key"),
    "concurrency": lambda store: Concurrency(store, "held", 5),
    "reset_store": reset_store,
}


def _look(name: str) -> list[str]:
    """What a user may do that may only read, and the refusals of everything else."""
    with Store.attach(name) as store:
        assert not store.attachment.is_writable
        assert 60 <= TokenBucket(store, "api", "100/hour").peek("key").remaining <= 61
        assert FixedWindow(store, "fixed", "10/hour").peek("key").remaining == 6
        assert TokenBucket(store, "api", "100/hour").peek("fresh").remaining == 100
        with Store.attach(name) as closed:
            bucket = TokenBucket(closed, "api", "100/hour")
        with pytest.raises(StoreClosed):
            bucket.peek("key")
        stats = store.stats()
        assert (stats.limiters["api"].allowed, stats.live_keys) == (1, 2)
        with pytest.raises(InvalidLimiter, match="adds none"):
            TokenBucket(store, "none", "1/s")
        messages = []
        for what, do in READ_ONLY.items():
            try:
                result = do(store)
            except SegmentError as error:
                messages.append(str(error))
            else:
                raise AssertionError(f"{what} returned {result!r}")
        # After refusals, too.
        assert TokenBucket(store, "api", "100/hour").peek("fresh").remaining == 100
        return messages


@as_root
def test_user_that_may_only_read_looks_and_changes_nothing(crew: Crew, used: str) -> None:
    os.chmod(path_of(used), 0o644)
    before = Path(path_of(used)).read_bytes()
    messages = crew.start(as_user, FREE_USER, FREE_USER, [], _look, used).result()
    assert len(messages) == len(READ_ONLY)
    for message in messages:
        assert message.startswith(f"{path_of(used)}: found a file that uid {FREE_USER} may only read"), message
    assert Path(path_of(used)).read_bytes() == before
    assert stat.S_IMODE(os.stat(path_of(used)).st_mode) == 0o644


def _look_by_pythons_clock(name: str) -> int:
    with Store.attach(name) as store:
        return store.now_ns() + store.stats().live_keys


@as_root
def test_reader_does_not_move_pythons_clock(crew: Crew, name: str) -> None:
    with Store(name, keys=1000, clock="time") as store:
        assert TokenBucket(store, "api", "1/hour").allow("key")
    os.chmod(path_of(name), 0o644)
    before = Path(path_of(name)).read_bytes()
    moved = int.from_bytes(before[layout.HEADER_MANUAL_NS : layout.HEADER_MANUAL_NS + 8], "little")
    assert crew.start(as_user, FREE_USER, FREE_USER, [], _look_by_pythons_clock, name).result() == moved + 1
    assert Path(path_of(name)).read_bytes() == before


def _fork_and_look(name: str) -> int:
    with Store.attach(name) as store:
        bucket = TokenBucket(store, "api", "100/hour")
        pid = os.fork()
        if pid == 0:
            try:
                with pytest.raises(SegmentError, match="may only read"):
                    bucket.allow("key")
                os._exit(bucket.peek("key").remaining)
            finally:
                os._exit(255)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@as_root
def test_forked_child_of_a_reader_looks(crew: Crew, used: str) -> None:
    os.chmod(path_of(used), 0o644)
    assert 60 <= crew.start(as_user, FREE_USER, FREE_USER, [], _fork_and_look, used).result() <= 61
