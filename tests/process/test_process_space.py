"""No room: in the file system, under a limit of file size, of descriptors, of address space."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from process_helpers import Crew, open_fds, opened_since

import forebay.segment.free_space
from forebay import SlidingLog, Store, TokenBucket
from forebay.errors import SegmentSpaceError
from forebay.segment import layout

KEYS = 1_000_000


def test_a_full_file_system_names_the_bytes_needed_and_keeps_nothing(small_disk: Path) -> None:
    fds, path = open_fds(), small_disk / "segment"
    before = os.statvfs(small_disk).f_bavail
    for _ in range(3):
        with pytest.raises(SegmentSpaceError) as caught:
            Store("a", keys=KEYS, path=path)
        assert os.listdir(small_disk) == []
        assert not opened_since(fds)
        assert os.statvfs(small_disk).f_bavail == before
        needed = int(caught.value.expected.split()[0])
        assert 21 * KEYS < needed < 22 * KEYS + 100_000
        assert f"for {KEYS} keys" in caught.value.expected
        # The header's page is still there when it looks.
        assert before - 1 <= int(caught.value.found.split()[0]) // 4096 <= before
        assert "fewer keys" in caught.value.remedy
    # Fewer keys, as the message advises, fit.
    with Store("a", keys=20_000, path=path) as store:
        assert TokenBucket(store, "api", "1/second").allow("key")
        assert path.stat().st_size == store.stats().bytes


def test_a_file_system_without_a_single_byte(small_disk: Path) -> None:
    (small_disk / "full").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with pytest.raises(SegmentSpaceError, match="0 bytes free"):
        Store("a", keys=1, path=small_disk / "segment")
    assert os.listdir(small_disk) == ["full"]


def test_a_takeover_without_room_keeps_nothing(small_disk: Path) -> None:
    """A creator that was killed left an empty file; the process that takes over has no room either."""
    (small_disk / "segment").touch(mode=0o600)
    with pytest.raises(SegmentSpaceError):
        Store("a", keys=KEYS, path=small_disk / "segment")
    assert os.listdir(small_disk) == []


def test_many_processes_without_room(small_disk: Path, crew: Crew) -> None:
    crew.run(8, _find_no_room, small_disk / "segment")
    assert os.listdir(small_disk) == []


def _find_no_room(me: int, path: Path) -> None:
    for _ in range(20):
        with pytest.raises(SegmentSpaceError):
            Store("a", keys=KEYS, path=path)


def test_the_advice_for_a_container_counts_the_bytes_in_use(
    small_disk: Path, as_root: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followed to the letter, for the store and then for its limiters, it is enough each time."""
    monkeypatch.setattr(forebay.segment.free_space, "SHARED_MEMORY", f"{small_disk}/")
    (small_disk / "other").write_bytes(bytes(700_000))

    def enlarge(error: SegmentSpaceError) -> int:
        as_sum = r"enlarge /dev/shm to (\d+) MiB \((\d+) MiB in use and (\d+) MiB needed\).* --shm-size=(\d+)m,"
        advice = re.search(as_sum, error.remedy)
        assert advice
        size, used, needed, given = map(int, advice.groups())
        assert size == given == used + needed
        system = os.statvfs(small_disk)
        assert (used - 1) << 20 < (system.f_blocks - system.f_bfree) * system.f_frsize <= used << 20
        assert (needed - 1) << 20 < int(error.expected.split()[0]) <= needed << 20
        subprocess.run(["mount", "-o", f"remount,size={size}m", small_disk], check=True)
        return size

    with pytest.raises(SegmentSpaceError) as caught:
        Store("a", keys=100_000, path=small_disk / "segment")
    assert enlarge(caught.value) == 1 + 3
    with Store("a", keys=100_000, path=small_disk / "segment") as store:
        for number in range(2):
            with pytest.raises(SegmentSpaceError) as caught:
                SlidingLog(store, f"log {number}", "100/hour", keys=2000)
            size = enlarge(caught.value)
            SlidingLog(store, f"log {number}", "100/hour", keys=2000)
        assert size == 4 + 2 + 2


def test_in_shared_memory_the_remedy_speaks_of_containers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SegmentSpaceError, match=r"bytes free on its file system.*--shm-size=\d+m.*emptyDir"):
        Store(name, keys=KEYS)
    assert not Path(f"/dev/shm/forebay-{name}").exists()


@pytest.mark.parametrize("limit", [0, 50, layout.HEADER_STATE + 4, 4096, 1 << 20])
def test_a_limit_of_file_size(crew: Crew, tmp_path: Path, limit: int) -> None:
    crew.start(_create_under_a_limit, tmp_path / "segment", limit).result()
    assert os.listdir(tmp_path) == []


def _create_under_a_limit(path: Path, limit: int) -> None:
    fds = open_fds()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    for make in (lambda: Store("a", keys=KEYS, path=path), lambda: Store.private(keys=KEYS)):
        with pytest.raises(SegmentSpaceError, match=rf"a limit of {limit} bytes to a file's size \(ulimit -f\)"):
            make()
    assert not opened_since(fds)


def test_descriptors_run_out_at_each_point(crew: Crew, tmp_path: Path) -> None:
    """Either the store works, or there is a clear error and nothing stays behind."""
    crew.start(_create_with_few_descriptors, tmp_path / "segment").result()


def _create_with_few_descriptors(path: Path) -> None:
    opened = 0
    refusals: list[str] = []
    for free in range(6):
        with _descriptors(free):
            try:
                store = Store("a", keys=1000, path=path)
            except SegmentSpaceError as error:
                refusals.append(str(error))
            else:
                opened += 1
                assert TokenBucket(store, "api", "1/second").allow(free)
                store.close()
        # A store that was opened is whole; nothing else is left.
        assert path.exists() == bool(opened), f"with {free} free descriptors"
        if opened:
            path.unlink()
            opened = 0
    assert all("open files" in refusal for refusal in refusals)
    with _descriptors(0), pytest.raises((OSError, SegmentSpaceError), match="open files"):
        Store.private(keys=1000)


def test_one_free_descriptor_is_enough_to_attach(crew: Crew, name: str) -> None:
    with Store(name, keys=1000):
        assert crew.start(_use_with_one_descriptor, name).result() == 5


def _use_with_one_descriptor(name: str) -> int:
    with _descriptors(1):
        store = Store(name, keys=1000)
        log = SlidingLog(store, "log", "5/hour", keys=10)
        return sum(log.allow("key") for _ in range(9))


class _descriptors:  # noqa: N801  # reads like a function
    """Leave this process no more than so many free descriptors."""

    def __init__(self, free: int) -> None:
        self.free, self.fillers = free, list[int]()

    def __enter__(self) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 20_000))
        while True:
            try:
                self.fillers.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        for _ in range(self.free):
            os.close(self.fillers.pop())

    def __exit__(self, *_: object) -> None:
        for fd in self.fillers:
            os.close(fd)


def test_a_child_without_a_descriptor_shares_the_counters(crew: Crew, name: str) -> None:
    with Store(name, keys=1000) as store:
        bucket = TokenBucket(store, "api", "10000/year", 100)
        assert bucket.allow("key")
        assert crew.start(_decide_without_descriptors, bucket).result() == 99
        stats = store.stats().limiters["api"]
        assert (stats.allowed, stats.denied) == (100, 51)


def _decide_without_descriptors(bucket: TokenBucket) -> int:
    with _descriptors(0):
        return sum([bucket.allow("key") for _ in range(150)])


def test_no_address_space(crew: Crew, tmp_path: Path) -> None:
    """The descriptor is closed once: the number may belong to another file by then."""
    for make in (_named, _private):
        assert crew.start(_map_too_much, make, tmp_path).result() == []


def _named(directory: Path) -> Store:
    return Store("a", keys=3_000_000, path=directory / "segment")


def _private(directory: Path) -> Store:
    return Store.private(keys=3_000_000)


def _map_too_much(make: Callable[[Path], Store], directory: Path) -> list[str]:
    unraisable: list[str] = []
    sys.unraisablehook = lambda hook: unraisable.append(repr(hook.exc_value))
    fds = open_fds()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20), resource.RLIM_INFINITY))
    with pytest.raises(SegmentSpaceError, match="address space") as caught:
        make(directory)
    del caught
    gc.collect()
    assert not opened_since(fds)
    return unraisable
