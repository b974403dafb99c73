"""The owner of a slot of a concurrency limit, and whether that process is alive."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from forebay.segment import process_identity
from forebay.segment.process_identity import (
    BY_PIDFD,
    INCARNATION_BITS,
    INITIAL_PID_NAMESPACE,
    INITIAL_TIME_NAMESPACE,
    PID_BITS,
    Owners,
    this_process,
)

NAMESPACE_AT: Final = PID_BITS + INCARNATION_BITS
SYS_EXIT: Final = {"x86_64": 60, "aarch64": 93}[os.uname().machine]


def owner_of(pid: int, incarnation: str) -> int:
    """The process's identity, as the process itself would compute it from this kind of incarnation."""
    number: int | None = 0
    if incarnation == "pidfd":
        pidfd = os.pidfd_open(pid)
        number = process_identity._pidfd_incarnation(pidfd)
        os.close(pidfd)
    elif incarnation == "start":
        number = process_identity._start_incarnation(pid)
    return pid | (number or 0) << PID_BITS | this_process() >> NAMESPACE_AT << NAMESPACE_AT


@pytest.fixture(params=["pidfd", "start", "unknown"])
def incarnation(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def kill_unreaped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


def refuse_pidfds(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(pid: int) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("forebay.segment.process_identity.os.pidfd_open", refuse)


def in_namespace(monkeypatch: pytest.MonkeyPatch, inode: int, name: str = "pid") -> None:
    """Put this process into the namespace of that inode number."""
    real = os.stat

    def stat(path: Any, *args: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(st_ino=inode) if path == f"/proc/self/ns/{name}" else real(path, *args, **kwargs)

    monkeypatch.setattr("forebay.segment.process_identity.os.stat", stat)


def test_owner_is_a_pid_an_incarnation_and_a_namespace(in_child: Callable[..., Any]) -> None:
    me = this_process()
    assert me == this_process()
    assert me % 2**PID_BITS == os.getpid()
    child = in_child(this_process)
    assert child != me
    owners = Owners()
    assert owners.me == me
    assert owners.dead_among({me}) == set()
    assert owners.dead_among({me, child}) == {child}
    elsewhere = child ^ (1 << 63)
    assert owners.dead_among({elsewhere}) == set()


def test_every_namespace_number_of_linux_is_distinguished(
    in_child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner in another namespace never counts as dead, even if no process here has its pid."""
    inodes = [INITIAL_PID_NAMESPACE, *range(0xF0000000, 0xF0000000 + 6000), 0xFF000000, 0xFFFFFFF0]
    dead = in_child(this_process)
    seen = set()
    for inode in inodes:
        with monkeypatch.context() as patch:
            in_namespace(patch, inode)
            namespace = this_process() >> NAMESPACE_AT
        assert 0 < namespace < 2 ** (64 - NAMESPACE_AT)
        seen.add(namespace)
    assert len(seen) == len(inodes)
    in_namespace(monkeypatch, inodes[0])
    owners = Owners()
    words = {dead % 2**NAMESPACE_AT | namespace << NAMESPACE_AT for namespace in seen}
    assert owners.dead_among(words) == {dead % 2**NAMESPACE_AT | owners.me >> NAMESPACE_AT << NAMESPACE_AT}


@pytest.mark.parametrize("inode", [0, 1, INITIAL_PID_NAMESPACE - 1, 0xFFFFFFFF, 2**32 + INITIAL_PID_NAMESPACE])
def test_owner_in_an_unknown_namespace_never_counts_as_dead(
    in_child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, inode: int
) -> None:
    in_namespace(monkeypatch, inode)
    dead = in_child(this_process)
    assert dead >> NAMESPACE_AT == 0
    assert Owners().dead_among({dead}) == set()


def test_owner_without_proc_never_counts_as_dead(in_child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Any, *args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr("forebay.segment.process_identity.os.stat", missing)
    dead = in_child(this_process)
    assert dead >> NAMESPACE_AT == 0
    assert Owners().dead_among({dead}) == set()


@pytest.mark.parametrize("incarnation", ["pidfd", "start"])
def test_incarnation_distinguishes_processes_with_the_same_pid(
    process: subprocess.Popen[bytes], incarnation: str
) -> None:
    owner = owner_of(process.pid, incarnation)
    other_incarnation = owner ^ (1 << PID_BITS)
    owners, before = Owners(), lowest_free_descriptor()
    assert owners.dead_among({other_incarnation}) == {other_incarnation}
    assert lowest_free_descriptor() == before
    assert owners.dead_among({owner, other_incarnation}) == {other_incarnation}


def test_pidfds_of_one_process_share_a_number_that_no_other_process_has() -> None:
    """Processes that are started in sequence have neighbouring numbers."""
    incarnations = set()
    for _ in range(20):
        with subprocess.Popen(["true"]) as process:
            numbers = [owner_of(process.pid, "pidfd") >> PID_BITS & (2**INCARNATION_BITS - 1) for _ in range(3)]
        assert len(set(numbers)) == 1
        assert numbers[0] >= BY_PIDFD or numbers[0] == 0
        incarnations.add(numbers[0])
    assert len(incarnations) == (20 if incarnations != {0} else 1)


def test_incarnation_is_a_start_time_if_all_pidfds_share_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 6.9."""
    pidfd = os.pidfd_open(os.getpid())
    device = os.fstat(pidfd).st_dev
    os.close(pidfd)
    monkeypatch.setattr("forebay.segment.process_identity._device_of_nameless_files", lambda: device)
    assert this_process() == owner_of(os.getpid(), "start")


def test_start_times_count_only_in_the_initial_time_namespace(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another time namespace the same process has another start time, so its incarnation is unknown."""
    began_at_another_time = owner_of(process.pid, "start") ^ (1 << PID_BITS)
    in_namespace(monkeypatch, INITIAL_TIME_NAMESPACE + 7, "time")
    assert process_identity._start_incarnation("self") is None
    assert Owners().dead_among({began_at_another_time}) == set()


def test_unreaped_process_has_ended(process: subprocess.Popen[bytes], incarnation: str) -> None:
    owner = owner_of(process.pid, incarnation)
    early = Owners()
    assert early.dead_among({owner}) == set()
    kill_unreaped(process)
    assert early.dead_among({owner}) == {owner}
    assert Owners().dead_among({owner}) == {owner}
    process.wait()
    assert Owners().dead_among({owner}) == {owner}


def test_first_look_after_the_reaping_finds_the_end_and_closes_the_pidfd(
    process: subprocess.Popen[bytes], incarnation: str
) -> None:
    owner = owner_of(process.pid, incarnation)
    owners = Owners()
    before = lowest_free_descriptor()
    assert owners.dead_among({owner}) == set()
    process.kill()
    process.wait()
    assert owners.dead_among({owner}) == {owner}
    assert lowest_free_descriptor() == before


def test_process_of_another_user_is_watched_by_one_pidfd(
    process: subprocess.Popen[bytes], incarnation: str, in_child: Callable[..., Any]
) -> None:
    """No signal may be sent to it."""
    if os.geteuid() != 0:
        pytest.fail("this test changes users: run it as root, as CI does")
    owner = owner_of(process.pid, incarnation)

    def look_on_without_root() -> list[int]:
        owners = Owners()
        owners.dead_among({owner})
        os.setresuid(65534, 65534, 65534)
        free = []
        for _ in range(3):
            assert owners.dead_among({owner}) == set()
            free.append(lowest_free_descriptor())
        return free

    assert len(set(in_child(look_on_without_root))) == 1


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_end_is_noticed_without_pidfds(
    process: subprocess.Popen[bytes], incarnation: str, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sandbox or an old kernel refuses pidfds, or the process has too many descriptors."""
    owner = owner_of(process.pid, incarnation)
    refuse_pidfds(monkeypatch, error)
    owners = Owners()
    assert owners.me % 2**PID_BITS == os.getpid()
    for _ in range(3):
        assert owners.dead_among({owner}) == set()
    kill_unreaped(process)
    assert owners.dead_among({owner}) == {owner}
    process.wait()
    assert owners.dead_among({owner}) == {owner}


def test_start_time_identifies_the_pids_process_without_pidfds(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = owner_of(process.pid, "start")
    refuse_pidfds(monkeypatch, errno.EPERM)
    began_at_another_time = owner ^ (1 << PID_BITS)
    assert Owners().dead_among({owner, began_at_another_time}) == {began_at_another_time}


def test_end_is_noticed_without_a_descriptor_once_the_process_is_reaped(
    process: subprocess.Popen[bytes], incarnation: str, in_child: Callable[..., Any]
) -> None:
    owner = owner_of(process.pid, incarnation)

    def look(kill: Callable[[], object]) -> tuple[set[int], set[int]]:
        owners = Owners()
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        before = owners.dead_among({owner})
        kill()
        return before, owners.dead_among({owner})

    assert in_child(lambda: look(lambda: None)) == (set(), set())
    process.kill()
    process.wait()
    assert in_child(lambda: look(lambda: None)) == ({owner}, {owner})


@pytest.mark.parametrize("with_pidfds", [True, False])
def test_process_outlives_its_first_thread(with_pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a process looks like an unreaped one."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        threading.Thread(target=lambda: os._exit(len(os.read(reading, 1)))).start()
        ctypes.CDLL(None).syscall(SYS_EXIT, 0)  # of this thread alone
    owner = owner_of(pid, "start")
    try:
        while b"zombie" not in Path(f"/proc/{pid}/status").read_bytes():
            time.sleep(0.001)
        if not with_pidfds:
            refuse_pidfds(monkeypatch, errno.ENOSYS)
        owners = Owners()
        assert owners.dead_among({owner}) == set()
    finally:
        os.close(reading)
        os.close(writing)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert owners.dead_among({owner}) == {owner}
    os.waitpid(pid, 0)


def test_pid_that_is_now_a_threads_owns_nothing() -> None:
    ready, go_on = threading.Event(), threading.Event()
    ids: list[int] = []

    def run() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    owner = ids[0] | this_process() >> NAMESPACE_AT << NAMESPACE_AT
    try:
        assert Owners().dead_among({owner}) == {owner}
    finally:
        go_on.set()
        thread.join()


def test_impossible_owners_count_as_alive_or_ended_and_never_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    same_place = this_process() >> NAMESPACE_AT << NAMESPACE_AT
    senseless = (0, 1, 2**64 - 1, 2**63, same_place, same_place | 2**NAMESPACE_AT - 1, same_place | 2**PID_BITS - 1)
    for pidfds in (True, False):
        if not pidfds:
            refuse_pidfds(monkeypatch, errno.ENOSYS)
        for owner in senseless:
            assert Owners().dead_among({owner}) <= {owner}


def test_live_owner_stays_alive_after_all_files_are_closed(
    process: subprocess.Popen[bytes], incarnation: str, in_child: Callable[..., Any]
) -> None:
    """A program that becomes a daemon closes all files; the kernel then reuses their numbers."""
    owner = owner_of(process.pid, incarnation)

    def daemon(reopen: bool) -> tuple[set[int], bool]:
        owners = Owners()
        lowest_free = os.dup(0)
        os.close(lowest_free)
        assert owners.dead_among({owner}) == set()
        watched = lowest_free
        os.close(watched)
        if reopen:
            readable, writing = os.pipe()
            os.close(writing)
            os.dup2(readable, watched)
        dead = owners.dead_among({owner})
        del owners
        return dead, not reopen or os.fstat(watched) is not None

    for reopen in (False, True):
        assert in_child(lambda reopen=reopen: daemon(reopen)) == (set(), True)


def test_owner_is_watched_again_after_all_files_are_closed(
    process: subprocess.Popen[bytes], incarnation: str, in_child: Callable[..., Any]
) -> None:
    owner = owner_of(process.pid, incarnation)

    def close_and_look() -> list[set[int]]:
        pidfd = os.pidfd_open(process.pid)
        owners = Owners()
        watched = lowest_free_descriptor()
        looks = [owners.dead_among({owner})]
        os.close(watched)
        looks.append(owners.dead_among({owner}))
        os.kill(process.pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 60)[0]
        return [*looks, owners.dead_among({owner})]

    assert in_child(close_and_look) == [set(), set(), {owner}]


def test_programs_own_pidfd_is_not_mistaken_for_an_owners(
    process: subprocess.Popen[bytes], incarnation: str, in_child: Callable[..., Any]
) -> None:
    """It may get the number of a pidfd that was closed with all files. The end of its process is not the owner's
    end."""
    owner = owner_of(process.pid, incarnation)
    are_distinguished = owner_of(process.pid, "pidfd") != owner_of(process.pid, "unknown")  # from Linux 6.9 on

    def daemon(looks: bool) -> tuple[set[int], set[int], bool]:
        owners = Owners()
        watched = os.dup(0)
        os.close(watched)
        assert owners.dead_among({owner}) == set()
        another = subprocess.Popen(["sleep", "60"])
        pidfd = os.pidfd_open(another.pid)
        os.dup2(pidfd, watched)
        kill_unreaped(another)
        dead = (owners.dead_among({owner}), owners.dead_among({owner})) if looks else (set(), set())
        del owners
        return *dead, os.path.exists(f"/proc/self/fd/{watched}")

    for looks in (False, True):
        assert (in_child(lambda looks=looks: daemon(looks)) == (set(), set(), True)) == are_distinguished
