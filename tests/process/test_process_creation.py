"""Creating a store: many at once, killed half-way, stopped half-way, unlinked under way."""

from __future__ import annotations

import itertools
import os
import random
import signal
import stat
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from process_helpers import (
    FREE_USER,
    SHARED_GROUP,
    Crew,
    Meeting,
    SharedNumbers,
    Worker,
    as_user,
    files_of,
    path_of,
    wait_until,
)

from forebay import Store, TokenBucket
from forebay.errors import SegmentBusy, SegmentError, SegmentRemovedWarning, SegmentSizeWarning
from forebay.segment import ofd_locks

REFILLS_NOTHING = "10000/year"


@pytest.mark.parametrize(("processes", "turns"), [(2, 100), (32, 20)])
def test_processes_that_create_at_the_same_moment_share_one_segment(
    crew: Crew, name: str, processes: int, turns: int
) -> None:
    results = crew.run(processes, _create_again_and_again, name, Meeting(processes), turns)
    assert [sum(answers) for answers in zip(*results, strict=True)] == [100] * turns


def _create_again_and_again(me: int, name: str, meeting: Meeting, turns: int) -> list[int]:
    admitted = []
    for _ in range(turns):
        meeting.wait(me)
        with Store(name, keys=1000) as store:
            bucket = TokenBucket(store, "api", REFILLS_NOTHING, 100)
            admitted.append(sum([bucket.allow("key") for _ in range(100)]))
        meeting.wait(me)
        if me == 0:
            Store.unlink(name)
    return admitted


def test_a_killed_creator_leaves_nothing_that_blocks_the_next(crew: Crew, name: str) -> None:
    """Kills at random moments of a creation of 42 MB; what is there afterwards is made, or made again, at once."""
    draws = random.Random(13)
    states = set()
    for turn in range(120):
        begun = SharedNumbers(2)
        creator = crew.start(_create_large, name, begun)
        wait_until(lambda begun=begun: begun[0], "the creation")
        for _ in range(draws.randrange(200) ** 2):
            pass
        creator.kill()
        path = Path(path_of(name))
        states.add((path.exists(), path.exists() and path.stat().st_size, bool(begun[1])))
        with Store(name, keys=2_000_000) as store:
            assert store.keys == 2_000_000
            bucket = TokenBucket(store, f"limiter {turn}", REFILLS_NOTHING, 1)
            assert [bucket.allow("key"), bucket.allow("key")] == [True, False]
        assert files_of(name) == [path_of(name)]
        Store.unlink(name)
    assert len(states) > 1, "all kills fell into the same moment"


def _create_large(name: str, begun: SharedNumbers) -> None:
    begun[0] = 1
    with Store(name, keys=2_000_000):
        begun[1] = 1
        signal.pause()


CALLS = [
    *("open", "fstat", "stat", "lstat", "fchown", "fchmod", "link", "rename", "replace", "unlink", "close"),
    *("pread", "pwrite", "posix_fallocate"),
]


def _before_call(names: Iterable[str], number: int, stop_signal: int) -> None:
    """Send this process a signal just before the call number `number` of these functions of os."""
    calls = itertools.count(1)

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), stop_signal)
            return original(*arguments, **options)

        return instead

    for name in names:
        setattr(os, name, wrapped(getattr(os, name)))


def _die_before_call(number: int, work: Callable[..., Any], *arguments: Any) -> Any:
    _before_call(CALLS, number, signal.SIGKILL)
    return work(*arguments)


def _was_killed(worker: Worker) -> bool:
    try:
        worker.result()
    except AssertionError as error:
        if "by SIGKILL" in str(error):
            return True
        raise
    return False


@pytest.mark.parametrize("victims", [1, 3])
def test_creators_killed_before_each_call(crew: Crew, name: str, victims: int) -> None:
    """Whatever a creator was about to do: the next makes the segment, and nothing else is left.

    With more than one victim, each process that takes over is killed at the same point too.
    """
    for number in itertools.count(1):
        killed = [_was_killed(crew.start(_die_before_call, number, _create, name)) for _ in range(victims)]
        assert sum(crew.run(3, _open_as, name)) == 1, number
        assert files_of(name) == [path_of(name)], number
        Store.unlink(name)
        if not any(killed):
            break
    assert number > 5


def test_a_creator_for_a_group_killed_before_each_call_locks_no_member_out(
    as_root: None, crew: Crew, name: str
) -> None:
    for number in itertools.count(1):
        killed = _was_killed(crew.start(_die_before_call, number, _open_for_group, name))
        crew.start(_open_for_group, name).result()
        crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _open_for_group, name).result()
        assert files_of(name) == [path_of(name)], number
        Store.unlink(name)
        if not killed:
            break
    assert number > 5


def _create(name: str) -> None:
    Store(name, keys=1000).close()


def _open(name: str) -> bool:
    with Store(name, keys=1000) as store:
        return TokenBucket(store, "api", REFILLS_NOTHING, 1).allow("key")


def _open_as(me: int, name: str) -> bool:
    return _open(name)


def _open_for_group(name: str) -> bool:
    with Store(name, keys=1000, mode=0o660, group=SHARED_GROUP) as store:
        return TokenBucket(store, "api", REFILLS_NOTHING, 1).allow("key")


@pytest.mark.parametrize("step", ["pwrite", "posix_fallocate"])
def test_a_stopped_creator_keeps_others_waiting_for_a_while_only(crew: Crew, name: str, step: str) -> None:
    creator = crew.start(_stop_at, step, name)
    creator.wait_for_stop()
    message = crew.start(_open_impatiently, name).result()
    assert path_of(name) in message
    assert "found a segment that another process has been creating" in message
    assert "expected a creation that ends" in message
    assert "stopped process" in message
    creator.resume()
    admitted = [creator, crew.start(_open, name)]
    assert sorted(crew.results(admitted)) == [False, True]


def _stop_at(step: str, name: str) -> bool:
    _before_call([step], 1, signal.SIGSTOP)
    return _open(name)


def _open_impatiently(name: str) -> str:
    ofd_locks.TIMEOUT_S = 0.05  # type: ignore[misc]
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentBusy) as caught:
        _open(name)
    assert len(os.listdir("/proc/self/fd")) == before
    return str(caught.value)


def test_a_waiting_process_goes_on_when_the_stopped_creator_is_killed(crew: Crew, name: str) -> None:
    creator = crew.start(_stop_at, "posix_fallocate", name)
    creator.wait_for_stop()
    waiting = [crew.start(_open, name) for _ in range(4)]
    creator.kill()
    assert sum(crew.results(waiting)) == 1


def test_a_stopped_creator_whose_file_is_unlinked_blocks_no_process(crew: Crew, name: str) -> None:
    creator = crew.start(_stop_at, "posix_fallocate", name)
    creator.wait_for_stop()
    waiting = [crew.start(_open, name) for _ in range(4)]
    Store.unlink(name)
    assert _open(name) in (False, True)
    creator.kill()
    crew.results(waiting)
    assert not _open(name)


def test_unlinking_while_others_attach(crew: Crew, name: str) -> None:
    """Every process ends up with some whole segment; after the last unlink, all with the same one."""
    stop = SharedNumbers(1)
    meeting = Meeting(6)
    workers = [crew.start(_attach_until, i, name, stop, meeting) for i in range(6)]
    unlinked = 0
    while unlinked < 300:
        try:
            Store.unlink(name)
            unlinked += 1
        except SegmentError:
            os.sched_yield()
    stop[0] = 1
    assert sum(crew.results(workers)) == 100


def _attach_until(me: int, name: str, stop: SharedNumbers, meeting: Meeting) -> int:
    warnings.simplefilter("ignore", SegmentRemovedWarning)
    while not stop[0]:
        with Store(name, keys=1000) as store:
            assert TokenBucket(store, "attach", "1000/second", 1000).hit(me)
    meeting.wait(me)
    with Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 100)
        return sum([bucket.allow("key") for _ in range(100)])


def test_an_attached_process_keeps_an_unlinked_segment(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 3)
        assert bucket.allow("key")
        Store.unlink(name)
        with pytest.warns(SegmentRemovedWarning):
            other = Store(name, keys=1000)
        with other:
            fresh = TokenBucket(other, "api", REFILLS_NOTHING, 3)
            assert [fresh.allow("key") for _ in range(4)] == [True, True, True, False]
        assert crew.start(bucket.allow, "key").result()
        assert [bucket.allow("key") for _ in range(2)] == [True, False]


def test_another_size_is_named_and_the_existing_one_used(name: str) -> None:
    with Store(name, keys=1000):
        size = Path(path_of(name)).stat().st_size
        with pytest.warns(SegmentSizeWarning, match="for 1000 keys.*has keys=5000;") as warned:
            other = Store(name, keys=5000)
        assert [warning.filename for warning in warned] == [__file__]
        with other:
            assert other.keys == 1000
        assert Path(path_of(name)).stat().st_size == size


def test_a_segment_is_private_and_whole_from_the_start(name: str) -> None:
    old = os.umask(0)
    try:
        with Store(name, keys=100_000):
            status = Path(path_of(name)).stat()
            assert stat.S_IMODE(status.st_mode) == 0o600
            assert status.st_blocks * 512 >= status.st_size
        Store.unlink(name)
        with Store(name, keys=100_000, mode=0o660):
            assert stat.S_IMODE(Path(path_of(name)).stat().st_mode) == 0o660
    finally:
        os.umask(old)
