"""Stores larger than the available memory, by made-up figures: the tests allocate no such memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from forebay import SegmentSpaceError, SlidingLog, Store
from forebay.segment import free_space, layout

MIB = 2**20
PLENTY = 2**40


class Machine:
    """The kernel's figures of memory, made up."""

    def __init__(self, directory: Path) -> None:
        self.proc, self.groups = directory / "proc", directory / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.groups.mkdir()
        self.has_available(PLENTY)

    def has_available(self, available: int) -> None:
        meminfo = f"MemTotal:       {PLENTY} kB\nMemAvailable:   {available // 1024} kB\nHugePages_Total:       0\n"
        (self.proc / "meminfo").write_text(meminfo)

    def has_group(self, path: str, most: int | str, used: int, cached: int = 0) -> None:
        (self.proc / "self/cgroup").write_text(f"4:memory:/old\n0::{path}\n")
        group = self.groups / path.removeprefix("/")
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\nactive_file {cached // 2}\ninactive_file {cached // 2}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr(free_space, "PROC", machine.proc)
    monkeypatch.setattr(free_space, "CONTROL_GROUPS", machine.groups)
    return machine


def test_private_store_larger_than_memory_is_refused(machine: Machine) -> None:
    machine.has_available(20 * MIB)
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(SegmentSpaceError) as caught:
        Store.private(keys=1_000_000)
    assert caught.value.found == f"{20 * MIB} bytes of memory available"
    assert caught.value.expected == "21102592 bytes for 1000000 keys"
    assert "path=" not in caught.value.remedy
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)
    machine.has_available(21 * MIB)
    Store.private(keys=1_000_000).close()


def test_shared_store_larger_than_memory_is_refused_and_leaves_no_file(machine: Machine, name: str) -> None:
    machine.has_available(20 * MIB)
    with pytest.raises(SegmentSpaceError, match=f"found {20 * MIB} bytes of memory available"):
        Store(name, keys=1_000_000)
    assert not Path(f"/dev/shm/forebay-{name}").exists()


def test_store_on_a_disk_needs_no_memory(machine: Machine) -> None:
    machine.has_available(0)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # /tmp may be in memory
        Store("a", keys=1000, path=f"{directory}/segment").close()


def test_store_on_any_tmpfs_needs_memory(machine: Machine, tmp_path: Path) -> None:
    machine.has_available(20 * MIB)
    mounted = tmp_path / "limits"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", mounted], check=True)
    try:
        with pytest.raises(SegmentSpaceError, match=f"found {20 * MIB} bytes of memory available") as caught:
            Store("a", keys=1_000_000, path=mounted / "segment")
        assert "/dev/shm" not in caught.value.remedy
        assert os.listdir(mounted) == []
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_memory_taken_by_a_dead_creator_is_not_needed_again(machine: Machine, name: str) -> None:
    path = Path(f"/dev/shm/forebay-{name}")
    with open(path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        with Store.private(keys=1_000_000) as store:
            header = store.segment.read(0, layout.HEADER_CHECKSUM)
            size = store.stats().bytes
        file.write(header + bytes(4) + layout.STATE_CREATING.to_bytes(4, "little"))
        os.posix_fallocate(file.fileno(), 0, size)
    machine.has_available(0)
    with Store(name, keys=1_000_000) as store:
        assert store.stats().bytes == size


def test_limit_of_a_control_group_counts(machine: Machine) -> None:
    machine.has_group("/service/worker", 100 * MIB, 80 * MIB)
    with pytest.raises(SegmentSpaceError, match=f"found {20 * MIB} bytes of memory available"):
        Store.private(keys=1_000_000)
    # The kernel can drop cached file pages.
    machine.has_group("/service/worker", 100 * MIB, 80 * MIB, cached=2 * MIB)
    Store.private(keys=1_000_000).close()
    machine.has_group("/service/worker", "max", 10**15)
    Store.private(keys=1_000_000).close()
    # Limits of parent groups count, and so does a container's, which sees its own group as the root.
    for path in ("/service", "/"):
        machine.has_group(path, 100 * MIB, 101 * MIB)
        machine.has_group("/service/worker", "max", 10**15)
        with pytest.raises(SegmentSpaceError, match="found 0 bytes of memory available"):
            Store.private(keys=1)
        machine.has_group(path, "max", 0)


def test_unreadable_figures_set_no_bound(machine: Machine) -> None:
    (machine.proc / "meminfo").unlink()
    Store.private(keys=1_000_000).close()
    (machine.proc / "meminfo").write_text("MemTotal: 5 kB\n")
    Store.private(keys=1_000_000).close()


def test_limiter_larger_than_memory_is_refused(machine: Machine) -> None:
    with Store.private(keys=100) as store:
        machine.has_available(20 * MIB)
        with pytest.raises(SegmentSpaceError, match=f"found {20 * MIB} bytes of memory available, expected .* smaller"):
            SlidingLog(store, "log", "100/hour", keys=100_000)
        machine.has_available(PLENTY)
        assert SlidingLog(store, "log", "100/hour", keys=10).allow("key")
