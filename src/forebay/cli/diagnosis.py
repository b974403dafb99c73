"""Findings about the stores of a host, each with its remedy. Only reads."""

from __future__ import annotations

import os
import pwd
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final, Literal

from forebay.cli.printing import counted
from forebay.cli.survey import Seen, count
from forebay.errors import ClockMismatch, ForebayError, SegmentError
from forebay.segment import attachment_locks, free_space, host_clock
from forebay.segment.file_users import ANONYMOUS, FileUsers
from forebay.segment.kernel_files import read_kernel_file
from forebay.segment.names import successor_of
from forebay.store_options import DIRECTORY

__all__ = ["Finding", "of_directory", "of_host", "of_processes", "of_store"]

PROC: Final = Path("/proc")
CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
# They are read without a system call.
FAST_CLOCKS: Final = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
SYSTEMD: Final = Path("/run/systemd/system")
LINGER: Final = Path("/var/lib/systemd/linger")
FIRST_USER: Final = 1000
NEARLY: Final = 0.9
MIB: Final = 2**20
SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    severity: Literal["problem", "note"]
    """A note needs no action."""
    where: str
    found: str
    remedy: str = ""


def problem(where: str, found: str, remedy: str) -> Finding:
    return Finding("problem", where, found, remedy)


def note(where: str, found: str, remedy: str = "") -> Finding:
    return Finding("note", where, found, remedy)


def of_host() -> Iterator[Finding]:
    """Findings about this host: its clock, its memory and its huge pages."""
    with suppress(OSError):
        source = read_kernel_file(CLOCK_SOURCE).decode().strip()
        if source in FAST_CLOCKS:
            yield note("clock", f"{source}, which is read without a system call")
        else:
            yield problem(
                "clock",
                f"the clock source {source}: each decision reads it by a system call, which takes about a microsecond",
                "switch to tsc, if the processor's is stable (kernel parameter tsc=reliable, or the hypervisor's)",
            )
    try:
        offset_ns = host_clock.read_offset_ns()
    except ClockMismatch as error:
        yield problem("clock", error.found, error.remedy)
    except SegmentError as error:
        yield problem("clock", str(error), error.remedy)
    else:
        if offset_ns:
            yield note("clock", f"this process is in a time namespace, {offset_ns / 1e9:.0f} s ahead of the host's")
    with suppress(OSError):
        setting = read_kernel_file(HUGE_PAGES).decode()
        chosen = setting[setting.index("[") + 1 : setting.index("]")] if "[" in setting else setting.strip()
        found = f"{chosen!r} for shared memory ({HUGE_PAGES}), of which {_huge_pages_mib():,.0f} MiB are in huge pages"
        yield note("huge pages", found)
    for group, most, used in free_space.memory_limits():
        found = f"{used / MIB:,.0f} of {most / MIB:,.0f} MiB in use in the control group {group}"
        if used >= NEARLY * most:
            yield problem(
                "memory", found, "give the container more memory, or stop what uses it: the kernel ends processes"
            )
        else:
            yield note("memory", found)


def _huge_pages_mib() -> float:
    with suppress(OSError, KeyError):
        return free_space.first_numbers(PROC / "meminfo")["ShmemHugePages:"] / 1024
    return 0.0


def of_directory(directory: str) -> Iterator[Finding]:
    """Findings about a directory's file system: its size, and the largest files in it."""
    try:
        system = os.statvfs(directory)
        names = os.listdir(directory)
    except OSError as error:
        yield problem(directory, f"a directory that can't be read ({error.strerror})", "run as root")
        return
    size = system.f_blocks * system.f_frsize
    used = size - system.f_bfree * system.f_frsize
    found = f"{used / MIB:,.1f} of {size / MIB:,.1f} MiB in use"
    files = []
    for name in names:
        with suppress(OSError):
            status = os.lstat(os.path.join(directory, name))
            files.append((status.st_blocks * 512, name, status.st_uid))
    largest = sorted(files, reverse=True)[:SHOWN]
    if largest:
        found += ", by " + ", ".join(f"{name} {taken / MIB:,.1f} (uid {uid})" for taken, name, uid in largest)
    if size and used >= NEARLY * size:
        remedy = "remove what isn't needed, or enlarge it (docker run --shm-size, shm_size in Compose, emptyDir with "
        yield problem(directory, found, remedy + "medium: Memory in Kubernetes; mount -o remount,size= on a host)")
    else:
        yield note(directory, found)


def of_store(seen: Seen) -> Iterator[Finding]:
    """Findings about a store: whether it can be used, who uses it, and how full it is."""
    where = seen.path
    if seen.problem:
        yield problem(where, seen.problem, "")
        return
    if seen.mode & 0o002:
        yield problem(
            where, f"mode {seen.mode:04o}: every user may change it, so stores refuse it", f"chmod o-w {quote(where)}"
        )
    if seen.is_stale:
        remedy = "none if its service starts again; else remove it: forebay rm " + quote(seen.name)
        if os.path.dirname(where) == os.path.normpath(DIRECTORY):
            yield problem(where, "a segment of another boot, which no process has attached", remedy)
        else:
            yield note(where, "a segment of an earlier boot, which no process has attached since", remedy)
    elif not seen.attached:
        yield note(
            where, "no process has it attached", f"if no service uses it any more: forebay rm {quote(seen.name)}"
        )
    else:
        yield note(where, f"used by {counted(seen.attached, 'process', 'processes')}" + _described(seen.pids))
    yield from _of_root(seen)
    yield from _of_successor(seen)
    if seen.live_keys >= NEARLY * seen.keys:
        yield problem(
            where,
            f"{seen.live_keys:,} of {seen.keys:,} keys live",
            f"forebay resize {quote(seen.name)} --keys N, also while processes use it: 21 bytes per key",
        )
    yield from _of_counts(seen)
    yield from _of_logout(seen)
    yield from _of_namespaces(seen)


def _of_root(seen: Seen) -> Iterator[Finding]:
    """Whether root, perhaps by a command, made a store that its service can't open."""
    if seen.uid == 0 and seen.mode == 0o600 and not any(_uid(pid) == 0 for pid in seen.pids):
        is_of_a_service = _uid_of(os.path.dirname(seen.path)) != 0
        yield (problem if is_of_a_service else note)(
            seen.path,
            "owned by root, mode 0600, and no process of root has it attached: a service of another user is refused",
            f"if a command made it as root: forebay rm {quote(seen.name)}, then start the service; to look, forebay "
            "stat makes nothing",
        )


def _of_successor(seen: Seen) -> Iterator[Finding]:
    """Whether a killed process has left the store that was to replace this one."""
    left = successor_of(seen.path)
    with suppress(OSError):
        size = os.lstat(left).st_size
        yield problem(
            left,
            f"{size / MIB:,.1f} MiB that a killed resize or restore has left",
            f"if none runs now: rm {quote(left)}",
        )


def _of_counts(seen: Seen) -> Iterator[Finding]:
    try:
        counts = count(seen.path)
    except ForebayError as error:
        yield problem(seen.path, str(error), "forebay verify " + seen.name)
        return
    for label, one in counts.limiters.items():
        for number, what in ((one.evicted, "live keys were forgotten"), (one.full, "decisions found no room")):
            if number:
                remedy = "more keys=, of the store or of a limiter with memory of its own; "
                remedy += "on floods see docs/operations/capacity.md"
                yield problem(f"{seen.path}, limiter {label!r}", f"{number:,} {what}, as it was full", remedy)
    for memory in counts.memories:
        # One that is for a single key, as a shedder's, is never fuller than that; more keys find no room, as above.
        if memory.keys > 1 and memory.live_keys >= NEARLY * memory.keys:
            where = f"{seen.path}, limiter {memory.limiter!r}"
            found = f"{memory.live_keys:,} of the {memory.keys:,} keys of its own memory live"
            yield problem(where, found, "stop its users, remove the store, and give the limiter a larger keys=")


def _of_logout(seen: Seen) -> Iterator[Finding]:
    """Whether systemd-logind removes the file at its owner's last logout."""
    if SYSTEMD.is_dir() and seen.uid >= FIRST_USER and os.path.dirname(seen.path) == os.path.normpath(DIRECTORY):
        with suppress(KeyError):
            user = pwd.getpwuid(seen.uid).pw_name
            if not (LINGER / user).exists():
                yield problem(
                    seen.path,
                    f"owned by {user}, no system user: systemd-logind removes it at the user's last logout, unless "
                    "RemoveIPC=no is set",
                    f"run the service as a system user; or loginctl enable-linger {user}",
                )


def _of_namespaces(seen: Seen) -> Iterator[Finding]:
    namespaces = {number for pid in seen.pids if (number := _namespace(pid)) is not None}
    if len(namespaces) > 1:
        yield note(
            seen.path,
            f"processes of {len(namespaces)} time namespaces use it",
            "none, if each made its Store itself: after a fork into another time namespace limits are refused",
        )


def of_processes(users: FileUsers, paths: Iterable[str]) -> Iterator[Finding]:
    """Findings about processes that don't use the store of their name, or that have none: they count alone."""
    for path in paths:
        pids, count_of = _of_removed(users, path)
        if count_of:
            by = counted(count_of, "process", "processes") + _described(pids)
            yield problem(
                path,
                f"a removed segment of that name is in use by {by}: these processes and those that start later each "
                "admit the whole limit",
                "restart these processes",
            )
    # By parent and command line: other children of a shell or a supervisor are other programs.
    alone: dict[tuple[int, bytes], set[int]] = defaultdict(set)
    for file, pids in users.mapped_by.items():
        if file.path == ANONYMOUS and len(pids) == 1:
            alone[_parent(pids[0]), _command_line(pids[0])].update(pids)
    for (parent, _), together in alone.items():
        if parent > 1 and len(together) > 1:
            yield problem(
                f"process {parent}",
                f"{len(together)} children have private stores of their own{_described(sorted(together))}: each "
                "counts alone",
                "give the store a name, or make it before the workers are forked",
            )
    if users.hidden:
        hidden = counted(users.hidden, "process", "processes")
        yield note("processes", f"{hidden} can't be looked at", "run as root" if os.geteuid() else "")


def _of_removed(users: FileUsers, path: str) -> tuple[list[int], int]:
    """The processes that use a removed segment of that path, and their number: not each may be seen."""
    try:
        status = os.stat(path, follow_symlinks=False)
        inodes = attachment_locks.removed_segments(status, attachment_locks.place_of(path))
    except OSError:
        return [], 0
    pids = {
        pid
        for file, mapping in users.mapped_by.items()
        for pid in mapping
        # The creator of a segment shows no path: the file was made without a name.
        if (file.device == status.st_dev and file.inode in inodes) or file.path == f"{path} (deleted)"
    }
    return sorted(pids), max(len(pids), len(inodes))


def _described(pids: Iterable[int]) -> str:
    texts = [f"{pid} {_command(pid)}".strip() for pid in pids]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return f": {', '.join(texts[:SHOWN])}{more}" if texts else ""


def _command(pid: int) -> str:
    with suppress(OSError):
        return read_kernel_file(PROC / str(pid) / "comm").decode(errors="replace").strip()
    return ""


def _command_line(pid: int) -> bytes:
    with suppress(OSError):
        return read_kernel_file(PROC / str(pid) / "cmdline")
    return b""


def _uid(pid: int) -> int | None:
    return _uid_of(PROC / str(pid))


def _uid_of(path: str | Path) -> int | None:
    with suppress(OSError):
        return os.stat(path).st_uid
    return None


def _namespace(pid: int) -> int | None:
    with suppress(OSError):
        return os.stat(PROC / str(pid) / "ns" / "time").st_ino
    return None


def _parent(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may contain anything.
        return int(read_kernel_file(PROC / str(pid) / "stat").rpartition(b")")[2].split()[1])
    return 0
