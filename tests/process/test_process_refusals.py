"""Files that are no segment, or not one to trust: each refused by name, left as it was, and nothing leaked."""

from __future__ import annotations

import contextlib
import os
import random
import stat
import struct
import subprocess
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from process_helpers import FREE_USER, SHARED_GROUP, Crew, Meeting, as_user, open_fds, opened_since

from forebay import SlidingLog, Store, TokenBucket
from forebay.errors import (
    ClockMismatch,
    DamagedSegment,
    ForeignSegment,
    SegmentError,
    SegmentVersionMismatch,
    TruncatedSegment,
    UntrustedSegment,
)
from forebay.segment import layout
from forebay.testing import ManualClock

REFILLS_NOTHING = "10000/year"


@pytest.fixture
def path() -> Iterator[Path]:
    """A path in a directory that every user may enter, with nothing there."""
    directory = Path(f"/dev/shm/forebay-process-test-{os.getpid()}")
    directory.mkdir(mode=0o755)
    yield directory / "segment"
    for entry in directory.iterdir():
        entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    directory.rmdir()


@pytest.fixture
def segment(path: Path) -> Path:
    """A segment that was used a little."""
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        for key in range(50):
            bucket.allow(key)
    return path


@dataclass(frozen=True)
class Snapshot:
    """Everything about a path that a refusal could have changed."""

    status: tuple[int, ...]
    content: bytes
    link: str

    @classmethod
    def of(cls, path: Path) -> Snapshot:
        status = path.lstat()
        fields = (status.st_ino, status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_mtime_ns)
        return cls(
            fields,
            path.read_bytes() if stat.S_ISREG(status.st_mode) else b"",
            str(path.readlink()) if path.is_symlink() else "",
        )


def refused(path: Path, kind: type[SegmentError], *words: str, **options: object) -> SegmentError:
    """Attach, be refused with `kind`, and see that nothing was changed or kept open."""
    before, fds = Snapshot.of(path), open_fds()
    with pytest.raises(SegmentError) as caught:
        Store("a", path=path, **{"keys": 100, **options})  # type: ignore[arg-type]
    error = caught.value
    assert type(error) is kind, error
    assert Snapshot.of(path) == before
    assert not opened_since(fds)
    assert error.path == str(path)
    assert error.found
    assert error.expected
    assert error.remedy
    assert str(error) == f"{path}: found {error.found}, expected {error.expected}; {error.remedy}"
    for word in words:
        assert word in str(error)
    return error


def changed(path: Path, offset: int, value: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)


def sealed_again(path: Path) -> None:
    """Make the checksum of a changed header right."""
    raw = path.read_bytes()[: layout.HEADER_CHECKSUM]
    changed(path, layout.HEADER_CHECKSUM, zlib.crc32(raw).to_bytes(4, "little"))


def put(path: Path, field: int, value: int, size: int = 8) -> None:
    """Overwrite a header field, with a checksum that fits."""
    changed(path, field, value.to_bytes(size, "little"))
    sealed_again(path)


def test_the_good_one_is_accepted(segment: Path) -> None:
    with Store("a", keys=100, path=segment) as store:
        assert store.stats().limiters["api"].allowed == 50


@pytest.mark.parametrize("content", [b"x", b"\x7fELF" + bytes(5000), bytes(1), bytes(100_000), b"forebay" * 1000])
def test_a_foreign_file(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o600)
    refused(path, ForeignSegment, "begins with", repr(content[:8]), "another name or path")


def test_a_truncated_segment(segment: Path) -> None:
    whole = segment.read_bytes()
    lengths = [*range(8, 140), 1000, 4095, 4096, 4097, layout.TABLE_OFFSET, len(whole) - 4096, len(whole) - 1]
    for length in lengths:
        segment.write_bytes(whole[:length])
        error = refused(segment, TruncatedSegment, f"{length} bytes")
        assert str(len(whole)) in error.expected or "header" in error.expected
    for length in range(1, 8):
        segment.write_bytes(whole[:length])
        refused(segment, ForeignSegment)


def test_a_grown_segment(segment: Path) -> None:
    """Bytes behind the table that are in no extent belong to no limiter."""
    whole = segment.read_bytes()
    for extra in (1, 256, 4096, len(whole)):
        segment.write_bytes(whole + b"\xff" * extra)
        with Store("a", keys=100, path=segment) as store:
            assert store.stats().limiters["api"].allowed == 50
            assert SlidingLog(store, "log", "1/hour", keys=20).allow("k")


def test_every_damaged_header_byte(segment: Path) -> None:
    """Only a flip to the state of an unfinished creation means something else: see the next test."""
    whole = segment.read_bytes()
    draws = random.Random(17)
    expected = {range(8): ForeignSegment, range(8, 12): SegmentVersionMismatch}
    for offset in range(layout.HEADER_STATE + 4):
        kind = next((kind for offsets, kind in expected.items() if offset in offsets), DamagedSegment)
        for flip in (0xFF, 0x80, draws.randrange(1, 256)):
            value = whole[offset] ^ flip
            if (offset, value) == (layout.HEADER_STATE, layout.STATE_CREATING):
                continue
            changed(segment, offset, bytes([value]))
            refused(segment, kind)
        changed(segment, offset, whole[offset : offset + 1])
    assert segment.read_bytes() == whole
    with Store("a", keys=100, path=segment) as store:
        assert store.stats().limiters["api"].allowed == 50


def test_a_segment_that_claims_to_be_unfinished_takes_no_memory_from_attached_processes(
    crew: Crew, segment: Path
) -> None:
    """No bytes in the file crash a process: making the segment again must not truncate what others have mapped."""
    assert crew.start(_use_beside_a_damaged_state, segment).result() == 10


def _use_beside_a_damaged_state(path: Path) -> int:
    with Store("a", keys=100, path=path) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        changed(path, layout.HEADER_STATE, bytes([layout.STATE_CREATING]))
        original = os.posix_fallocate

        def decide_first(*arguments: int) -> None:
            for key in range(1000):
                bucket.peek(key)
            original(*arguments)

        os.posix_fallocate = decide_first
        # Whether it is refused or made again is the ladder's choice.
        with contextlib.suppress(SegmentError):
            Store("a", keys=100, path=path).close()
        return sum([bucket.allow("new") for _ in range(100)])


def test_damage_behind_the_header_is_no_reason_to_refuse(segment: Path) -> None:
    draws = random.Random(19)
    size = segment.stat().st_size
    for _ in range(300):
        changed(segment, draws.randrange(96, size), draws.randbytes(1))
        with Store("a", keys=100, path=segment) as store:
            TokenBucket(store, "mine", REFILLS_NOTHING, 10).allow("key")


def test_another_layout_version(segment: Path) -> None:
    for version in (0, layout.LAYOUT_VERSION - 1, layout.LAYOUT_VERSION + 1, 2**32 - 1):
        put(segment, layout.HEADER_LAYOUT_VERSION, version, 4)
        refused(
            segment,
            SegmentVersionMismatch,
            f"layout version {version}",
            f"layout version {layout.LAYOUT_VERSION}",
            "one version of forebay",
        )


def test_numbers_that_do_not_fit_each_other(segment: Path) -> None:
    """With a right checksum: made so, not damaged."""
    whole = segment.read_bytes()
    for field, value, kind in (
        (layout.HEADER_SEGMENT_SIZE, 2**63, TruncatedSegment),
        (layout.HEADER_SEGMENT_SIZE, 0, DamagedSegment),
        (layout.HEADER_GROUP_COUNT, 0, DamagedSegment),
        (layout.HEADER_GROUP_COUNT, 2**64 - 1, DamagedSegment),
        (layout.HEADER_GROUP_COUNT, 2**56 + layout.MIN_GROUPS, DamagedSegment),
        (layout.HEADER_GROUP_COUNT, layout.MIN_GROUPS + 1, DamagedSegment),
    ):
        put(segment, field, value)
        refused(segment, kind)
        segment.write_bytes(whole)
    put(segment, layout.HEADER_EPOCH_NS, 2**63)
    refused(segment, ClockMismatch, "after now")
    segment.write_bytes(whole)
    put(segment, layout.HEADER_CLOCK_KIND, 4, 4)
    refused(segment, DamagedSegment)
    put(segment, layout.HEADER_CLOCK_KIND, layout.CLOCK_PYTHON, 4)
    refused(segment, ClockMismatch, "Python (time.time)", "monotonic")


def test_too_few_groups(segment: Path) -> None:
    """A probe set needs three different groups."""
    for groups in (0, 1, 2, layout.MIN_GROUPS - 1):
        size = layout.TABLE_OFFSET + groups * layout.GROUP_BYTES
        os.truncate(segment, size)
        put(segment, layout.HEADER_GROUP_COUNT, groups)
        put(segment, layout.HEADER_SEGMENT_SIZE, size)
        refused(segment, DamagedSegment)


def test_odd_numbers_that_fit_are_survived(segment: Path) -> None:
    for field, value in (
        (layout.HEADER_EPOCH_NS, 2**64 - 1),
        (layout.HEADER_WALL_EPOCH_NS, 2**64 - 1),
        (layout.HEADER_ADVERTISED_KEYS, 0),
        (layout.HEADER_ADVERTISED_KEYS, 2**64 - 1),
    ):
        put(segment, field, value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Store("a", keys=100, path=segment) as store:
                bucket = TokenBucket(store, "api", "10/second")
                for key in range(500):
                    repr(bucket.hit(key))
                store.stats()


@pytest.mark.parametrize("manual", [False, True])
def test_another_clock(path: Path, manual: bool) -> None:
    with Store("a", keys=100, path=path, clock=ManualClock() if manual else "monotonic"):
        pass
    clock = "monotonic" if manual else ManualClock()
    refused(path, ClockMismatch, "manual clock", "monotonic clock", "the same clock=", clock=clock)


def test_a_symbolic_link(segment: Path) -> None:
    link = segment.with_name("link")
    link.symlink_to(segment)
    before = Snapshot.of(segment)
    refused(link, UntrustedSegment, "a symbolic link", "remove the link")
    assert Snapshot.of(segment) == before


def test_a_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.with_name("nothing"))
    refused(path, UntrustedSegment, "a symbolic link")
    assert not path.with_name("nothing").exists()


def test_a_directory(path: Path) -> None:
    path.mkdir()
    refused(path, ForeignSegment, "a directory", "a regular file")


def test_a_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)
    refused(path, ForeignSegment, "a regular file")


def test_a_socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)
    refused(path, ForeignSegment, "a regular file")


@pytest.mark.parametrize(("kind", "major", "minor"), [(stat.S_IFCHR, 1, 3), (stat.S_IFCHR, 1, 5), (stat.S_IFBLK, 7, 0)])
def test_a_device(as_root: None, path: Path, kind: int, major: int, minor: int) -> None:
    os.mknod(path, 0o600 | kind, os.makedev(major, minor))
    refused(path, ForeignSegment, "a regular file")


def test_no_directory(path: Path) -> None:
    with pytest.raises(SegmentError, match=r"no such directory.*create the directory"):
        Store("a", keys=1, path=path / "missing" / "segment")


def test_a_file_of_another_user(as_root: None, crew: Crew, segment: Path) -> None:
    """Root is refused too: the file could have been planted."""
    os.chown(segment, FREE_USER, FREE_USER)
    refused(segment, UntrustedSegment, f"uid {FREE_USER}", "uid 0", "mode=0o660")
    os.chown(segment, 12345, 12345)
    crew.start(as_user, FREE_USER, FREE_USER, [], _refused_without_a_look, segment).result()


def test_a_readable_file_of_another_user(as_root: None, crew: Crew, segment: Path) -> None:
    os.chown(segment, 12345, SHARED_GROUP)
    segment.chmod(0o660)
    crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], refused, segment, UntrustedSegment).result()


def _refused_without_a_look(path: Path, **options: object) -> str:
    """For users that can't read the file."""
    fds = open_fds()
    with pytest.raises(UntrustedSegment) as caught:
        Store("a", keys=100, path=path, **options)  # type: ignore[arg-type]
    assert not opened_since(fds)
    assert f"uid {os.geteuid()}" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o666, 0o777, 0o662])
def test_a_world_writable_file(segment: Path, mode: int) -> None:
    segment.chmod(mode)
    refused(segment, UntrustedSegment, "others may write", f"{mode:04o}")
    refused(segment, UntrustedSegment, "others may write", mode=0o660)


@pytest.mark.parametrize("mode", [0o620, 0o660])
def test_a_file_that_a_group_may_write_without_opting_in(segment: Path, mode: int) -> None:
    segment.chmod(mode)
    refused(segment, UntrustedSegment, "others may write", f"{mode:04o}", "mode=0o660")


def test_a_file_that_another_group_may_write(as_root: None, segment: Path) -> None:
    segment.chmod(0o660)
    os.chown(segment, -1, SHARED_GROUP + 1)
    refused(segment, UntrustedSegment, f"gid {SHARED_GROUP + 1}", str(SHARED_GROUP), mode=0o660, group=SHARED_GROUP)


def test_a_member_of_the_group_shares_a_store_that_root_made(as_root: None, crew: Crew, path: Path) -> None:
    assert _admitted_for_group(path) == 10
    status = path.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, SHARED_GROUP, 0o660)
    assert crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _admitted_for_group, path).result() == 0
    # A user outside the group, and a store made without the group.
    crew.start(
        as_user, 12345, 12345, [], _call_with, _refused_without_a_look, path, {"mode": 0o660, "group": SHARED_GROUP}
    ).result()
    crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], refused, path, UntrustedSegment).result()


def _call_with(work: Callable[..., object], path: Path, options: dict[str, object]) -> object:
    return work(path, **options)


def _admitted_for_group(path: Path) -> int:
    with Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP) as store:
        bucket = TokenBucket(store, "api", REFILLS_NOTHING, 10)
        return sum([bucket.allow("key") for _ in range(30)])


@pytest.mark.parametrize(
    ("mode", "owner", "trusted"),
    [(0o2777, 0, False), (0o3777, 0, False), (0o2775, 12345, False), (0o2775, 0, True), (0o2770, 0, True)],
)
def test_a_directory_that_gives_its_group_to_strangers_files(
    as_root: None, crew: Crew, path: Path, mode: int, owner: int, trusted: bool
) -> None:
    """A file of the group's proves nothing there: neither to a member nor to root."""
    os.chown(path.parent, owner, SHARED_GROUP)
    path.parent.chmod(mode)
    if not trusted:
        crew.start(as_user, 12345, 12345, [], _plant, path).result()
    users: list[tuple[int, list[int]]] = [(FREE_USER, [SHARED_GROUP]), (0, [])]
    for uid, groups in users:
        work = _admitted_for_group if trusted else _refused_for_group
        crew.start(as_user, uid, uid, groups, work, path).result()
    path.parent.chmod(0o755)


@pytest.mark.parametrize(("options", "trusted"), [("rw,grpid", False), ("rw,nogrpid", True)])
def test_a_mount_that_gives_the_directorys_group_to_strangers_files(
    as_root: None, crew: Crew, path: Path, options: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ext4 and XFS do with the option grpid: without the setgid bit. The kernel's table of mounts is made up."""
    device = path.parent.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / /a\\040place rw,relatime shared:1 - ext4 /dev/vdb {options}"
    mounts = path.parent / "mounts"
    mounts.write_text(f"35 1 0:1 / /proc rw - proc proc rw,grpid\n{line}\n")
    monkeypatch.setattr("forebay.segment.trust.MOUNTS", str(mounts))
    os.chown(path.parent, 0, SHARED_GROUP)
    path.parent.chmod(0o1777)
    Store("a", keys=100, path=path, mode=0o660, group=0).close()
    os.chown(path, 12345, SHARED_GROUP)
    if trusted:
        assert crew.start(as_user, FREE_USER, FREE_USER, [SHARED_GROUP], _admitted_for_group, path).result() == 10
    else:
        for uid in (FREE_USER, 0):
            message = crew.start(as_user, uid, uid, [SHARED_GROUP], _refusal_for_group, path).result()
            assert "one without the mount option grpid" in message
            assert "mount it without grpid" in message


def _refusal_for_group(path: Path) -> str:
    return str(refused(path, UntrustedSegment, mode=0o660, group=SHARED_GROUP))


def _plant(path: Path) -> None:
    Store("a", keys=100, path=path).close()
    path.chmod(0o660)
    assert path.stat().st_gid == SHARED_GROUP


def _refused_for_group(path: Path) -> None:
    message = str(refused(path, UntrustedSegment, mode=0o660, group=SHARED_GROUP))
    assert f"gid {SHARED_GROUP}" in message
    assert "gives its group to the files of users that aren't in it" in message
    assert f"chmod g-s {path.parent}" in message


def set_acl(path: Path, kind: str, *named: tuple[int, int, int]) -> None:
    """Give a file an ACL with these named entries: each a tag, permissions and an id."""
    none, all_ = 2**32 - 1, 7
    entries = sorted([(1, all_, none), (4, all_, none), (16, all_, none), (32, 0, none), *named])
    raw = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, f"system.posix_acl_{kind}", raw)


ACL_USER, ACL_GROUP = 2, 8


@pytest.mark.parametrize("entry", [(ACL_USER, 7, FREE_USER), (ACL_GROUP, 7, FREE_USER)])
def test_an_acl_lets_no_stranger_plant_a_segment(
    as_root: None, crew: Crew, path: Path, entry: tuple[int, int, int]
) -> None:
    """Its setgid bit gives the stranger's file the group, though its mode lets only the group write."""
    os.chown(path.parent, 0, SHARED_GROUP)
    path.parent.chmod(0o2770)
    set_acl(path.parent, "access", entry)
    crew.start(as_user, FREE_USER, FREE_USER, [], _plant, path).result()
    for uid in (FREE_USER + 1, 0):
        message = crew.start(as_user, uid, uid, [SHARED_GROUP], _refusal_for_group, path).result()
        assert "with an ACL for others" in message
        assert f"setfacl -b {path.parent}" in message


@pytest.mark.parametrize("entry", [(ACL_USER, 7, 0), (ACL_USER, 5, FREE_USER), (ACL_GROUP, 7, SHARED_GROUP)])
def test_an_acl_that_lets_no_stranger_write_is_accepted(as_root: None, path: Path, entry: tuple[int, int, int]) -> None:
    os.chown(path.parent, 0, SHARED_GROUP)
    path.parent.chmod(0o2770)
    set_acl(path.parent, "access", entry)
    Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP).close()


def test_a_file_that_its_acl_lets_strangers_write_is_refused(as_root: None, path: Path) -> None:
    Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP).close()
    set_acl(path, "access", (ACL_USER, 6, FREE_USER))
    message = _refusal_for_group(path)
    assert "by its ACL" in message
    assert f"setfacl -b {path})" in message


def test_a_new_file_that_a_default_acl_lets_strangers_write_never_appears(as_root: None, path: Path) -> None:
    set_acl(path.parent, "default", (ACL_USER, 6, FREE_USER))
    fds = open_fds()
    with pytest.raises(UntrustedSegment, match=rf"by its ACL.*setfacl -b {path.parent}\)"):
        Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP)
    assert not path.exists()
    assert not opened_since(fds)
    # Without rights for a group, the mode keeps the ACL's users out.
    Store("a", keys=100, path=path).close()
    path.chmod(0o660)
    assert f"setfacl -b {path.parent})" in _refusal_for_group(path)
    Store.unlink(path=path)
    os.removexattr(path.parent, "system.posix_acl_default")
    Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP).close()


def test_a_creator_outside_the_group_leaves_nothing(as_root: None, crew: Crew, path: Path) -> None:
    path.parent.chmod(0o777)
    crew.start(as_user, FREE_USER, FREE_USER, [], _no_right_to_give, path).result()
    assert not path.exists()


def _no_right_to_give(path: Path) -> None:
    fds = open_fds()
    with pytest.raises(UntrustedSegment, match=f"group {SHARED_GROUP}"):
        Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP)
    assert not opened_since(fds)


def test_users_of_one_group_create_and_share_a_store_at_the_same_moment(as_root: None, crew: Crew, path: Path) -> None:
    """Any of them may be the first: all are in."""
    path.parent.chmod(0o777)
    users = [20001, 20002, 20003]
    for _ in range(30):
        meeting = Meeting(len(users))
        workers = [
            crew.start(as_user, uid, uid, [SHARED_GROUP], _meet_and_admit, i, meeting, path)
            for i, uid in enumerate(users)
        ]
        results = crew.results(workers)
        assert sum(admitted for admitted, _ in results) == 10
        assert {decisions for _, decisions in results} == {30 * len(users)}
        path.unlink()


def _meet_and_admit(me: int, meeting: Meeting, path: Path) -> tuple[int, int]:
    meeting.wait(me)
    admitted = _admitted_for_group(path)
    meeting.wait(me)
    with Store("a", keys=100, path=path, mode=0o660, group=SHARED_GROUP) as store:
        total = store.stats().total
        return admitted, total.allowed + total.denied


def test_an_empty_file_is_made_a_segment(path: Path) -> None:
    """It is what a creator leaves that was killed before its first byte."""
    path.touch(mode=0o600)
    with Store("a", keys=100, path=path) as store:
        assert TokenBucket(store, "api", REFILLS_NOTHING, 1).allow("key")


def test_a_file_system_for_reading_only(small_disk: Path) -> None:
    """With another mode nothing would be better."""
    Store("a", keys=100, path=small_disk / "there").close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for path in (small_disk / "there", small_disk / "new"):
        with pytest.raises(SegmentError, match=r"found .* mounted read-only, expected .* can be written") as caught:
            Store("a", keys=100, path=path)
        assert "path=" in caught.value.remedy
        assert "mode" not in caught.value.remedy
    with pytest.raises(SegmentError, match=r"can't be removed \(Read-only file system\)"):
        Store.unlink(path=small_disk / "there")


def test_a_directory_that_this_user_may_not_write(crew: Crew, as_root: None) -> None:
    refusal = crew.start(as_user, FREE_USER, FREE_USER, [], _refusal_of_a_new_one, "/etc/limits").result()
    assert "no right to make a file there (Permission denied)" in refusal
    assert f"a directory that uid {FREE_USER} may write" in refusal
    assert "mode" not in refusal


def _refusal_of_a_new_one(path: str) -> str:
    with pytest.raises(SegmentError) as caught:
        Store("a", keys=100, path=path)
    return str(caught.value)


def test_paths_that_cannot_be_unlinked(path: Path, name: str, crew: Crew, as_root: None) -> None:
    path.mkdir()
    with pytest.raises(SegmentError, match=r"can't be removed \(Is a directory\)"):
        Store.unlink(path=path)
    Store(name, keys=100).close()
    refusal = crew.start(as_user, FREE_USER, FREE_USER, [], _refusal_to_unlink, name).result()
    assert f"expected a file that uid {FREE_USER} may remove; remove it as its owner or as root" in refusal
    for nonsense in (5, ["a"], "a\0b"):
        with pytest.raises(ValueError, match="path is the path of a file"):
            Store.unlink(path=nonsense)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="path is the path of a file"):
            Store("a", keys=1, path=nonsense)  # type: ignore[arg-type]
    Store.unlink(name)
    Store.unlink(name, missing_ok=True)


def _refusal_to_unlink(name: str) -> str:
    with pytest.raises(SegmentError) as caught:
        Store.unlink(name, missing_ok=True)
    return str(caught.value)


def test_unlinking_a_missing_segment(path: Path) -> None:
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(path=path)


@pytest.fixture
def own_directory(path: Path) -> Path:
    """For one user, as a service manager makes it."""
    path.mkdir(mode=0o700)
    yield path
    for entry in path.iterdir():
        entry.unlink()


@pytest.mark.parametrize("owner", [0, FREE_USER])
def test_a_directory_of_ones_own(as_root: None, crew: Crew, own_directory: Path, owner: int) -> None:
    """Its stores are others than those of their names elsewhere."""
    os.chown(own_directory, owner, owner)
    crew.start(as_user, owner, owner, [], _use_own_directory, own_directory).result()
    own_directory.chmod(0o755)
    crew.start(as_user, owner, owner, [], _use_own_directory, own_directory).result()


def _use_own_directory(directory: Path) -> None:
    name = f"process-test-{os.getpid()}"
    with Store(name, keys=100, directory=directory) as store:
        assert store.path == f"{directory}/forebay-{name}"
        assert TokenBucket(store, "api", REFILLS_NOTHING, 1).allow("key")
        with Store(name, keys=100, directory=str(directory)) as again:
            assert not TokenBucket(again, "api", REFILLS_NOTHING, 1).allow("key")
    Store.unlink(name, directory=directory)
    assert not list(directory.iterdir())
    with pytest.raises(SegmentError, match="no such file"):
        Store.unlink(name, directory=directory)


@pytest.mark.parametrize(
    ("owner", "mode"), [(0, 0o702), (0, 0o1777), (0, 0o770), (12345, 0o700), (FREE_USER, 0o777), (FREE_USER, 0o720)]
)
def test_a_directory_where_others_may_make_files_is_not_ones_own(
    as_root: None, crew: Crew, own_directory: Path, owner: int, mode: int
) -> None:
    os.chown(own_directory, owner, SHARED_GROUP)
    own_directory.chmod(mode)
    user = owner if owner == FREE_USER else 0
    message = crew.start(as_user, user, user, [], _refused_in, own_directory, {}).result()
    assert f"uid {owner}, gid {SHARED_GROUP}, mode {mode:04o}" in message
    assert "RuntimeDirectory" in message
    if mode in (0o770, 0o720):
        # Without mode=0o660 no group is trusted, not even the process's own.
        os.chown(own_directory, owner, user)
        crew.start(as_user, user, user, [], _refused_in, own_directory, {}).result()
        os.chown(own_directory, owner, SHARED_GROUP)
        options = {"mode": 0o660, "group": SHARED_GROUP + 1}
        crew.start(as_user, user, user, [SHARED_GROUP + 1], _refused_in, own_directory, options).result()
        own_directory.chmod(0o770)
        crew.start(as_user, user, user, [SHARED_GROUP], _admitted_in, own_directory).result()


def _refused_in(directory: Path, options: dict[str, int]) -> str:
    with pytest.raises(UntrustedSegment, match="in which others may make files") as caught:
        Store("a", keys=100, directory=directory, **options)
    assert not list(directory.iterdir())
    return str(caught.value)


def _admitted_in(directory: Path) -> None:
    with Store("a", keys=100, directory=directory, mode=0o660, group=SHARED_GROUP) as store:
        assert TokenBucket(store, "api", REFILLS_NOTHING, 10).allow("key")


def test_a_path_and_a_directory(path: Path) -> None:
    with pytest.raises(ValueError, match="not both"):
        Store("a", keys=100, path=path, directory=path.parent)
    with pytest.raises(SegmentError, match="no such directory"):
        Store("a", keys=100, directory=path)


def test_the_error_for_a_name_that_another_user_took_names_a_safe_directory(
    as_root: None, crew: Crew, path: Path
) -> None:
    path.parent.chmod(0o1777)
    crew.start(as_user, 12345, 12345, [], _take_name, path).result()
    for uid in (0, FREE_USER):
        message = crew.start(as_user, uid, uid, [], _refused_without_a_look, path).result()
        assert "directory=" in message
        assert "RuntimeDirectory" in message
    path.parent.chmod(0o755)
    assert "directory=" not in crew.start(as_user, FREE_USER, FREE_USER, [], _refused_without_a_look, path).result()


def _take_name(path: Path) -> None:
    Store("a", keys=100, path=path).close()
